"""The house itself: which way imports point, what a room shows, what an import costs."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Floors, lowest first: a room may import rooms of lower floors, and `models`.
FLOORS = (
    {"stats", "quantities", "activations", "symmetry"},
    {"rivals", "probing"},
    {"matching", "causal"},
    {"verdict"},
    {"subjects"},
    {"figures"},
    {"report"},
)
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
MODULES = [path for package in ("models", "probe") for path in (ROOT / package).rglob("*.py")]
ROOMS = sorted(
    f"{package}.{init.parent.name}"
    for package in ("models", "probe")
    for init in (ROOT / package).glob("*/__init__.py")
)


def imported(path):
    """Modules of the project that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def room_of(module):
    """Second part of a dotted name, if it is one of `probe`'s rooms."""
    parts = module.split(".")
    return parts[1] if parts[0] == "probe" and len(parts) > 1 and parts[1] in FLOOR else None


def test_every_room_has_a_floor():
    assert {name.split(".")[1] for name in ROOMS if name.startswith("probe.")} == set(FLOOR)


def test_imports_point_down():
    upwards = []
    for path in MODULES:
        here = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for module in imported(path):
            there = room_of(module)
            if here and there and here != there and FLOOR[there] >= FLOOR[here]:
                upwards.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not upwards


def test_rooms_of_one_floor_do_not_form_a_circle():
    # Covered by the floors; within `models` there are no floors, so look for circles.
    arrows = {}
    for path in MODULES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] == "models" and len(parts) > 2:
            targets = (module.split(".") for module in imported(path))
            found = {t[1] for t in targets if t[0] == "models" and len(t) > 1}
            arrows.setdefault(parts[1], set()).update(found - {parts[1]})

    def reached(room, seen=frozenset()):
        return set().union(*(reached(r, seen | {r}) | {r} for r in arrows.get(room, set()) - seen))

    assert not [room for room in arrows if room in reached(room)]


def test_models_never_import_probe_and_nothing_imports_analyses():
    for path in MODULES:
        names = {module.split(".")[0] for module in imported(path)}
        assert "analyses" not in names, path
        if path.is_relative_to(ROOT / "models"):
            assert "probe" not in names, path


def test_one_module_imports_transformer_lens():
    found = [p for p in MODULES if any(m.split(".")[0] == "transformer_lens" for m in imported(p))]
    assert [path.name for path in found] == ["hooks.py"]


def test_no_drawing_or_prose_below_figures():
    drawing = {"matplotlib", "seaborn"}
    for path in MODULES:
        room = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if room and FLOOR[room] < FLOOR["figures"]:
            assert not drawing & {module.split(".")[0] for module in imported(path)}, path


@pytest.mark.parametrize("room", ["models", "probe", *ROOMS])
def test_a_room_says_what_it_is_and_shows_its_names(room):
    module = importlib.import_module(room)
    assert module.__doc__
    assert len(module.__doc__.splitlines()[0]) > 20
    assert module.__all__
    for name in module.__all__:
        value = getattr(module, name)
        assert value is not None
        if inspect.isclass(value) or inspect.isroutine(value):
            assert value.__doc__, f"{room}.{name}"


def in_fresh_python(code, cwd=ROOT):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=cwd
    )


def test_importing_needs_no_torch():
    code = "import sys, models, probe; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert in_fresh_python(code).returncode == 0


def test_a_strangers_models_is_told_apart(tmp_path):
    (tmp_path / "models.py").write_text("mine = 1\n")
    for code in ("import probe", "import models, probe"):
        result = in_fresh_python(code, tmp_path)
        assert result.returncode == 1
        last = result.stderr.strip().splitlines()[-1]
        assert last.startswith(
            f"ImportError: 'models' is {tmp_path / 'models.py'}, not the package"
        )
        assert "Rename it" in last


def test_train_stays_a_function_whatever_is_imported():
    code = "import models.train, models; assert callable(models.train), models.train"
    result = in_fresh_python(code)
    assert result.returncode == 0, result.stderr


def test_the_version_is_that_of_the_distribution():
    from importlib.metadata import version

    import models
    import probe

    assert models.__version__ == probe.__version__ == version("which-algorithm")
