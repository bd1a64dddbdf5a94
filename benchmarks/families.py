"""Every family of instructions beside what it can do at best: `python -m benchmarks.families [--output FOLDER] [PREFIX ...]`, resumable.

A family is measured in processes that are held to it: our kernels by ECHELON_ISA, those of the framework, which the rate of multiplying is
also taken from, by the variables of their libraries. The model has random weights in the shape llama-1.1b, in bfloat16.

steps      passes of 1 to 512 tokens beside reading the weights and beside as much arithmetic (`echelon bench step`)
attention  of 1 and of 8 new tokens over 256 and over 2,048 keys; of a prompt of 1,984, beside its linear layers
prompt     a stream's steps while another prompt of 1,984 tokens is read, beside its steps before
sampling   of places by the vocabulary, as trained models have their logits, and flat; one thread
pass       of the embedded draft model over one token
draft      the embedded pair grown to 1.1 billion parameters: the draft model's speed-up beside its tokens a step
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.cells import Cell, Record, Records, asked_of, run_asked
from echelon import LLM, SamplingParams
from echelon.batch import Span
from echelon.bench.clock import seconds_of
from echelon.bench.latency import sequence_of
from echelon.bench.report import described, table
from echelon.bench.shapes import random_model
from echelon.bench.step import StepSpeed
from echelon.bench.step import as_markdown as steps_as_markdown
from echelon.bench.throughput import NUM_DRAFTED
from echelon.demo import DRAFT
from echelon.kv.cache import cache_for_rows
from echelon.model.attention import record_layers
from echelon.model.load.loading import LoadedModel, load_model
from echelon.model.runner import ModelRunner
from echelon.ops import compiled, cpu
from echelon.sampling import Sampler

SHAPE, LAYERS, CONTEXT, PROMPT = "llama-1.1b", 22, 256, 1984
ONEDNN = {"avx2": "AVX2", "avx512": "AVX512_CORE", "avx512_bf16": "AVX512_CORE_BF16", "amx": "AVX512_CORE_AMX"}
LIBRARIES = {"avx2": ("avx2", "AVX2"), "avx512": ("avx512", "AVX512"), "avx512_bf16": ("avx512", "AVX512"), "amx": ("avx512", "AVX512")}
BESIDE, NEAR, AT_512 = 1.25, 1.45, 1.15  # times the larger limit; where the limits lie within a factor of 2; at 512 tokens
VOCABULARIES, PLACES, MOST_NS, MOST_PASS = (32_000, 151_936), 8, {"trained": 2.0, "flat": 6.0}, 0.25
ROUNDS = 7
TITLE = "## By family of instructions"
ABOUT = (
    "`python -m benchmarks.families`: processes held to one family each, a model with random weights in the shape llama-1.1b, bfloat16, "
    "two threads, 256 tokens before the new ones. A step's limit is the larger of reading the weights and of as many operations at the "
    "rate of the fastest large product, both measured between the steps; the steps of 512 tokens are a prompt's. Milliseconds."
)


def environment_of(family: str) -> dict[str, str]:
    """What holds our kernels and the framework's to a family."""
    held = {"ECHELON_ISA": family}
    if family in ONEDNN:
        aten, mkl = LIBRARIES[family]
        held |= {"ONEDNN_MAX_CPU_ISA": ONEDNN[family], "ATEN_CPU_CAPABILITY": aten, "MKL_ENABLE_INSTRUCTIONS": mkl}
    return held


def in_family(family: str, *words: str) -> str:
    """Run `python -m words` held to a family; what it prints."""
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, env=os.environ | environment_of(family), stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def steps(family: str) -> Record:
    """Steps and their limits, narrow ones over a context and one of 512 tokens."""
    narrow = ["--tokens", "1,4,8,16,32,64", "--rounds", str(ROUNDS)]
    wide = ["--tokens", "512", "--tokens-per-row", "512", "--context", "0", "--rounds", "3"]
    results = []
    for words in (narrow, wide):
        results += json.loads(in_family(family, "echelon", "bench", "step", SHAPE, *words, "--json"))["results"]
    return {"results": results}


