import pandas as pd
import torch

from models import PromptConfig, closed_form, sample_prompts
from probe import ablate, collect, fit_probes, interchange, read_out
from probe.figures.interventions import ablation_bars
from probe.figures.probes import wide
from probe.figures.style import site_title, style

MODEL = closed_form(10)
PROMPTS = PromptConfig(n_context=10)
SCALE = "blocks.1.ln1_post.hook_scale"


def test_prompts_and_their_inputs_read_the_same(generator):
    prompts = sample_prompts(PROMPTS, 4, generator)
    by_prompts, by_inputs = collect(MODEL, prompts), collect(MODEL, prompts.inputs)
    assert list(by_prompts) == [n for n, site in MODEL.sites.items() if not site.on_request]
    for name, value in by_prompts.items():
        torch.testing.assert_close(value, by_inputs[name], rtol=0, atol=0)


def test_titles_stay_with_tables_that_are_cut_joined_and_extended():
    probes = fit_probes(MODEL, PROMPTS, SCALE, n_train=200, n_test=200, n_untrained=1)
    other = ablate(MODEL, PROMPTS, [SCALE, "hook_embed"], n_prompts=50)
    tables = [
        probes,
        probes[probes.statistic == "x_var"].assign(control=0.0),
        other,
        pd.concat([other, other.assign(mode="zero")]),
        interchange(MODEL, PROMPTS, SCALE, "x_var", n_train=200, n_prompts=50),
        read_out(MODEL, PROMPTS, n_prompts=48),
    ]
    for table in tables:
        assert site_title(table, SCALE) == "layer 1: norm scale"
        assert site_title(table, "hook_embed") == "embedding"
    assert site_title(pd.DataFrame(), SCALE) == SCALE


def test_figures_show_titles():
    probes = fit_probes(MODEL, PROMPTS, SCALE, n_train=200, n_test=200, n_untrained=1)
    assert list(wide(probes, "r2").index) == ["layer 1: norm scale"]
    with style():
        ax = ablation_bars(ablate(MODEL, PROMPTS, ["hook_embed", SCALE], n_prompts=50))
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["embedding", "layer 1: norm scale"]
