"""Models as functions: which dtype they get, what they may do, what is refused."""

import pytest
import torch
from torch import nn

import models
from models import PromptConfig, Prompts, closed_form, sample_prompts
from probe.rivals import algorithms
from probe.rivals.predictor import Predictor

CONFIG = PromptConfig()


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def least_squares(inputs):
    return Prompts.from_inputs(inputs).least_squares


def solve(rows, targets):
    """Least squares at the last of some rows [b, N+1, f], on the rows before."""
    solved = torch.linalg.lstsq(rows[:, :-1], targets[..., None]).solution
    return (rows[:, -1:] @ solved)[:, 0, 0]


# ---- inputs -----------------------------------------------------------------------------


def test_inputs_may_be_edited_in_place():
    def editing(inputs):
        predictions = least_squares(inputs)
        inputs.mul_(3).add_(1)
        return predictions

    prompts = sample_prompts(CONFIG, 32, seeded())
    before = prompts.inputs.clone()
    torch.testing.assert_close(Predictor(editing).checked(prompts), prompts.least_squares)
    torch.testing.assert_close(prompts.inputs, before, rtol=0, atol=0)


def test_a_buffer_that_is_written_again_hides_no_change():
    buffer = torch.zeros(32, dtype=torch.float64)

    def reusing(inputs):
        return buffer.copy_(inputs[:, 0, 2] + torch.rand(32))

    with pytest.raises(ValueError, match="second call"):
        Predictor(reusing).checked(sample_prompts(CONFIG, 32, seeded()))


class Mixed(nn.Module):
    """Least squares in the dtype of its inputs; the first of its parameters is an embedding's."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 2, dtype=torch.bfloat16)
        self.gains = nn.ParameterList([torch.ones((), dtype=torch.float64)])
        self.seen = []

    def forward(self, inputs):
        self.seen.append(inputs.dtype)
        return self.gains[0] * solve(inputs[:, :, :2], inputs[:, :-1, 2])


class Declared(Mixed):
    dtype = torch.float32


def test_parameters_of_several_dtypes_leave_inputs_in_float64():
    prompts = sample_prompts(CONFIG, 64, seeded())
    model = Mixed()
    error = (Predictor(model)(prompts) - prompts.least_squares).square().mean()
    assert model.seen == [torch.float64]
    assert error / prompts.least_squares.var() < 1e-24


def test_an_attribute_dtype_decides_between_several():
    model = Declared()
    Predictor(model)(sample_prompts(CONFIG, 8, seeded()))
    assert model.seen == [torch.float32]


def test_dtypes_that_do_not_fit_are_named_with_a_remedy():
    layers = nn.Linear(3, 1, dtype=torch.bfloat16), nn.Linear(1, 1, dtype=torch.float64)
    model = nn.Sequential(*layers)
    message = (
        r"bfloat16, torch\.float64, was given torch\.float64 inputs.*model\.to\(torch\.float64\)"
    )
    with pytest.raises(ValueError, match=message):
        Predictor(model)(sample_prompts(CONFIG, 8, seeded()))


def test_other_errors_of_the_model_pass_unchanged():
    def failing(inputs):
        raise RuntimeError("the model is tired")

    with pytest.raises(RuntimeError, match="tired"):
        Predictor(failing)(sample_prompts(CONFIG, 8, seeded()))


# ---- models that cannot be compared -----------------------------------------------------


class Dropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, inputs):
        return self.drop(inputs[:, :, 2]).sum(1)


BAD = {
    "nan": (lambda x: x[:, 0, 2] * torch.nan, "NaN or infinite for 64 of 64"),
    "one nan": (lambda x: torch.where(torch.arange(64) == 5, torch.inf, x[:, 0, 2]), "prompt 5"),
    "constant": (lambda x: torch.full((64,), 2.5), r"constant \(2\.5"),
    "column": (lambda x: x[:, 0, 2:3], r"shape \(64, 1\), expected\s+\(64,\)"),
    "scalar": (lambda x: x.sum(), r"shape \(\)"),
    "not numbers": (lambda x: "seven", "returned str"),
    "complex": (lambda x: x[:, 0, 2] * 1j, "real numbers"),
    "stochastic function": (lambda x: x[:, 0, 2] + torch.rand(64), "second call"),
    "stochastic module": (Dropout(), r"model\.eval\(\)"),
    "device of predictions": (lambda x: x[:, 0, 2].to("meta"), "on meta"),
}


@pytest.mark.parametrize(("model", "message"), BAD.values(), ids=BAD)
def test_bad_models_are_refused_by_name(model, message):
    with pytest.raises(ValueError, match=message):
        Predictor(model).checked(sample_prompts(CONFIG, 64, seeded()))


def test_a_model_on_another_device_is_refused():
    with pytest.raises(ValueError, match="model is on meta"):
        Predictor(closed_form(20).to("meta"))


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="dict"):
        Predictor({})


def test_modules_are_called_in_their_own_dtype_and_lists_are_accepted():
    prompts = sample_prompts(CONFIG, 8, seeded())
    linear = nn.Sequential(nn.Flatten(), nn.Linear(63, 1), nn.Flatten(0))
    assert Predictor(linear)(prompts).dtype == torch.float64
    assert Predictor(lambda inputs: inputs[:, 0, 2].tolist())(prompts).shape == (8,)
    built = models.gradient_descent(2, 0.5, dtype=torch.float32)
    torch.testing.assert_close(
        Predictor(built)(prompts),
        algorithms.gradient_descent(prompts, 2, 0.5),
        rtol=1e-4,
        atol=1e-5,
    )
