"""Which algorithm is it? Evidence, rules, thresholds, and the oracles that set them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
