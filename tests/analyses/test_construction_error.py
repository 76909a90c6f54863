"""The script as a user runs it, on few prompts."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

SCRIPT = Path(__file__).parents[2] / "analyses" / "construction_error.py"
SMALL = (
    *("--covariates", "1", "2", "--contexts", "20", "200", "--scales", "10", "1000"),
    *("--scale-grid", "30", "300", "30000", "--rows", "40000", "--checkpoint", "constructed"),
)


def run(folder: Path) -> dict[str, bytes]:
    command = [sys.executable, SCRIPT, *SMALL, "--output", folder]
    subprocess.run(command, check=True, capture_output=True)
    return {p.name: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_it_finds_the_theory_and_writes_the_same_bytes_twice(tmp_path):
    files = run(tmp_path / "out")
    assert files == run(tmp_path / "out")
    scores = pd.read_csv(tmp_path / "out" / "scores.csv")
    on_n = scores[(scores.sweep == "N") & (scores.scale == 1000)]
    for _, line in on_n.groupby("p"):
        slope = np.diff(np.log(line.normalised_mse)) / np.diff(np.log(line.n_context))
        assert abs(slope + 2) < 0.5
    on_r = scores[scores.sweep == "R"].set_index(["dtype", "p", "scale"]).normalised_mse
    for p in (1, 2):
        slope = np.log(on_r["float64", p, 300] / on_r["float64", p, 30]) / np.log(10)
        assert abs(slope + 4) < 0.1
        # Rounding: in float32 the largest R is worse than the middle one.
        assert on_r["float32", p, 30000] > 3 * on_r["float32", p, 300]
    record = json.loads(files["run.json"])
    assert record["config"]["seed"] == 0
    assert "construction_error.py" in record["command"]
    assert files["construction_error.pdf"].startswith(b"%PDF")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"contexts": ()}, "--contexts is empty"),
        ({"covariates": ()}, "--covariates is empty"),
        ({"scale_grid": (1e308,)}, r"--scale-grid 1e\+308: "),
        ({"scales": (0.0,)}, "--scales 0.0: "),
        ({"scales": (float("nan"),)}, "--scales nan: "),
        ({"contexts": (5,), "covariates": (4,)}, "--contexts 5: .* at least 6"),
        ({"scale_context": 5}, "--scale-context 5: "),
    ],
)
def test_settings_out_of_range_are_refused_before_the_work(settings, message):
    config = runpy.run_path(str(SCRIPT))["Config"]
    with pytest.raises(ValueError, match=message):
        config(**settings)
    assert config(contexts=(3,), covariates=(1,), scale_context=3)


def test_an_empty_option_ends_with_2(tmp_path):
    command = [sys.executable, SCRIPT, "--contexts", "--output", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--contexts is empty" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
