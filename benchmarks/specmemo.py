"""SpecMemo's experiments: `python -m benchmarks.specmemo [--method eagle|medusa] [--questions FILE] [--output FOLDER] [PREFIX ...]`,
resumable by cell.

The embedded target, grown, with its EAGLE head, or with Medusa's once `make heads` has trained them. A tree of Medusa's keeps the ten
likeliest first tokens, as SpecMemo's 1-10-16-17 does, and loses depth and leaves; one of EAGLE grows by what is likely. Keys and values are
those of the planned conversation, and of the stock setting those of the whole context. What is said: held-out source (no suffix),
MT-Bench's questions of two turns (`_mt_bench`, with --questions: Spec-Bench's question.jsonl), and a story of many turns (`_story`).

grid     tokens a second of decoding at batch 1, tokens a step, bytes of the tree, and milliseconds turn by turn, for paths of 2 to 5 tokens
         (Medusa's tree has none of five) and 16 to 64 nodes
planned  the fastest shape of the grid whose tree takes no more than 36 % of the stock tree, beside that with its 64 nodes, in turn:
         throughput kept, memory beyond the weights, equal texts; and beside plain decoding
budgets  keys and values of SpecMemo's 1 to 7.2 GB, scaled so that the largest holds the context: under each the turns that fit, and of the
         shapes that lose none of them the one with the least milliseconds a token, run again in a pool of just that size
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.cells import Cell, Record, Records, asked_of, is_here, run_asked, said
from benchmarks.conversations import LABELS, Conversation, Turn, ms_a_token, of_mt_bench, of_source, of_story, told
from benchmarks.memory_document import LEAST_SPEED, MOST_MEMORY, MOST_TREE, fastest_within, write_memory
from benchmarks.questions import other_questions
from benchmarks.workloads import Models, Size, greedy, trained_heads
from echelon import ConfigError, EngineConfig, SpeculativeConfig
from echelon.bench.report import table
from echelon.bench.throughput import DecodingMethod, EngineRun, environment
from echelon.memory.plan import MemoryPlan
from echelon.memory.residents import PlannedModels
from echelon.trees import MEDUSA_63
from echelon.trees import Path as TreePath

HEADS, NODES = (2, 3, 4, 5), (16, 24, 32, 44, 64)
STOCK = {"medusa": (4, 64), "eagle": (5, 64)}
WIDTH = 10  # nodes of the first level that every tree keeps
KV_BUDGETS = (1.0, 1.8, 3.6, 7.2)  # GB of a model of 7 B; the first and the last are SpecMemo's


@dataclass(frozen=True)
class Lengths:
    """Conversations; tokens of a prompt of source and of its answer, of any other answer, of the story; rounds of `planned` and `grid`."""

    conversations: int = 4
    prompt: int = 256
    new: int = 96
    answer: int = 48
    story: int = 1900
    rounds: int = 5
    grid_rounds: int = 2


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
    """The grown target with its heads, and what is said to it, loaded when first asked for."""

    def __init__(
        self, models: Models, method: str, workload: str = "", lengths: Lengths | None = None, questions: Path | None = None
    ) -> None:
        self.models, self.method, self.workload = models, method, workload
        self.lengths, self.questions = lengths or Lengths(), questions

    def name(self, cell: str) -> str:
        """Of a cell of this study."""
        return "_".join(filter(None, (cell, self.method, self.workload)))

    @cached_property
    def conversations(self) -> list[Conversation]:
        target, lengths = self.models.with_heads[0], self.lengths
        if self.workload == "mt_bench":
            return of_mt_bench(target, self.questions, lengths.conversations, lengths.answer)
        if self.workload == "story":
            return of_story(target, min(lengths.story, target.max_len - max(NODES)), lengths.answer)
        return of_source(target, lengths.conversations, lengths.prompt, lengths.new)

    def config(self, heads: int, nodes: int) -> dict[str, Any]:
        return drafting(self.method, self.models.with_heads[1][self.method], heads, nodes)

    def run(self, name: str, config: dict[str, Any] | None, **settings: Any) -> EngineRun:
        """An engine for one row, warm."""
        settings = {"max_model_len": self.length, "enable_prefix_caching": True} | settings
        run = EngineRun(DecodingMethod(name, config), self.models.with_heads[0], None, 1, settings)
        run.warm_up([self.conversations[0].turns[0][:64]], greedy(4))
        return run

    def told(self, run: EngineRun) -> tuple[list[list[list[int]]], list[list[Turn]]]:
        """Answers to all conversations, turn by turn, and what each turn took."""
        found = [told(run, conversation) for conversation in self.conversations]
        return [answers for answers, _ in found], [turns for _, turns in found]

    @cached_property
    def length(self) -> int:
        """Tokens of the longest conversation."""
        return max(conversation.length for conversation in self.conversations)

    def plan(self, config: dict[str, Any], length: int) -> MemoryPlan:
        """The plan of an engine with one row of `length` tokens."""
        settings, spec = EngineConfig(max_num_seqs=1, max_model_len=length), SpeculativeConfig(**config)
        return PlannedModels(settings, spec, self.models.with_heads[0]).plan(settings, spec)


def shapes_of_the_grid(method: str) -> list[tuple[int, int]]:
    """(heads, nodes) of trees that there are."""
    shapes = list(product(HEADS, NODES))
    return shapes if method != "medusa" else [(h, n) for h, n in shapes if h < max(HEADS) and len(paths_of(h, n)) == n - 1]


def speed_of(conversations: list[list[Turn]]) -> float:
    """Tokens a second of decoding."""
    return 1000 / ms_a_token([turn for turns in conversations for turn in turns])


def grid(study: Study) -> Record:
    """Medians of the rounds, one shape after the other in each."""
    runs = {shape: study.run(f"{shape[0]} heads, {shape[1]} nodes", study.config(*shape)) for shape in shapes_of_the_grid(study.method)}
    rounds: dict[tuple[int, int], list[list[list[Turn]]]] = {shape: [] for shape in runs}
    for _, (shape, run) in product(range(study.lengths.grid_rounds), runs.items()):
        rounds[shape].append(study.told(run)[1])
        said(f"{run.name}: {speed_of(rounds[shape][-1]):.1f} tokens/s")
    lines = []
    for (heads, nodes), own in rounds.items():
        plan, result = study.plan(study.config(heads, nodes), study.length), runs[heads, nodes].result(1, [])
        line = {"heads": heads, "nodes": nodes, "speed": statistics.median(map(speed_of, own)), "tokens_per_step": result.tokens_per_step}
        lines.append(line | {"tree_bytes": plan.tree_bytes, "turns": [[astuple(turn) for turn in turns] for turns in own[-1]]})
    return {"shapes": lines}


def beyond_weights(plan: MemoryPlan) -> int:
    """Bytes of a plan that are neither the process's own nor the target's weights."""
    return plan.total_bytes - sum(plan.terms[name] for name in ("runtime", "tokenizer", "target weights"))


def shapes_measured(study: Study, records: Records, where: Mapping[str, str]) -> list[dict[str, Any]]:
    """The shapes of the study's grid.

    Raises
    ------
    ConfigError  it has not been measured by the sources and on the processor of `where`
    """
    record = records.read().get(study.name("grid"), {})
    found: list[dict[str, Any]] = record.get("shapes", [])
    is_known = bool(found) and record["environment"]["commit"] == where["commit"] and is_here(record, where)
    if not is_known or "turns" not in found[0]:
        raise ConfigError(f"shapes are chosen from the grid; measure the cell `{study.name('grid')}` first")
    return found


def planned(study: Study, records: Records, where: Mapping[str, str]) -> Record:
    """Stock and planned settings by turns; the shape is the fastest of the grid that keeps within its share of the stock tree.

    Raises
    ------
    ConfigError  the grid has not been measured, or texts differ
    """
    shapes = shapes_measured(study, records, where)
    stock_plan = study.plan(study.config(*STOCK[study.method]), study.models.with_heads[0].max_len)
    best = fastest_within(shapes, stock_plan.tree_bytes)
    shape = int(best["heads"]), int(best["nodes"])
    runs = {"plain": study.run("plain", None), "stock": study.run("stock", study.config(*STOCK[study.method]))}
    runs["planned"] = study.run("planned", study.config(*shape))
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    texts: list[list[list[list[int]]]] = []
    for _, (name, run) in product(range(study.lengths.rounds), runs.items()):
        answers, turns = study.told(run)
        speeds[name].append(speed_of(turns))
        said(f"{name}: {speeds[name][-1]:.1f} tokens/s")
        texts.append(answers)
    if any(text != texts[0] for text in texts):
        raise ConfigError("a text differs from that of plain decoding")
    plan = study.plan(study.config(*shape), study.length)
    return {
        "shape": shape,
        "speeds": speeds,
        "tree": [stock_plan.tree_bytes, plan.tree_bytes],
        "beyond": [beyond_weights(stock_plan), beyond_weights(plan)],
        "process": [stock_plan.total_bytes, plan.total_bytes - plan.terms["runtime"] + stock_plan.terms["runtime"]],
    }


def fitting(turns: list[list[tuple[int, float, float]]], length: int) -> list[Turn]:
    """The turns of all conversations that end within `length` tokens."""
    return [Turn(*turn) for own in turns for turn in own if turn[0] <= length]


def budgets(study: Study, records: Records, where: Mapping[str, str]) -> Record:
    """Under each budget the best shape of the grid, measured again in a pool of that size, and whether the stock setting runs there.

    Raises
    ------
    ConfigError  the grid has not been measured
    """
    shapes, context = shapes_measured(study, records, where), study.models.with_heads[0].max_len
    lines = []
    for gigabytes in KV_BUDGETS:
        found = []
        for shape in shapes:
            block = study.plan(study.config(shape["heads"], shape["nodes"]), study.length).pool
            given = int((context + max(NODES)) * block.block_bytes / block.block_size * gigabytes / KV_BUDGETS[-1])
            holds = given // block.block_bytes * block.block_size - (shape["nodes"] - 1)
            if turns := fitting(shape["turns"], holds):
                found.append({**shape, "bytes": given, "holds": holds, "held": len(turns), "ms": ms_a_token(turns)})
        if not found:
            continue
        most = max(f["held"] for f in found)
        best = min((f for f in found if f["held"] == most), key=lambda f: f["ms"])
        asked = {"budget": gigabytes, "asked": sum(map(len, shapes[0]["turns"])), "stock_runs": _stock_runs(study, best["bytes"])}
        lines.append(asked | _again(study, best))
    return {"budgets": lines}


def _again(study: Study, best: dict[str, Any]) -> Record:
    """The shape in a pool of just these bytes: the turns that its engine takes, and milliseconds a token."""
    length = min(int(best["holds"]), study.length)
    run = study.run("planned", study.config(best["heads"], best["nodes"]), max_model_len=length, kv_cache_memory_bytes=best["bytes"])
    turns = [turn for c in study.conversations if (fits := c.shortened(length)).turns for turn in told(run, fits)[1]]
    kept = {name: best[name] for name in ("heads", "nodes", "bytes", "holds", "held")}
    return kept | {"ran": len(turns), "ms": ms_a_token(turns), "ms_in_grid": best["ms"]}


def _stock_runs(study: Study, given: int) -> bool:
    """Whether keys and values of the whole context, and of the nodes of the stock tree, fit."""
    plan = study.plan(study.config(*STOCK[study.method]), study.models.with_heads[0].max_len)
    return plan.terms["keys and values"] + plan.terms["nodes in flight"] <= given


def as_markdown(records: Mapping[str, Record]) -> str:
    """A table a record."""
    return "\n\n".join(f"{name}\n\n{_as_table(record)}" for name, record in records.items())


def _as_table(record: Record) -> str:
    """A line a shape, one for each goal, or one a budget."""
    if "shapes" in record:
        lines = [
            (str(s["heads"]), str(s["nodes"]), f"{s['speed']:.1f}", f"{s['tokens_per_step']:.2f}", f"{s['tree_bytes'] / 1e6:.2f} MB")
            for s in record["shapes"]
        ]
        return table(["heads", "nodes", "tokens/s", "tokens a step", "tree"], lines)
    if "budgets" in record:
        budgets = [
            (
                f"{b['budget']:.1f} GB",
                f"{b['bytes'] / 1e6:.1f} MB, {b['holds']} tokens",
                f"{b['ran']} of {b['asked']}",
                f"{b['heads']}, {b['nodes']}",
                f"{b['ms']:.1f} ({b['ms_in_grid']:.1f})",
                "yes" if b["stock_runs"] else "no",
            )
            for b in record["budgets"]
        ]
        return table(["of a 7 B model", "here", "turns", "heads, nodes", "ms a token (in the grid)", "stock runs"], budgets)
    pairs = zip(record["speeds"]["planned"], record["speeds"]["stock"], strict=True)
    plain = zip(record["speeds"]["planned"], record["speeds"]["plain"], strict=True)
    kept, gain = statistics.median(a / b for a, b in pairs), statistics.median(a / b for a, b in plain)
    goals = [
        ("shape", f"{record['shape'][0]} heads, {record['shape'][1]} nodes", ""),
        ("throughput kept", f"{kept:.2f} ({gain:.2f} × plain)", f"≥ {LEAST_SPEED}"),
        ("tree, of the stock tree", _share(record["tree"], 2), f"≤ {MOST_TREE}"),
        ("memory beyond the weights", _share(record["beyond"], 0), f"≤ {MOST_MEMORY}"),
        *([("the whole process", _share(record["process"], 0), "")] if "process" in record else []),
    ]
    return table(["planned beside stock", "measured", "goal"], goals)


def _share(sizes: list[int], digits: int) -> str:
    stock, own = sizes
    return f"{own / stock:.2f} ({own / 1e6:.{digits}f} of {stock / 1e6:.{digits}f} MB)"


def main(arguments: list[str] | None = None) -> int:
    """Measure the cells that have no record of this commit; 1 if one fails."""
    more: dict[str, dict[str, Any]] = {
        "--method": {"choices": tuple(STOCK), "default": "eagle"},
        "--questions": {"type": Path, "metavar": "FILE", "help": "Spec-Bench's question.jsonl"},
    }
    asked = asked_of(__doc__, "specmemo", more, arguments)
    records, models, where = Records(asked.output), Models(Size(), [asked.method]), environment()
    workloads = [w for w in LABELS if w != "mt_bench" or asked.questions]
    studies = [Study(models, asked.method, w, questions=asked.questions) for w in workloads]
    measures: dict[str, Callable[[Study], Record]] = {
        "grid": grid,
        "planned": partial(planned, records=records, where=where),
        "budgets": partial(budgets, records=records, where=where),
    }
    cells = [
        Cell(study.name(name), partial(measure, study), inputs=trained_heads([asked.method]) | other_questions(study.questions))
        for study, (name, measure) in product(studies, measures.items())
        if study.workload or name != "budgets"  # of source there is one turn
    ]
    failed = run_asked(asked, cells, as_markdown)[1]
    write_memory(asked.output.parents[1] / "memory.md", Records(asked.output.parent / "memory").read(), records.read())
    return failed


if __name__ == "__main__":
    sys.exit(main())
