"""Thresholds of the verdict; calibrate_verdict.py --write-thresholds fits them to oracles only.

score         log10 distance, half in distribution and half over the shifts: at or below the first
              the nearest algorithm describes the model, at or above the second it does not, between
              them the verdict is undecided
alone         score at or below which it describes a model of which only behaviour is seen
lead          decades of score by which a rival must beat least squares, which is the limit of
              Newton, gradient descent and ridge, to be named in its place
margin        decades of score by which the named algorithm must beat every other
division_r2   R² of the division test at its best layer: absent, in force
division_slope
              smallest slope at that layer
residual_r2, residual_slope
              the same for the residual division test
share         least share of the fit that is left to a residual division (a convention: most of it)
coincide      distance below which two rivals are the same on given prompts (a convention)
"""

THRESHOLDS = {
    "score": (-1.98, -1.875),
    "alone": -3.909,
    "lead": 0.405,
    "margin": 0.117,
    "division_r2": (0.343, 0.59),
    "division_slope": 0.332,
    "residual_r2": (0.186, 0.356),
    "residual_slope": 0.246,
    "share": 0.5,
    "coincide": 0.0001,
}