def draft(family: str) -> Record:
    """The draft model at batch 1 on the pair grown to serving size."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "throughput.json"
        words = ["--parameters", "1100000000", "--batch-sizes", "1", "--strategies", "unpadded"]
        words += ["--speculative-config", json.dumps({"method": "draft_model", "num_speculative_tokens": NUM_DRAFTED})]
        sizes = ["--num-prompts", "4", "--max-tokens", "40", "--rounds", "2", "--no-transformers"]
        in_family(family, "echelon", "bench", "throughput", *words, *sizes, "--output", str(output))
        by_method = {r["method"]: r for r in json.loads(output.read_text("utf-8"))["results"]}
    drafting = f"draft model {NUM_DRAFTED}"
    plain, drafted = (statistics.median(by_method[name]["decode_tokens_per_second"]) for name in ("plain", drafting))
    return {"speedup": drafted / plain, "tokens_per_step": by_method[drafting]["tokens_per_step"]}


def measured(what: str, family: str) -> Record:
    """A measurement of this module in a process of its own."""
    record: Record = json.loads(in_family(family, "benchmarks.families", "--measure", what))
    return record


def runner_of(loaded: LoadedModel, num_rows: int, length: int) -> ModelRunner:
    """A runner with room for so many rows, all reserved."""
    return ModelRunner(loaded, cache_for_rows(record_layers(loaded.model), num_rows, length, loaded.model.dtype, loaded.device))


def seconds_of_pass(runner: ModelRunner, span: Span) -> tuple[float, float]:
    """Seconds in linear layers and in attention of one pass."""
    before = cpu.seconds_in_kernels()
    runner.run(runner.pack([span]))
    linear, attention = (after - earlier for after, earlier in zip(cpu.seconds_in_kernels(), before, strict=True))
    return linear, attention


def attention() -> Record:
    """Milliseconds of attention by new tokens and keys, and GFLOP/s of a prompt's attention and linear layers."""
    loaded = random_model(SHAPE)
    by_keys: dict[str, dict[str, float]] = {}
    float32: dict[str, float] = {}  # GFLOP/s of a large product, between the passes
    x, weight = torch.ones(512, 2048), cpu.pack(torch.ones(2048, 2048))
    product = partial(cpu.packed_linear, x, weight)
    for keys in (256, 2048):
        runner = runner_of(loaded, 1, keys + 8)
        for start in range(0, keys, 512):
            runner.feed([Span(0, start, [7] * min(512, keys - start), 0, keys)])
        taken: dict[int, list[float]] = {1: [], 8: []}
        wide = []
        for _ in range(ROUNDS):
            wide.append(seconds_of(product, loaded.device))
            for count, seconds in taken.items():
                seconds.append(seconds_of_pass(runner, Span(0, keys, [7] * count, 1, keys + 1, count - 1))[1])
        by_keys[str(keys)] = {str(count): statistics.median(seconds[1:]) * 1e3 for count, seconds in taken.items()}
        float32[str(keys)] = 2 * 512 * 2048**2 / statistics.median(wide[1:]) / 1e9
    runner = runner_of(loaded, 1, PROMPT)
    in_linear = in_attention = 0.0
    for start in range(0, PROMPT, 512):
        count = min(512, PROMPT - start)
        linear, attended = seconds_of_pass(runner, Span(0, start, [7] * count, 0, PROMPT))
        runner.cache.tables.advance(0, start + count)
        in_linear, in_attention = in_linear + linear, in_attention + attended
    config = loaded.model.config
    layers, head = config.num_hidden_layers, config.hidden_size // config.num_attention_heads
    per_layer = (
        2 * config.hidden_size * (config.hidden_size + config.num_key_value_heads * head)
        + 3 * config.hidden_size * config.intermediate_size
    )
    products, pairs = 2 * PROMPT * layers * per_layer, PROMPT * (PROMPT + 1) // 2
    return {
        "milliseconds": by_keys,
        "float32_gflop": float32,
        "gflop_of_8": {keys: 4 * 8 * (int(keys) + 4) * config.hidden_size * layers / by_keys[keys]["8"] / 1e6 for keys in by_keys},
        "linear_gflop": products / in_linear / 1e9,
        "attention_gflop": 4 * pairs * config.num_attention_heads * head * layers / in_attention / 1e9,
    }


