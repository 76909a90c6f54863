"""Which divisors answer to V, and does the prediction answer to them?

One row per place where the forward pass divides, and one for all together: elasticity to the
spread of the prompt, what the divisor carries, what is left when it is replaced by V, by what
the stream holds of it (V′) or by a constant, scales exchanged between prompts of equal and of
unequal V, each with intervals and beside untrained models. And the range of V in which the
prediction is least squares, from a curve of its gain over four decades.
"""

from pydantic import Field

from probe.report.command import AnalysisConfig, read_command_line


class Config(AnalysisConfig):
    """Settings of the analysis.

    Attributes:
        n_prompts: prompts, and pairs of prompts in the exchange.
        n_untrained: untrained models beside the studied one.
        n_gain: prompts at each V of the gain curve.
    """

    n_prompts: int = Field(2000, ge=50)
    n_untrained: int = Field(3, ge=1)
    n_gain: int = Field(3000, ge=20)


if __name__ == "__main__":
    # --help and mistakes are answered before the imports below, which take seconds.
    read_command_line(Config, __doc__)

import pandas as pd
import torch

from probe import load_subject
from probe.causal.gain import TOLERANCES, gain_curve
from probe.causal.ledger import division_ledger
from probe.figures.ledger import gain_line, ledger_panels
from probe.report.script import Output, main

_SHOWN = {
    "elasticity": "e (V)",
    "elasticity_held": "e (V′)",
    "carried_slope": "carried",
    "error": "error",
    "replaced_held": "κV′",
    "replaced_v": "κV",
    "replaced_constant": "const",
    "exchange_held_r2": "exch.",
}


def run(config: Config) -> Output:
    """Measure every divisor, on the prompts the checkpoint was trained on."""
    subject = load_subject(config.checkpoint)
    generator = torch.Generator().manual_seed(config.seed)
    ledger = division_ledger(
        subject.model,
        subject.prompts,
        n_prompts=config.n_prompts,
        n_untrained=config.n_untrained,
        generator=generator,
    )
    curve = gain_curve(subject.model, subject.prompts, n_prompts=config.n_gain, generator=generator)
    shown = pd.DataFrame({"divisor": ledger["label"]})
    for name, words in _SHOWN.items():
        shown[words] = ledger[name]
    figures = {
        "division_ledger": (ledger_panels(ledger), ledger),
        "gain_curve": (gain_line(curve).figure, curve),
    }
    ranges = {name: curve.attrs[name] for name in (f"range_{t}" for t in TOLERANCES)}
    notes = (
        "e: d log s / d log V within a prompt; 1 is a division by it. carried: slope of "
        "-dŷ/d log s on (C/V)(u - x̄).",
        "error: mean squared error / variance of the target; then with the divisor replaced by "
        "κV′, κV, a constant. V′: variance of x as the stream holds it.",
        "exch.: prediction under another prompt's divisor, R² about the change expected of V′.",
        "scores.csv has 95 % intervals and untrained controls.",
        *(f"gain within {t} % of 1: {curve.attrs[f'words_{t}']}" for t in TOLERANCES),
    )
    facts = {"gain_ranges": ranges}
    return Output(ledger, shown, figures, subject.sha256, notes, facts=facts, source=subject.source)


if __name__ == "__main__":
    main("division_ledger", Config, run, __doc__)
