"""Do the weights match the closed-form construction, and at which level?

One checkpoint: what every coordinate holds (read-out), and its alignment to the nearest
construction at three levels (permutations with signs, all symmetries of the weights, what is
computed on the same prompts), each with its p-value against untrained models and models with
another algorithm. A model of another size is read out too, and aligned to the construction at the
levels that can compare them. Several checkpoints: the scores of each, and of each against the
others: do independent runs find the same circuit?
"""

from pydantic import Field

from probe.report.command import AnalysisConfig, read_command_line


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


if __name__ == "__main__":
    # --help and mistakes are answered before the imports below, which take seconds.
    read_command_line(Config, __doc__)

import itertools

import pandas as pd
import torch
from joblib import delayed
from matplotlib.figure import Figure

from models import available, closed_form
from models.architecture.transformer import LinearAttentionTransformer
from models.checkpoint import CheckpointError
from probe import Subject, align, load_subject, read_out
from probe.figures.matching import (
    layer_map_panels,
    null_panel,
    pair_panels,
    score_panels,
    weight_panels,
)
from probe.figures.readout import quantity_columns, read_out_panel
from probe.matching.alignment import Alignment
from probe.matching.construction_family import ConstructionFamily, has_construction
from probe.matching.pair import Level, require_comparable
from probe.matching.tables import layer_map_tables, weight_tables
from probe.report.script import Output, in_parallel, main
from probe.subjects.subject import family_of

LEVELS: tuple[Level, ...] = ("signed_permutation", "gauge", "functional")
NEAREST, OTHERS = "nearest construction", "other models"
# What a model of another size is aligned to: it has no family of its own.
CONSTRUCTION = "construction"
SCORES = ["checkpoint", "reference", "level", "score", "distance", "p_value", "null_95", "words"]
ALPHA = 0.05


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
    """All of it for one checkpoint, as far as its size goes."""
    model, prompts = subject.model, subject.prompts
    shape = model.cfg
    family = ConstructionFamily.for_model(shape) if has_construction(shape) else None
    base = family.base if family else closed_form(shape.n_context, shape.n_covariates)
    levels, notes = comparable(model, base)
    alignments = {
        level: align(
            model, family or base, level, prompt_config=prompts, generator=seeded(config.seed)
        )
        for level in levels
    }
    canonical = ("canonical",) if shape.has_norm and not shape.norm_affine else ()
    tables = {
        basis: read_out(
            model, prompts, basis=basis, generator=torch.Generator().manual_seed(config.seed)
        )
        for basis in ("model", *canonical)
    }
    reference = NEAREST if family else CONSTRUCTION
    scores = pd.DataFrame(
        [row(subject.name, reference, found) for found in alignments.values()], columns=SCORES
    )
    figures = alignment_figures(alignments, family)
    for basis, table in tables.items():
        columns = ["site", "coordinate", "r2", *quantity_columns(table)]
        figures[f"read_out_{basis}"] = (read_out_panel(table).figure, table[columns])
    notes += dict.fromkeys(note for found in alignments.values() for note in found.notes)
    notes += [f"{level}: {', '.join(found.words)}" for level, found in alignments.items()]
    notes += [
        f"{site}: {words}"
        for site, words in zip(tables["model"]["site"], tables["model"]["words"], strict=True)
    ]
    pages = {f"read_out_{basis}.csv": table.to_csv(index=False) for basis, table in tables.items()}
    shown = scores.drop(columns=["checkpoint", "words"])
    if scores.empty:
        shown = tables["model"][["site", "coordinate", "r2"]]
    return Output(
        scores, shown, figures, subject.sha256, tuple(notes), pages=pages, source=subject.source
    )


def alignment_figures(
    alignments: dict[Level, Alignment], family: ConstructionFamily | None
) -> dict[str, tuple[Figure, pd.DataFrame]]:
    """Scores beside their null, and for a model of the construction's size its weights."""
    figures: dict[str, tuple[Figure, pd.DataFrame]] = {}
    found = list(alignments.values())
    if family and len(found) == len(LEVELS):
        parts = pd.concat([each.table.assign(level=each.level) for each in found])
        gauge = alignments["gauge"]
        panels = {
            "learned, permuted": alignments["signed_permutation"].model,
            "learned, all symmetries": gauge.model,
            "construction": gauge.reference,
        }
        maps = {label: panels[label] for label in ("learned, all symmetries", "construction")}
        weights = {label: weight_tables(each, family.names) for label, each in panels.items()}
        layers = {label: layer_map_tables(each, family.names) for label, each in maps.items()}
        figures["weights"] = (weight_panels(weights), parts)
        figures["layer_maps"] = (layer_map_panels(layers), parts)
    if found:
        nulls = pd.concat([each.null.assign(level=each.level) for each in found])
        figures["null"] = (null_panel(found).figure, nulls)
    return figures


