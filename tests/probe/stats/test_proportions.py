import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from probe.stats.proportions import wilson
from probe.stats.regression import FEWEST_SAMPLES, fit_line

Z = 1.959963984540054


@given(n=st.integers(1, 500), share=st.floats(0, 1))
def test_wilson_solves_its_quadratic(n, share):
    # The bounds are the p with |k/n - p| = z sqrt(p (1 - p) / n).
    k = round(share * n)
    middle = (k + Z**2 / 2) / (n + Z**2)
    half = Z * math.sqrt(k * (n - k) / n + Z**2 / 4) / (n + Z**2)
    assert wilson(k, n) == pytest.approx((middle - half, middle + half), abs=1e-9)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (3, 2), (-1, 4)])
def test_what_is_no_share_is_refused(successes, n):
    with pytest.raises(ValueError, match=f"{successes} of {n} is no share"):
        wilson(successes, n)


def test_a_line_through_few_points_is_refused(generator):
    x, y = torch.randn(2, FEWEST_SAMPLES, generator=generator, dtype=torch.float64)
    assert fit_line(x, y, generator).r2 < 0.5
    with pytest.raises(ValueError, match=rf"n_prompts=2 is too few.* at least {FEWEST_SAMPLES}"):
        fit_line(x[:2], y[:2], generator)
