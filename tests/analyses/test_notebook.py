"""The notebook: in step with its text twin, committed with outputs, and it runs."""

from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "analyses" / "hook_checkpoint.ipynb"


def code(notebook) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def test_it_is_in_step_with_its_text_twin_and_short():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert code(notebook) == code(jupytext.read(NOTEBOOK.with_suffix(".md")))
    lines = [line for cell in code(notebook) for line in cell.splitlines() if line.strip()]
    assert len(lines) < 40


def test_it_runs_and_says_what_its_committed_outputs_say(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    committed = [str(cell.outputs[-1]) for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(str(NOTEBOOK.parents[1]) in output for output in committed)
    run = {"metadata": {"path": tmp_path}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=run).execute()
    last = next(cell for cell in reversed(notebook.cells) if cell.cell_type == "code")
    verdict = last.outputs[-1].text.splitlines()[0]
    assert verdict
    assert verdict in committed[-1]
