"""Do the weights match the closed-form construction, and at which level?

One checkpoint: what every coordinate holds (read-out), and its alignment to the nearest
construction at three levels (permutations with signs, all symmetries of the weights, what is
computed on the same prompts), each with its p-value against untrained models and models with
another algorithm. Several checkpoints: the scores of each, and of each against the others: do
independent runs find the same circuit?
"""

import itertools

import pandas as pd
import torch
from joblib import delayed
from matplotlib.figure import Figure
from pydantic import Field

from models import available
from models.checkpoint import CheckpointError
from probe import Subject, align, load_subject, read_out
from probe.match_figures import (
    layer_map_panels,
    null_panel,
    pair_panels,
    quantity_columns,
    read_out_panel,
    score_panels,
    weight_panels,
)
from probe.matching import Alignment
from probe.nearest import ConstructionFamily
from probe.reporting import AnalysisConfig, Output, in_parallel, main
from probe.subject import family_of
from probe.survey import has_construction

LEVELS = ("signed_permutation", "gauge", "functional")
NEAREST, OTHERS = "nearest construction", "other models"
ALPHA = 0.05


class Config(AnalysisConfig):
    """Settings of the analysis.

    Attributes:
        against: further checkpoints; every one is then aligned to every other as well.
        zoo: study all shipped checkpoints of the construction's size instead, each aligned to
            the other seeds of its training.
        jobs: processes, for several checkpoints.
    """

    against: tuple[str, ...] = ()
    zoo: bool = False
    jobs: int = Field(2, ge=1)


def run(config: Config) -> Output:
    """Align the checkpoint(s) and read them out."""
    if config.zoo:
        return several(available(), config)
    checkpoints = [config.checkpoint, *config.against]
    subjects = [load_subject(checkpoint) for checkpoint in checkpoints]
    if len({subject.name for subject in subjects}) < len(subjects):
        raise ValueError("the same checkpoint is named twice; name each once")
    if len(subjects) == 1:
        return one(subjects[0], config)
    return several(checkpoints, config)


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


def several(checkpoints: list[str], config: Config) -> Output:
    """Each checkpoint beside its nearest construction, and beside the others it belongs with.

    Shipped checkpoints are compared with the other seeds of the same training, others with all.
    """
    loaded = {checkpoint: load_subject(checkpoint) for checkpoint in checkpoints}
    matched = {source: one for source, one in loaded.items() if has_construction(one.model)}
    if not matched:
        raise CheckpointError("none of the checkpoints has the construction's size")
    # Named as they were given: another process cannot load a folder by its last part.
    groups: dict[str, list[str]] = {}
    for source, subject in matched.items():
        groups.setdefault(family_of(subject.name) if config.zoo else "", []).append(source)
    calls = []
    # Constructions differ between shapes, and a process keeps its null scores.
    for _, group in sorted(groups.items()):
        calls.append((group, NEAREST))
        calls += [([other for other in group if other != source], source) for source in group]
    rows = in_parallel(
        [delayed(align_all)(*call, config.seed) for call in calls if call[0]],
        config.jobs,
        "references",
    )
    scores = pd.DataFrame(itertools.chain.from_iterable(rows))
    scores["family"] = scores["checkpoint"].map(family_of) if config.zoo else scores["checkpoint"]
    scores["against"] = scores["reference"].where(scores["reference"] == NEAREST, OTHERS)
    figures = {
        "scores": (score_panels(scores[scores["against"] == NEAREST]), scores),
    }
    between = scores[scores["against"] == OTHERS]
    if len(between):
        panels = score_panels(between) if config.zoo else pair_panels(between)
        figures["pairs"] = (panels, between)
    notes = [
        f"{len(loaded) - len(matched)} checkpoint(s) of another size or placement left out"
    ] * (len(matched) < len(loaded))
    for (level, against), group in scores.groupby(["level", "against"], sort=False):
        count = int((group["p_value"] <= ALPHA).sum())
        notes.append(f"{level}, {against}: {count} of {len(group)} agree at p ≤ {ALPHA}")
    hashes = {subject.name: subject.sha256 for subject in matched.values()}
    return Output(scores, summary(scores), figures, hashes, tuple(notes))


def align_all(checkpoints: list[str], reference: str, seed: int) -> list[dict[str, object]]:
    """Rows for several checkpoints beside one reference, or each beside its construction."""
    torch.set_num_threads(1)
    target = None if reference == NEAREST else load_subject(reference)
    rows = []
    for checkpoint in checkpoints:
        subject = load_subject(checkpoint)
        goal = target.model if target else ConstructionFamily.for_model(subject.model.cfg)
        # Two models meet on prompts that neither was favoured on, unless both know the same.
        shared = target is None or target.prompts == subject.prompts
        prompts = subject.prompts if shared else None
        for level in LEVELS:
            found = align(subject.model, goal, level, prompt_config=prompts, seed=seed)
            rows.append(row(subject.name, target.name if target else NEAREST, found))
    return rows


def summary(scores: pd.DataFrame) -> pd.DataFrame:
    """Median score per level, and in brackets how many of how many agree at p ≤ `ALPHA`."""
    rows = []
    for (family, against), group in scores.groupby(["family", "against"], sort=False):
        line = {"model": family, "against": against}
        for level, own in group.groupby("level", sort=False):
            agree = f"{(own['p_value'] <= ALPHA).sum()}/{len(own)}"
            line[level] = f"{own['score'].median():.2f} ({agree})"
        rows.append(line)
    return pd.DataFrame(rows)


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


if __name__ == "__main__":
    main("match_weights", Config, run, __doc__)
