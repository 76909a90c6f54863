"""Which sites and directions does the model use?

Replaces whole sites (by their mean, or by another prompt's activation), removes the directions
in which probes find a statistic (beside random directions), and writes one prompt's statistics
into another along them; effects are on the loss to least squares and on the prediction.
"""

from pydantic import Field

from probe.report.command import AnalysisConfig, read_command_line


class Config(AnalysisConfig):
    """Settings of the analysis.

    Attributes:
        n_prompts: prompts that effects are measured on.
        n_train: prompts that probes are fitted on, or more where a site has many features.
        n_random: random directions beside each probe direction.
    """

    n_prompts: int = Field(2000, ge=100)
    n_train: int = Field(20_000, ge=100)
    n_random: int = Field(10, ge=1)


if __name__ == "__main__":
    # --help and mistakes are answered before the imports below, which take seconds.
    read_command_line(Config, __doc__)

import pandas as pd
import torch

from probe import ablate, ablate_direction, interchange, load_subject
from probe.causal.directions import READABLE_R2
from probe.figures.interventions import (
    ablation_bars,
    direction_bars,
    interchange_slopes,
    statistic_panels,
)
from probe.probing.linear import needed_prompts
from probe.quantities.statistics import statistic_label
from probe.report.script import Output, main


def run(config: Config) -> Output:
    """Intervene at every site, on the prompts the checkpoint was trained on."""
    subject = load_subject(config.checkpoint)
    generator = torch.Generator().manual_seed(config.seed)
    model, prompts = subject.model, subject.prompts
    measured = {"n_prompts": config.n_prompts, "generator": generator}
    modes = ("mean", "resample")
    sites = pd.concat([ablate(model, prompts, mode=mode, **measured) for mode in modes])
    measured["n_train"] = max(config.n_train, needed_prompts(model, prompts))
    directions = ablate_direction(model, prompts, n_random=config.n_random, **measured)
    written = interchange(model, prompts, **measured)

    tables = {"site": sites, "direction": directions, "interchange": written}
    scores = pd.concat([t.assign(intervention=name) for name, t in tables.items()])
    found = directions.merge(written, on=["site", "statistic"], suffixes=("", "_line"))
    found = found.dropna(subset="effect")
    titles = {name: site.title for name, site in model.sites.items()}
    shown = pd.DataFrame(
        {
            "site": found["site"].map(titles),
            "": found["statistic"].map(statistic_label),
            "removed": found["effect"],
            "random": found["random_effect"],
            "interchange slope": found["slope"],
            "R²": found["r2"],
        }
    )
    figures = {
        "ablated_sites": (ablation_bars(sites).figure, sites),
        "removed_directions": (statistic_panels(directions, direction_bars), directions),
        "interchange": (statistic_panels(written, interchange_slopes), written),
    }
    notes = (
        f"Sites where a probe has R² of {READABLE_R2} or more. removed: increase of the loss in "
        "units of Var ŷ without the probe's direction; random: without a random one (mean).",
        "interchange slope: change of the prediction against that of least squares.",
    )
    return Output(scores, shown, figures, subject.sha256, notes, source=subject.source)


if __name__ == "__main__":
    main("ablations", Config, run, __doc__)
