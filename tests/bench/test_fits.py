"""Laws are recovered from points that follow them, and told apart from others."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fits import FORMS, fitted, foretold

TOKENS = np.array([1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0])
LAWS = {"logarithmic": (0.74, 4.61), "power": (2.0, 0.15), "saturating": (1.5, 0.7, 5.0), "sigmoid": (2.0, 2.0, 1.5, 10.0)}


@pytest.mark.parametrize("name", LAWS)
def test_a_law_is_recovered_from_noisy_points_and_preferred(name: str) -> None:
    noise = np.random.default_rng(3).normal(0.0, 0.003, len(TOKENS))
    y = FORMS[name].value(TOKENS, *LAWS[name]) + noise
    fits = fitted(TOKENS.tolist(), y.tolist())
    assert min(fits, key=lambda n: fits[n].aic) == name
    assert fits[name].r_squared > 0.99
    for value, true, (low, high) in zip(fits[name].parameters, LAWS[name], fits[name].intervals, strict=True):
        assert value == pytest.approx(true, rel=0.05)
        assert low < true < high
    assert abs(foretold(TOKENS.tolist(), y.tolist())[name]) < 0.02


def test_the_wrong_law_foretells_the_wrong_point() -> None:
    y = FORMS["saturating"].value(TOKENS, 1.5, 1.5, 5.0).tolist()
    errors = foretold(TOKENS.tolist(), y)
    assert abs(errors["saturating"]) < 1e-3
    assert errors["logarithmic"] > 0.02


def test_too_few_points_have_no_law() -> None:
    assert fitted([1.0, 2.0, 5.0], [1.0, 1.2, 1.4]).keys() == {"logarithmic", "power"}
    assert fitted([1.0, 2.0], [1.0, 1.2]) == {}
    assert fitted([2.0, 2.0, 2.0], [1.0, 1.2, 1.3]) == {}


def test_a_fit_reads_as_a_formula() -> None:
    text = str(fitted([1, 10, 100, 1000], [1.0, 2.01, 2.99, 4.0])["logarithmic"])
    assert text.startswith("a · log10 x + b, a = ") and "b = " in text


def test_parameters_that_the_points_leave_open_are_not_printed() -> None:
    """Of a logarithm a saturating power takes the slope alone: where the solver stops depends on the processor."""
    text = str(fitted(TOKENS.tolist(), (1.0 + np.log10(TOKENS) + np.tile([0.01, -0.01], 4)[:7]).tolist())["saturating"])
    assert text == "c − a · x^−b, of which these points do not determine the parameters"
