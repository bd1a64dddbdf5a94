"""Plans beside what processes take: `python -m benchmarks.memory [--output FOLDER] [PREFIX ...]`, resumable by cell.

peak_MODEL_SETTING   the plan of an engine, and the peak of a process that loads it and fills every row (VmHWM)
trees                bytes that grow with the nodes of a tree, for one query of Vicuna-7B in fp16: Medusa's stock tree in its own layout
                     and in ours, and SpecMemo's best one
nodes_N              the same of the embedded target with its EAGLE head, measured: the peak of a process with 32 rows, whose trees have N
                     nodes, beside its plan
limit_MODEL          conversations of random lengths under a hard limit of data (RLIMIT_DATA) equal to the plan: how many come to their end
ratio_llama_N        under one hard limit, of 16 bytes for every 13.5 of weights as SpecMemo's smaller device has for its model, with keys
                     and values of 1/N of the weights: whether the engine starts, and how many queries of 128 tokens it holds, by plan and
                     in truth; ratio_llama_plan: with as many as the plan finds room for
bound                SpecMemo's lower bound, of the embedded pair grown to 1.1 billion parameters: under a hard limit of what drafting needs
                     by plan it is faster than plain decoding in what that needs; with less than its process then took it dies
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random

from benchmarks.cells import Cell, Record, Records, asked_of, run_asked
from benchmarks.hard_limits import CONVERSATIONS, RATIOS, bound, bounded, drafting_gains, in_process, limited, of_ratio, survived
from benchmarks.memory_document import is_met, over, write_memory
from benchmarks.memory_models import MODELS, SETTINGS, engine_settings, folder_of, status
from echelon import LLM, EngineConfig, SamplingParams
from echelon.bench.report import table
from echelon.demo import EAGLE, TARGET
from echelon.memory.residents import PlannedModels
from echelon.speculative_config import speculative

ROWS, NODES = 32, (16, 64)  # of trees whose bytes are measured


def filled(llm: LLM, length: int, prompt: int, seed: int) -> None:
    """As many random texts as there are rows, each as long as it may be, and one more."""
    random, count = Random(seed), llm.config.max_num_seqs + 1
    prompts = [[random.randrange(5, 4000) for _ in range(prompt)] for _ in range(count)]
    llm.generate(prompts, SamplingParams(max_tokens=length - prompt, temperature=0.8, top_p=0.95, seed=1, ignore_eos=True))


def measured_peak(model: str, setting: str) -> Record:
    """In a process of its own: the plan, made before anything is loaded, and then the peak."""
    engine, drafter, length, prompt = engine_settings(model, setting)
    plan = PlannedModels(EngineConfig(**engine), speculative(drafter), folder_of(model)[0])
    planned = plan.plan(EngineConfig(**engine), speculative(drafter))
    filled(LLM(folder_of(model)[0], drafter, **engine), length, prompt, 0)
    return planned.as_dict() | {"peak": status("VmHWM"), "data": status("VmData")}


def measured_nodes(nodes: int) -> Record:
    """In a process of its own: the plan of 32 rows with trees of so many nodes, the root included, and the peak."""
    engine = EngineConfig(max_num_seqs=ROWS, max_model_len=256)
    drafter = {"method": "eagle", "model": str(EAGLE), "tree": "dynamic", "num_speculative_tokens": nodes - 1, "tree_top_k": 10}
    planned = PlannedModels(engine, speculative(drafter), TARGET).plan(engine, speculative(drafter))
    filled(LLM(TARGET, drafter, max_num_seqs=ROWS, max_model_len=256), 256, 224, 0)
    return planned.as_dict() | {"tree_bytes": planned.tree_bytes, "peak": status("VmHWM")}


@dataclass(frozen=True)
class TreeShape:
    """A tree for heads of Medusa: nodes with the root, leaves, the depth of the deepest, and the heads that reach it."""

    nodes: int
    leaves: int
    depth: int
    heads: int


STOCK, PLANNED = TreeShape(64, 42, 4, 5), TreeShape(44, 19, 3, 3)  # mc_sim_7b_63; 1-10-16-17, whose leaves are not published
VICUNA = {"layers": 32, "hidden": 4096, "vocabulary": 32000, "context": 2048, "key_bytes": 2 * 32 * 4096 * 2}


def medusa_buffers(tree: TreeShape) -> dict[str, int]:
    """Bytes in Medusa's layout (fp16, one query): what is scored is gathered once more for each leaf, and the mask covers the context."""
    vocabulary, width = VICUNA["vocabulary"], 1 + tree.heads
    return {
        "logits of nodes": width * tree.nodes * vocabulary * 2,
        "logits gathered by leaf": width * tree.leaves * (tree.depth + 1) * vocabulary * 2,
        "masks": 4 * tree.nodes * tree.nodes + 4 * tree.nodes * (VICUNA["context"] + tree.nodes),
        "keys and values of nodes": tree.nodes * VICUNA["key_bytes"],
        "hidden states": tree.nodes * VICUNA["hidden"] * 2,
    }


