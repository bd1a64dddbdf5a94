"""Pictures of results."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path

from echelon.bench.throughput import Result
from echelon.errors import MissingExtraError

COLOURS = {"plain": "#9aa5b1", "LLMA": "#2f7ed8", "draft model": "#1a9850", "transformers": "#d98c5f"}


def bar_chart(path: Path, groups: Mapping[str, SequenceOf[Result]]) -> None:
    """One panel a group: median tokens per second of each method, the range as an error bar, τ written on the bar.

    Raises
    ------
    MissingExtraError  matplotlib is not installed
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("plots need matplotlib: pip install 'echelon[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(groups), figsize=(5.2 * len(groups), 3.6), constrained_layout=True, squeeze=False)
    for axis, (title, results) in zip(axes[0], groups.items(), strict=True):
        names = [r.method for r in results]
        medians = [r.median for r in results]
        errors = [[r.median - min(r.tokens_per_second) for r in results], [max(r.tokens_per_second) - r.median for r in results]]
        bars = axis.bar(names, medians, yerr=errors, capsize=4, color=[COLOURS.get(n, "#777777") for n in names])
        axis.bar_label(bars, [f"{r.median:,.0f}\nτ {r.tokens_per_step:.2f}" for r in results], padding=3, fontsize=9)
        axis.set_title(f"{title}, batch {results[0].batch_size}", fontsize=11)
        axis.set_ylabel("new tokens per second")
        axis.set_ylim(0, max(medians) * 1.3)
        axis.tick_params(axis="x", labelsize=8.5)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
