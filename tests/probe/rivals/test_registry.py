"""What the registry promises of every rival."""

import pytest
import torch

from models import PromptConfig, prompts_from_arrays, sample_prompts
from probe.rivals.algorithms import NormalEquations
from probe.rivals.known import Draw
from probe.rivals.registry import RIVALS, compared
from probe.rivals.rival import DIVERGED, Rival


def draw(batch=64, **config):
    return sample_prompts(PromptConfig(**config), batch, torch.Generator().manual_seed(0))


def test_a_rival_cannot_be_without_an_algorithm():
    with pytest.raises(TypeError, match="algorithm"):
        Rival("median slope", path=lambda problem, parameters, steps: iter(()))


def test_names_are_unique_and_limits_are_compared_with():
    assert len({rival.name for rival in RIVALS}) == len(RIVALS)
    known = compared()
    assert {rival.algorithm.name for rival in RIVALS} == set(known)
    for algorithm in known.values():
        assert algorithm.limit is None or known[algorithm.limit.name] == algorithm.limit


def test_trivial_algorithms_come_last():
    trivial = [algorithm.trivial for algorithm in compared().values()]
    assert trivial == sorted(trivial)
    assert sum(trivial) == 2


@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.name)
def test_descriptions_are_numbers_and_penalties_are_named(rival):
    described = rival.describe(rival.starts(NormalEquations.of(draw()))[0, 0])
    assert all(isinstance(value, float) for value in described.values())
    assert ("lambda" in described) == (rival.algorithm.names == "penalty")


@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.name)
def test_oracles_deserve_the_algorithm_of_their_rival(rival):
    for known in rival.oracles(Draw(0)):
        assert known.kind == rival.algorithm.name
        assert (known.k is not None) == (rival.algorithm.names == "steps")


@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.name)
def test_rescaling_y_is_exact_for_every_rival(rival):
    prompts = draw()
    tripled = prompts_from_arrays(prompts.x, 3 * prompts.y, prompts.query)
    parameters = rival.starts(NormalEquations.of(prompts))[0, :1].expand(len(rival.steps), -1)
    steps = torch.tensor(rival.steps)
    plain, scaled = (
        rival.predict(NormalEquations.of(p), parameters, steps) for p in (prompts, tripled)
    )
    converging = plain.abs() < 1e6
    torch.testing.assert_close(scaled[converging], 3 * plain[converging], rtol=1e-9, atol=1e-9)


def test_divergence_stays_finite():
    problem = NormalEquations.of(draw(16))
    (rival,) = (rival for rival in RIVALS if rival.name == "GD++")
    parameters = torch.tensor([[6.0, 6.0]]).double()
    predictions = rival.predict(problem, parameters, torch.tensor([32]))
    assert predictions.isfinite().all()
    assert predictions.abs().max() == DIVERGED
