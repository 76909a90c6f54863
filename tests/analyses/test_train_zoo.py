"""The training of the shipped checkpoints: once, under the shipped names, and tabulated."""

import runpy
from pathlib import Path

import pytest
import torch

from models import LinearAttentionTransformer, ModelConfig, TrainConfig, available
from models.checkpoint import SHIPPED, provenance
from models.training import evaluation
from probe.subjects.sparsity import active_heads

ZOO = runpy.run_path(str(Path(__file__).parents[2] / "analyses" / "train_zoo.py"))


def test_a_run_is_trained_once_and_tabulated(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "EVALUATION_PROMPTS", 32)
    config = ZOO["Config"](folder=tmp_path, steps=2, seed=5, checkpoint="varied")
    output = ZOO["run"](config)
    assert len(output.scores) == 24
    assert set(output.scores.seed) == set(range(5, 13))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(output.scores.name)

    # Again, and for one model of the run: nothing is trained.
    monkeypatch.setitem(ZOO["run"].__globals__, "train", pytest.fail)
    assert ZOO["run"](config).scores.equals(output.scores)
    one = config.model_copy(update={"checkpoint": "varied_l1_1e-3_seed7"})
    assert ZOO["run"](one).scores.equals(output.scores)


def test_several_covariates_are_trained_as_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "EVALUATION_PROMPTS", 32)
    config = ZOO["Config"](folder=tmp_path, steps=2, checkpoint="p2_corr95")
    name = ZOO["run"](config).scores.name[0]
    assert name == "p2_corr95_l1_1e-3_seed0"
    record = provenance(tmp_path / name)
    assert record["prompts"]["x_correlation"] == 0.95
    assert TrainConfig(**record["training"]).model.n_layers == 3


def test_the_shipped_checkpoints_are_those_of_the_script():
    config = ZOO["Config"]()
    expected = []
    for label, settings in ZOO["runs"](config).items():
        for name in ZOO["names"](label, settings):
            assert ZOO["_finished"](SHIPPED / name, settings), name
            expected.append(name)
    assert sorted(expected) == available()


def test_an_unknown_run_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="the runs are varied, uniform, plain, p2"):
        ZOO["run"](ZOO["Config"](folder=tmp_path, checkpoint="varied_l1_9_seed0"))


def test_a_head_is_active_whatever_its_gauge():
    model = LinearAttentionTransformer(ModelConfig(), torch.Generator().manual_seed(0))
    model.requires_grad_(False)
    attn = model.blocks[1].attn
    attn.W_Q[0] *= 1e-4
    assert active_heads(model) == [2, 1]
    attn.W_V[0] *= 1e4
    assert active_heads(model) == [2, 2]
    # What layer norm removes is no contribution.
    attn.W_V[0] = attn.W_V[0].mean(1, keepdim=True)
    assert active_heads(model) == [2, 1]
