"""Figures and reports lay out tables: whatever looks at a model stands in a room below."""

import ast
import importlib
import inspect
from pathlib import Path

ROOT = Path(__file__).parents[3]
MEASURING = ("probing", "causal", "rivals", "symmetry", "matching", "verdict", "subjects")


def imported_from_below(path: Path):
    """Functions that a module takes from the measuring rooms."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            if parts[0] == "probe" and len(parts) > 1 and parts[1] in MEASURING:
                for alias in node.names:
                    value = getattr(importlib.import_module(node.module), alias.name)
                    if inspect.isfunction(value):
                        yield alias.name, value


def test_no_measuring_in_figures_and_reports():
    for room in ("figures", "report"):
        for path in sorted((ROOT / "probe" / room).glob("*.py")):
            for name, function in imported_from_below(path):
                taken = inspect.signature(function).parameters
                assert not {"model", "models", "generator"} & set(taken), (path.name, name)


def test_the_test_above_sees_measuring(tmp_path):
    path = tmp_path / "page.py"
    path.write_text("from probe.probing.linear import fit_probes, strongest_control\n")
    found = dict(imported_from_below(path))
    assert "model" in inspect.signature(found["fit_probes"]).parameters
    assert "model" not in inspect.signature(found["strongest_control"]).parameters
