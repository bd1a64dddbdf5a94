"""Plans beside what processes take: `python -m benchmarks.memory [--output FOLDER] [PREFIX ...]`, resumable by cell.

peak_MODEL_SETTING   the plan of an engine, and the peak of a process that loads it and fills every row (VmHWM)
trees                bytes that grow with the nodes of a tree, for one query of Vicuna-7B in fp16: Medusa's stock tree in its own layout
                     and in ours, and SpecMemo's best one
limit_MODEL          conversations of random lengths under a hard limit of data (RLIMIT_DATA) that the plan allows: how many die; and under
                     fixed ratios of keys and values to weights, 1:2 … 1:15, how many queries of 128 tokens each holds, by plan and in truth
bound                SpecMemo's lower bound, of the embedded pair grown to 1.1 billion parameters: under a hard limit of what drafting needs
                     by plan it is faster than plain decoding; with less than its process then took it dies
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from benchmarks.cells import Cell, Record, asked_of, run_asked
from benchmarks.workloads import ROOT, Size, source
from echelon import LLM, ConfigError, EngineConfig, SamplingParams
from echelon.bench.inflate import inflate, plan_growth
from echelon.bench.phases import Recorder
from echelon.bench.report import table
from echelon.config import speculative
from echelon.demo import DRAFT, TARGET
from echelon.memory.lower_bound import least_memory
from echelon.memory.residents import PlannedModels
from echelon.model.load.loading import load_plain

MOST_OVER, MOST_OVER_BYTES = 0.05, 128 * 2**20  # by how much a plan may exceed the peak: the larger of the two
BUILD = ROOT / "build" / "memory"
RATIOS = (2, 3, 5, 8, 15)
CONVERSATIONS = 200
Settings = dict[str, Any]

SIZES: Mapping[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4
        ),
    ),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config(
            vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=12, num_attention_heads=14, num_key_value_heads=2
        ),
    ),
    "opt": (OPTForCausalLM, OPTConfig(vocab_size=50272, hidden_size=1024, ffn_dim=4096, num_hidden_layers=12, num_attention_heads=16)),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig(
            vocab_size=32000,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=2,
            num_local_experts=8,
            max_position_embeddings=4096,
        ),
    ),
}
MODELS = ("embedded", *SIZES)
SETTINGS: Mapping[str, tuple[Settings, Settings | None, int, int]] = {  # engine, drafter, length of texts, and of prompts within
    "chain": ({"max_num_seqs": 8}, {"method": "draft_model", "num_speculative_tokens": 4}, 384, 352),
    "tree": ({"max_num_seqs": 4}, {"method": "draft_model", "tree": "dynamic", "num_speculative_tokens": 24}, 384, 352),
    "int8": ({"max_num_seqs": 8, "quantization": "int8"}, None, 384, 352),
    "int8_kv": ({"max_num_seqs": 8, "kv_cache_dtype": "int8"}, None, 384, 352),
    "long": ({"max_num_seqs": 2}, None, 2048, 2016),
    "prefixes": ({"max_num_seqs": 4}, {"method": "ngram", "num_speculative_tokens": 7}, 768, 736),
}


def folder_of(model: str) -> tuple[Path, Path]:
    """A model, random where it is none of ours, and a draft model beside it with its vocabulary."""
    if model == "embedded":
        return TARGET, DRAFT
    if model == "grown":
        if not (BUILD / model / "config.json").exists():
            plain, tokenizer = load_plain(str(TARGET))
            inflate(plain, plan_growth(plain, Size().pair_parameters)).save_pretrained(BUILD / model)
            if tokenizer is not None:
                tokenizer.save_pretrained(BUILD / model)
        return BUILD / model, DRAFT
    cls, config = SIZES[model]
    target, draft = BUILD / model, BUILD / f"{model}-draft"
    if not (draft / "config.json").exists():
        torch.manual_seed(0)
        cls(config).bfloat16().save_pretrained(target)
        small = LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4
        )
        LlamaForCausalLM(small).bfloat16().save_pretrained(draft)
    return target, draft


def engine_settings(model: str, setting: str) -> tuple[Settings, Settings | None, int, int]:
    engine, drafter, length, prompt = SETTINGS[setting]
    if drafter is not None and drafter["method"] == "draft_model":
        drafter = drafter | {"model": str(folder_of(model)[1])}
    return engine | {"max_model_len": length}, drafter, length, prompt


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


def survived(model: str, extra: int) -> Record:
    """Under a limit of data that the plan and `extra` bytes allow: conversations of random lengths, and how far they came."""
    engine, drafter, length, _ = engine_settings(model, "chain")
    config = EngineConfig(**engine)
    planned = PlannedModels(config, speculative(drafter), folder_of(model)[0]).plan(config, speculative(drafter))
    limit = planned.total_bytes + max(0, status("VmData") - status("RssAnon")) + extra
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    llm, random, done = LLM(folder_of(model)[0], drafter, **engine), Random(1), 0
    while done < CONVERSATIONS:
        rows = [[random.randrange(5, 4000) for _ in range(random.randrange(1, length - 17))] for _ in range(config.max_num_seqs)]
        llm.generate(rows, SamplingParams(max_tokens=16, temperature=0.8, seed=done, ignore_eos=True))
        done += len(rows)
    return {"limit": limit, "planned": planned.total_bytes, "survived": done, "data": status("VmData")}


def bounded(drafter: str, extra: int) -> Record:
    """Under a limit of data that one row with this drafter needs by plan, and `extra` bytes: tokens a second of decoding."""
    target, draft = folder_of("grown")
    drafting = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4} if drafter == "draft_model" else None
    config, spec = EngineConfig(max_num_seqs=1, max_model_len=384), speculative(drafting)
    least = least_memory(PlannedModels(config, spec, target), config, spec)[-1].bytes
    limit = least + max(0, status("VmData") - status("RssAnon")) + extra
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    llm = LLM(target, drafting, max_num_seqs=1, max_model_len=384)
    prompts = source(llm.target, 4, 128, is_ragged=False)
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    recorder = Recorder(llm.stats)
    llm.generate(prompts, params, on_step=recorder)
    return {"least": least, "limit": limit, "data": status("VmData"), "speed": recorder.decode["tokens"] / recorder.decode["seconds"]}


def bound() -> Record:
    """Plain decoding, drafting in the least memory by plan, and in less than its process then took."""
    folder_of("grown")  # made here, so that no measured process holds what is left of making it
    plain, above = (in_process("bound", drafter, "0") for drafter in ("none", "draft_model"))
    extra = above["data"] - above["limit"] - 32 * 2**20
    try:
        below = in_process("bound", "draft_model", str(extra))
    except ConfigError as error:
        below = {"died": str(error)}
    return {"plain": plain, "above": above, "below": below | {"limit": above["limit"] + extra}}


def of_ratio(model: str, ratio: int) -> Record:
    """Keys and values of a 1/`ratio` of the weights: queries of 128 tokens that are held at once, planned and counted as they run."""
    models = PlannedModels(EngineConfig(), None, folder_of(model)[0])
    weights = models.residents(EngineConfig(), None).target.weights
    given = weights // ratio
    per_query = models.plan(EngineConfig(max_num_seqs=1, max_model_len=128), None).terms["keys and values"]
    llm = LLM(folder_of(model)[0], max_num_seqs=512, max_model_len=128, kv_cache_memory_bytes=given, enable_prefix_caching=False)
    held = 0

    def watch(_: object) -> None:
        nonlocal held
        held = max(held, len(llm.engine.scheduler.running))

    count = min(512, given // per_query)
    with llm.engine.observed(watch):
        llm.generate([[5 + i % 90] * 120 for i in range(count + 8)], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    return {"ratio": ratio, "bytes": given, "planned": count, "held": held, "preempted": llm.get_counters()["num_preemptions"]}


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


def status(key: str) -> int:
    """Bytes that the system counts for this process under `key`."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"))
    if found is None:
        raise ConfigError(f"/proc/self/status has no {key}; memory is measured on Linux")
    return 1024 * int(found[1])


