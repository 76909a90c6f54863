"""How models are studied: sites, probes, interventions, matching, verdict, figures.

Names are imported on first use (they are listed in ``__init__.pyi``).
"""

import importlib.util
import sys
from pathlib import Path

import lazy_loader


def _require_own_models() -> None:
    """Refuse a stranger's ``models`` that stands in the way of the package beside this one."""
    loaded = sys.modules.get("models")
    spec = loaded.__spec__ if loaded else importlib.util.find_spec("models")
    found = spec.origin if spec else None
    expected = Path(__file__).resolve().parents[1] / "models" / "__init__.py"
    if found is None or Path(found).resolve() != expected:
        raise ImportError(
            f"'models' is {found or 'missing'}, not the package that probe belongs to "
            f"({expected}): a file or folder of that name comes first on the path. Rename it, or "
            f"start Python in another folder"
        )


_require_own_models()

from models import __version__ as __version__  # noqa: E402

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
