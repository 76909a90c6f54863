"""Which algorithm is it?

Names the algorithm of one checkpoint, or of every shipped one (--checkpoint zoo): distance to
each rival in and out of distribution, equivariance, the division test, and a verdict in words.
The confusion matrix of the verdict on models with a known answer is made by
analyses/calibrate_verdict.py.
"""

import pandas as pd
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from pydantic import Field

from models import available
from probe import Subject, Verdict, identify, load_subject
from probe.behaviour import LENGTHS
from probe.figures import TWO_COLUMNS
from probe.reporting import AnalysisConfig, Output, main
from probe.subject import ZOO
from probe.verdict_figures import confusion_heatmap, rival_distances, score_heatmap


class Config(AnalysisConfig):
    """Settings of the analysis.

    Attributes:
        n_prompts: prompts per condition.
    """

    n_prompts: int = Field(512, ge=64)


def run(config: Config) -> Output:
    """Identify one model on its training distribution, or every shipped one on its own."""
    names = available() if config.checkpoint == ZOO else [config.checkpoint]
    subjects = [load_subject(name) for name in names]
    verdicts = {}
    for subject in subjects:
        generator = torch.Generator().manual_seed(config.seed)
        verdicts[subject.name] = identify(
            subject.model, subject.prompts, n_prompts=config.n_prompts, generator=generator
        )
    scores = pd.concat(
        [v.evidence.assign(model=name, verdict=v.label) for name, v in verdicts.items()]
    )
    facts = {"verdicts": {name: verdict.to_dict() for name, verdict in verdicts.items()}}
    hashes = {subject.name: subject.sha256 for subject in subjects}
    if config.checkpoint != ZOO:
        (verdict,) = verdicts.values()
        figures = {"rival_distances": distance_figure(verdict)}
        return Output(scores, shown(verdict), figures, hashes, (verdict.words,), facts)
    notes = tuple(f"{name}: {verdict.words}" for name, verdict in verdicts.items())
    return Output(scores, overview(verdicts), zoo_figures(subjects, verdicts), hashes, notes, facts)


def shown(verdict: Verdict) -> pd.DataFrame:
    """The best rival of every algorithm, nearest first."""
    table = verdict.findings.best.sort_values("score")
    return table[["algorithm", "family", "k", "query_row", "distance", "worst", "score"]]


def overview(verdicts: dict[str, Verdict]) -> pd.DataFrame:
    """One row per model."""
    rows = []
    for name, verdict in verdicts.items():
        score = verdict.findings.best.set_index("algorithm").score
        rows.append(
            {
                "model": name,
                "verdict": verdict.label,
                "least squares": score["least squares"],
                "Newton": score["Newton"],
                "ridge": score["ridge"],
                "gradient descent": score["gradient descent"],
                "division R²": verdict.findings.division_r2,
            }
        )
    return pd.DataFrame(rows)


def distance_figure(verdict: Verdict) -> tuple[Figure, pd.DataFrame]:
    """Distance to the best rival of each algorithm."""
    best = verdict.findings.best.sort_values("score")
    distances = verdict.evidence[verdict.evidence.measure == "distance"]
    rows = best[["family", "k", "query_row"]].merge(distances, how="left")
    rival = rows.family.where(rows.k <= 1, rows.family + " (" + rows.k.astype(str) + ")")
    rows.insert(0, "rival", rival + rows.query_row.map({True: ", with query row", False: ""}))
    rows = rows[~rows.condition.isin(LENGTHS)]
    ax = rival_distances(rows)
    ax.set_title(verdict.label)
    return ax.figure, rows


def zoo_figures(
    subjects: list[Subject], verdicts: dict[str, Verdict]
) -> dict[str, tuple[Figure, pd.DataFrame]]:
    """Scores of all models, and verdicts by training distribution."""
    scores = pd.concat(
        [v.findings.best.assign(model=name, verdict=v.label) for name, v in verdicts.items()]
    )[["model", "verdict", "algorithm", "family", "k", "query_row", "score", "distance"]]
    kinds = pd.DataFrame(
        {
            "trained on": [training(subject) for subject in subjects],
            "verdict": [verdict.kind for verdict in verdicts.values()],
        }
    )
    counts = pd.crosstab(kinds["trained on"], kinds["verdict"])
    figure = plt.figure(figsize=(TWO_COLUMNS, 1.2 + 0.25 * len(counts)))
    ax = confusion_heatmap(counts, figure.add_subplot())
    ax.set(ylabel="trained on")
    data = counts.stack().rename("count").reset_index()
    return {
        "scores": (score_heatmap(scores), scores),
        "verdicts_by_distribution": (figure, data),
    }


def training(subject: Subject) -> str:
    """Training prompts in a few words."""
    prompts = subject.prompts
    if prompts.x_distribution == "uniform":
        return f"x ~ U{prompts.x_bounds}"
    varied = prompts.x_log_scale > 0 or prompts.x_mean_std > 0
    return "x of varied mean and scale" if varied else "x ~ N(0, 1)"


if __name__ == "__main__":
    main("identify_algorithm", Config, run, __doc__)