def in_process(*words: str) -> Record:
    """A measurement in a process of its own; one that dies is a record of that."""
    run = subprocess.run([sys.executable, "-m", "benchmarks.memory", "--measure", *words], capture_output=True, text=True, check=False)
    if run.returncode:
        raise ConfigError(f"{' '.join(words)} ended with status {run.returncode}: {run.stderr.strip().splitlines()[-1:]}")
    record: Record = json.loads(run.stdout.splitlines()[-1])
    return record


def over(record: Record) -> float:
    """Bytes by which the plan exceeds the peak."""
    return float(record["total_bytes"] - record["peak"])


def is_met(record: Record) -> bool:
    """Never under, and over by no more than is allowed."""
    return 0 <= over(record) <= max(MOST_OVER_BYTES, MOST_OVER * float(record["peak"]))


def as_markdown(records: Mapping[str, Record]) -> str:
    """A line for each cell."""
    lines: list[tuple[str, ...]] = []
    for name, r in records.items():
        if name.startswith("peak"):
            sizes = f"{r['total_bytes'] / 2**20:,.0f} MiB", f"{r['peak'] / 2**20:,.0f} MiB"
            lines.append((name, *sizes, f"{over(r) / 2**20:+,.0f} MiB ({over(r) / r['peak']:+.1%})", "yes" if is_met(r) else "**no**"))
        elif name.startswith("limit"):
            sizes = f"{r['planned'] / 2**20:,.0f} MiB", f"{r['data'] / 2**20:,.0f} MiB of data"
            lines.append((name, *sizes, f"{r['survived']} conversations, none died", "yes"))
        elif name == "bound":
            plain, above, below = r["plain"], r["above"], r["below"]
            speed = f"{above['speed'] / plain['speed']:.2f} × plain" + (
                "; less: died" if "died" in below else f"; less: {below['speed']:.1f} tokens/s"
            )
            sizes = f"{above['least'] / 2**20:,.0f} MiB", f"{above['data'] / 2**20:,.0f} MiB of data"
            lines.append((name, *sizes, speed, "yes" if above["speed"] > plain["speed"] and "died" in below else "**no**"))
        elif name == "trees":
            sums = {kind: sum(r[kind].values()) for kind in r if isinstance(r[kind], dict) and kind != "environment"}
            lines += [
                (f"tree, {kind}", f"{count / 1e6:.1f} MB", f"{count / sums['Medusa stock']:.0%}", "", "") for kind, count in sums.items()
            ]
        else:
            lines.append((name, f"{r['planned']} queries", f"{r['held']} held", f"{r['preempted']} preempted", ""))
    return table(["cell", "plan", "measured", "difference", "met"], lines)


