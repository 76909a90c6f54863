"""One self-contained HTML page about a checkpoint, or about all shipped ones.

What was found, with its uncertainty, then the evidence: read-out, probes with controls, layer
norm as division, weights beside the construction, verdict, training, method, and how to make the
page again. Images and data are inside; figures for papers and tables lie beside the page.
"""

from pydantic import Field

from probe.report.command import AnalysisConfig, read_command_line
from probe.subjects.names import ZOO


class Config(AnalysisConfig):
    """Settings of the report; checkpoint "zoo" reports on all shipped models of one covariate.

    Attributes:
        n_prompts: prompts per condition of the verdict; probes and the division test take
            eight times as many.
    """

    checkpoint: str = ZOO
    n_prompts: int = Field(512, ge=64)


if __name__ == "__main__":
    # --help and mistakes are answered before the imports below, which take seconds.
    read_command_line(Config, __doc__)

from collections.abc import Sequence

import pandas as pd
import torch

from models.training.evaluation import normalised_mse
from probe import Subject, Verdict, fit_probes, identify, load_subject
from probe.probing.linear import needed_prompts
from probe.report.many_models import (
    every_model,
    explanation,
    path_chart,
    read_out_chart,
    rival_chart,
    strip_chart,
    studied,
    zoo_claim,
)
from probe.report.one_model import (
    curves_of,
    division_blocks,
    facts,
    method_blocks,
    probe_blocks,
    provenance_blocks,
    read_out_blocks,
    rival_blocks,
    training_chart,
    weight_blocks,
)
from probe.report.page import Block, Code, Listing, Section, charts, render
from probe.report.script import Output, command, main
from probe.report.words import model_in_words, prompts_in_words
from probe.rivals.behaviour import IN_DISTRIBUTION
from probe.subjects.counts import typical, verdict_counts
from probe.subjects.one_model import study
from probe.subjects.sparsity import active_heads, exact_zeros
from probe.subjects.subject import is_zoo
from probe.subjects.survey import read_outs, survey, trained_zoo
from probe.verdict.thresholds import THRESHOLDS

# Of the training record, what a reader asks for; the rest is in training.json.
RECORD = ("status", "steps", "l1", "seed")


def run(config: Config) -> Output:
    """Measure, and write the page."""
    return zoo_report(config) if is_zoo(config.checkpoint) else model_report(config)


def model_report(config: Config) -> Output:
    """The page of one checkpoint."""
    subject = load_subject(config.checkpoint)
    verdict = _identify(subject, config)
    n, seed = 8 * config.n_prompts, config.seed
    found = study(subject, n_prompts=n, seed=seed)
    claim = _claim(subject, verdict)
    title = f"Which algorithm did {subject.name} learn?"
    sections = [
        Section("What was found", [verdict.words]),
        Section("What was studied", [_studied(subject)]),
        Section("What each coordinate holds", read_out_blocks(found)),
        Section("Probes with controls", _probes([subject], n, seed)),
        Section("Layer norm as division", division_blocks(found)),
        Section("Weights beside the construction", weight_blocks(found)),
        Section("Verdict with evidence", rival_blocks(verdict)),
        Section("Training and sparsity", _training(subject)),
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
        source=subject.source,
    )


def zoo_report(config: Config) -> Output:
    """The page of all shipped models of one covariate."""
    zoo = trained_zoo()
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
    found = study(example, n_prompts=n, seed=seed)
    alike = [each.subject for each in zoo if each.distribution == zoo[0].distribution]
    curves = [curves_of(each.subject.name, each.distribution, each.subject.record) for each in zoo]
    hashes = {each.subject.name: each.subject.sha256 for each in zoo}
    sections = [
        Section("What was found", [explanation(scores), shares]),
        Section("What was studied", studied(zoo, scores)),
        Section(
            "What each coordinate holds",
            [read_out_chart(zoo, read_outs(zoo, seed), scores), detail, *read_out_blocks(found)],
        ),
        Section(
            "Probes with controls",
            [
                f"The {len(alike)} models on “{zoo[0].distribution}” prompts.",
                *_probes(alike, n, seed),
            ],
        ),
        Section(
            "Layer norm as division",
            [strip_chart(scores), detail, *division_blocks(found)],
        ),
        Section("Weights beside the construction", [detail, *weight_blocks(found)]),
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
        source={each.subject.name: each.subject.source for each in zoo},
    )


def _identify(subject: Subject, config: Config) -> Verdict:
    generator = torch.Generator().manual_seed(config.seed)
    return identify(subject.model, subject.prompts, n_prompts=config.n_prompts, generator=generator)


def _probes(subjects: Sequence[Subject], n: int, seed: int) -> list[Block]:
    """Probes of one model, or of several of one shape on the same prompts."""
    models, generator = [each.model for each in subjects], torch.Generator().manual_seed(seed)
    prompts = subjects[0].prompts
    sizes = {"n_train": max(n, needed_prompts(models[0], prompts)), "n_test": n}
    table = fit_probes(models, prompts, n_untrained=2, generator=generator, **sizes)
    return probe_blocks(table, models[0], len(models), **sizes)


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
    division, residual = verdict.findings.division, verdict.findings.residual
    if division is None:
        return sentence + "."
    best, of = division, ""
    at_once = division.slope >= THRESHOLDS["division_slope"]
    if not at_once and residual is not None and residual.value > division.value:
        best, of = residual, " of what a step of gradient descent has left"
    return (
        f"{sentence}, and exchanging layer-norm scales between prompts moves them as a division by "
        f"the variance{of} would with R² {best.value:.2f} ({best.ci_low:.2f} to "
        f"{best.ci_high:.2f})."
    )


def _studied(subject: Subject) -> Listing:
    rows = {"model": model_in_words(subject.model), "prompts": prompts_in_words(subject.prompts)}
    rows["MSE against least squares / variance"] = (
        f"{normalised_mse(subject.model, subject.prompts):.2e}"
    )
    rows |= {key: subject.record[key] for key in RECORD if key in subject.record}
    return facts(rows, "The checkpoint, and the prompts it is studied on.")


def _training(subject: Subject) -> list[Block]:
    model = subject.model
    sparsity = facts(
        {
            "exact zeros": f"{exact_zeros(model)} of {model.cfg.n_parameters} parameters",
            "active heads by layer": ", ".join(map(str, active_heads(model))),
        },
        "What is left of the weights.",
    )
    curves = curves_of(subject.name, "this model", subject.record)
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