def prompt() -> Record:
    """Seconds of a stream's steps, before and while a prompt is read beside it; the first prompt has shown what reading costs."""
    loaded = random_model(SHAPE)
    llm = LLM(loaded, max_num_seqs=2, max_model_len=2048, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=PROMPT // 2, temperature=0, ignore_eos=True)  # the stream outlives the prompt's pieces
    prompts = [[5 + i % 90 for i in range(n)] for n in (64, PROMPT)]
    seconds: dict[str, list[float]] = {"alone": [], "beside": []}
    with llm.exclusive() as engine:
        now = engine.timer.clock
        stream, late = (sequence_of(llm, row, text, params) for row, text in enumerate(prompts))

        def step(kind: str) -> None:
            start = now()
            engine.step()
            seconds[kind].append(now() - start)

        engine.add(stream)
        while stream.num_output_tokens < 24:
            step("alone")
        engine.add(late)
        while not late.num_output_tokens:
            step("beside")
        assert not stream.is_finished
    plain = statistics.median(seconds["alone"][4:])
    largest = max(seconds["beside"])
    return {"plain": plain, "largest": largest, "gap": largest / plain, "reading": sum(seconds["beside"]), "steps": len(seconds["beside"])}


def sampling() -> Record:
    """Nanoseconds that a place takes a token of the vocabulary, at temperature 0.8 with top_p 0.95, on one thread."""
    torch.set_num_threads(1)
    samplers = [Sampler(SamplingParams(temperature=0.8, top_p=0.95), seed=i) for i in range(PLACES)]
    found: dict[str, dict[str, float]] = {"trained": {}, "flat": {}}
    for size in VOCABULARIES:
        generator = torch.Generator().manual_seed(size)
        noise = torch.randn(PLACES, size, generator=generator)
        ranks = torch.stack([torch.randperm(size, generator=generator) for _ in range(PLACES)])
        for kind, logits in (("trained", 0.7 * noise - 1.6 * torch.log1p(ranks)), ("flat", 0.01 * noise)):
            draw = partial(cpu.sample_rows, list(logits), samplers, range(PLACES))
            seconds = [seconds_of(draw, logits.device) for _ in range(5 * ROUNDS)]
            found[kind][str(size)] = statistics.median(seconds) / (PLACES * size) * 1e9
    return {"nanoseconds": found}


def draft_pass() -> Record:
    """Milliseconds of a pass of the embedded draft model over one token that is packed, one pass after the other as in a draft."""
    loaded = load_model(str(DRAFT), device="cpu")
    runner = runner_of(loaded, 1, CONTEXT + 1)
    runner.feed([Span(0, 0, [7] * CONTEXT, 0, CONTEXT)])
    run = partial(runner.run, runner.pack([Span(0, CONTEXT, [7], 1, CONTEXT + 1)]))
    seconds = [seconds_of(run, loaded.device) for _ in range(100 * ROUNDS)]
    return {"milliseconds": statistics.median(seconds) * 1e3}


MEASURES = {"attention": attention, "prompt": prompt, "sampling": sampling, "pass": draft_pass}


@dataclass(frozen=True)
class Verdict:
    """One figure beside what it must be."""

    what: str
    figure: str
    goal: str
    is_met: bool


def step_goal(result: dict[str, float]) -> float:
    """Times the larger limit that a step may take."""
    low, high = sorted((result["reading"], result["arithmetic"]))
    return AT_512 if result["tokens"] == 512 else NEAR if high <= 2 * low else BESIDE


def verdicts(records: dict[str, Record], family: str) -> list[Verdict]:
    """What the family's records say."""
    found = []
    for r in records.get(f"steps_{family}", {}).get("results", []):
        times, goal = r["milliseconds"] / max(r["reading"], r["arithmetic"]), step_goal(r)
        found.append(Verdict(f"step of {r['tokens']}: times its limit", f"{times:.2f}", f"≤ {goal}", times <= goal))
        if r["tokens"] <= 8:
            found.append(
                Verdict(f"step of {r['tokens']}: other, ms a layer", f"{r['other'] / LAYERS:.3f}", "≤ 0.12", r["other"] / LAYERS <= 0.12)
            )
    if (record := records.get(f"attention_{family}")) is not None:
        for keys, by_count in record["milliseconds"].items():
            ratio, share = by_count["8"] / by_count["1"], record["gflop_of_8"][keys] / record["float32_gflop"][keys]
            what = f"attention of 8 over 1 token, {keys} keys, and its share of the float32 rate"
            found.append(Verdict(what, f"{ratio:.2f}, {share:.2f}", "≤ 2.5 or ≥ 0.5", ratio <= 2.5 or share >= 0.5))
        share = record["attention_gflop"] / record["linear_gflop"]
        found.append(Verdict("attention's rate over the linear layers', prompt", f"{share:.2f}", "≥ 0.5", share >= 0.5))
    if (record := records.get(f"sampling_{family}")) is not None:
        for kind, by_size in record["nanoseconds"].items():
            figures, goal = ", ".join(f"{ns:.1f}" for ns in by_size.values()), MOST_NS[kind]
            what = f"sampling, {kind} logits, ns a token of {', '.join(by_size)} and place"
            found.append(Verdict(what, figures, f"≤ {goal:g}", max(by_size.values()) <= goal))
    if (record := records.get(f"pass_{family}")) is not None:
        took = record["milliseconds"]
        found.append(Verdict("pass of the embedded draft model over one token, ms", f"{took:.2f}", f"≤ {MOST_PASS}", took <= MOST_PASS))
    if (record := records.get(f"prompt_{family}")) is not None:
        found.append(Verdict("largest gap beside a prompt, plain steps", f"{record['gap']:.1f}", "≤ 5", record["gap"] <= 5))
    if (record := records.get(f"draft_{family}")) is not None:
        share = record["speedup"] / record["tokens_per_step"]
        found.append(Verdict("draft model's speed-up over its tokens a step", f"{share:.2f}", "≥ 0.65", share >= 0.65))
    return found


def families_part(folder: Path) -> list[str]:
    """A section for every family that was measured: its steps, and its figures beside their goals."""
    found = {name: record for name, record in Records(folder).read().items() if "failed" not in record}
    parts = []
    for family in ("generic", *LIBRARIES):
        steps = found.get(f"steps_{family}")
        if steps is None:
            continue
        lines = [[v.what, v.figure, v.goal, "yes" if v.is_met else "**no**"] for v in verdicts(found, family)]
        parts += [
            f"### {family}",
            f"On {described(steps['environment'])}.",
            steps_as_markdown([StepSpeed(**r) for r in steps["results"]]),
            table(["", "measured", "goal", "met"], lines),
        ]
    return [TITLE, ABOUT, *parts] if parts else []


def main(arguments: list[str] | None = None) -> int:
    """Measure every family that this processor has; 1 if a cell fails."""
    asked = asked_of(__doc__, "families", {"--measure": {"choices": MEASURES, "help": argparse.SUPPRESS}}, arguments)
    if asked.measure:
        print(json.dumps(MEASURES[asked.measure]()))
        return 0
    families = compiled.offered_isas()
    inside = {m: partial(measured, m) for m in MEASURES}
    kinds: dict[str, Callable[[str], Record]] = {"steps": steps, "draft": draft, **inside}
    cells = [Cell(f"{what}_{family}", partial(measure, family)) for family in families for what, measure in kinds.items()]
    _, failed = run_asked(asked, cells)
    print("\n\n".join(families_part(asked.output)))
    return failed


if __name__ == "__main__":
    sys.exit(main())
