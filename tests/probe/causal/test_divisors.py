import pytest
import torch

from models import LinearAttentionTransformer, ModelConfig, closed_form, gradient_descent
from models.architecture.hooks import StrictHookPoint
from models.architecture.sites import Site
from models.architecture.transformer import LinearAttention
from probe.causal.divisors import (
    divisors,
    log_at_query,
    on_stream,
    pooled_mean,
    pooled_median,
    stream_before,
)


class Denominated(LinearAttention):
    """Heads whose output is divided by a positive number of its own per query."""

    def __init__(self, config):
        super().__init__(config)
        self.hook_denominator = StrictHookPoint(
            "batch position head", "divisor", "attention denominator"
        )

    def forward(self, resid):
        shared = torch.einsum("bpd,hde->bphe", resid, self.W_Q)
        denominator = self.hook_denominator(1 + shared.square().mean(-1))
        weights = 1 / denominator.mean(-1, keepdim=True)
        return super().forward(resid) * weights


class DenominatedTransformer(LinearAttentionTransformer):
    """A model that divides in its attention and nowhere else."""

    plain_forward = False
    attention_type = Denominated


def test_branch_norms_in_forward_order():
    table = divisors(closed_form(20, gradient_steps=[0.1]))
    assert list(table["site"]) == [f"blocks.{i}.ln1_post.hook_scale" for i in range(3)]
    assert list(table["layer"]) == [0, 1, 2]
    assert table["label"][1] == "layer 1: norm scale"
    assert table["axes"][0] == "batch position 1"
    assert not table["before_readout"].any()


def test_only_the_last_norm_on_the_stream_stands_before_the_readout():
    model = LinearAttentionTransformer(ModelConfig(n_layers=3, normalization="post"))
    assert list(divisors(model)["before_readout"]) == [False, False, True]
    places = [model.sites[name] for name in divisors(model)["site"]]
    assert all(on_stream(model, place) for place in places)
    assert stream_before(model, places[1]).name == "blocks.1.hook_resid_pre"


def test_a_branch_norm_is_not_on_the_stream():
    model = closed_form(20)
    assert not any(on_stream(model, model.sites[name]) for name in divisors(model)["site"])


def test_a_model_that_divides_nowhere_has_an_empty_table():
    table = divisors(gradient_descent(2, 0.6, n_context=20))
    assert table.empty
    assert list(table.columns) == ["site", "layer", "label", "axes", "before_readout"]


def test_divisors_of_another_kind_and_shape_are_found():
    model = DenominatedTransformer(ModelConfig(normalization="none"))
    table = divisors(model)
    assert list(table["label"]) == [f"layer {i}: attention denominator" for i in range(2)]
    assert list(table["axes"]) == ["batch position head"] * 2


def test_reductions_keep_to_the_axes():
    site = Site("s", ("batch", "head", "position"), "divisor", "denominator", "", None)
    scale = torch.rand(7, 2, 5, dtype=torch.float64) + 0.5
    torch.testing.assert_close(log_at_query(scale, site), scale[:, :, -1].log().mean(1))
    assert pooled_mean(scale, site).shape == pooled_median(scale, site).shape == (1, 2, 1)
    flat = scale.transpose(0, 1).flatten(1)
    torch.testing.assert_close(pooled_median(scale, site)[0, :, 0], flat.median(1).values)


def test_a_divisor_without_a_stream_before_it_is_not_applicable():
    site = Site("s", ("batch", "position", "1"), "divisor", "norm scale", "", None)

    class Bare:
        sites = {"s": site}  # noqa: RUF012

    with pytest.raises(ValueError, match="not applicable: no site of the roles"):
        stream_before(Bare(), site)
