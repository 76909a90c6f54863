"""Words that stand for models which are no checkpoint folder of their own."""

from __future__ import annotations

# All shipped checkpoints together.
ZOO = "zoo"
# Models whose algorithm is known, made on the spot: the controls of every analysis.
CONSTRUCTED, GRADIENT_DESCENT, UNTRAINED = MADE = ("constructed", "gradient_descent", "untrained")
# Says of a word that it is one of these, where a folder of that name stands as well.
MADE_PREFIX = "made:"
