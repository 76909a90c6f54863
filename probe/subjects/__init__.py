"""What is studied: a model with its prompts, and many of them in one table."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
