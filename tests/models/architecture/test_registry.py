"""The registry of classes that checkpoints can hold."""

import pytest

from models import LinearAttentionTransformer, ModelConfig
from models.architecture.registry import (
    ARCHITECTURES,
    architecture_named,
    architecture_of,
    register,
)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Names of a test are forgotten at its end."""
    before = dict(ARCHITECTURES)
    yield
    ARCHITECTURES.clear()
    ARCHITECTURES.update(before)


class WiderConfig(ModelConfig):
    """A config with a field of its own."""

    d_mlp: int = 3


def a_class(**body):
    return type("Mine", (LinearAttentionTransformer,), body)


def test_a_class_is_found_by_its_name_and_a_model_tells_it():
    cls = register(a_class(architecture="mine", config_type=WiderConfig))
    assert architecture_named("mine") is cls
    assert architecture_of(cls(WiderConfig())) == "mine"
    assert architecture_of(LinearAttentionTransformer(ModelConfig())) == "linear_attention"
    assert type(cls(WiderConfig()).like(cls(WiderConfig()).state_dict()).cfg) is WiderConfig


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "Mine has no architecture name of its own"),
        ({"architecture": ""}, "no architecture name of its own"),
        ({"architecture": "linear_attention"}, "is the name of .*LinearAttentionTransformer"),
        ({"architecture": "mine", "config_type": dict}, "config_type is <class 'dict'>; give"),
    ],
)
def test_what_cannot_be_told_apart_is_not_registered(body, message):
    with pytest.raises(ValueError, match=message):
        register(a_class(**body))
    assert ARCHITECTURES["linear_attention"] is LinearAttentionTransformer


def test_a_cell_that_runs_again_replaces_its_class():
    register(a_class(architecture="mine"))
    again = register(a_class(architecture="mine"))
    assert architecture_named("mine") is again


def test_a_config_of_another_class_is_named():
    cls = register(a_class(architecture="mine"))
    with pytest.raises(ValueError, match=r"WiderConfig, its config_type .*ModelConfig; set"):
        architecture_of(cls(WiderConfig()))
