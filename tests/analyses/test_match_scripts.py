"""Scripts about matching: one checkpoint, several, and whether planted symmetries come back."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch

from models import (
    LinearAttentionTransformer,
    ModelConfig,
    PromptConfig,
    load,
    save,
    training_prompts,
)
from models.checkpoint import CheckpointError
from probe.matching import null

ANALYSES = Path(__file__).parents[2] / "analyses"
LEVELS = ["signed_permutation", "gauge", "functional"]
SEEDS = ["varied_l1_1e-3_seed0", "varied_l1_1e-3_seed3"]


@pytest.fixture
def few_draws(monkeypatch):
    """Null distributions of five models, so that p-values are cheap and at least 1/6."""
    monkeypatch.setattr(null, "DRAWS", 5)
    monkeypatch.setattr(null, "FEW_DRAWS", 5)
    yield
    plt.close("all")


def test_the_construction_is_its_own_nearest(tmp_path):
    command = [sys.executable, ANALYSES / "match_weights.py", "--checkpoint", "constructed"]
    done = subprocess.run(
        [*command, "--output", tmp_path], check=True, capture_output=True, text=True
    )
    scores = pd.read_csv(tmp_path / "scores.csv").set_index("level")
    assert list(scores.index) == LEVELS
    assert (scores.p_value <= 0.01).all()
    assert scores.score.min() > 0.98
    assert scores.words["gauge"] == "learned 0 = x_1; learned 1 = y; learned 2 = const; " + (
        "learned 3 = spare"
    )
    assert (tmp_path / "read_out_model.csv").exists()
    assert {p.stem for p in (tmp_path / "figures").glob("*.png")} == {
        *("weights", "layer_maps", "null", "read_out_model", "read_out_canonical")
    }
    assert "nearest construction" in done.stdout
    assert json.loads((tmp_path / "run.json").read_text())["command"].startswith("python")


def test_seeds_of_the_zoo_meet_each_other_and_the_construction(few_draws, monkeypatch):
    script = runpy.run_path(str(ANALYSES / "match_weights.py"))
    names = [*SEEDS, "plain_l1_1e-3_seed0", "p2_d7_l1_1e-3_seed0"]
    monkeypatch.setitem(script["run"].__globals__, "available", lambda: names)
    output = script["run"](script["Config"](zoo=True, jobs=1))
    scores = output.scores
    assert len(scores) == len(LEVELS) * (3 + 2)
    pairs = scores[scores.against == "other models"]
    assert set(zip(pairs.checkpoint, pairs.reference, strict=True)) == {
        tuple(SEEDS),
        tuple(reversed(SEEDS)),
    }
    assert output.notes[0].startswith("1 checkpoint(s) of another size")
    assert list(output.shown.model) == ["plain_l1_1e-3", *["varied_l1_1e-3"] * 2]
    assert set(output.figures) == {"scores", "pairs"}
    assert set(output.sha256) == set(names[:3])


def test_checkpoints_of_other_trainings_are_all_compared(few_draws):
    script = runpy.run_path(str(ANALYSES / "match_weights.py"))
    config = script["Config"](checkpoint=SEEDS[0], against=("plain_l1_1e-3_seed0",), jobs=1)
    output = script["run"](config)
    pairs = output.scores[output.scores.against == "other models"]
    assert len(pairs) == 2 * len(LEVELS)
    assert set(output.shown.model) == {SEEDS[0], "plain_l1_1e-3_seed0"}
    with pytest.raises(ValueError, match="twice"):
        script["run"](script["Config"](checkpoint=SEEDS[0], against=(SEEDS[0],)))


def test_folders_of_ones_own_are_compared(few_draws, tmp_path):
    script = runpy.run_path(str(ANALYSES / "match_weights.py"))
    folders = [
        save(load(name), tmp_path / f"mine_{k}", prompts=training_prompts(name))
        for k, name in enumerate(SEEDS)
    ]
    config = script["Config"](checkpoint=str(folders[0]), against=(str(folders[1]),), jobs=2)
    output = script["run"](config)
    pairs = output.scores[output.scores.against == "other models"]
    assert set(pairs.checkpoint) == set(pairs.reference) == {"mine_0", "mine_1"}
    assert set(output.sha256) == {"mine_0", "mine_1"}


OTHER_SIZES = {
    # One coordinate more: no symmetry relates the weights, yet both can be compared.
    "wide": (ModelConfig(d_model=5), ["signed_permutation", "functional"]),
    # Weights under another norm mean something else; what is computed can be compared.
    "post": (ModelConfig(normalization="post"), ["functional"]),
    # Its layers have no counterpart.
    "deep": (ModelConfig(n_layers=3, normalization="none"), []),
}


@pytest.mark.parametrize("kind", OTHER_SIZES)
def test_a_model_of_another_size_gets_all_that_is_possible(kind, few_draws, tmp_path):
    script = runpy.run_path(str(ANALYSES / "match_weights.py"))
    config, levels = OTHER_SIZES[kind]
    model = LinearAttentionTransformer(config, torch.Generator().manual_seed(0))
    folder = save(model, tmp_path / kind, prompts=PromptConfig())
    output = script["run"](script["Config"](checkpoint=str(folder)))
    assert list(output.scores.level) == levels
    assert set(output.scores.reference) <= {"construction"}
    assert "weights" not in output.figures
    assert ("null" in output.figures) == bool(levels)
    assert "read_out_model.csv" in output.pages
    assert ("read_out_canonical.csv" in output.pages) == config.has_norm
    refused = [note for note in output.notes if note.startswith("not compared")]
    said = " ".join(refused)
    assert all((level in said.split(":")[0]) != (level in levels) for level in LEVELS)
    assert {"wide": "d_model 5", "post": "'post'", "deep": "n_layers: 3"}[kind] in said
    assert len(output.shown)


def test_models_of_another_size_are_compared_with_each_other(few_draws, tmp_path):
    script = runpy.run_path(str(ANALYSES / "match_weights.py"))

    def saved(name, seed, **shape):
        model = LinearAttentionTransformer(
            ModelConfig(**shape), torch.Generator().manual_seed(seed)
        )
        return str(save(model, tmp_path / name, prompts=PromptConfig()))

    post = [saved(f"post_{k}", k, normalization="post") for k in range(2)]
    config = script["Config"](checkpoint=post[0], against=(post[1],), jobs=1)
    output = script["run"](config)
    assert set(output.scores.level) == {"signed_permutation", "functional"}
    assert set(output.scores.against) == {"other models"}
    assert set(output.figures) == {"pairs"}
    assert any("gauge" in note for note in output.notes)
    deep = saved("deep", 0, n_layers=3)
    with pytest.raises(CheckpointError, match="n_layers"):
        script["run"](script["Config"](checkpoint=post[0], against=(deep,), jobs=1))


def test_planted_symmetries_come_back_and_nothing_else_is_significant(few_draws):
    script = runpy.run_path(str(ANALYSES / "benchmark_matching.py"))
    output = script["run"](script["Config"](trials=2, draws=4, nulls=1))
    scores = output.scores
    found = scores[scores.part == "recovery"]
    assert len(found) == 3 * 2 * 2
    exact = found[found.noise == 0]
    assert (exact.recovered == exact.trials).all()
    assert (exact.largest_distance < 1e-7).all()
    alarms = scores[(scores.part == "false alarms") & (scores.alpha == 0.01)]
    assert len(alarms) == 2 * len(LEVELS)
    assert (alarms["count"] == 0).all()  # five draws cannot reach 1 %
    assert (alarms.ci_high > 0.3).all()
