"""Alignment of learned weights to a reference, and what a score is worth."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
