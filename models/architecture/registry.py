"""The classes of model that checkpoints can hold, by the name that stands in config.json.

A class is registered where it is defined, and names itself::

    @register
    class TwoStep(LinearAttentionTransformer):
        architecture = "two_step"

The name must be the class's own: an inherited one would make a checkpoint load as the parent,
which predicts otherwise.
"""

from __future__ import annotations

from typing import Any, TypeVar

from models.architecture.config import ModelConfig
from models.wording import listed, shortened

Model = TypeVar("Model", bound=type[Any])

ARCHITECTURES: dict[str, type[Any]] = {}


def register(cls: Model) -> Model:
    """Let checkpoints hold models of a class; for use as a decorator.

    Args:
        cls: a class of models, made as ``cls(config)``, whose parameters have the names and
            shapes of ``config.parameter_shapes()``, and with the attributes

            - ``architecture``: the name, a word of the class's own;
            - ``config_type``: `ModelConfig` or a subclass;
            - ``cfg`` on each model: its config.

    Returns:
        `cls`.

    Raises:
        ValueError: on a missing, inherited or taken name, or another kind of config.
    """
    name = cls.__dict__.get("architecture")
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"{cls.__name__} has no architecture name of its own (an inherited one does not "
            f'count); write architecture = "..." in its body'
        )
    taken = ARCHITECTURES.get(name)
    # A notebook cell that runs again makes the same class anew.
    if taken is not None and _full_name(taken) != _full_name(cls):
        raise ValueError(
            f"architecture {name!r} of {_full_name(cls)} is the name of {_full_name(taken)}; "
            f"choose another"
        )
    config_type = getattr(cls, "config_type", None)
    if not (isinstance(config_type, type) and issubclass(config_type, ModelConfig)):
        raise ValueError(
            f"{cls.__name__}.config_type is {config_type!r}; give ModelConfig or a subclass of it"
        )
    ARCHITECTURES[name] = cls
    return cls


def architecture_of(model: Any) -> str:
    """Registered name of a model's class.

    Raises:
        ValueError: if the class is not registered, naming it, or says nothing of its config.
    """
    cls = type(model)
    name = cls.__dict__.get("architecture", "")
    if ARCHITECTURES.get(name) is not cls:
        raise ValueError(
            f"{_full_name(cls)} is not registered, and would load as another class with other "
            f'predictions; give it a name of its own, architecture = "...", and decorate it with '
            f"models.architecture.registry.register"
        )
    if type(model.cfg) is not cls.config_type:
        raise ValueError(
            f"the config of {_full_name(cls)} is a {_full_name(type(model.cfg))}, its config_type "
            f"{_full_name(cls.config_type)}; set config_type in the class"
        )
    return name


def architecture_named(name: object) -> type[Any]:
    """The class of a registered name.

    Raises:
        ValueError: on an unknown name, listing those there are.
    """
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"architecture {shortened(repr(name))} is not one of {listed(ARCHITECTURES)}; import "
            f"the module that defines and registers its class first"
        )
    return ARCHITECTURES[name]


def _full_name(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
