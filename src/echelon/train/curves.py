"""Curves of a training run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.errors import MissingExtraError


def draw(lines: Sequence[dict[str, Any]], file: Path, title: str) -> None:
    """Loss, and top-1 and top-5 accuracy by depth, over the steps of a log."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("curves need matplotlib: pip install 'echelon[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses = [x for x in lines if "loss" in x]
    measured = [x for x in lines if "top1" in x]
    figure, (left, *rest) = pyplot.subplots(1, 3, figsize=(13, 4))
    left.plot([x["step"] for x in losses], [x["loss"] for x in losses], linewidth=0.8)
    left.set(title=f"{title}: loss", xlabel="step", ylabel="nats a place")
    for axes, key in zip(rest, ("top1", "top5"), strict=True):
        for depth in range(len(measured[0][key]) if measured else 0):
            axes.plot([x["step"] for x in measured], [100 * x[key][depth] for x in measured], marker=".", label=f"depth {depth}")
        axes.set(title=f"{key[:3]}-{key[3:]} accuracy on held-out text of the target", xlabel="step", ylabel="%", ylim=(0, 100))
        axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
