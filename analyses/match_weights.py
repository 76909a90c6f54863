"""Do the weights match the closed-form construction, and at which level?

One checkpoint: what every coordinate holds (read-out), and its alignment to the nearest
construction at three levels (permutations with signs, all symmetries of the weights, what is
computed on the same prompts), each with its p-value against untrained models and models with
another algorithm. Several checkpoints: the same for each, and each against each other: do
independent runs find the same circuit?
"""

import pandas as pd
from matplotlib.figure import Figure

from models import available
from models.checkpoint import CheckpointError
from probe import Subject, align, load_subject, read_out
from probe.match_figures import (
    layer_map_panels,
    null_panel,
    pair_panels,
    quantity_columns,
    read_out_panel,
    score_panel,
    weight_panels,
)
from probe.matching import Alignment
from probe.nearest import ConstructionFamily
from probe.reporting import AnalysisConfig, Output, main

LEVELS = ("signed_permutation", "gauge", "functional")
NEAREST = "nearest construction"


class Config(AnalysisConfig):
    """Settings of the analysis.

    Attributes:
        against: further checkpoints; every one is then aligned to every other as well.
        zoo: study all shipped checkpoints of the construction's size instead, without pairs.
    """

    against: tuple[str, ...] = ()
    zoo: bool = False


def run(config: Config) -> Output:
    """Align the checkpoint(s) and read them out."""
    if config.zoo:
        return several([load_subject(name) for name in available()], config, pairs=False)
    subjects = [load_subject(name) for name in (config.checkpoint, *config.against)]
    if len({subject.name for subject in subjects}) < len(subjects):
        raise ValueError("the same checkpoint is named twice; name each once")
    if len(subjects) == 1:
        return one(subjects[0], config)
    return several(subjects, config, pairs=True)


def one(subject: Subject, config: Config) -> Output:
    """All of it for one checkpoint."""
    model, prompts = subject.model, subject.prompts
    family = ConstructionFamily.for_model(model.cfg)
    alignments = [
        align(model, family, level, prompt_config=prompts, seed=config.seed) for level in LEVELS
    ]
    tables = {
        basis: read_out(model, prompts, basis=basis, seed=config.seed)
        for basis in ("model", "canonical")
    }
    scores = pd.DataFrame([row(subject.name, NEAREST, found) for found in alignments])
    permuted, gauge, _ = alignments
    panels = {
        "learned, permuted": permuted.model,
        "learned, all symmetries": gauge.model,
        "construction": gauge.reference,
    }
    maps = {label: panels[label] for label in ("learned, all symmetries", "construction")}
    parts = pd.concat([found.table.assign(level=found.level) for found in alignments])
    nulls = pd.concat([found.null.assign(level=found.level) for found in alignments])
    figures: dict[str, tuple[Figure, pd.DataFrame]] = {
        "weights": (weight_panels(panels, family.names), parts),
        "layer_maps": (layer_map_panels(maps, family.names), parts),
        "null": (null_panel(alignments).figure, nulls),
    }
    for basis, table in tables.items():
        columns = ["site", "coordinate", "r2", *quantity_columns(table)]
        figures[f"read_out_{basis}"] = (read_out_panel(table).figure, table[columns])
    notes = [*dict.fromkeys(note for found in alignments for note in found.notes)]
    notes += [f"{found.level}: {', '.join(found.words)}" for found in alignments]
    notes += [
        f"{site}: {words}"
        for site, words in zip(tables["model"]["site"], tables["model"]["words"], strict=True)
    ]
    pages = {f"read_out_{basis}.csv": table.to_csv(index=False) for basis, table in tables.items()}
    shown = scores.drop(columns=["checkpoint", "words"])
    return Output(scores, shown, figures, subject.sha256, tuple(notes), pages=pages)


def several(subjects: list[Subject], config: Config, pairs: bool) -> Output:
    """Each checkpoint beside its nearest construction, and beside each other."""
    rows = []
    matched = [subject for subject in subjects if _has_construction(subject)]
    for subject in matched:
        family = ConstructionFamily.for_model(subject.model.cfg)
        for level in LEVELS:
            found = align(subject.model, family, level, seed=config.seed)
            rows.append(row(subject.name, NEAREST, found))
    if not matched:
        raise CheckpointError("none of the checkpoints has the construction's size")
    if pairs:
        for subject in matched:
            for other in matched:
                if subject is other:
                    continue
                for level in LEVELS:
                    found = align(subject.model, other.model, level, seed=config.seed)
                    rows.append(row(subject.name, other.name, found))
    scores = pd.DataFrame(rows)
    scores["family"] = scores["checkpoint"].str.replace(r"_seed\d+$", "", regex=True)
    nearest = scores[scores["reference"] == NEAREST]
    figures = {"scores": (score_panel(nearest).figure, nearest)}
    notes = [
        f"{len(subjects) - len(matched)} checkpoint(s) of another size or placement left out"
    ] * (len(matched) < len(subjects))
    if pairs:
        between = scores[scores["reference"] != NEAREST]
        figures["pairs"] = (pair_panels(between), between)
        for level, group in between.groupby("level", sort=False):
            share = (group["p_value"] <= 0.05).mean()
            notes.append(f"{level}: {share:.0%} of pairs of models agree at p ≤ 0.05")
    for level, group in nearest.groupby("level", sort=False):
        share = (group["p_value"] <= 0.05).mean()
        notes.append(f"{level}: {share:.0%} of models match their construction at p ≤ 0.05")
    wide = nearest.pivot(index="checkpoint", columns="level", values=["score", "p_value"])
    shown = pd.DataFrame(
        {
            f"{level} {what}": wide[value, level]
            for level in LEVELS
            for what, value in (("score", "score"), ("p", "p_value"))
        }
    ).reset_index()
    hashes = {subject.name: subject.sha256 for subject in matched}
    return Output(scores, shown, figures, hashes, tuple(notes))


def row(checkpoint: str, reference: str, found: Alignment) -> dict[str, object]:
    """One line of the table of scores."""
    quantile = found.null.groupby("kind")["score"].quantile(0.95)
    return {
        "checkpoint": checkpoint,
        "reference": reference,
        "level": found.level,
        "score": found.score,
        "distance": found.distance,
        "p_value": found.p_value,
        "null_95": float(quantile.max()),
        "words": "; ".join(found.words),
    }


def _has_construction(subject: Subject) -> bool:
    """Whether the construction has this model's size and placement."""
    config = subject.model.cfg
    p = config.n_covariates
    size = (config.d_model, config.n_layers) == (p + 3, p + 1)
    return size and config.normalization == "branch" and not config.norm_affine


if __name__ == "__main__":
    main("match_weights", Config, run, __doc__)
