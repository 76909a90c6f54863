"""The scripts of the verdict as a user runs them, on few prompts."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from models import LinearAttentionTransformer, ModelConfig, PromptConfig, save
from probe import identify, load_subject
from probe.verdict.kinds import KINDS, NORMALIZATION, UNDECIDED
from probe.verdict.thresholds import THRESHOLDS

ANALYSES = Path(__file__).parents[2] / "analyses"


def run(script: str, *options: str, check: bool = True) -> subprocess.CompletedProcess:
    command = [sys.executable, ANALYSES / script, *map(str, options)]
    return subprocess.run(command, check=check, capture_output=True, text=True)


@pytest.fixture(scope="module")
def calibration():
    return runpy.run_path(str(ANALYSES / "calibrate_verdict.py"))


def test_identify_a_construction(tmp_path):
    done = run(
        "identify_algorithm.py",
        *("--checkpoint", "constructed", "--n-prompts", "64", "--output", tmp_path),
    )
    assert "Verdict: closed form by normalization." in done.stdout
    scores = pd.read_csv(tmp_path / "scores.csv")
    assert {"distance", "division R²", "sensitivity cosine"} <= set(scores.measure)
    record = json.loads((tmp_path / "run.json").read_text())
    verdict = record["verdicts"]["constructed"]
    assert verdict["label"] == NORMALIZATION
    assert set(verdict["thresholds"]) == set(THRESHOLDS)
    drawn = pd.read_csv(tmp_path / "figures" / "rival_distances.csv")
    assert drawn.groupby("rival").condition.nunique().eq(9).all()


def test_identify_a_folder_twice_gives_the_same_bytes(tmp_path):
    config = ModelConfig(n_context=12, normalization="none")
    model = LinearAttentionTransformer(config, torch.Generator().manual_seed(3))
    folder = save(model.double(), tmp_path / "mine", prompts=PromptConfig(n_context=12))
    outputs = []
    for name in ("first", "second"):
        options = ("--checkpoint", folder, "--n-prompts", "64", "--output", tmp_path / name)
        run("identify_algorithm.py", *options)
        outputs.append((tmp_path / name / "scores.csv").read_bytes())
    assert outputs[0] == outputs[1]
    record = json.loads((tmp_path / "first" / "run.json").read_text())
    assert record["verdicts"]["mine"]["label"] == "other"


def test_an_unknown_checkpoint_exits_with_2(tmp_path):
    options = ("--checkpoint", "nothing_of_that_name", "--output", tmp_path / "out")
    done = run("identify_algorithm.py", *options, check=False)
    assert done.returncode == 2
    assert "nothing_of_that_name" in done.stderr
    assert not (tmp_path / "out").exists()


def test_zoo_figures():
    script = runpy.run_path(str(ANALYSES / "identify_algorithm.py"))
    subjects = [load_subject(name) for name in ("constructed", "gradient_descent")]
    verdicts = {s.name: identify(s.model, s.prompts, n_prompts=64) for s in subjects}
    table = script["overview"](verdicts)
    assert table.verdict.tolist() == [NORMALIZATION, "gradient descent (2)"]
    figures = script["zoo_figures"](verdicts)
    assert set(figures) == {"agreement", "verdicts_by_training"}
    assert figures["verdicts_by_training"][1]["count"].sum() == 2
    data = figures["agreement"][1]
    np.testing.assert_allclose(data.score, (data.in_distribution + data.shifted) / 2)


# ---- calibration ------------------------------------------------------------------------


def test_calibration_script_judges_oracles(tmp_path):
    options = ("--every", "60", "--n-prompts", "64", "--jobs", "1", "--no-fit")
    done = run("calibrate_verdict.py", *options, "--output", tmp_path)
    scores = pd.read_csv(tmp_path / "scores.csv")
    assert set(scores.half) == {"fresh"}
    assert not ((scores.verdict == NORMALIZATION) & (scores.known != NORMALIZATION)).any()
    assert "right" in done.stdout
    counts = pd.read_csv(tmp_path / "figures" / "confusion.csv")
    assert counts["count"].sum() == len(scores)
    assert set(counts.verdict) == set(KINDS)


def test_calibration_needs_every_kind_of_oracle(calibration):
    with pytest.raises(ValueError, match="no oracle for"):
        calibration["fit"](pd.DataFrame({"known": [NORMALIZATION]}))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        ([0.0, 1.0], [4.0, 9.0], (2.0, 3.0)),
        # One value on the wrong side does not move the gap.
        ([0.0, 1.0, 8.0], [4.0, 9.0], (2.0, 3.0)),
    ],
)
def test_thresholds_stand_at_thirds_of_the_best_gap(calibration, low, high, expected):
    np.testing.assert_allclose(calibration["between"](low, high), expected)


def test_rewritten_thresholds_are_read_back(calibration, tmp_path):
    changed = {**THRESHOLDS, "lead": 0.123, "score": (-2.5, -1.5)}
    calibration["rewrite"](tmp_path / "thresholds.py", changed)
    module = runpy.run_path(str(tmp_path / "thresholds.py"))
    assert module["THRESHOLDS"] == changed
    assert "coincide" in module["__doc__"]


def test_thresholds_are_written_on_request_only(calibration, tmp_path, monkeypatch):
    table = tmp_path / "thresholds.py"
    table.write_bytes(calibration["TABLE"].read_bytes())
    changed = {**THRESHOLDS, "lead": 0.123}
    inside = calibration["run"].__globals__
    monkeypatch.setitem(inside, "TABLE", table)
    # So few oracles are not of every kind.
    monkeypatch.setitem(inside, "fit", lambda scores: changed)
    settings = {"checkpoint": "constructed", "every": 200, "n_prompts": 64, "jobs": 1}
    output = calibration["run"](calibration["Config"](**settings))
    assert output.facts["thresholds"] == changed
    assert table.read_bytes() == calibration["TABLE"].read_bytes()
    assert not any(note.startswith("wrote") for note in output.notes)
    output = calibration["run"](calibration["Config"](**settings, write_thresholds=True))
    assert runpy.run_path(str(table))["THRESHOLDS"] == changed
    assert f"wrote {table}" in output.notes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"write_thresholds": True, "fit": False}, "no fitted thresholds"),
        ({"table": Path("thresholds.py")}, "add --write-thresholds"),
        ({"table": Path("no/folder/of/this/name.py"), "write_thresholds": True}, "no folder"),
    ],
)
def test_thresholds_that_cannot_be_written_are_refused_first(calibration, options, message):
    with pytest.raises(ValueError, match=message):
        calibration["Config"](**options)


def test_thresholds_in_force_are_fitted_on_the_shipped_oracles(calibration):
    scores = pd.read_csv(ANALYSES.parent / "reports" / "calibrate_verdict" / "scores.csv")
    assert calibration["fit"](scores[scores.half == "calibration"]) == THRESHOLDS
    assert len(scores) >= 300
    wrong = scores[~scores.right]
    assert (wrong.verdict == UNDECIDED).all()
    assert scores.right.mean() >= 0.98


def test_thresholds_in_force_are_in_order():
    for key in ("score", "division_r2"):
        accept, reject = THRESHOLDS[key]
        assert accept < reject
    assert min(THRESHOLDS[key] for key in ("lead", "margin", "division_slope", "coincide")) > 0
