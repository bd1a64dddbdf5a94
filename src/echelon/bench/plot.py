"""Pictures of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from echelon.bench.latency import Latency
from echelon.bench.phases import SPLIT
from echelon.bench.throughput import ThroughputResult
from echelon.pyplot import pyplot_or_refusal

STRATEGY_COLOURS = {
    "unpadded": "#1a9850",
    "padded": "#d73027",
    "padded-kv": "#fc8d59",
    "padded-inputs": "#fdae61",
    "realign": "#762a83",
    "same-length": "#2f7ed8",
}
IN_A_ROW = 2  # panels
SPLIT_COLOURS = dict(zip(SPLIT, ("#91bfdb", "#4575b4", "#fee090", "#d73027", "#9aa5b1"), strict=True))
COLOURS = {"plain": "#9aa5b1", "LLMA": "#2f7ed8", "draft model": "#1a9850", "transformers": "#d98c5f", "EAGLE": "#762a83"}


@contextmanager
def panels_in(path: Path, count: int, width: float, height: float, dpi: int = 130) -> Iterator[list[Any]]:
    """Axes to be drawn on, of these inches each and two in a row, so that a page shows them large enough to be read; the picture is kept
    as PNG in the end.

    Raises
    ------
    MissingExtraError  matplotlib is not installed
    """
    pyplot = pyplot_or_refusal()
    columns = min(count, IN_A_ROW)
    rows = -(-count // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(width * columns, height * rows), constrained_layout=True, squeeze=False)
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.remove()
    yield axes[:count]
    for axis in axes[:count]:
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)


def grouped_bars(path: Path, panels: Mapping[str, Mapping[str, float]], ylabel: str) -> None:
    """Draw one panel a key as PNG, a bar a method, with its value.

    Raises
    ------
    MissingExtraError  matplotlib is not installed
    """
    with panels_in(path, len(panels), 4.2, 3.6) as axes:
        for axis, (title, values) in zip(axes, panels.items(), strict=True):
            bars = axis.bar(list(values), list(values.values()), color=[COLOURS.get(name, "#777777") for name in values])
            axis.bar_label(bars, [f"{value:,.0f}" for value in values.values()], padding=3, fontsize=9)
            axis.set_title(title, fontsize=11)
            axis.set(ylabel=ylabel, ylim=(0, max(values.values()) * 1.2))
            axis.tick_params(axis="x", labelsize=8)


@dataclass(frozen=True)
class Curve:
    """One curve: values by batch size, with the range of the rounds where there were several."""

    name: str
    points: SequenceOf[tuple[int, float]]
    colour: str
    style: str = "-"
    ranges: SequenceOf[tuple[float, float]] = ()


def line_chart(
    path: Path, panels: Mapping[str, SequenceOf[Curve]], ylabel: str, level: float | None = None, xlabel: str = "batch size"
) -> None:
    """Draw one panel a key as PNG; `level` draws a horizontal line there."""
    with panels_in(path, len(panels), 4.8, 4.2) as axes:
        for axis, (title, lines) in zip(axes, panels.items(), strict=True):
            for line in lines:
                x, y = [p[0] for p in line.points], [p[1] for p in line.points]
                axis.plot(x, y, line.style, marker="o", markersize=4, color=line.colour, label=line.name)
                if line.ranges:
                    axis.fill_between(
                        x, [r[0] for r in line.ranges], [r[1] for r in line.ranges], color=line.colour, alpha=0.15, linewidth=0
                    )
            ticks = sorted({p[0] for line in lines for p in line.points})
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [str(t) for t in ticks])
            axis.minorticks_off()
            axis.set(xlabel=xlabel, ylabel=ylabel)
            axis.set_ylim(bottom=0)
            if level is not None:
                axis.axhline(level, color="#777777", linewidth=0.8)
            axis.set_title(title, fontsize=10.5)
            axis.legend(fontsize=8, frameon=False)


def split_chart(path: Path, bars: Mapping[str, Mapping[str, float]]) -> None:
    """Where a step's milliseconds go: one horizontal bar a key, cut into the parts of a step."""
    with panels_in(path, 1, 8.5, 1.2 + 0.32 * len(bars)) as (axis,):
        names, left = list(bars), [0.0] * len(bars)
        for part in SPLIT:
            values = [bars[n].get(part, 0.0) for n in names]
            axis.barh(names, values, left=left, color=SPLIT_COLOURS[part], label=part)
            left = [a + b for a, b in zip(left, values, strict=True)]
        axis.invert_yaxis()
        axis.set_xlabel("milliseconds a decoding step")
        axis.tick_params(axis="y", labelsize=8)
        axis.legend(fontsize=8, frameon=False, ncols=len(SPLIT), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def strategy_lines(results: SequenceOf[ThroughputResult], drafter: str) -> list[Curve]:
    """Decoding speed of every strategy with one drafter, and of plain decoding, by batch size."""
    drafted = [r for r in results if r.method == drafter]
    lines = [_line(name, [r for r in drafted if r.strategy == name], colour) for name, colour in STRATEGY_COLOURS.items()]
    lines.append(_line("plain decoding", [r for r in results if r.name == "plain"], "#555555", "--"))
    return [line for line in lines if line.points]


def _line(name: str, results: SequenceOf[ThroughputResult], colour: str, style: str = "-") -> Curve:
    found = sorted(results, key=lambda r: r.batch_size)
    speeds = [r.decode_tokens_per_second or [0.0] for r in found]
    return Curve(name, [(r.batch_size, r.decode_median) for r in found], colour, style, [(min(s), max(s)) for s in speeds])


def throughput_charts(folder: Path, results: SequenceOf[ThroughputResult]) -> list[Path]:
    """Speed by batch size, one panel a drafter, and the parts of a step at the largest batch."""
    drafters = list(dict.fromkeys(r.method for r in results if r.strategy != "transformers" and r.method != "plain")) or ["plain"]
    speed, split = folder / "throughput.png", folder / "steps.png"
    line_chart(speed, {d: strategy_lines(results, d) for d in drafters}, "new tokens per second, decoding")
    largest = max(r.batch_size for r in results)
    bars = {f"{r.name}, batch {largest}": r.step_ms for r in results if r.step_ms and r.batch_size == largest}
    split_chart(split, bars)
    return [speed, split]


def latency_charts(folder: Path, results: SequenceOf[Latency]) -> list[Path]:
    """P50 and P99 of every strategy by batch size, and of plain decoding, one panel a drafter and load."""
    panels: dict[str, list[Curve]] = {}
    drafters = list(dict.fromkeys(r.method for r in results if r.method != "plain")) or ["plain"]
    for load, drafter in product(dict.fromkeys(r.load for r in results), drafters):
        lines = panels.setdefault(f"{drafter}, arrivals at {load:.0%} of capacity", [])
        own = [r for r in results if r.load == load]
        for name, method, strategy, colour in (
            *((strategy, drafter, strategy, colour) for strategy, colour in STRATEGY_COLOURS.items()),
            *([("plain decoding", "plain", "unpadded", "#555555")] if drafter != "plain" else []),
        ):
            if found := [r for r in own if (r.method, r.strategy) == (method, strategy)]:
                lines.append(Curve(f"{name}, P50", [(r.batch_size, 1e3 * r.p50) for r in found], colour))
                lines.append(Curve(f"{name}, P99", [(r.batch_size, 1e3 * r.p99) for r in found], colour, ":"))
    line_chart(folder / "latency.png", panels, "milliseconds from arrival to last token")
    return [folder / "latency.png"]
