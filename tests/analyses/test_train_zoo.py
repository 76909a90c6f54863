import runpy
from pathlib import Path

import pandas as pd
import pytest
import torch

from models import LinearAttentionTransformer, ModelConfig, load, training

ZOO = runpy.run_path(str(Path(__file__).parents[2] / "analyses" / "train_zoo.py"))


def test_the_zoo_is_trained_once_and_tabulated(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "EVALUATION_PROMPTS", 32)
    config = ZOO["Config"](output=tmp_path, steps=2, seed=5)
    zoo = ZOO["run"](config)
    assert zoo.groupby("distribution").size().to_dict() == {"plain": 4, "uniform": 4, "varied": 24}
    assert set(zoo.seed) == set(range(5, 13))
    assert (zoo.parameters == load(tmp_path / zoo.name[0]).cfg.n_parameters).all()
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "zoo.csv"), zoo, rtol=1e-3)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*zoo.name, "zoo.csv"])

    monkeypatch.setitem(ZOO["run"].__globals__, "train", pytest.fail)
    pd.testing.assert_frame_equal(ZOO["run"](config), zoo)


def test_a_head_is_active_whatever_its_gauge():
    model = LinearAttentionTransformer(ModelConfig(), torch.Generator().manual_seed(0))
    model.requires_grad_(False)
    attn = model.blocks[1].attn
    attn.W_Q[0] *= 1e-4
    assert ZOO["active_heads"](model) == [2, 1]
    attn.W_V[0] *= 1e4
    assert ZOO["active_heads"](model) == [2, 2]
    # What layer norm removes is no contribution.
    attn.W_V[0] = attn.W_V[0].mean(1, keepdim=True)
    assert ZOO["active_heads"](model) == [2, 1]
