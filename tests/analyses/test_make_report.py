"""The report: what stands on the page, and how a browser shows it."""

import html
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from models import LinearAttentionTransformer, ModelConfig, PromptConfig, save
from probe.figures.style import style
from probe.matching import null
from probe.report.script import write_output
from probe.subjects.survey import Trained

SCRIPT = Path(__file__).parents[2] / "analyses" / "make_report.py"
EVIL = "<img src=x onerror=alert(1)>"
HEADINGS = (
    "What was found",
    "What was studied",
    "What each coordinate holds",
    "Probes with controls",
    "Layer norm as division",
    "Weights beside the construction",
    "Verdict with evidence",
    "Training and sparsity",
    "Method",
    "The command that makes this page",
    "Provenance",
)
WIDTHS = {"desktop": 1280, "phone": 390}

# Runs before the page's own content: collects what a reader would stumble over, and tells the
# frame around it.
WATCH = """<script>
const found = {errors: []};
addEventListener("error", e => found.errors.push(e.message || "cannot load " + e.target.src), true);
addEventListener("securitypolicyviolation", e => found.errors.push("blocked " + e.blockedURI));
console.error = (...words) => found.errors.push(words.join(" "));
addEventListener("load", () => {
  found.width = document.documentElement.clientWidth;
  found.needed = document.documentElement.scrollWidth;
  found.height = document.documentElement.scrollHeight;
  found.missing = [...document.images].filter(i => !i.naturalWidth).map(i => i.alt);
  found.images = document.images.length;
  parent.postMessage(JSON.stringify(found), "*");
});
</script>"""
# A window is never narrower than 500 pixels, a frame is.
FRAME = """<!doctype html><body style="margin: 0"><pre id="found" hidden></pre>
<script>onmessage = e => {{ document.getElementById("found").textContent = e.data; }};</script>
<iframe src="{src}" style="border: 0; display: block; width: {width}px; height: {height}px">
</iframe>"""


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module", autouse=True)
def few_null_models():
    """Null models cost most of a report and are tested where they live."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(null, "DRAWS", 4)
        patch.setattr(null, "FEW_DRAWS", 4)
        yield


def written(script, folder: Path, **settings) -> Path:
    config = script["Config"](n_prompts=128, **settings)
    with style():
        write_output(folder, script["run"](config), config)
    return folder


@pytest.fixture(scope="module")
def zoo(script, tmp_path_factory) -> Path:
    names = ["varied_l1_3e-3_seed1", "uniform_l1_1e-3_seed0"]
    with pytest.MonkeyPatch.context() as patch:
        small = [Trained.load(name) for name in names]
        patch.setitem(script["run"].__globals__, "trained_zoo", lambda: small)
        return written(script, tmp_path_factory.mktemp("zoo"), checkpoint="zoo")


@pytest.fixture(scope="module")
def evil(tmp_path_factory) -> Path:
    """The report of an untrained checkpoint whose folder name is markup, by the command."""
    folder = tmp_path_factory.mktemp("evil")
    config = ModelConfig(n_layers=1, n_context=6)
    model = LinearAttentionTransformer(config, torch.Generator().manual_seed(0))
    save(model, folder / EVIL, prompts=PromptConfig(n_context=6, x_log_scale=0.7))
    command = [sys.executable, SCRIPT, "--checkpoint", folder / EVIL, "--n-prompts", "64"]
    subprocess.run([*command, "--output", folder / "report"], check=True, capture_output=True)
    return folder / "report"


def test_sections_stand_in_order_and_the_zoo_claim_has_its_interval(zoo):
    page = (zoo / "report.html").read_text()
    assert tuple(re.findall(r"<h2>(.*?)</h2>", page)) == HEADINGS
    claim = re.search(r'<p class="claim">(.*?)</p>', page)[1]
    scores = pd.read_csv(zoo / "scores.csv")
    closed = (scores.verdict == "closed form by normalization") & (scores.distribution == "varied")
    assert f"{closed.sum()} of 1 on “varied” prompts" in claim
    assert "95 % intervals" in claim
    for name in scores.name:
        assert name in page


def test_every_figure_is_inside_with_captions_alt_text_and_data(zoo):
    page = (zoo / "report.html").read_text()
    figures = re.findall(r"<figure id=\"(.*?)\">(.*?)</figure>", page, re.DOTALL)
    assert len(figures) >= 9
    for name, body in figures:
        assert re.search(r'<img src="data:image/png;base64,[^"]+" alt="[^"]{20,}">', body), name
        assert "<b>Shows.</b>" in body
        assert "<b>How to read it.</b>" in body
        assert f'download="{name}.csv" href="data:text/csv;base64,' in body
        for suffix in ("pdf", "png", "csv"):
            assert (zoo / "figures" / f"{name}.{suffix}").is_file()


def test_nothing_is_loaded_from_elsewhere(zoo):
    page = (zoo / "report.html").read_text()
    assert "default-src 'none'" in page
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', page)
    assert "<script" not in page


def test_names_from_files_are_text(evil):
    page = (evil / "report.html").read_text()
    assert EVIL not in page
    assert page.count(html.escape(EVIL)) >= 5
    assert tuple(re.findall(r"<h2>(.*?)</h2>", page)) == HEADINGS


def test_the_same_settings_give_the_same_bytes(script, tmp_path):
    folders = [written(script, tmp_path / n, checkpoint="gradient_descent") for n in "ab"]
    first, second = (
        {path.relative_to(each): path.read_bytes() for path in each.rglob("*") if path.is_file()}
        for each in folders
    )
    assert first == second
    assert "no layer norm" in (folders[0] / "report.html").read_text()


def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    reason = "no Chromium here: apt-get install chromium (Debian), then run the test again"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def look(page: str, folder: Path, width: int) -> dict:
    """Open a page in a browser; what was found, and a screenshot of all of it in `folder`."""
    policy = "default-src 'none';"
    assert policy in page
    watched = page.replace(policy, f"{policy} script-src 'unsafe-inline';")
    copy, frame = folder / "page.html", folder / f"frame_{width}.html"
    copy.write_text(watched.replace("<title>", f"{WATCH}<title>"), encoding="utf-8")
    command = [
        browser(),
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}"),
    ]

    def run(height: int, *more: str) -> str:
        frame.write_text(FRAME.format(src=copy.name, width=width, height=height))
        size = f"--window-size={width},{height}"
        ran = subprocess.run(
            [*command, size, *more, frame.as_uri()], check=True, capture_output=True, timeout=120
        )
        return ran.stdout.decode()

    dom = run(1000, "--dump-dom")
    found = json.loads(html.unescape(re.search(r'<pre id="found" hidden="">(.*?)</pre>', dom)[1]))
    found["screenshot"] = folder / f"screenshot_{width}.png"
    run(found["height"], f"--screenshot={found['screenshot']}")
    return found


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS.keys())
@pytest.mark.parametrize("report", ["zoo", "evil"])
def test_a_browser_shows_it_whole(report, width, request, tmp_path):
    folder = request.getfixturevalue(report)
    found = look((folder / "report.html").read_text(), tmp_path, width)
    assert found["errors"] == []
    assert found["missing"] == []
    assert found["images"] >= 4
    assert found["width"] == width
    assert found["needed"] <= width, "the page scrolls sideways"
    picture = Image.open(found["screenshot"])
    assert picture.size == (width, found["height"])
    assert np.asarray(picture.convert("L")).std() > 10, "the page is blank"


def test_the_browser_test_sees_what_is_wrong(evil, tmp_path):
    page = (evil / "report.html").read_text()
    wide = '<div style="width: 3000px">wide</div>'
    broken = '<img src="https://example.invalid/x.png" alt="gone"><script>throw Error("x")</script>'
    found = look(page.replace("<main>", f"<main>{wide}{broken}"), tmp_path, 390)
    assert found["needed"] >= 3000
    assert found["missing"] == ["gone"]
    assert any("blocked" in error for error in found["errors"])
    assert any("Uncaught" in error for error in found["errors"])
