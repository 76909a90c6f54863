"""The worked examples of CONTRIBUTING.md, run as they stand there."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = GUIDE.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"```python\n(.*?)```", text, re.DOTALL))
    assert len(blocks) >= 5
    namespace = {"__name__": "contributing"}
    for block in blocks:
        # Lines keep their numbers, so that an error points into the guide.
        above = "\n" * text.count("\n", 0, block.start(1))
        exec(compile(above + block[1], str(GUIDE), "exec"), namespace)
    assert namespace["verdict"].label == "halved slope"
    assert namespace["probes"].r2.notna().all()
