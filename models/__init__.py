"""What is studied: tasks, the transformer, constructions, training, checkpoints.

Names are imported on first use (they are listed in ``__init__.pyi``), so that work on prompts or
training alone does not pay the seconds that transformer-lens takes to import.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
