"""The command line answers before anything heavy is imported."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field

from probe.report.command import AnalysisConfig

ANALYSES = Path(__file__).parents[3] / "analyses"
SCRIPTS = sorted(path.stem for path in ANALYSES.glob("*.py"))
# Runs a script and says which heavy packages it imported before it ended.
LOOK = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    heavy = {"torch", "pandas", "numpy", "matplotlib", "scipy", "transformer_lens"}
    print("imported:", sorted(heavy & sys.modules.keys()), "code:", end.code)
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_and_mistakes_import_nothing_heavy(name, tmp_path):
    for option, code in (("--help", 0), ("--no-such-option", 2), ("--seed=x", 2)):
        done = subprocess.run(
            [sys.executable, "-c", LOOK, ANALYSES / f"{name}.py", option],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
        last = done.stdout.strip().splitlines()[-1]
        assert last == f"imported: [] code: {code}", (option, done.stdout, done.stderr)


def test_a_setting_out_of_range_is_named_as_its_option():
    class Config(AnalysisConfig):
        n_prompts: int = Field(10, ge=5)

    with pytest.raises(ValueError, match=r"^--n-prompts 3: input should be greater than or equal"):
        Config(n_prompts=3)
    with pytest.raises(ValueError, match="--nprompts"):
        Config(nprompts=9)
    assert Config(n_prompts=9).n_prompts == 9
