"""SpecMemo's experiment: `python -m benchmarks.specmemo [--method eagle|medusa] [--output FOLDER] [PREFIX ...]`, resumable by cell.

The embedded target, grown, with its EAGLE head, or with Medusa's once `make heads` has trained them. A tree of Medusa's keeps the ten
likeliest first tokens, as SpecMemo's 1-10-16-17 does, and loses depth and leaves; one of EAGLE grows by what is likely. Keys and values are
those of the planned conversation, and of the stock setting those of the whole context.

grid     tokens a second of decoding at batch 1, tokens a step and bytes of the tree, for paths of 2 to 5 tokens (Medusa's tree has none
         of five) and 16 to 64 nodes
planned  the fastest shape of the grid whose tree takes no more than 36 % of the stock tree, beside that with its 64 nodes, in turn:
         throughput kept, memory beyond the weights, equal texts; and beside plain decoding
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.cells import Cell, Record, Records, asked_of, run_asked
from benchmarks.workloads import Models, Size, greedy, source
from echelon import ConfigError, EngineConfig, SpeculativeConfig
from echelon.bench.plot import pyplot_or_refusal
from echelon.bench.report import table
from echelon.bench.throughput import DecodingMethod, EngineRun
from echelon.memory.plan import MemoryPlan
from echelon.memory.residents import PlannedModels
from echelon.trees import MEDUSA_63
from echelon.trees import Path as TreePath

HEADS, NODES = (2, 3, 4, 5), (16, 24, 32, 44, 64)
STOCK = {"medusa": (4, 64), "eagle": (5, 64)}
MOST_TREE, MOST_MEMORY, LEAST_SPEED = 0.36, 0.60, 0.96
WIDTH = 10  # nodes of the first level that every tree keeps
PROMPT, NEW, ROUNDS = 256, 96, 5


def paths_of(heads: int, nodes: int) -> list[TreePath]:
    """Paths of `nodes` − 1 drafted tokens, none longer than `heads`: the first level, then Medusa's in the order of their worth."""
    first = [path for path in MEDUSA_63 if len(path) == 1][:WIDTH]
    rest = [path for path in MEDUSA_63 if 1 < len(path) <= heads]
    return [*first, *rest][: nodes - 1]


def drafting(method: str, folder: str, heads: int, nodes: int) -> dict[str, Any]:
    """What drafts trees of so many nodes, the root included."""
    own = {"method": method, "model": folder, "num_speculative_tokens": nodes - 1}
    if method == "medusa":
        return own | {"tree": "static", "speculative_token_tree": paths_of(heads, nodes)}
    return own | {"tree": "dynamic", "tree_depth": heads}


class Study:
    """The grown target with its heads, and prompts, loaded when first asked for."""

    def __init__(self, size: Size, method: str, prompt: int = PROMPT, new: int = NEW, rounds: int = ROUNDS) -> None:
        self.method, self.prompt, self.new, self.rounds = method, prompt, new, rounds
        self.models = Models(size, [method])

    @cached_property
    def prompts(self) -> list[list[int]]:
        return source(self.models.with_heads[0], 4, self.prompt, is_ragged=False)

    def config(self, heads: int, nodes: int) -> dict[str, Any]:
        return drafting(self.method, self.models.with_heads[1][self.method], heads, nodes)

    def run(self, name: str, config: dict[str, Any] | None) -> EngineRun:
        run = EngineRun(DecodingMethod(name, config), self.models.with_heads[0], None, 1, {"max_model_len": self.length})
        run.warm_up(self.prompts[:1], greedy(4))
        return run

    @property
    def length(self) -> int:
        """Tokens of the planned conversation."""
        return self.prompt + self.new

    def plan(self, config: dict[str, Any], length: int) -> MemoryPlan:
        """The plan of an engine with one row of `length` tokens."""
        settings, spec = EngineConfig(max_num_seqs=1, max_model_len=length), SpeculativeConfig(**config)
        return PlannedModels(settings, spec, self.models.with_heads[0]).plan(settings, spec)


def shapes_of_the_grid(method: str) -> list[tuple[int, int]]:
    """(heads, nodes) of trees that there are."""
    shapes = list(product(HEADS, NODES))
    return shapes if method != "medusa" else [(h, n) for h, n in shapes if h < max(HEADS) and len(paths_of(h, n)) == n - 1]


def grid(study: Study) -> Record:
    """Medians of two rounds."""
    runs = {shape: study.run(f"{shape[0]} heads, {shape[1]} nodes", study.config(*shape)) for shape in shapes_of_the_grid(study.method)}
    speeds: dict[tuple[int, int], list[float]] = {shape: [] for shape in runs}
    for _, (shape, run) in product(range(2), runs.items()):
        found = run.run(study.prompts, greedy(study.new))
        speeds[shape].append(found.decoding_speed)
    lines = []
    for (heads, nodes), own in speeds.items():
        plan, result = study.plan(study.config(heads, nodes), study.length), runs[heads, nodes].result(1, [])
        speed, per_step = statistics.median(own), result.tokens_per_step
        lines.append({"heads": heads, "nodes": nodes, "speed": speed, "tokens_per_step": per_step, "tree_bytes": plan.tree_bytes})
    return {"shapes": lines}


def beyond_weights(plan: MemoryPlan) -> int:
    """Bytes of a plan that are neither the process's own nor the target's weights."""
    return plan.total_bytes - sum(plan.terms[name] for name in ("runtime", "tokenizer", "target weights"))


