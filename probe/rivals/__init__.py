"""The algorithms a model may have learned, fitted to it and compared with it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
