"""matplotlib's pyplot, which is an optional part, for all that draws."""

from __future__ import annotations

from typing import Any

from echelon.errors import MissingExtraError


def pyplot_or_refusal() -> Any:
    """matplotlib's pyplot, without a window.

    Raises
    ------
    MissingExtraError  matplotlib is not installed
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("curves and charts need matplotlib: pip install 'echelon[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
