"""Does layer norm divide by V?

Per layer: how the norm's scale follows V over prompts (log-log slope, R²), what happens to the
prediction when scales are swapped between prompts (the division test), the same with the
residuals that the stream holds after a step of gradient descent, and the distributions of the
norm's input, mean, scale and output beside those of the closed-form construction.
"""

from pydantic import Field

from probe.report.command import AnalysisConfig, read_command_line


class Config(AnalysisConfig):
    """Settings of the analysis.

    Attributes:
        n_prompts: prompts, and pairs of prompts in the division test.
    """

    n_prompts: int = Field(4000, ge=100)


if __name__ == "__main__":
    # --help and mistakes are answered before the imports below, which take seconds.
    read_command_line(Config, __doc__)

import pandas as pd
import torch

from probe import division_test, load_subject, norm_statistics, residual_division_test
from probe.causal.division import held_scale_points, require_one_quotient, require_residuals
from probe.causal.norm_scale import scale_law, scale_points
from probe.figures.norms import norm_panels, scale_panels
from probe.quantities.statistics import statistic_label
from probe.report.script import Output, main
from probe.subjects.survey import applies

_RENAMED = ("slope", "slope_low", "slope_high", "r2", "ci_low", "ci_high")


def run(config: Config) -> Output:
    """Follow the scale and swap it, on the prompts the checkpoint was trained on."""
    subject = load_subject(config.checkpoint)
    generator = torch.Generator().manual_seed(config.seed)
    settings = {"n_prompts": config.n_prompts, "generator": generator}
    points = scale_points(subject.model, subject.prompts, **settings)
    law = scale_law(points, generator)
    distributions = norm_statistics(subject.model, subject.prompts, **settings)
    scores = law.rename(columns={name: f"scale_{name}" for name in _RENAMED})
    shown = _shown(law, "scale")
    notes = [
        "scale: log norm scale against log V at the query token.",
        "±: half a 95 % interval over prompts; scores.csv has its ends.",
    ]
    if applies(require_one_quotient, subject.model, subject.prompts):
        division = division_test(subject.model, subject.prompts, **settings)
        renamed = division.rename(columns={name: f"division_{name}" for name in _RENAMED})
        scores = scores.merge(renamed, on="layer")
        shown = shown.merge(_shown(division, "division"), on="layer")
        notes.append(
            "division: prediction under another prompt's scale, against (C/V_B - C/V_A)(u - x̄)."
        )
    figures = {
        "scale_against_variance": (scale_panels(points), points),
        "norm_distributions": (norm_panels(distributions), distributions),
    }
    if applies(require_residuals, subject.model, subject.prompts):
        residual = residual_division_test(subject.model, subject.prompts, **settings)
        held = held_scale_points(subject.model, subject.prompts, **settings)
        for name, table in (("residual", residual), ("held_scale", scale_law(held, generator))):
            renamed = {column: f"{name}_{column}" for column in (*_RENAMED, "share", "step")}
            scores = scores.merge(
                table.drop(columns="statistic", errors="ignore").rename(columns=renamed), on="layer"
            )
        figures["scale_against_held_variance"] = (scale_panels(held), held)
        notes.append(
            "residual: the same with x' and y' that the stream holds; share: of the fit, left to "
            "the division; γ: x' = (1 - γ V)(x - x̄)."
        )
        notes += [
            f"residual, layer {row.layer}: slope {row.slope:.3f} ± "
            f"{(row.slope_high - row.slope_low) / 2:.3f}, R² {row.r2:.3f} ± "
            f"{(row.ci_high - row.ci_low) / 2:.3f}; share {row.share:.2f}, γ {row.step:.3f}"
            for row in residual.itertuples()
        ]
    return Output(scores, shown, figures, subject.sha256, tuple(notes), source=subject.source)


def _shown(lines: pd.DataFrame, what: str) -> pd.DataFrame:
    """Slope and R² by layer, each with half the width of its interval."""
    shown = lines[["layer"]].copy()
    if "statistic" in lines:
        shown["of"] = lines["statistic"].map(statistic_label)
    ends = {"slope": ("slope_low", "slope_high"), "r2": ("ci_low", "ci_high")}
    for (value, (low, high)), label in zip(ends.items(), ("slope", "R²"), strict=True):
        shown[f"{what}: {label}"] = [
            f"{v:.3f} ± {(b - a) / 2:.3f}"
            for v, a, b in lines[[value, low, high]].itertuples(index=False)
        ]
    return shown


if __name__ == "__main__":
    main("norm_division", Config, run, __doc__)
