"""Models that share a label and a penalty differ in their seed only."""

import pandas as pd
import pytest
import torch

from models import LinearAttentionTransformer, ModelConfig, PromptConfig
from models.training.config import DISTRIBUTIONS
from probe.subjects.counts import normalization_shares, share, typical, verdict_counts
from probe.subjects.subject import Subject
from probe.subjects.survey import Trained, distribution_label, told_apart, trained_zoo
from probe.verdict.kinds import NORMALIZATION, UNDECIDED


def trained(prompts: PromptConfig, seed: int, **shape) -> Trained:
    config = ModelConfig(n_context=prompts.n_context, **shape)
    model = LinearAttentionTransformer(config, torch.Generator().manual_seed(seed))
    subject = Subject(f"m{seed}", model, prompts, "", "")
    return Trained(subject, distribution_label(prompts), 1e-3, seed)


def labels(zoo) -> list[str]:
    return [each.distribution for each in told_apart(zoo)]


def test_distributions_without_a_name_are_told_apart_by_what_differs():
    narrow, wide = (PromptConfig(n_context=9, x_log_scale=scale) for scale in (0.25, 0.5))
    zoo = [trained(p, seed) for seed in (0, 1) for p in (narrow, wide)]
    assert labels(zoo) == ["other, x_log_scale 0.25"] * 2 + ["other, x_log_scale 0.5"] * 2
    assert [each.seed for each in told_apart(zoo)] == [0, 1, 0, 1]


def test_one_distribution_keeps_its_plain_label():
    varied = DISTRIBUTIONS["varied"]
    unnamed = PromptConfig(n_context=9)
    zoo = [trained(varied, 0), trained(varied, 1), trained(unnamed, 0)]
    assert labels(zoo) == ["varied", "varied", "other"]


def test_models_of_another_shape_are_no_further_seeds():
    varied = DISTRIBUTIONS["varied"]
    zoo = [trained(varied, 0), trained(varied, 0, d_model=8, n_heads=1)]
    assert labels(zoo) == ["varied, d_model 4, n_heads 2", "varied, d_model 8, n_heads 1"]


def test_shipped_models_have_the_names_of_their_distributions():
    zoo = trained_zoo()
    assert {each.distribution for each in zoo} == {"varied", "uniform", "plain"}
    seeds = pd.Series([(each.distribution, each.l1, each.seed) for each in zoo])
    assert seeds.is_unique


def test_shares_have_wilson_intervals():
    # Wilson 1927 for 2 of 3 at 95 %.
    found = share(2, 3)
    assert found["share"] == pytest.approx(2 / 3)
    assert (found["ci_low"], found["ci_high"]) == pytest.approx((0.2077, 0.9385), abs=1e-3)


def test_counts_are_of_models():
    scores = pd.DataFrame(
        {
            "distribution": ["b", "b", "b", "a"],
            "l1": [0.0, 0.0, 1.0, 0.0],
            "verdict": [NORMALIZATION, UNDECIDED, NORMALIZATION, UNDECIDED],
            "division_r2": [0.9, 0.2, 0.8, 0.1],
        }
    )
    counts = verdict_counts(scores).set_index(["distribution", "l1"])
    assert counts.models.tolist() == [2, 1, 1]
    assert counts[NORMALIZATION].tolist() == [1, 1, 0]
    assert counts.share.tolist() == [0.5, 1.0, 0.0]
    shares = normalization_shares(scores).set_index("distribution")
    assert shares.found.to_dict() == {"b": 2, "a": 0}
    assert shares.models.to_dict() == {"b": 3, "a": 1}
    # Of those by normalization (.8 and .9) the upper median.
    assert typical(scores) == 0
    assert typical(scores[scores.verdict == UNDECIDED].reset_index()) == 0