def comparable(
    model: LinearAttentionTransformer, reference: LinearAttentionTransformer
) -> tuple[list[Level], list[str]]:
    """Levels at which two models can be compared; and at which not, with the reasons."""
    levels: list[Level] = []
    reasons: dict[str, list[str]] = {}
    for level in LEVELS:
        try:
            require_comparable(model, reference, level)
            levels.append(level)
        except ValueError as reason:
            reasons.setdefault(str(reason), []).append(level)
    return levels, [f"not compared, {', '.join(at)}: {why}" for why, at in reasons.items()]


def seeded(seed: int) -> torch.Generator:
    """A fresh source of randomness."""
    return torch.Generator().manual_seed(seed)


def several(checkpoints: list[str], config: Config) -> Output:
    """Each checkpoint beside its nearest construction, and beside the others it belongs with.

    Shipped checkpoints are compared with the other seeds of the same training, others with all.
    """
    loaded = {checkpoint: load_subject(checkpoint) for checkpoint in checkpoints}
    sized = [name for name, each in loaded.items() if has_construction(each.model.cfg)]
    matched = {name: loaded[name] for name in (sized if config.zoo else loaded)}
    # Named as they were given: another process cannot load a folder by its last part.
    groups: dict[str, list[str]] = {}
    for source, subject in matched.items():
        groups.setdefault(family_of(subject.name) if config.zoo else "", []).append(source)
    calls = []
    # Constructions differ between shapes, and a process keeps its null scores.
    for _, group in sorted(groups.items()):
        calls.append(([source for source in group if source in sized], NEAREST))
        calls += [([other for other in group if other != source], source) for source in group]
    refused = {
        f"{loaded[one].name} and {loaded[other].name}: {note}": None
        for group in groups.values()
        for one, other in itertools.combinations(group, 2)
        for note in comparable(loaded[one].model, loaded[other].model)[1]
    }
    if not sized and not any(
        comparable(loaded[one].model, loaded[other].model)[0]
        for group in groups.values()
        for one, other in itertools.combinations(group, 2)
    ):
        raise CheckpointError("; ".join(["no two of the checkpoints can be compared", *refused]))
    rows = in_parallel(
        [delayed(align_all)(*call, config.seed) for call in calls if call[0]],
        config.jobs,
        "references",
    )
    scores = pd.DataFrame(itertools.chain.from_iterable(rows))
    scores["family"] = scores["checkpoint"].map(family_of) if config.zoo else scores["checkpoint"]
    scores["against"] = scores["reference"].where(scores["reference"] == NEAREST, OTHERS)
    figures = {}
    if sized:
        figures["scores"] = (score_panels(scores[scores["against"] == NEAREST]), scores)
    between = scores[scores["against"] == OTHERS]
    if len(between):
        panels = score_panels(between) if config.zoo else pair_panels(between)
        figures["pairs"] = (panels, between)
    left_out = len(loaded) - len(matched)
    notes = [f"{left_out} checkpoint(s) of another size or placement left out"] * (left_out > 0)
    notes += [
        f"{each.name}: the construction has another size or placement; compared with the others"
        for source, each in matched.items()
        if source not in sized
    ]
    notes += refused
    for (level, against), group in scores.groupby(["level", "against"], sort=False):
        count = int((group["p_value"] <= ALPHA).sum())
        notes.append(f"{level}, {against}: {count} of {len(group)} agree at p ≤ {ALPHA}")
    hashes = {subject.name: subject.sha256 for subject in matched.values()}
    sources = {subject.name: subject.source for subject in matched.values()}
    return Output(scores, summary(scores), figures, hashes, tuple(notes), source=sources)


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
        levels = comparable(subject.model, target.model)[0] if target else LEVELS
        for level in levels:
            found = align(subject.model, goal, level, prompt_config=prompts, generator=seeded(seed))
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
