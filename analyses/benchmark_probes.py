"""How fast are the probes, and what does caching one site cost?

Probes: `fit_probes` with its controls (one untrained model) against scikit-learn's
LinearRegression, one per site, on as many prompts, with the same controls. The regressions get
their activations either site by site (the usual loop: a forward pass per site) or all at once (one
forward pass, everything in memory). Caching: `run_with_cache` for one site against the plain
forward pass. Medians over interleaved repeats of CPU seconds on one thread, which other work on
the machine hardly changes.
"""

from pydantic import Field

from probe.report.command import AnalysisConfig, read_command_line
from probe.subjects.names import CONSTRUCTED


class Config(AnalysisConfig):
    """Settings of the analysis.

    Attributes:
        checkpoint: what is probed; by default a model that needs no checkpoint.
        n_prompts: half of them to fit on, half to score on.
        repeats: timings of each probing; medians are reported.
        forward_batch: prompts in a timed forward pass.
        forward_repeats: timings of each forward pass.
    """

    checkpoint: str = CONSTRUCTED
    n_prompts: int = Field(200_000, ge=1000)
    repeats: int = Field(3, ge=1)
    forward_batch: int = Field(1000, ge=1)
    forward_repeats: int = Field(100, ge=1)


if __name__ == "__main__":
    # --help and mistakes are answered before the imports below, which take seconds.
    read_command_line(Config, __doc__)

import time
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from sklearn.linear_model import LinearRegression
from threadpoolctl import threadpool_limits

from models import LinearAttentionTransformer, PromptConfig, sample_prompts
from probe import fit_probes, load_subject
from probe.probing.linear import NATURAL_POSITIONS, needed_prompts, plan_positions, read_sites
from probe.quantities.statistics import statistic_values
from probe.report.script import Output, main


def run(config: Config) -> Output:
    """Time both ways of probing, and both forward passes."""
    subject = load_subject(config.checkpoint)
    model, prompts = subject.model, subject.prompts
    sites = list(plan_positions(model, prompts, None, NATURAL_POSITIONS))
    half = config.n_prompts // 2
    if half < needed_prompts(model, prompts):
        raise ValueError(
            f"--n-prompts {config.n_prompts}: too few for {subject.name}; give at least "
            f"{2 * needed_prompts(model, prompts)}"
        )

    def ours() -> None:
        generator = torch.Generator().manual_seed(config.seed)
        sizes = {"n_train": half, "n_test": half, "n_untrained": 1}
        fit_probes(model, prompts, generator=generator, **sizes)

    probing = _medians(
        {
            "fit_probes": ours,
            "scikit-learn, site by site": lambda: _regress(
                model, prompts, [[site] for site in sites], half, config.seed
            ),
            "scikit-learn, all at once": lambda: _regress(
                model, prompts, [sites], half, config.seed
            ),
        },
        config.repeats,
    )

    inputs = sample_prompts(
        prompts, config.forward_batch, torch.Generator().manual_seed(config.seed)
    ).inputs
    site = sites[-2]
    with torch.no_grad():
        passes = _medians(
            {
                "forward": lambda: model(inputs),
                f"run_with_cache {site}": lambda: model.run_with_cache(inputs, names_filter=site),
            },
            config.forward_repeats,
        )
    scores = pd.concat(
        [
            pd.DataFrame(
                {
                    "what": list(timed),
                    "CPU seconds": list(timed.values()),
                    "ratio": np.array(list(timed.values())) / next(iter(timed.values())),
                }
            )
            for timed in (probing, passes)
        ]
    )
    notes = (f"{config.n_prompts:,} prompts, {len(sites)} sites; ratio: to the first of its kind.",)
    return Output(scores, scores, {}, subject.sha256, notes, source=subject.source)


def _regress(
    model: LinearAttentionTransformer,
    prompt_config: PromptConfig,
    groups: list[list[str]],
    half: int,
    seed: int,
) -> None:
    """Probe the query token by scikit-learn with the controls of `fit_probes`.

    Each group of sites is read in one forward pass per model.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = sample_prompts(prompt_config, 2 * half, generator)
    targets = statistic_values(prompt_config, prompts)
    shuffled = targets[torch.randperm(len(targets), generator=generator)]
    targets = torch.cat([targets, shuffled], dim=1).numpy()
    untrained = model.untrained(generator)

    def score(features: np.ndarray) -> None:
        regression = LinearRegression().fit(features[:half], targets[:half])
        residual = targets[half:] - regression.predict(features[half:])
        1 - residual.var(axis=0) / targets[half:].var(axis=0)

    score(prompts.inputs[:, -1].numpy())
    for names in groups:
        plan = plan_positions(model, prompt_config, names, NATURAL_POSITIONS)
        for which in (model, untrained):
            for features in _read(which, prompts.inputs, plan):
                score(features)


def _read(
    model: LinearAttentionTransformer, inputs: torch.Tensor, plan: dict[str, tuple[str, ...]]
) -> list[np.ndarray]:
    """Features of each planned site on all prompts, in batches of a size that suits the model."""
    batches = [read_sites(model, part, plan) for part in inputs.split(1500)]
    return [torch.cat([batch[key][0] for batch in batches]).numpy() for key in batches[0]]


def _medians(tasks: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each task on one thread, tasks taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    with threadpool_limits(1):
        for _ in range(repeats):
            for name, task in tasks.items():
                start = time.process_time()
                task()
                seconds[name].append(time.process_time() - start)
    return {name: float(np.median(values)) for name, values in seconds.items()}


if __name__ == "__main__":
    main("benchmark_probes", Config, run, __doc__)