def own_buffers(tree: TreeShape) -> dict[str, int]:
    """Bytes here: logits once, in float32; nothing is gathered, a node's parent is its mask."""
    return {
        "logits of nodes": tree.nodes * VICUNA["vocabulary"] * 4,
        "masks": tree.nodes * 4,
        "keys and values of nodes": tree.nodes * VICUNA["key_bytes"],
        "hidden states": tree.nodes * VICUNA["hidden"] * 2,
    }


def trees() -> Record:
    """Stock and planned tree, in both layouts."""
    shapes = {"stock": STOCK, "planned": PLANNED}
    return {
        f"{kind} {name}": count(tree)
        for name, tree in shapes.items()
        for kind, count in (("Medusa", medusa_buffers), ("ours", own_buffers))
    }


def as_markdown(records: Mapping[str, Record]) -> str:
    """A line for each cell."""
    lines: list[tuple[str, ...]] = []
    for name, r in records.items():
        if name.startswith(("peak", "nodes")):
            sizes = f"{r['total_bytes'] / 2**20:,.0f} MiB", f"{r['peak'] / 2**20:,.0f} MiB"
            lines.append((name, *sizes, f"{over(r) / 2**20:+,.0f} MiB ({over(r) / r['peak']:+.1%})", "yes" if is_met(r) else "**no**"))
        elif name.startswith("limit"):
            sizes = f"{r['planned'] / 2**20:,.0f} MiB", f"{r.get('data', 0) / 2**20:,.0f} MiB of data"
            came = f"{r['survived']} of {CONVERSATIONS} conversations came to their end"
            lines.append((name, *sizes, came, "yes" if r["survived"] == CONVERSATIONS else "**no**"))
        elif name == "bound":
            gain, above, below = statistics.median(drafting_gains(r)), r["rounds"][-1]["draft_model"], r["below"]
            speed = f"{gain:.2f} × plain" + ("; less: died" if "died" in below else f"; less: {below['speed']:.1f} tokens/s")
            sizes = f"{above['least'] / 2**20:,.0f} MiB", f"{above['data'] / 2**20:,.0f} MiB of data"
            lines.append((name, *sizes, speed, "yes" if gain > 1 and "died" in below else "**no**"))
        elif name == "trees":
            sums = {kind: sum(r[kind].values()) for kind in r if isinstance(r[kind], dict) and kind != "environment"}
            lines += [
                (f"tree, {kind}", f"{count / 1e6:.1f} MB", f"{count / sums['Medusa stock']:.0%}", "", "") for kind, count in sums.items()
            ]
        else:
            came = "died" if "died" in r else f"{r['held']} held"
            lines.append((name, f"{r['planned']} queries", came, f"{r['bytes'] / 2**20:,.0f} MiB of keys and values", ""))
    return table(["cell", "plan", "measured", "difference", "met"], lines)


def cells() -> list[Cell]:
    found = [Cell(f"peak_{m}_{s}", partial(in_process, "peak", m, s)) for m in MODELS for s in SETTINGS]
    found += [Cell(f"limit_{m}", partial(limited, "limit", m, "0")) for m in MODELS]
    found += [Cell("trees", trees), Cell("bound", bound)]
    found += [Cell(f"nodes_{n}", partial(in_process, "nodes", "embedded", str(n))) for n in NODES]
    return found + [Cell(f"ratio_llama_{n}", partial(limited, "ratio", "llama", str(n))) for n in (*RATIOS, "plan")]


MEASURES: Mapping[str, Callable[[str, str], Record]] = {
    "peak": measured_peak,
    "limit": lambda m, n: survived(m, int(n)),
    "bound": lambda d, n: bounded(d, int(n)),
    "ratio": of_ratio,
    "nodes": lambda _, n: measured_nodes(int(n)),
}


def main(arguments: list[str] | None = None) -> int:
    """Measure the cells that have no record of this commit; 1 if one fails, a plan is too far from its peak, or conversations died."""
    asked = asked_of(__doc__, "memory", {"--measure": {"nargs": 3, "help": argparse.SUPPRESS}}, arguments)
    if asked.measure:
        kind, model, what = asked.measure
        print(json.dumps(MEASURES[kind](model, what)))
        return 0
    for model in MODELS:
        folder_of(model)
    measured, failed = run_asked(asked, cells(), as_markdown)
    write_memory(asked.output.parents[1] / "memory.md", Records(asked.output).read(), Records(asked.output.parent / "specmemo").read())
    is_over = any("peak" in record and not is_met(record) for record in measured.values())
    has_died = any(record.get("survived", CONVERSATIONS) < CONVERSATIONS for record in measured.values())
    return failed or int(is_over or has_died)


if __name__ == "__main__":
    sys.exit(main())
