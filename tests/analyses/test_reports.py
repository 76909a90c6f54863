"""The committed report says what the shipped checkpoints say."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import torch

from models.checkpoint import checkpoint_hash
from probe import identify
from probe.matching import null
from probe.report.many_models import zoo_claim
from probe.subjects.survey import survey, trained_zoo

REPORT = Path(__file__).parents[2] / "reports" / "zoo"
REBUILD = "make report builds it anew"


@pytest.fixture(scope="module")
def scores() -> pd.DataFrame:
    return pd.read_csv(REPORT / "scores.csv")


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((REPORT / "run.json").read_text())


def test_it_is_about_the_shipped_checkpoints(record):
    hashes = {each.subject.name: checkpoint_hash(each.subject.name) for each in trained_zoo()}
    assert record["checkpoint_sha256"] == hashes, REBUILD


def test_its_numbers_are_those_of_the_checkpoints(scores, record, monkeypatch):
    # Null models give the p-value only, which is left out: they take most of the time.
    monkeypatch.setattr(null, "FEW_DRAWS", 1)
    zoo = {each.subject.name: each for each in trained_zoo()}
    n, seed = record["config"]["n_prompts"], record["config"]["seed"]
    chosen = scores.iloc[[0, len(scores) // 2, -1]].reset_index(drop=True)
    again = survey([zoo[name] for name in chosen.name], n_prompts=4 * n, seed=seed)
    again = again.drop(columns="alignment_p")
    pd.testing.assert_frame_equal(
        chosen[list(again)], again, check_dtype=False, rtol=1e-6, atol=1e-9, obj=REBUILD
    )
    subject = zoo[chosen.name[0]].subject
    generator = torch.Generator().manual_seed(seed)
    verdict = identify(subject.model, subject.prompts, n_prompts=n, generator=generator)
    assert verdict.kind == chosen.verdict[0], REBUILD


def test_its_claim_is_that_of_its_table(scores):
    page = (REPORT / "report.html").read_text()
    assert re.search(r'<p class="claim">(.*?)</p>', page)[1] == zoo_claim(scores)


def test_reports_are_small_enough_for_the_repository():
    size = sum(path.stat().st_size for path in REPORT.rglob("*") if path.is_file())
    assert size < 3e6
