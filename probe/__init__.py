"""How models are studied: sites, probes, interventions, matching, verdict, figures.

Names are imported on first use (see `models`).
"""

from models.lazy import attach

_HOMES = {
    "Subject": "probe.subject",
    "load_subject": "probe.subject",
    "collect": "probe.activations",
    "sites": "probe.activations",
    "fit_probes": "probe.linear",
    "ablate": "probe.interventions",
    "ablate_direction": "probe.interventions",
    "interchange": "probe.interventions",
    "division_test": "probe.division",
    "residual_division_test": "probe.division",
    "norm_statistics": "probe.norms",
    "pivot_label": "probe.pivots",
    "pivot_test": "probe.pivots",
    "align": "probe.matching",
    "Alignment": "probe.matching",
    "read_out": "probe.readout",
    "symmetry_count": "probe.symmetries",
    "identify": "probe.verdict",
    "Verdict": "probe.verdict",
}

__getattr__, __dir__, __all__ = attach(__name__, _HOMES)
