"""Pictures of planned memory, from records: shapes of trees, budgets, plans beside peaks, and queries under a hard limit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cells import Record
from echelon.pyplot import pyplot_or_refusal

MIB = 2**20


def draw_shapes(record: Record, plain: float | None, path: Path) -> None:
    """Speed by bytes of the tree, a line for each depth; `plain`: that of decoding without drafts."""
    shapes: list[dict[str, Any]] = record["shapes"]
    pyplot = pyplot_or_refusal()
    figure, axis = pyplot.subplots(figsize=(6.4, 4.0), constrained_layout=True)
    for heads in dict.fromkeys(s["heads"] for s in shapes):
        own = sorted((s["tree_bytes"] / 1e6, s["speed"], s["nodes"]) for s in shapes if s["heads"] == heads)
        axis.plot([x for x, _, _ in own], [y for _, y, _ in own], marker="o", label=f"paths of at most {heads}")
    sizes = {s["nodes"]: s["tree_bytes"] / 1e6 for s in shapes}
    for nodes, size in sizes.items():
        axis.annotate(f"{nodes}", (size, 0.02), xycoords=("data", "axes fraction"), ha="center", fontsize=8)
    if plain is not None:
        axis.axhline(plain, color="#888888", linewidth=0.8, linestyle="--")
        axis.annotate("plain decoding", (0.99, plain), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    axis.set(xlabel="MB that grow with the nodes of one row (nodes above the axis)", ylabel="tokens a second, batch 1", ylim=(0, None))
    axis.legend(fontsize=8)
    _keep(figure, path)


def draw_budgets(records: Mapping[str, Record], path: Path) -> None:
    """The best milliseconds a token under each budget of keys and values, a panel for each kind of conversation."""
    pyplot = pyplot_or_refusal()
    figure, panels = pyplot.subplots(
        1, len(records), figsize=(1 + 4.2 * len(records), 3.6), sharey=True, squeeze=False, constrained_layout=True
    )
    for axis, (label, record) in zip(panels[0], records.items(), strict=True):
        own = record["budgets"]
        axis.plot([b["budget"] for b in own], [b["ms"] for b in own], marker="o")
        for b in own:
            said = f"{b['heads']} heads,\n{b['nodes']} nodes,\n{b['ran']} of {b['asked']} turns"
            axis.annotate(said, (b["budget"], b["ms"]), textcoords="offset points", xytext=(0, 8), ha="center", fontsize=7)
        axis.set(title=label, xlabel="keys and values: GB of a model of 7 B", xscale="log")
        axis.set_xticks([b["budget"] for b in own], [f"{b['budget']:g}" for b in own])
        axis.minorticks_off()
        axis.margins(x=0.15)
    panels[0][0].set(ylabel="milliseconds a token, batch 1", ylim=(0, 1.35 * max(b["ms"] for r in records.values() for b in r["budgets"])))
    _keep(figure, path)


def _keep(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot_or_refusal().close(figure)


def draw_peaks(records: Mapping[str, Record], allowed: float, path: Path) -> None:
    """By how much plans exceed peaks, a bar a setting for each model; `allowed`: MiB that they may."""
    found: dict[str, dict[str, float]] = {}
    for name, record in records.items():
        if name.startswith("peak_"):
            _, model, setting = name.split("_", 2)
            found.setdefault(setting, {})[model] = (record["total_bytes"] - record["peak"]) / MIB
    if not found:
        return
    pyplot = pyplot_or_refusal()
    figure, axis = pyplot.subplots(figsize=(6.4, 4.0), constrained_layout=True)
    models = list(dict.fromkeys(model for own in found.values() for model in own))
    width, least = 0.8 / max(1, len(found)), min((v for own in found.values() for v in own.values()), default=0.0)
    for i, (setting, own) in enumerate(found.items()):
        places = [models.index(model) + (i + 0.5) * width - 0.4 for model in own]
        axis.bar(places, list(own.values()), width, label=setting.replace("_", " "))
    axis.axhline(allowed, color="#888888", linewidth=0.8, linestyle="--")
    axis.annotate("allowed", (0.01, allowed), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(models)), models)
    axis.set(ylabel="MiB by which the plan exceeds the peak", ylim=(min(0.0, least), 1.15 * allowed))
    axis.legend(fontsize=8, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, columnspacing=1.0)
    _keep(figure, path)


def draw_ratios(records: Mapping[str, Record], path: Path) -> None:
    """Queries that are held under one hard limit: by fixed shares of the weights, and by plan."""
    found = {str(r["ratio"]): r for name, r in records.items() if name.startswith("ratio_")}
    if not found:
        return
    order = sorted((ratio for ratio in found if ratio != "plan"), key=int) + [ratio for ratio in found if ratio == "plan"]
    pyplot = pyplot_or_refusal()
    figure, axis = pyplot.subplots(figsize=(6.4, 3.6), constrained_layout=True)
    for i, ratio in enumerate(order):
        record = found[ratio]
        axis.bar(i, record["held"], color="tab:green" if ratio == "plan" else "tab:blue")
        said = "out of memory" if "died" in record else str(record["held"])
        axis.annotate(said, (i, record["held"]), ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(len(order)), ["plan" if ratio == "plan" else f"1:{ratio}" for ratio in order])
    axis.set(xlabel="keys and values : weights", ylabel="queries of 128 tokens held at once")
    axis.margins(y=0.12)
    _keep(figure, path)
