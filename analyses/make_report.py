"""One self-contained HTML page about a checkpoint, or about all shipped ones.

What was found, with its uncertainty, then the evidence: read-out, probes with controls, layer
norm as division, weights beside the construction, verdict, training, method, and how to make the
page again. Images and data are inside; figures for papers and tables lie beside the page.
"""

import pandas as pd
import torch
from pydantic import Field

from models.checkpoint import CheckpointError, checkpoint_folder, provenance
from models.training import normalised_mse
from probe import Subject, Verdict, identify, load_subject
from probe.behaviour import IN_DISTRIBUTION
from probe.mechanism import DIVISION, RESIDUAL_DIVISION
from probe.page import Block, Code, Listing, Section, charts, render
from probe.report_blocks import (
    curves_of,
    division_blocks,
    facts,
    method_blocks,
    model_in_words,
    probe_blocks,
    prompts_in_words,
    provenance_blocks,
    read_out_blocks,
    rival_blocks,
    training_chart,
    weight_blocks,
)
from probe.report_zoo import (
    every_model,
    explanation,
    path_chart,
    read_out_chart,
    rival_chart,
    strip_chart,
    studied,
    typical,
    verdict_counts,
    zoo_claim,
)
from probe.reporting import AnalysisConfig, Output, command, main
from probe.sparsity import active_heads, exact_zeros
from probe.subject import ZOO
from probe.survey import survey, trained_zoo
from probe.thresholds import THRESHOLDS

# Of the training record, what a reader asks for; the rest is in training.json.
RECORD = ("status", "steps", "l1", "seed")


class Config(AnalysisConfig):
    """Settings of the report; checkpoint "zoo" reports on all shipped models of one covariate.

    Attributes:
        n_prompts: prompts per condition of the verdict; probes and the division test take
            eight times as many.
    """

    checkpoint: str = ZOO
    n_prompts: int = Field(512, ge=64)


def run(config: Config) -> Output:
    """Measure, and write the page."""
    return zoo_report(config) if config.checkpoint == ZOO else model_report(config)


def model_report(config: Config) -> Output:
    """The page of one checkpoint."""
    subject = load_subject(config.checkpoint)
    verdict = _identify(subject, config)
    record = _record(config.checkpoint)
    n, seed = 8 * config.n_prompts, config.seed
    claim = _claim(subject, verdict)
    title = f"Which algorithm did {subject.name} learn?"
    sections = [
        Section("What was found", [verdict.words]),
        Section("What was studied", [_studied(subject, record)]),
        Section("What each coordinate holds", read_out_blocks(subject, seed)),
        Section("Probes with controls", probe_blocks([subject.model], subject.prompts, n, seed)),
        Section("Layer norm as division", division_blocks(subject, n, seed)),
        Section("Weights beside the construction", weight_blocks(subject, seed)),
        Section("Verdict with evidence", rival_blocks(verdict)),
        Section("Training and sparsity", _training(subject, record)),
        *_closing({subject.name: subject.sha256}, seed),
    ]
    scores = verdict.evidence
    shown = verdict.findings.best[["algorithm", "family", "k", "score", "distance"]]
    return Output(
        scores,
        shown,
        charts(sections),
        subject.sha256,
        (claim,),
        facts={"verdict": verdict.to_dict()},
        pages={"report.html": render(title, claim, sections)},
    )


