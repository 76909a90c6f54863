"""Training ensembles: config, loop, fused kernel, sweeps that survive a kill."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