def planned(study: Study, records: Records) -> Record:
    """Stock and planned settings by turns; the shape is the fastest of the grid that keeps within its share of the stock tree.

    Raises
    ------
    ConfigError  the grid has not been measured, or texts differ
    """
    grid_record = records.read().get(f"grid_{study.method}", {})
    if "shapes" not in grid_record:
        raise ConfigError("the planned shape is chosen from the grid; measure the cell `grid` first")
    stock_plan = study.plan(study.config(*STOCK[study.method]), study.models.with_heads[0].max_len)
    allowed = [s for s in grid_record["shapes"] if s["tree_bytes"] <= MOST_TREE * stock_plan.tree_bytes]
    best = max(allowed, key=lambda s: s["speed"])
    shape = int(best["heads"]), int(best["nodes"])
    runs = {"plain": study.run("plain", None), "stock": study.run("stock", study.config(*STOCK[study.method]))}
    runs["planned"] = study.run("planned", study.config(*shape))
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    texts: list[list[list[int]]] = []
    for _, (name, run) in product(range(study.rounds), runs.items()):
        found = run.run(study.prompts, greedy(study.new))
        speeds[name].append(found.decoding_speed)
        texts.append(found.outputs)
    if any(text != texts[0] for text in texts):
        raise ConfigError("a text differs from that of plain decoding")
    plan = study.plan(study.config(*shape), study.length)
    return {
        "shape": shape,
        "speeds": speeds,
        "tree": [stock_plan.tree_bytes, plan.tree_bytes],
        "beyond": [beyond_weights(stock_plan), beyond_weights(plan)],
    }


def as_markdown(records: Mapping[str, Record]) -> str:
    """A line a shape, and one for each goal."""
    parts = []
    if shapes := next((r["shapes"] for r in records.values() if "shapes" in r), None):
        lines = [
            (str(s["heads"]), str(s["nodes"]), f"{s['speed']:.1f}", f"{s['tokens_per_step']:.2f}", f"{s['tree_bytes'] / 1e6:.2f} MB")
            for s in shapes
        ]
        parts.append(table(["heads", "nodes", "tokens/s", "tokens a step", "tree"], lines))
    if record := next((r for r in records.values() if "beyond" in r), None):
        pairs = zip(record["speeds"]["planned"], record["speeds"]["stock"], strict=True)
        plain = zip(record["speeds"]["planned"], record["speeds"]["plain"], strict=True)
        kept, gain = statistics.median(a / b for a, b in pairs), statistics.median(a / b for a, b in plain)
        (stock_tree, tree), (stock_beyond, beyond) = record["tree"], record["beyond"]
        goals = [
            ("shape", f"{record['shape'][0]} heads, {record['shape'][1]} nodes", ""),
            ("throughput kept", f"{kept:.2f} ({gain:.2f} × plain)", f"≥ {LEAST_SPEED}"),
            ("tree, of the stock tree", f"{tree / stock_tree:.2f} ({tree / 1e6:.2f} of {stock_tree / 1e6:.2f} MB)", f"≤ {MOST_TREE}"),
            (
                "memory beyond the weights",
                f"{beyond / stock_beyond:.2f} ({beyond / 1e6:.0f} of {stock_beyond / 1e6:.0f} MB)",
                f"≤ {MOST_MEMORY}",
            ),
        ]
        parts.append(table(["planned beside stock", "measured", "goal"], goals))
    return "\n\n".join(parts)


def draw(records: Mapping[str, Record], path: Path) -> None:
    """Speed by bytes of the tree, a line for each depth; the shapes that were compared stand out."""
    shapes: list[dict[str, Any]] = next((r["shapes"] for r in records.values() if "shapes" in r), [])
    pyplot = pyplot_or_refusal()
    figure, axis = pyplot.subplots(figsize=(6.4, 4.0), constrained_layout=True)
    for heads in dict.fromkeys(s["heads"] for s in shapes):
        own = sorted((s["tree_bytes"] / 1e6, s["speed"], s["nodes"]) for s in shapes if s["heads"] == heads)
        axis.plot([x for x, _, _ in own], [y for _, y, _ in own], marker="o", label=f"paths of at most {heads}")
    for nodes in dict.fromkeys(s["nodes"] for s in shapes):
        size, speed = min(((s["tree_bytes"] / 1e6, s["speed"]) for s in shapes if s["nodes"] == nodes), key=lambda point: point[1])
        axis.annotate(f"{nodes}", (size, speed), textcoords="offset points", xytext=(0, -14), ha="center", fontsize=8)
    if record := next((r for r in records.values() if "beyond" in r), None):
        plain = statistics.median(record["speeds"]["plain"])
        axis.axhline(plain, color="#888888", linewidth=0.8, linestyle="--")
        axis.annotate("plain decoding", (0.99, plain), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    axis.set(xlabel="MB that grow with the nodes of one row (nodes below the points)", ylabel="tokens a second, batch 1", ylim=(0, None))
    axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Measure the cells that have no record of this commit; 1 if one fails."""
    asked = asked_of(__doc__, "specmemo", {"--method": {"choices": tuple(STOCK), "default": "eagle"}}, arguments)
    study = Study(Size(), asked.method)
    cells = [
        Cell(f"grid_{study.method}", partial(grid, study)),
        Cell(f"planned_{study.method}", partial(planned, study, Records(asked.output))),
    ]
    measured, failed = run_asked(asked, cells, as_markdown)
    if measured:
        draw(measured, asked.output.parents[1] / "plots" / f"memory-shapes-{study.method}.png")
    return failed


if __name__ == "__main__":
    sys.exit(main())