def zoo_report(config: Config) -> Output:
    """The page of all shipped models of one covariate."""
    zoo = trained_zoo()
    if not zoo:
        raise ValueError("no trained checkpoint ships with the package: make zoo trains them")
    n, seed = 8 * config.n_prompts, config.seed
    scores = survey(zoo, n_prompts=n // 2, seed=seed)
    verdicts = [_identify(each.subject, config) for each in zoo]
    scores["verdict"] = [verdict.kind for verdict in verdicts]
    scores["family"] = [f"{each.distribution}\nl1 {each.l1:g}" for each in zoo]
    counts, claim = verdict_counts(scores), zoo_claim(scores)
    shares = Listing(
        counts, "Verdicts; share: closed form by normalization, with its 95 % Wilson interval."
    )
    example = zoo[typical(scores)].subject
    detail = (
        f"In detail: {example.name}. Of the models in closed form by normalization it is the one "
        "whose division test is the median."
    )
    alike = [each.subject for each in zoo if each.distribution == zoo[0].distribution]
    curves = [curves_of(each.subject.name, each.distribution, each.record) for each in zoo]
    hashes = {each.subject.name: each.subject.sha256 for each in zoo}
    sections = [
        Section("What was found", [explanation(scores), shares]),
        Section("What was studied", studied(zoo, scores)),
        Section(
            "What each coordinate holds",
            [read_out_chart(zoo, scores, seed), detail, *read_out_blocks(example, seed)],
        ),
        Section(
            "Probes with controls",
            [
                f"The {len(alike)} models on “{zoo[0].distribution}” prompts.",
                *probe_blocks([each.model for each in alike], alike[0].prompts, n, seed),
            ],
        ),
        Section(
            "Layer norm as division",
            [strip_chart(scores), detail, *division_blocks(example, n, seed)],
        ),
        Section("Weights beside the construction", [detail, *weight_blocks(example, seed)]),
        Section("Verdict with evidence", [rival_chart(zoo, verdicts), every_model(scores)]),
        Section("Training and sparsity", [training_chart(pd.concat(curves)), path_chart(scores)]),
        *_closing(hashes, seed),
    ]
    return Output(
        scores.drop(columns="family"),
        counts,
        charts(sections),
        hashes,
        (claim,),
        pages={
            "report.html": render(
                f"Which algorithm did the {len(zoo)} shipped models learn?", claim, sections
            )
        },
    )


def _identify(subject: Subject, config: Config) -> Verdict:
    generator = torch.Generator().manual_seed(config.seed)
    return identify(subject.model, subject.prompts, n_prompts=config.n_prompts, generator=generator)


def _claim(subject: Subject, verdict: Verdict) -> str:
    """The verdict in one sentence, with the intervals of what it rests on."""
    named, evidence = verdict.decision.named, verdict.evidence
    distance = evidence[
        (evidence.measure == "distance")
        & (evidence.condition == IN_DISTRIBUTION)
        & (evidence.family == named.family)
        & (evidence.k == named.k)
        & (evidence.query_row == named.query_row)
    ].iloc[0]
    sentence = (
        f"{subject.name}: {verdict.label}; {named.algorithm} leaves "
        f"{distance.value:.1e} ({distance.ci_low:.1e} to {distance.ci_high:.1e}) of the variance "
        f"of its predictions unexplained"
    )
    found = verdict.findings
    if found.division_r2 is None:
        return sentence + "."
    at_once = found.division_slope >= THRESHOLDS["division_slope"]
    residual = not at_once and (found.residual_r2 or 0) > found.division_r2
    tests = evidence[evidence.measure == (RESIDUAL_DIVISION if residual else DIVISION)]
    best = tests.loc[tests.value.idxmax()]
    of = " of what a step of gradient descent has left" * residual
    return (
        f"{sentence}, and exchanging layer-norm scales between prompts moves them as a division by "
        f"the variance{of} would with R² {best.value:.2f} ({best.ci_low:.2f} to "
        f"{best.ci_high:.2f})."
    )


def _record(checkpoint: str) -> dict:
    """Contents of training.json; empty for a model made on the spot."""
    try:
        return provenance(checkpoint_folder(checkpoint))
    except CheckpointError:
        return {}


def _studied(subject: Subject, record: dict) -> Listing:
    rows = {"model": model_in_words(subject.model), "prompts": prompts_in_words(subject.prompts)}
    rows["MSE against least squares / variance"] = (
        f"{normalised_mse(subject.model, subject.prompts):.2e}"
    )
    rows |= {key: record[key] for key in RECORD if key in record}
    return facts(rows, "The checkpoint, and the prompts it is studied on.")


def _training(subject: Subject, record: dict) -> list[Block]:
    model = subject.model
    sparsity = facts(
        {
            "exact zeros": f"{exact_zeros(model)} of {model.cfg.n_parameters} parameters",
            "active heads by layer": ", ".join(map(str, active_heads(model))),
        },
        "What is left of the weights.",
    )
    curves = curves_of(subject.name, "this model", record)
    if curves.empty:
        return ["No training curves are on record.", sparsity]
    return [training_chart(curves), sparsity]


def _closing(hashes: dict[str, str], seed: int) -> list[Section]:
    return [
        Section("Method", method_blocks()),
        Section("The command that makes this page", [Code(command())]),
        Section("Provenance", provenance_blocks(hashes, seed)),
    ]


if __name__ == "__main__":
    main("make_report", Config, run, __doc__)
