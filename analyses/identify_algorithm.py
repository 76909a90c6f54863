"""Which algorithm is it?

Names the algorithm of one checkpoint, or of every shipped one (--checkpoint zoo): distance to
each rival in and out of distribution, equivariance, the division test, and a verdict in words.
The confusion matrix of the verdict on models with a known answer is made by
analyses/calibrate_verdict.py.
"""

from pydantic import Field

from probe.report.command import AnalysisConfig, read_command_line


class Config(AnalysisConfig):
    """Settings of the analysis.

    Attributes:
        n_prompts: prompts per condition.
        jobs: processes, for several models.
    """

    n_prompts: int = Field(512, ge=64)
    jobs: int = Field(2, ge=1)


if __name__ == "__main__":
    # --help and mistakes are answered before the imports below, which take seconds.
    read_command_line(Config, __doc__)

import re

import numpy as np
import pandas as pd
import torch
from joblib import delayed
from matplotlib.figure import Figure

from models import available
from models.checkpoint import PREFIX
from probe import Verdict, identify, load_subject
from probe.figures.verdict import agreement_panels, confusion_heatmap, rival_distances
from probe.report.script import Output, in_parallel, main
from probe.rivals.behaviour import LENGTHS
from probe.subjects.subject import family_of, is_zoo
from probe.verdict.findings import CEILING, FLOOR

# What names one rival, and the measure that compares it with the model.
RIVAL, DISTANCE = ["family", "k", "query_row"], "distance"


def run(config: Config) -> Output:
    """Identify one model on its training distribution, or every shipped one on its own."""
    zoo = is_zoo(config.checkpoint)
    names = [PREFIX + name for name in available()] if zoo else [config.checkpoint]
    subjects = [load_subject(name) for name in names]
    calls = [delayed(judge)(name, config.n_prompts, config.seed) for name in names]
    jobs = min(config.jobs, len(calls))
    verdicts = dict(
        zip((s.name for s in subjects), in_parallel(calls, jobs, "models"), strict=True)
    )
    tables = {name: verdict.evidence for name, verdict in verdicts.items()}
    if zoo:
        tables = {name: of_best_rivals(verdict) for name, verdict in verdicts.items()}
    scores = pd.concat(
        [table.assign(model=name, verdict=verdicts[name].label) for name, table in tables.items()]
    )
    facts = {"verdicts": {name: verdict.to_dict() for name, verdict in verdicts.items()}}
    hashes = {subject.name: subject.sha256 for subject in subjects}
    sources = {subject.name: subject.source for subject in subjects}
    if not zoo:
        (verdict,) = verdicts.values()
        figures = {"rival_distances": distance_figure(verdict)}
        return Output(
            scores, shown(verdict), figures, hashes, (verdict.words,), facts, source=sources
        )
    notes = tuple(f"{name}: {verdict.words}" for name, verdict in verdicts.items())
    figures = zoo_figures(verdicts)
    return Output(scores, overview(verdicts), figures, hashes, notes, facts, source=sources)


def judge(checkpoint: str, n_prompts: int, seed: int) -> Verdict:
    """The verdict on one model."""
    torch.set_num_threads(1)
    subject = load_subject(checkpoint)
    generator = torch.Generator().manual_seed(seed)
    return identify(subject.model, subject.prompts, n_prompts=n_prompts, generator=generator)


def of_best_rivals(verdict: Verdict) -> pd.DataFrame:
    """The evidence, of distances only those to the best rival of each algorithm."""
    best = pd.MultiIndex.from_frame(verdict.findings.best[RIVAL])
    evidence = verdict.evidence
    kept = pd.MultiIndex.from_frame(evidence[RIVAL]).isin(best)
    return evidence[kept | (evidence.measure != DISTANCE)]


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
                "least sq.": score["least squares"],
                "descent": score["gradient descent"],
                "division": verdict.findings.numbers["division_r2"],
                "residual": verdict.findings.numbers["residual_r2"],
            }
        )
    return pd.DataFrame(rows)


def distance_figure(verdict: Verdict) -> tuple[Figure, pd.DataFrame]:
    """Distance to the best rival of each algorithm."""
    best = verdict.findings.best.sort_values("score")
    distances = verdict.evidence[verdict.evidence.measure == DISTANCE]
    rows = best[RIVAL].merge(distances, how="left")
    rival = rows.family.where(rows.k <= 1, rows.family + " (" + rows.k.astype(str) + ")")
    rows.insert(0, "rival", rival + rows.query_row.map({True: ", with query row", False: ""}))
    rows = rows[~rows.condition.isin(LENGTHS)]
    ax = rival_distances(rows)
    ax.set_title(verdict.label)
    return ax.figure, rows


def zoo_figures(verdicts: dict[str, Verdict]) -> dict[str, tuple[Figure, pd.DataFrame]]:
    """Distances of all models, and their verdicts by training."""
    frames = []
    for name, verdict in verdicts.items():
        best = verdict.findings.best
        here = np.log10(best.distance.clip(FLOOR, CEILING))
        # A score is the mean of both.
        frames.append(
            best.assign(
                model=name,
                verdict=verdict.label,
                in_distribution=here,
                shifted=2 * best.score - here,
            )
        )
    scores = pd.concat(frames)
    kept = ["model", "verdict", "algorithm", "family", "k", "query_row"]
    scores = scores.loc[scores.algorithm != "zero", [*kept, "in_distribution", "shifted", "score"]]
    kinds = pd.DataFrame(
        {
            "trained as": [family_of(name) for name in verdicts],
            # Which order, how many steps or which penalty is left out.
            "verdict": [re.sub(r" \(.*\)", "", verdict.label) for verdict in verdicts.values()],
        }
    )
    counts = pd.crosstab(kinds["trained as"], kinds["verdict"])
    ax = confusion_heatmap(counts)
    ax.set(ylabel="trained as")
    data = counts.stack().rename("count").reset_index()
    return {
        "agreement": (agreement_panels(scores), scores),
        "verdicts_by_training": (ax.figure, data),
    }


if __name__ == "__main__":
    main("identify_algorithm", Config, run, __doc__)
