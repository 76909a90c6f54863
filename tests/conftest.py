import os

# One thread per process: the suite runs a process per core (and so do the scripts it starts),
# and sums come out the same wherever it runs.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

# Shapes in annotations are checked while the suite runs, in the modules where tensors are made;
# modules that check a user's input themselves are left to their own messages.
install_import_hook(
    [
        "models.architecture.transformer",
        "models.tasks.statistics",
        "models.tasks.shifts",
        "probe.stats",
        "probe.quantities",
        "probe.rivals.algorithms",
        "probe.symmetry.heads",
    ],
    "beartype.beartype",
)

torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
