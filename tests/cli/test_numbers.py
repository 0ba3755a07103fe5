"""Numbers as reports print them."""

import math

import pytest

from trl_repulse._numbers import percent, plain


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.0, "0"), (-5.25, "-5.25"), (0.00012346, "0.0001235"), (1.2e-5, "1.2e-5"), (1.11e-20, "1.11e-20")),
        *(
            (9999.6, "10,000"),
            (123456.0, "123,456"),
            (-9.87654e20, "-9.877e+20"),
            (math.inf, "inf"),
            (math.nan, "nan"),
        ),
    ],
)
def test_plain(value, text):
    assert plain(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        *((0.0, "0"), (0.005, "0.5"), (1.11e-22, "<0.001"), (-1e-9, ">-0.001")),
        *((1e-5, "0.001"), (0.2191, "21.9"), (1, "100")),
    ],
)
def test_percent(share, text):
    assert percent(share) == text
