"""What docs/memory.md says was measured, from the records of `benchmarks.memory` and `benchmarks.specmemo`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from functools import partial
from pathlib import Path

from benchmarks.cells import Record
from benchmarks.conversations import LABELS
from benchmarks.document_parts import picture
from benchmarks.hard_limits import CONVERSATIONS, RATIOS, drafting_gains
from benchmarks.memory_models import MODELS, SETTINGS
from benchmarks.memory_plots import draw_budgets, draw_peaks, draw_ratios, draw_shapes
from echelon.bench.report import table
from echelon.inputs import write_text

Records = Mapping[str, Record]
MIB = 2**20
MOST_OVER, MOST_OVER_BYTES = 0.05, 128 * MIB  # by how much a plan may exceed the peak: the larger of the two
MOST_TREE, MOST_MEMORY, LEAST_SPEED = 0.36, 0.60, 0.96
HEADING = "## Measured"
CALLED = {
    "chain": "chain of 4",
    "tree": "tree of 24",
    "int8": "weights in 8 bits",
    "int8_kv": "keys in 8 bits",
    "long": "prompts of 2,016",
    "prefixes": "prefix cache, n-gram",
}
METHODS = {"medusa": "Medusa's heads", "eagle": "the EAGLE head"}


def write_memory(page: Path, memory: Records, specmemo: Records) -> Path:
    """Write what was measured into the page, in the place of what it has under that heading, with the pictures beside it."""
    text, plots = page.read_text("utf-8"), page.parent / "plots"
    parts = [*_machines([*memory.values(), *specmemo.values()]), *peaks_part(memory, plots), *limits_part(memory)]
    parts += [*ratios_part(memory, plots), *bound_part(memory), *trees_part(memory), *nodes_part(memory)]
    for method in METHODS:
        parts += specmemo_part(specmemo, method, plots)
    return write_text(page, "\n\n".join([text.partition(HEADING)[0].rstrip(), HEADING, *parts]) + "\n", "--output")


def _machines(records: list[Record]) -> Iterator[str]:
    where = [r["environment"] for r in records]
    if where:
        values = {key: ", ".join(sorted({e[key] for e in where})) for key in ("cpu", "isa", "threads", "torch", "commit")}
        yield (
            "Written by `python -m benchmarks.memory` and `python -m benchmarks.specmemo` from `evidence/memory` and `evidence/specmemo`: "
            f"{values['cpu']}; kernels for {values['isa']}, {values['threads']} threads, torch {values['torch']}; commits "
            f"{values['commit']}."
        )


def over(record: Record) -> int:
    """Bytes by which the plan exceeds the peak."""
    return int(record["total_bytes"] - record["peak"])


def is_met(record: Record) -> bool:
    """Never under, and over by no more than is allowed."""
    return 0 <= over(record) <= max(MOST_OVER_BYTES, MOST_OVER * float(record["peak"]))


def peaks_part(records: Records, plots: Path) -> Iterator[str]:
    """Plans beside peaks."""
    found = {name: r for name, r in records.items() if name.startswith("peak_")}
    if not found:
        return

    def cell(record: Record | None) -> str:
        if record is None:
            return "–"
        return f"{over(record) / MIB:+,.0f} of {record['peak'] / MIB:,.0f}{'' if is_met(record) else ' (missed)'}"

    lines = [(model, *(cell(found.get(f"peak_{model}_{setting}")) for setting in SETTINGS)) for model in MODELS]
    met = sum(map(is_met, found.values()))
    yield (
        "The plan beyond the peak of a process that loads the model and fills every row (`python -m benchmarks.memory peak`, VmHWM), in "
        "MiB. Models are the embedded one and random ones in the shapes of Llama, Qwen2 (vocabulary 151,936), OPT and Mixtral; chain and "
        "tree are drafted by a small model. A plan may be never under, and over by 5 % or 128 MiB: "
        f"{met} of {len(found)} are met."
    )
    yield table(["", *(CALLED[setting] for setting in SETTINGS)], lines)
    allowed = MOST_OVER_BYTES / MIB
    yield picture(plots, "memory-peaks", "MiB by which plans exceed peaks", lambda path: draw_peaks(found, allowed, path))


def limits_part(records: Records) -> Iterator[str]:
    """Conversations under a limit that is the plan."""
    found = {name.partition("_")[2]: r for name, r in records.items() if name.startswith("limit_")}
    if found:
        said = ", ".join(f"{model} {r['survived']}" for model, r in found.items())
        yield (
            f"Under a hard limit equal to the plan (`python -m benchmarks.memory limit`: RLIMIT_DATA, which counts memory mapped to be "
            "written; pages of files are taken from the plan, and what is mapped and not resident when idle is added), of "
            f"{CONVERSATIONS} conversations of random lengths with 4 drafted tokens came to their end: {said}."
        )


def ratios_part(records: Records, plots: Path) -> Iterator[str]:
    """Fixed shares of the weights beside the plan."""
    found = {str(n): r for n in (*RATIOS, "plan") if (r := records.get(f"ratio_llama_{n}"))}
    if not found:
        return
    yield (
        "Keys and values may also be given a fixed share of the weights' bytes. Here the random Llama has, besides what the process takes, "
        "16 bytes for every 13.5 of its weights, as a device of 16 GB has for a model of 7 B, as a hard limit (`python -m "
        "benchmarks.memory ratio`): queries of 128 tokens that run at once, none of them put off."
    )
    lines = [
        (
            "the plan's choice" if name == "plan" else f"1:{name}",
            f"{r['bytes'] / MIB:,.0f} MiB",
            "does not fit" if not r["planned"] else str(r["planned"]),
            "died" if "died" in r else f"{r['held']}{', and one more' if r['holds_one_more'] else ''}",
        )
        for name, r in found.items()
    ]
    yield table(["keys and values : weights", "bytes", "planned", "held"], lines)
    yield picture(plots, "memory-ratios", "Queries held under one hard limit", partial(draw_ratios, records))


def bound_part(records: Records) -> Iterator[str]:
    """The lower bound of drafting, confirmed or not."""
    if record := records.get("bound"):
        last, below = record["rounds"][-1], record["below"]
        less = "it dies" if "died" in below else f"it decodes {below['speed'] / last['none']['speed']:.2f} times as fast"
        yield (
            "The lower bound, of the embedded pair grown to 1.1 B (`python -m benchmarks.memory bound`): of the "
            f"{last['draft_model']['least'] / MIB:,.0f} MiB that one row with 4 drafted tokens needs by plan, "
            f"{last['draft_model']['limit'] / MIB:,.0f} are data. Under a hard limit of so much data it decodes "
            f"{statistics.median(drafting_gains(record)):.1f} times as fast as without drafts in the least that this needs; "
            f"under {below['limit'] / MIB:,.0f} MiB {less}."
        )


def trees_part(records: Records) -> Iterator[str]:
    """Buffers of trees, counted."""
    if record := records.get("trees"):
        sums = {kind: sum(record[kind].values()) / 1e6 for kind in ("Medusa stock", "Medusa planned", "ours stock", "ours planned")}
        leaf = record["Medusa stock"]["logits gathered by leaf"] / 1e6
        yield (
            f"A tree's buffers for one query of Vicuna-7B, counted by Medusa's own layout: {sums['Medusa stock']:.1f} MB for its 64 nodes, "
            f"of which {leaf:.0f} MB are logits gathered once more for every leaf. With 44 nodes they are {sums['Medusa planned']:.1f} MB. "
            f"Here, where nothing is gathered, these trees take {sums['ours stock']:.1f} and {sums['ours planned']:.1f} MB."
        )


def nodes_part(records: Records) -> Iterator[str]:
    """Bytes of trees, measured by peaks."""
    found = sorted((int(name.partition("_")[2]), r) for name, r in records.items() if name.startswith("nodes_"))
    if len(found) > 1:
        (few, small), (many, large) = found[0], found[-1]
        tree, planned, measured = ((large[key] - small[key]) / 1e6 for key in ("tree_bytes", "total_bytes", "peak"))
        yield (
            "Measured for ours (`python -m benchmarks.memory nodes`): the peak of a process with 32 rows of the embedded target and its "
            f"EAGLE head grows by {measured:.0f} MB from trees of {few} nodes to {many}, its plan by {planned:.0f} MB, of which "
            f"{tree:.0f} are keys, values and logits of nodes and the others activations."
        )


def specmemo_part(records: Records, method: str, plots: Path) -> Iterator[str]:
    """The paper's search with one method: shapes, what they keep, and budgets."""
    ends = {"_".join(filter(None, (method, workload))): label for workload, label in LABELS.items()}
    planned = {label: r for end, label in ends.items() if (r := records.get(f"planned_{end}"))}
    grids = {end: r for end in ends if (r := records.get(f"grid_{end}"))}
    if not grids:
        return
    yield f"### SpecMemo's search, with {METHODS[method]} of the embedded target, grown to 1.1 B"
    if planned:
        yield (
            "The fastest shape whose tree takes at most 36 % of the stock tree, beside that tree of 64 nodes with keys and values for "
            "the whole context, in turn, texts being equal (medians of rounds):"
        )
        yield table(
            ["", "shape", "throughput kept", "beside plain", "of the tree", "of the memory beyond the weights"],
            [*map(kept, planned, planned.values())],
        )
    for end, record in grids.items():
        if ends[end] not in planned:
            yield by_the_grid(ends[end], record["shapes"])
        speeds = records.get(f"planned_{end}", {}).get("speeds")
        plain = statistics.median(speeds["plain"]) if speeds else None
        name = f"memory-shapes-{end.replace('_', '-')}"
        yield picture(plots, name, f"Speed by bytes of the tree, {ends[end]}", partial(draw_shapes, record, plain))
    if budgets := {label: r for end, label in ends.items() if (r := records.get(f"budgets_{end}"))}:
        yield (
            "Budgets of keys and values, those of SpecMemo's model of 7 B scaled so that the largest holds the context and the stock "
            "tree: the shape that loses no turn and takes the least milliseconds a token, measured again in a pool of that size. "
            + "The stock setting runs in "
            + "; ".join(f"{sum(b['stock_runs'] for b in r['budgets'])} of {len(r['budgets'])} ({label})" for label, r in budgets.items())
            + "."
        )
        yield picture(plots, f"memory-budgets-{method}", "Milliseconds a token by budget", partial(draw_budgets, budgets))


