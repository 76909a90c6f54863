import json
import runpy
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from models import LinearAttentionTransformer, ModelConfig, PromptConfig, save
from probe.figures.style import style
from probe.subjects.survey import survey, trained_zoo

ANALYSES = Path(__file__).parents[2] / "analyses"


def run(script: str, output: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, ANALYSES / f"{script}.py", "--output", output, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_probe_stats_writes_the_same_bytes_twice(tmp_path):
    arguments = ["--checkpoint", "constructed", "--n-prompts", "500", "--n-untrained", "1"]
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        result = run("probe_stats", folder, *arguments)
        assert result.returncode == 0, result.stderr
    assert "stream out" in result.stdout
    assert "C/V" in result.stdout
    first, second = map(contents, folders)
    records = [json.loads(files.pop("run.json")) for files in (first, second)]
    assert records[0]["checkpoint_sha256"] == records[1]["checkpoint_sha256"]
    assert first == second
    assert {f"figures/probes.{kind}" for kind in ("pdf", "png", "csv")} <= first.keys()
    assert "figures/positions.png" in first
    scores = pd.read_csv(folders[0] / "scores.csv")
    stream = scores[scores["site"] == "blocks.0.hook_resid_post"].set_index("statistic")
    assert stream.loc["x_mean", "r2"] > 0.99


def test_norm_division(tmp_path):
    result = run("norm_division", tmp_path, "--checkpoint", "constructed", "--n-prompts", "500")
    assert result.returncode == 0, result.stderr
    scores = pd.read_csv(tmp_path / "scores.csv").set_index("layer")
    assert scores.loc[1, "division_r2"] > 0.8
    assert scores.loc[0, "division_r2"] < 0.05
    assert scores.loc[1, "scale_slope"] == pytest.approx(1, abs=0.1)
    for name in ("scale_against_variance", "norm_distributions"):
        assert (tmp_path / "figures" / f"{name}.pdf").stat().st_size > 1000


def test_norm_division_without_a_norm_is_not_applicable(tmp_path):
    result = run("norm_division", tmp_path / "out", "--checkpoint", "gradient_descent")
    assert result.returncode == 2
    assert "not applicable: the model has no layer norm" in result.stderr
    assert not (tmp_path / "out").exists()


def test_ablations(tmp_path):
    sizes = ["--n-prompts", "100", "--n-train", "500", "--n-random", "1"]
    result = run("ablations", tmp_path, "--checkpoint", "constructed", *sizes)
    assert result.returncode == 0, result.stderr
    scores = pd.read_csv(tmp_path / "scores.csv")
    assert set(scores["intervention"]) == {"site", "direction", "interchange"}
    for name in ("ablated_sites", "removed_directions", "interchange"):
        assert (tmp_path / "figures" / f"{name}.png").exists()


def test_benchmark_probes(tmp_path):
    sizes = ["--n-prompts", "1000", "--repeats", "1", "--forward-repeats", "1"]
    result = run("benchmark_probes", tmp_path, *sizes)
    assert result.returncode == 0, result.stderr
    scores = pd.read_csv(tmp_path / "scores.csv")
    assert (scores["CPU seconds"] > 0).all()
    assert scores["ratio"].iloc[0] == 1


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A checkpoint whose head states have 1024 numbers: probes need ten prompts for each."""
    config = ModelConfig(d_model=16, n_heads=4, n_layers=1, n_context=6)
    model = LinearAttentionTransformer(config, torch.Generator().manual_seed(0))
    prompts = PromptConfig(n_context=6, x_log_scale=0.7)
    folder = tmp_path_factory.mktemp("trained") / "wide"
    return save(model, folder, prompts=prompts, l1=0.001, seed=0)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("probe_stats", {"n_prompts": 200, "n_untrained": 1}),
        ("ablations", {"n_prompts": 100, "n_train": 200, "n_random": 1}),
    ],
)
def test_wide_models_get_the_prompts_that_their_probes_need(name, settings, wide):
    script = runpy.run_path(str(ANALYSES / f"{name}.py"))
    with style():
        output = script["run"](script["Config"](checkpoint=str(wide), **settings))
    assert output.source == str(wide)
    states = output.scores[output.scores.site == "blocks.0.attn.hook_state"]
    assert len(states)


def test_a_survey_gives_wide_models_the_prompts_that_their_probes_need(wide):
    (row,) = survey(trained_zoo(str(wide.parent)), n_prompts=100).to_dict("records")
    assert row["name"] == "wide"
    assert row["distribution"] == "other"
    # An untrained model's head state is a random map of the prompt's moments.
    assert row["probe_C"] == pytest.approx(row["probe_C_control"], abs=0.1)
    assert "alignment" not in row


def test_the_benchmark_says_at_once_how_many_prompts_it_needs(wide):
    script = runpy.run_path(str(ANALYSES / "benchmark_probes.py"))
    with pytest.raises(ValueError, match="--n-prompts 2000: too few for wide; give at least 20480"):
        script["run"](script["Config"](checkpoint=str(wide), n_prompts=2000))
