"""What a word on the command line stands for: never another model than the user means."""

import pytest
import torch

from models import LinearAttentionTransformer, ModelConfig, PromptConfig, load, save
from models.checkpoint import CheckpointError
from probe import load_subject
from probe.subjects.subject import is_zoo
from probe.subjects.survey import Trained, trained_zoo

SHIPPED = "varied_l1_3e-4_seed0"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def mine(folder, **record) -> LinearAttentionTransformer:
    """A saved model that is no shipped or made one."""
    config = ModelConfig(n_context=9)
    model = LinearAttentionTransformer(config, torch.Generator().manual_seed(9)).double()
    save(model, folder, prompts=PromptConfig(n_context=9), **record)
    return model


@pytest.mark.parametrize("name", ["constructed", "gradient_descent", "untrained", SHIPPED])
def test_a_folder_of_a_known_name_is_never_passed_over(name):
    known = load_subject(name)
    model = mine(f"./{name}")
    with pytest.raises(CheckpointError, match=rf"\./{name}"):
        load_subject(name)
    prefix = "shipped" if name == SHIPPED else "made"
    assert load_subject(f"{prefix}:{name}").sha256 == known.sha256
    found = load_subject(f"./{name}")
    assert found.name == name
    assert found.source == f"./{name}"
    torch.testing.assert_close(found.model.embed.W_E, model.embed.W_E.detach())


def test_a_subject_says_where_it_came_from():
    assert load_subject("constructed").source == "made:constructed"
    assert load_subject("constructed").record == {}
    shipped = load_subject(SHIPPED)
    assert shipped.source == f"shipped:{SHIPPED}"
    assert shipped.record["seed"] == 0
    torch.testing.assert_close(shipped.model.embed.W_E, load(SHIPPED).embed.W_E.double())
    with pytest.raises(CheckpointError, match="gradient_descent"):
        load_subject("made:gradient_decent")
    with pytest.raises(CheckpointError, match="made on the spot: constructed"):
        load_subject("nothing_of_that_name")


def test_a_name_is_the_last_part_of_the_folder(tmp_path, monkeypatch):
    mine("runs/mine")
    assert load_subject("runs/mine/").name == "mine"
    monkeypatch.chdir(tmp_path / "runs" / "mine")
    assert load_subject(".").name == "mine"


def test_trained_models_of_a_folder_are_those_of_the_folder(tmp_path):
    mine(f"runs/{SHIPPED}", l1=0.5, seed=7)
    (found,) = trained_zoo("runs")
    assert (found.l1, found.seed, found.subject.prompts.n_context) == (0.5, 7, 9)
    assert Trained.load(tmp_path / "runs" / SHIPPED).l1 == 0.5
    with pytest.raises(CheckpointError, match="one checkpoint"):
        trained_zoo(f"runs/{SHIPPED}")
    with pytest.raises(CheckpointError, match="no trained checkpoint"):
        trained_zoo("nowhere")
    mine("unknown")
    with pytest.raises(CheckpointError, match="no l1 and seed"):
        Trained.load("unknown")


def test_a_folder_called_zoo_is_not_the_zoo():
    assert is_zoo("zoo")
    assert not is_zoo("./zoo")
    mine("zoo/mine", l1=0.0, seed=0)
    with pytest.raises(CheckpointError, match="shipped:zoo"):
        trained_zoo("zoo")
    assert is_zoo("shipped:zoo")
    assert [each.subject.name for each in trained_zoo("./zoo")] == ["mine"]