def fastest_within(shapes: SequenceOf[Record], stock_bytes: float) -> Record:
    """The fastest shape of a grid whose tree keeps to its share of the stock tree's bytes."""
    return max((s for s in shapes if s["tree_bytes"] <= MOST_TREE * stock_bytes), key=lambda shape: float(shape["speed"]))


def by_the_grid(label: str, shapes: SequenceOf[Record]) -> str:
    """What the fastest shape within its share of the largest tree gains over that tree, by the grid alone."""
    stock = max(shapes, key=lambda shape: (shape["nodes"], shape["heads"]))
    best = fastest_within(shapes, stock["tree_bytes"])
    speed, tree = (best[key] / stock[key] for key in ("speed", "tree_bytes"))
    return (
        f"{label[0].upper()}{label[1:]}, {len(stock['turns'][0])} of them, in the grid alone: {best['heads']} heads and {best['nodes']} "
        f"nodes decode at {speed:.2f} times the speed of the tree of {stock['nodes']} nodes, in {tree:.2f} of its bytes."
    )


def kept(label: str, record: Record) -> tuple[str, ...]:
    """A line: what the planned setting keeps of the stock one, with what falls short of its goal marked."""
    speeds: dict[str, list[float]] = record["speeds"]
    rounds = {name: zip(speeds["planned"], speeds[name], strict=True) for name in ("stock", "plain")}
    of_stock, of_plain = (statistics.median(a / b for a, b in pairs) for pairs in rounds.values())
    tree, beyond = (own / stock for stock, own in (record["tree"], record["beyond"]))

    def judged(value: float, is_enough: bool) -> str:
        return f"{value:.2f}{'' if is_enough else ' (missed)'}"

    return (
        label,
        f"{record['shape'][0]} heads, {record['shape'][1]} nodes",
        judged(of_stock, of_stock >= LEAST_SPEED),
        f"{of_plain:.2f}",
        judged(tree, tree <= MOST_TREE),
        judged(beyond, beyond <= MOST_MEMORY),
    )
