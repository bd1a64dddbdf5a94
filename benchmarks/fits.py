"""Laws of one variable fitted by least squares: which form fits best, how well, and what it foretells."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from math import inf, log

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats  # type: ignore[import-untyped]

Floats = NDArray[np.float64]
CONFIDENCE = 0.95
EXACT = 1e-12  # a mean square that rounding alone leaves
UNKNOWN = 100.0  # times its own size that half of a parameter's interval has where the points leave it open: its digits are the solver's


@dataclass(frozen=True)
class Form:
    """y as a function of x > 0 and of as many parameters as `start` finds first values for, given x and y."""

    formula: str
    value: Callable[..., Floats]
    start: Callable[[Floats, Floats], tuple[float, ...]]


def _slope(x: Floats, y: Floats) -> tuple[float, float]:
    a, b = np.polyfit(np.log10(x), y, 1)
    return float(a), float(b)


def _power(x: Floats, y: Floats) -> tuple[float, float]:
    b, a = np.polyfit(np.log(x), np.log(np.maximum(y, 1e-9)), 1)
    return float(np.exp(a)), float(b)


def _saturation(_: Floats, y: Floats) -> tuple[float, float, float]:
    return float(np.ptp(y)) + 1e-3, 0.5, float(y.max())


def _sigmoid(x: Floats, y: Floats) -> tuple[float, float, float, float]:
    half = float(np.exp(np.interp((y.min() + y.max()) / 2, np.sort(y), np.log(np.sort(x)))))
    return float(np.ptp(y)) + 1e-3, 1.5, float(y.min()), half


FORMS: Mapping[str, Form] = {
    "logarithmic": Form("a · log10 x + b", lambda x, a, b: a * np.log10(x) + b, _slope),
    "power": Form("a · x^b", lambda x, a, b: a * x**b, _power),
    "saturating": Form("c − a · x^−b", lambda x, a, b, c: c - a * x**-b, _saturation),
    "sigmoid": Form("c + a ÷ (1 + (d ÷ x)^b)", lambda x, a, b, c, d: c + a / (1.0 + (np.abs(d) / x) ** b), _sigmoid),
}


@dataclass(frozen=True)
class Fit:
    """A form with its least-squares parameters, their confidence intervals, R², and Akaike's criterion (the smaller the better) with the
    correction for few points (Hurvich and Tsai 1989).
    """

    name: str
    parameters: tuple[float, ...]
    intervals: tuple[tuple[float, float], ...]
    r_squared: float
    aic: float

    def at(self, x: float) -> float:
        """The law's y."""
        return float(FORMS[self.name].value(np.array([x]), *self.parameters)[0])

    def __str__(self) -> str:
        """The formula and its parameters with their intervals; without, where the points determine none of them by itself."""
        if any(high - low > 2.0 * UNKNOWN * abs(v) for v, (low, high) in zip(self.parameters, self.intervals, strict=True)):
            return f"{FORMS[self.name].formula}, of which these points do not determine the parameters"
        found = zip("abcd", self.parameters, self.intervals, strict=False)
        return f"{FORMS[self.name].formula}, " + ", ".join(f"{n} = {v:.4g} [{low:.3g}, {high:.3g}]" for n, v, (low, high) in found)


def fitted(x: SequenceOf[float], y: SequenceOf[float]) -> dict[str, Fit]:
    """Every form that these points can be fitted by; those with as many parameters as there are points are left out."""
    xs, ys = np.array(x, np.float64), np.array(y, np.float64)
    fits = {name: _fit(name, form, xs, ys) for name, form in FORMS.items()}
    return {name: fit for name, fit in fits.items() if fit is not None}


def _fit(name: str, form: Form, x: Floats, y: Floats) -> Fit | None:
    first = form.start(x, y) if len(set(x.tolist())) > 1 else ()
    num_free = len(x) - len(first)
    if not first or num_free < 1:
        return None
    try:
        with np.errstate(over="ignore"), warnings.catch_warnings():  # of parameters that are tried on the way
            warnings.simplefilter("ignore", optimize.OptimizeWarning)
            found, covariance = optimize.curve_fit(form.value, x, y, first, maxfev=20_000)
    except RuntimeError:  # it does not converge: the points are of another form
        return None
    rest = float(((y - form.value(x, *found)) ** 2).sum())
    width = stats.t.ppf(0.5 + CONFIDENCE / 2, num_free) * np.sqrt(np.diag(covariance))
    intervals = tuple((float(v - w), float(v + w)) if np.isfinite(w) else (-inf, inf) for v, w in zip(found, width, strict=True))
    spread = float(((y - y.mean()) ** 2).sum())
    spare = num_free - 1
    aic = len(x) * log(max(rest / len(x), EXACT)) + 2 * len(first) * (1 + (len(first) + 1) / spare if spare > 0 else inf)
    return Fit(name, tuple(float(v) for v in found), intervals, 1.0 - rest / spread if spread > 0.0 else 0.0, aic)


def foretold(x: SequenceOf[float], y: SequenceOf[float]) -> dict[str, float]:
    """By form, how far the last point, foretold from those before it, is off: a share of what it is."""
    earlier = fitted(x[:-1], y[:-1])
    return {name: fit.at(x[-1]) / y[-1] - 1.0 for name, fit in earlier.items()}
