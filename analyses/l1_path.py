"""What does the l1 penalty do?

Every trained model of one covariate along its l1 weight: error, exact zeros, active heads,
probes for V and C with their strongest control, division test, and functional alignment with
the construction. Nothing is trained.
"""

from pydantic import Field

from probe.report.command import AnalysisConfig, read_command_line
from probe.subjects.names import ZOO


class Config(AnalysisConfig):
    """Settings of the analysis.

    Attributes:
        checkpoint: a folder of checkpoint folders, as models.train writes; "zoo" for the
            shipped ones.
        n_prompts: pairs of prompts in the division test; probes take twice as many prompts.
    """

    checkpoint: str = ZOO
    n_prompts: int = Field(1000, ge=100)


if __name__ == "__main__":
    # --help and mistakes are answered before the imports below, which take seconds.
    read_command_line(Config, __doc__)

import pandas as pd

from probe.figures.survey import MEASURES, path_panels
from probe.report.script import Output, main
from probe.subjects.survey import survey, trained_zoo


def run(config: Config) -> Output:
    """Measure every model of one covariate."""
    zoo = trained_zoo(config.checkpoint)
    scores = survey(zoo, n_prompts=config.n_prompts, seed=config.seed)
    notes = (
        "medians over seeds; the penalty differs between rows of one distribution only.",
        f"{len(scores)} models, {config.n_prompts} pairs of prompts each in the division test.",
    )
    hashes = {each.subject.name: each.subject.sha256 for each in zoo}
    sources = {each.subject.name: each.subject.source for each in zoo}
    figures = {"l1_path": (path_panels(scores), scores)}
    return Output(scores, _shown(scores), figures, hashes, notes, source=sources)


def _shown(scores: pd.DataFrame) -> pd.DataFrame:
    """Medians by distribution and penalty, in words."""
    groups = scores.groupby(["distribution", "l1"], sort=False)
    shown = groups[list(MEASURES)].median()
    shown.insert(0, "models", groups.size())
    headings = {
        "normalised_mse": "norm. MSE",
        "zero_share": "zeros",
        "active_heads": "heads",
        "probe_V": "V",
        "probe_C": "C",
        "division_r2": "division",
        "division_slope": "slope",
        "alignment": "align",
    }
    return shown.rename(columns=headings).reset_index()


if __name__ == "__main__":
    main("l1_path", Config, run, __doc__)
