"""Scripts about many models: the penalty's path and the phase diagram."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from probe.matching import null
from probe.subjects.survey import Trained

ANALYSES = Path(__file__).parents[2] / "analyses"
TINY = (
    *("--log-scales", "0", "0.7", "--mean-stds", "1", "--l1", "0", "1e-3", "--n-seeds", "1"),
    *("--steps", "3", "--n-context", "6", "--n-prompts", "64", "--checkpoint", "gradient_descent"),
)


def test_phase_diagram_counts_verdicts_and_continues(tmp_path):
    work = tmp_path / "work"
    command = [sys.executable, ANALYSES / "phase_diagram.py", *TINY, "--work", work]
    command += ["--output", tmp_path / "out"]
    files = []
    for _ in range(2):
        subprocess.run(command, check=True, capture_output=True)
        files.append({p.name: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()})
        kept = sorted((work / "verdicts").glob("*.json"))
        times = {path: path.stat().st_mtime_ns for path in kept}
        if len(files) == 1:
            first = times
    assert files[0] == files[1]
    assert times == first  # nothing was judged again
    assert len(kept) == 4
    scores = pd.read_csv(tmp_path / "out" / "scores.csv")
    assert scores.groupby(["x_log_scale", "l1"]).size().tolist() == [1, 1, 1, 1]
    hashes = json.loads(files[0]["run.json"])["checkpoint_sha256"]
    assert set(hashes) == {*scores.name, "gradient_descent"}


def test_shares_have_wilson_intervals():
    script = runpy.run_path(str(ANALYSES / "phase_diagram.py"))
    verdicts = ["closed form by normalization"] * 6 + ["undecided"] * 2
    scores = pd.DataFrame({"x_mean_std": 1.0, "x_log_scale": 0.7, "l1": 1e-3, "verdict": verdicts})
    scores = scores.assign(**dict.fromkeys(script["MEDIANS"], 0.5))
    cell = script["shares"](scores).iloc[0]
    assert cell.share == 0.75
    # Wilson (1927) for 6 of 8 at 95 %, by hand.
    z2, n, p = 1.959964**2, 8, 0.75
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = (z2 * (p * (1 - p) / n + z2 / (4 * n * n))) ** 0.5 / (1 + z2 / n)
    assert cell.ci_low == pytest.approx(centre - half, abs=1e-6)
    assert cell.ci_high == pytest.approx(centre + half, abs=1e-6)


def test_l1_path_measures_shipped_models(monkeypatch):
    monkeypatch.setattr(null, "FEW_DRAWS", 4)
    script = runpy.run_path(str(ANALYSES / "l1_path.py"))
    names = ["varied_l1_3e-4_seed0", "varied_l1_3e-3_seed0", "plain_l1_1e-3_seed0"]
    monkeypatch.setitem(
        script["run"].__globals__, "trained_zoo", lambda _: [Trained.load(name) for name in names]
    )
    output = script["run"](script["Config"](n_prompts=510))
    scores = output.scores.set_index("name")
    assert list(scores.index) == names
    assert list(scores.l1) == [3e-4, 3e-3, 1e-3]
    # The stronger penalty leaves more zeros and more error.
    assert scores.zero_share.iloc[1] > scores.zero_share.iloc[0]
    assert scores.normalised_mse.iloc[1] > scores.normalised_mse.iloc[0]
    assert (scores.division_low <= scores.division_r2).all()
    assert (scores.division_r2 <= scores.division_high).all()
    assert len(output.figures["l1_path"][0].axes) == 10
    assert (scores.residual_r2 > 0.8).iloc[:2].all()
