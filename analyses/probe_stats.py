"""Where do the sufficient statistics live inside a transformer?

Linear probes for x̄, ȳ, V, C, C/V and ŷ at every site of a checkpoint, at the query token (head
states have no token), and in the residual stream at every position. Each is scored on fresh
prompts, beside the strongest of three controls: the raw input, untrained models of the same
shape, shuffled targets.
"""

from pydantic import Field

from probe.report.command import AnalysisConfig, read_command_line


class Config(AnalysisConfig):
    """Settings of the analysis.

    Attributes:
        n_prompts: prompts to fit on (or more where a site has many features), and as many fresh
            ones to score on.
        n_untrained: untrained models that the controls draw.
    """

    n_prompts: int = Field(20_000, ge=100)
    n_untrained: int = Field(8, ge=1)


if __name__ == "__main__":
    # --help and mistakes are answered before the imports below, which take seconds.
    read_command_line(Config, __doc__)

import pandas as pd
import torch

from models.architecture.sites import sites_with
from probe import fit_probes, load_subject
from probe.figures.probes import position_panels, probe_heatmaps, wide
from probe.probing.linear import needed_prompts, strongest_control
from probe.report.script import Output, main


def run(config: Config) -> Output:
    """Probe every site of the checkpoint on the prompts it was trained on."""
    subject = load_subject(config.checkpoint)
    model, prompts = subject.model, subject.prompts
    settings = {
        "n_train": max(config.n_prompts, needed_prompts(model, prompts)),
        "n_test": config.n_prompts,
        "n_untrained": config.n_untrained,
        "generator": torch.Generator().manual_seed(config.seed),
    }
    scores = fit_probes(model, prompts, **settings)
    stream = [site.name for role in ("embedding", "stream out") for site in sites_with(model, role)]
    everywhere = [*map(str, range(prompts.n_context)), "query"]
    by_position = fit_probes(model, prompts, stream, everywhere, **settings)

    notes = (
        f"R² of linear probes on {config.n_prompts:,} fresh prompts, then the strongest control "
        f"(raw input, {config.n_untrained} untrained models, shuffled targets).",
    )
    figures = {
        "probes": (probe_heatmaps(scores), scores),
        "positions": (position_panels(by_position), by_position),
    }
    return Output(scores, _shown(scores), figures, subject.sha256, notes, source=subject.source)


def _shown(scores: pd.DataFrame) -> pd.DataFrame:
    """Site x statistic with cells such as "1.0 .04": R², then the strongest control."""
    r2, control = (
        wide(scores, "r2"),
        wide(scores.assign(control=strongest_control(scores)), "control"),
    )
    shown = r2.map(_short) + " " + control.map(_short)
    layers, labels = zip(*(label.rpartition(": ")[::2] for label in r2.index), strict=True)
    shown.insert(0, "layer", [layer.removeprefix("layer ") for layer in layers])
    shown.insert(1, "site", labels)
    return shown


def _short(value: float) -> str:
    """R² in three characters: ".04", "1.0"."""
    if pd.isna(value):
        return " – "
    rounded = round(value, 2) + 0.0
    return f"{rounded:.1f}" if rounded == 1 else f"{rounded:.2f}".replace("0.", ".", 1)


if __name__ == "__main__":
    main("probe_stats", Config, run, __doc__)
