import runpy
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "analyses" / "benchmark_training.py"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module", params=["untrained", "p2_l1_1e-3_seed0"])
def config(script, request):
    options = {"n_models": 2, "batch": 16, "n_context": 5, "repeats": 2}
    return script["Config"](checkpoint=request.param, **options)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"normalization": "post", "norm_affine": True},
        {"normalization": "none", "readout": "query"},
        {"exclude_query": True},
    ],
)
def test_all_ways_compute_the_same_step(script, config, shape):
    model = config.model(5).model_copy(update=shape)
    steps = script["make_steps"](model, 2, 16, seed=0)
    assert list(steps) == list(script["ALL"])
    assert script["largest_difference"](steps) < 1e-3
    losses = [step()[0] for step in steps.values()]
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], rtol=1e-4)


def test_table_has_one_row_per_way_and_thread_count(script, config):
    steps = script["make_steps"](config.model(5), 2, 16, 0, script["FAST"])
    scores = script["timed"](
        config, "ways", steps, tuple(range(1, min(2, numba.config.NUMBA_NUM_THREADS) + 1)), 5, 2
    )
    assert (scores["low"] <= scores["median"]).all()
    assert (scores["median"] <= scores["high"]).all()
    assert (scores.loc[scores["implementation"] == script["KERNEL"], "ratio"] == 1).all()
    shown = script["_shown"](scores)
    assert shown["way"].tolist() == list(script["FAST"])


def test_the_first_call_is_timed_for_any_shape(script, config):
    words = [sys.executable, "-c", script["_START_UP"], config.model(5).model_dump_json()]
    assert float(subprocess.run(words, check=True, capture_output=True, text=True).stdout) > 0
