"""Thresholds of the verdict; written by analyses/calibrate_verdict.py from oracles only.

distance      largest share of variance in distribution that a rival may leave unexplained
score         largest log10 distance, half in distribution and half over the shifts
              each (accept, reject): at or below the first the rival describes the model, at or
              above the second it does not, between them the verdict is undecided
lead          decades of score by which a rival must beat least squares, which is the limit of
              Newton, gradient descent and ridge, to be named in its place
margin        decades of score by which the named algorithm must beat every other
division_r2   R² of the division test at its best layer, (absent, in force)
division_slope  smallest slope at that layer
coincide      distance below which two rivals are the same on given prompts (a convention)
"""

THRESHOLDS = {
    "distance": (0.05, 0.2),
    "score": (-1.3, -0.8),
    "lead": 0.5,
    "margin": 0.2,
    "division_r2": (0.3, 0.6),
    "division_slope": 0.3,
    "coincide": 1e-4,
}