def cells() -> list[Cell]:
    found = [Cell(f"peak_{m}_{s}", partial(in_process, "peak", m, s)) for m in MODELS for s in SETTINGS]
    found += [Cell(f"limit_{m}", partial(in_process, "limit", m, "0")) for m in MODELS]
    found += [Cell("trees", trees), Cell("bound", bound)]
    return found + [Cell(f"ratio_llama_{n}", partial(in_process, "ratio", "llama", str(n))) for n in RATIOS]


MEASURES: Mapping[str, Callable[[str, str], Record]] = {
    "peak": measured_peak,
    "limit": lambda m, n: survived(m, int(n)),
    "bound": lambda d, n: bounded(d, int(n)),
    "ratio": lambda m, n: of_ratio(m, int(n)),
}


def main(arguments: list[str] | None = None) -> int:
    """Measure the cells that have no record of this commit; 1 if one fails, or a plan is too far from its peak."""
    asked = asked_of(__doc__, "memory", {"--measure": {"nargs": 3, "help": argparse.SUPPRESS}}, arguments)
    if asked.measure:
        kind, model, what = asked.measure
        print(json.dumps(MEASURES[kind](model, what)))
        return 0
    for model in MODELS:
        folder_of(model)
    measured, failed = run_asked(asked, cells(), as_markdown)
    return failed or int(any("peak" in record and not is_met(record) for record in measured.values()))


if __name__ == "__main__":
    sys.exit(main())
