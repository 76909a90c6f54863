"""Where results go, what stays beside them, and what a run leaves when it fails."""

import json
import sys

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from pydantic import Field

from probe.report.command import AnalysisConfig
from probe.report.script import Output, main, output_folder, write_output


class Config(AnalysisConfig):
    """Settings.

    Attributes:
        n: a number.
        jobs: processes.
    """

    n: int = Field(1, ge=1)
    jobs: int = 1


def output(*figures: str, **settings) -> Output:
    table = pd.DataFrame({"a": [1.0]})
    return Output(table, table, {name: (plt.figure(), table) for name in figures}, "ab", **settings)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def record(folder) -> dict:
    return json.loads((folder / "run.json").read_text())


def run_main(monkeypatch, *arguments: str, run=lambda config: output("one")):
    monkeypatch.setattr(sys, "argv", ["x.py", *arguments])
    main("x", Config, run, "What it does.")


@pytest.mark.parametrize(
    ("settings", "folder"),
    [
        ({}, "reports/x"),
        ({"jobs": 4}, "reports/x"),
        ({"output": "else/where"}, "else/where"),
        ({"n": 2}, "results/x/varied_l1_3e-4_seed0"),
        ({"seed": 1}, "results/x/varied_l1_3e-4_seed0"),
        ({"checkpoint": "trained/mine/"}, "results/x/mine"),
        ({"checkpoint": "shipped:p2"}, "results/x/p2"),
        ({"checkpoint": "made:constructed"}, "results/x/constructed"),
    ],
)
def test_only_the_settings_of_the_report_go_to_reports(settings, folder):
    assert str(output_folder("x", Config(**settings))) == folder


def test_a_report_made_with_other_settings_is_kept(tmp_path):
    write_output(tmp_path / "reports" / "x", output(), Config(n=7, jobs=2))
    assert str(output_folder("x", Config(n=7))) == "reports/x"
    assert str(output_folder("x", Config())) == "results/x/varied_l1_3e-4_seed0"


def test_files_of_an_earlier_run_go_and_all_others_stay(tmp_path):
    folder, outside = tmp_path / "out", tmp_path / "outside"
    outside.write_text("mine")
    written = write_output(folder, output("one", "two"), Config())
    names = {str(path.relative_to(folder)) for path in written}
    assert names == set(record(folder)["files"])
    assert "figures/two.pdf" in names
    (folder / "figures" / "notes.txt").write_text("mine")
    (folder / "read_out.csv").write_text("mine")
    # A record that points out of the folder, by a path or by a link, removes nothing there.
    (folder / "link").symlink_to(outside)
    edited = record(folder)
    edited["files"] += ["../outside", str(outside), "link", "figures", 3]
    (folder / "run.json").write_text(json.dumps(edited))
    write_output(folder, output("one"), Config(n=2))
    kept = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert kept == {*record(folder)["files"], "figures/notes.txt", "read_out.csv", "link"}
    assert not any("two" in name for name in kept)
    assert outside.read_text() == "mine"


def test_a_record_says_where_the_checkpoint_came_from(tmp_path):
    write_output(tmp_path / "a", output(source="shipped:p2"), Config())
    write_output(tmp_path / "b", output(), Config())
    assert record(tmp_path / "a")["source"] == "shipped:p2"
    assert "source" not in record(tmp_path / "b")


def test_a_run_that_fails_leaves_earlier_results_as_they_were(tmp_path, monkeypatch, capsys):
    run_main(monkeypatch, "--output", "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}

    def fails(config):
        raise ValueError("not applicable: no layer norm")

    def cannot_be_written(config):
        return output("one", facts={"bad": float("nan")})

    for run in (fails, cannot_be_written):
        with pytest.raises(SystemExit) as stopped:
            run_main(monkeypatch, "--output", "out", run=run)
        assert stopped.value.code == 2
    after = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert before == after
    assert "not applicable" in capsys.readouterr().err


def test_the_folder_of_a_training_run_is_not_written_into(tmp_path, monkeypatch, capsys):
    kept = '{"run": {}, "models": ["a"]}'
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "run.json").write_text(kept)
    with pytest.raises(SystemExit):
        run_main(monkeypatch, "--output", "trained", run=lambda config: pytest.fail("ran"))
    assert (tmp_path / "trained" / "run.json").read_text() == kept
    assert "give another --output" in capsys.readouterr().err
