"""The named quantities of a prompt: statistics, and what an algorithm keeps of them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
