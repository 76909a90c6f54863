import json
import subprocess
import sys
from pathlib import Path

import pandas as pd

SCRIPT = Path(__file__).parents[2] / "analyses" / "division_ledger.py"


def run(output, *arguments):
    command = [sys.executable, SCRIPT, "--output", output, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


SMALL = ("--n-prompts", "200", "--n-untrained", "1", "--n-gain", "100")


def test_ledger_and_gain_curve_of_the_construction(tmp_path):
    result = run(tmp_path, "--checkpoint", "constructed", *SMALL)
    assert result.returncode == 0, result.stderr
    scores = pd.read_csv(tmp_path / "scores.csv").set_index("site")
    assert scores.loc["blocks.1.ln1_post.hook_scale", "elasticity"] > 0.95
    assert abs(scores.loc["blocks.0.ln1_post.hook_scale", "elasticity"]) < 0.05
    for name in ("division_ledger", "gain_curve"):
        assert (tmp_path / "figures" / f"{name}.pdf").stat().st_size > 1000
        assert (tmp_path / "figures" / f"{name}.csv").exists()
    record = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert set(record["gain_ranges"]) == {"range_5", "range_10"}
    assert "gain within 10 % of 1: " in result.stdout


def test_several_covariates_are_refused_before_anything_is_written(tmp_path):
    result = run(tmp_path / "out", "--checkpoint", "p2_l1_1e-3_seed0", *SMALL)
    assert result.returncode == 2
    assert "not applicable to 2 covariates" in result.stderr
    assert not (tmp_path / "out").exists()
