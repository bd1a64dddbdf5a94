"""What must hold on a CUDA device, measured cell by cell, in one table: `scripts/gpu_check.sh [--fresh] [--minutes N] [PREFIX ...]`.

A cell's record goes to docs/evidence/gpu_check.json: `lines` of the table [what, measured, goal, does it hold (None: there is no goal)],
and what they were made from. One that was measured with the same settings and commit on the same device is not measured again; none is
begun after `--minutes`. Without a CUDA device nothing is measured (exit 2); `--device cpu --small` runs the same code on tiny models, where
speeds mean nothing. Exit 1: something does not hold, or has not been measured.
"""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import OPTConfig

from benchmarks.cells import Cell, Record, Records, chosen, is_committed, run_cells, said
from benchmarks.claims_of_padding import LAUNCHED
from benchmarks.gpu_document import PADDINGS, Line, gpu_table, table_lines
from benchmarks.gpu_ranks import RANKS, TwoDevices, number_of_devices
from benchmarks.options import parser_of
from benchmarks.prefill import PrefilledRun, Prefix, begin, bytes_per_token, decode
from benchmarks.replayed import AcceptanceHistogram, replay, rescaled
from benchmarks.workloads import EVIDENCE, NUM_TEXTS, ROOT, Beginnings, greedy, source
from echelon import LLM, ConfigError
from echelon.bench.clock import clock_of, kernel_seconds
from echelon.bench.framework import FrameworkRun
from echelon.bench.kernels import measure_attention, measure_machine
from echelon.bench.report import described
from echelon.bench.shapes import opt, plain_with_random_weights, with_random_weights
from echelon.bench.throughput import DecodingMethod, environment, measure
from echelon.bench.verify import VerificationJob, verify_dtype
from echelon.cli.verify import as_json as verified_as_json
from echelon.demo import DRAFT, TARGET
from echelon.model.load.loading import LoadedModel, load_model
from echelon.model.patches.linear import packed_weights
from echelon.ops.devices import chosen_device

OUTPUT, ELSEWHERE = EVIDENCE / "gpu_check.json", Path("build/gpu_check.json")
TEST_SECONDS = 150  # that the tests may take
HISTOGRAMS = EVIDENCE / "benchmarks" / "histogram.json"
TOKENS_PER_STEP = 4.2  # 3.94 times the speed of plain decoding at batch 1 takes about as much
COPIED, DRAFTED = 7, 4  # tokens that LLMA copies, and that the draft model drafts
GREATEST_GAP, SHARE_OF_COPY, ATTENTION_SHARE = 0.05, 0.8, 0.75
TREE = {"method": "draft_model", "model": str(DRAFT), "tree": "dynamic", "num_speculative_tokens": 8, "tree_top_k": 3, "tree_depth": 4}
EQUALITY = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 2},
    "draft_model": {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": 4},
    "tree": TREE,
}


@dataclass(frozen=True)
class DeviceSize:
    """How large everything is. Models are OPT: hidden, layers, heads. Contexts are those of EMS-SD: up to 1,919 tokens of an article."""

    models: tuple[tuple[str, tuple[int, int, int]], ...] = (("OPT-6.7B", (4096, 32, 32)), ("OPT-2.7B", (2560, 32, 32)))
    draft: tuple[int, int, int] = (768, 12, 12)
    vocabulary: int = 50272
    prompt_tokens: tuple[int, int] = (384, 1919)
    new_tokens: int = 128
    table_batches: tuple[int, ...] = (8, 24, 1, 16, 4, 2)  # a minute each: the most telling first
    plain_batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    plain_context: int = 512
    plain_steps: int = 48
    fast_batches: tuple[int, ...] = (1, 8, 32)  # of plain decoding by the numerics that the table has not
    framework_batches: tuple[int, ...] = (1, 8)
    equality_batches: tuple[int, ...] = (1, 8, 32)
    equality_prompts: int = 32
    equality_prompt_tokens: int = 64
    equality_tokens: int = 24
    attention: tuple[int, int, int] = (32, 32, 128)  # heads, key/value heads, head size
    attention_context: int = 4096
    split_layer: tuple[int, int] = (4096, 4096)  # what goes in and what comes out of a layer that two devices share
    split_rows: tuple[int, ...] = (1, 8, 64, 512)


SMALL = DeviceSize(
    models=(("tiny", (64, 2, 2)),),
    draft=(32, 1, 2),
    vocabulary=256,
    prompt_tokens=(8, 20),
    new_tokens=8,
    table_batches=(1, 2),
    plain_batches=(2,),
    fast_batches=(2,),
    plain_context=16,
    plain_steps=4,
    framework_batches=(2,),
    equality_batches=(1, 2),
    equality_prompts=2,
    equality_prompt_tokens=12,
    equality_tokens=4,
    attention=(2, 2, 32),
    attention_context=64,
    split_layer=(64, 128),
    split_rows=(1, 5),
)


class DeviceModels:
    """What cells share. Of the large models one lives at a time."""

    def __init__(self, size: DeviceSize, device: torch.device) -> None:
        self.size, self.device = size, device
        self._held: tuple[tuple[str, str], LoadedModel, Beginnings] | None = None

    @cached_property
    def copy_gb(self) -> float:
        """GB/s that the device's memory copies at, bytes read and written."""
        return measure_machine(self.device).copy_gb

    @cached_property
    def texts(self) -> list[list[int]]:
        longest = max(self.size.prompt_tokens[1], self.size.plain_context)
        return list(np.random.default_rng(0).integers(5, self.size.vocabulary, (NUM_TEXTS, longest)).tolist())

    def config(self, shape: tuple[int, int, int]) -> OPTConfig:
        """With places enough for the dead slots that padding leaves in a row."""
        config = opt(*shape, self.size.vocabulary)
        config.max_position_embeddings = self.size.prompt_tokens[1] + (COPIED + 1) * self.size.new_tokens + self.size.plain_context
        return config

    def lengths(self, count: int) -> list[int]:
        """Of prompts of random tokens."""
        return list(np.random.default_rng(1).integers(*self.size.prompt_tokens, count, endpoint=True).tolist())

    @cached_property
    def draft(self) -> LoadedModel:
        return with_random_weights(self.config(self.size.draft), "draft", torch.float16, self.device.type)

    def target(self, name: str, numerics: str) -> tuple[LoadedModel, Beginnings]:
        """The model with random float16 weights, and prompts that it has read."""
        if self._held is None or self._held[0] != (name, numerics):
            self._held = None
            self.free()
            loaded = with_random_weights(self.config(dict(self.size.models)[name]), name, torch.float16, self.device.type, numerics)
            self._held = (name, numerics), loaded, Beginnings.read(loaded, self.texts, numerics=numerics)
        return self._held[1:]

    def free(self) -> None:
        """What nothing refers to any more; engines know themselves through their captured steps, and only the collector finds them."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class DeviceCells:
    """What is measured on a device, the most important first."""

    def __init__(self, size: DeviceSize, device: torch.device, numerics: str) -> None:
        self.size, self.device, self.numerics = size, device, numerics
        self.models = DeviceModels(size, device)

    @cached_property
    def all(self) -> list[Cell]:
        size, main = self.size, self.size.models[0][0]
        other = "fast" if self.numerics == "invariant" else "invariant"
        cells: dict[str, Callable[[], Record]] = {
            "tests": tests,
            "attention": self.attention,
            **{f"equality-{d}": partial(self.equality, d, "invariant", size.equality_batches) for d in ("float32", "bfloat16", "float16")},
            **{f"plain-{self.numerics}-{batch:02d}": partial(self.plain, self.numerics, batch) for batch in size.plain_batches},
            **{f"table-{main}-{batch:02d}": partial(self.table, main, batch) for batch in size.table_batches},
            **{f"plain-{other}-{batch:02d}": partial(self.plain, other, batch) for batch in size.fast_batches},
            **{f"table-{name}-{b:02d}": partial(self.table, name, b) for name, _ in size.models[1:] for b in size.table_batches},
            **{f"fast-{d}": partial(self.equality, d, "fast", size.equality_batches[1:]) for d in ("bfloat16", "float16")},
            **{f"transformers-{batch:02d}": partial(self.framework, batch) for batch in size.framework_batches},
        }
        if number_of_devices(self.device.type) >= RANKS:
            cells["two-devices"] = TwoDevices(self.device.type, *size.split_layer, size.split_rows).measured
        return [Cell(name, measure) for name, measure in cells.items()]

    def equality(self, dtype: str, numerics: str, batches: tuple[int, ...]) -> Record:
        """The lossless suite on the embedded pair, through `verify`: drafters × batch sizes, rows entering as others finish."""
        size = self.size
        ragged = source(load_model(str(TARGET), device="cpu"), size.equality_prompts, size.equality_prompt_tokens)
        request = VerificationJob(str(TARGET), ragged, EQUALITY, size.equality_tokens, device=self.device.type, numerics=numerics)
        results = list(verify_dtype(request, dtype, ["unpadded"], batches, has_control=False))
        num_rows, num_exact = sum(r.num_rows for r in results), sum(r.num_exact for r in results)
        num_faults = sum(r.num_faults for r in results)
        measured = f"{num_exact} of {num_rows} rows"
        if numerics == "fast":
            measured += f"; of the others {num_rows - num_exact - num_faults} are ties"
        goal, holds = ("all", num_exact == num_rows) if numerics == "invariant" else ("ties alone", num_faults == 0)
        line = [f"text of plain decoding alone, {dtype}, {numerics}, batch {', '.join(map(str, batches))}", measured, goal, holds]
        return {"lines": [line], "results": [verified_as_json(r) for r in results]}

    def table(self, name: str, batch: int) -> Record:
        """EMS-SD's Table 2: random float16 weights, acceptance replayed with the histograms of the embedded pair, LLMA's moved."""
        target, random = self.models.target(name, self.numerics)
        lengths = self.models.lengths(max(self.size.table_batches))[:batch]
        prompts, prefixes = random.prompts(lengths), random.of(lengths)
        measured = json.loads(HISTOGRAMS.read_text("utf-8"))["histograms"]
        laws = [rescaled(measured["LLMA"], TOKENS_PER_STEP), measured["draft model"]]
        copied, drafted = (partial(replay, law=AcceptanceHistogram.from_counts(entries, str(HISTOGRAMS))) for entries in laws)
        copies = {"method": "ngram", "num_speculative_tokens": COPIED}
        small = {"method": "draft_model", "num_speculative_tokens": DRAFTED}
        ablated = PADDINGS if name == self.size.models[0][0] else ("padded", "unpadded")
        methods = [
            DecodingMethod("plain", None),
            DecodingMethod(LAUNCHED, copies, "unpadded", copied),
            *(DecodingMethod("replay LLMA", copies, strategy, copied) for strategy in PADDINGS),
            *(DecodingMethod("replay draft model", small, strategy, drafted) for strategy in ablated),
        ]
        runs = [self._run(method, target, prefixes, enforce_eager=method.name == LAUNCHED) for method in methods]
        results = measure(target, self.models.draft, [], prompts, greedy(self.size.new_tokens), batch, 1, [], said, runs)
        return {"lines": table_lines(name, batch, results), "results": [asdict(r) for r in results]}

    def _run(self, method: DecodingMethod, target: LoadedModel, prefixes: list[Prefix], **settings: Any) -> PrefilledRun:
        a_step = COPIED + 1 if method.strategy in ("padded", "padded-kv") else 1  # as EMS-SD reserves, for the dead slots of every step
        longest = self.size.prompt_tokens[1] + self.size.new_tokens * a_step
        return PrefilledRun(method, target, self.models.draft, prefixes, longest, num_rehearsals=2, numerics=self.numerics, **settings)

    def plain(self, numerics: str, batch: int) -> Record:
        """What share of the memory's speed plain decoding reaches, and how long the device waits for the host."""
        name = self.size.models[0][0]
        seconds, kernels, num_bytes = self._plain_step(name, numerics, batch)
        busy = sum(kernels.values()) if kernels else None
        share, what = num_bytes / seconds / 1e9 / self.models.copy_gb, f"plain decoding, {name}, {numerics}, batch {batch}"
        lines: list[Line] = [
            [f"{what}: share of copying", f"{share:.2f} ({1e3 * seconds:.2f} ms)", f"{SHARE_OF_COPY}", share >= SHARE_OF_COPY]
        ]
        if busy is not None:
            gap = max(0.0, 1.0 - busy / seconds)
            lines.append([f"{what}: the device waits", f"{gap:.1%}", f"{GREATEST_GAP:.0%}", gap <= GREATEST_GAP])
        if numerics != self.numerics:
            lines = [[*line[:3], None] for line in lines]
        return {"lines": lines, "seconds_a_step": seconds, "kernels": kernels, "bytes": num_bytes, "copy_gb": self.models.copy_gb}

    def _plain_step(self, name: str, numerics: str, batch: int) -> tuple[float, dict[str, float], float]:
        """Seconds of a step, those of each kernel in it (none on the CPU), and bytes of weights, keys and values that it reads."""
        self.models.free()
        size, (target, random) = self.size, self.models.target(name, numerics)
        num_steps, now = size.plain_steps, clock_of(self.device)
        prompts, prefixes = random.prompts([size.plain_context] * batch), random.of([size.plain_context] * batch)
        longest = size.plain_context + 2 * num_steps + 2
        llm = LLM(target, max_num_seqs=batch, max_model_len=longest, refill=False, numerics=numerics, enable_prefix_caching=False)
        decode(llm, prompts, greedy(2 * num_steps + 2), prefixes)  # compiles, and captures every bucket that will be met
        begin(llm, prompts, greedy(2 * num_steps + 2), prefixes)
        llm.engine.step()
        steps = partial(step_often, llm, num_steps)
        start = now()
        steps()
        seconds = (now() - start) / num_steps
        kernels = kernel_seconds(steps, self.device) if self.device.type == "cuda" else {}
        weights = sum(w.data.nbytes for w in packed_weights(target.model))
        a_step = {name: total / num_steps for name, total in kernels.items()}
        return seconds, a_step, weights + batch * (size.plain_context + num_steps / 2) * bytes_per_token(target)

    def attention(self) -> Record:
        """Keys and values read, over what copying moves in the same time."""
        size, new = self.size, 8
        (speed,) = measure_attention(*size.attention, [new], "float16", self.device, size.attention_context)
        share = speed.gb / self.models.copy_gb
        what = f"attention, 8 rows × {size.attention_context:,} tokens × {new} new ones: share of copying"
        line = [what, f"{share:.2f} ({speed.milliseconds:.3f} ms)", f"{ATTENTION_SHARE}", share >= ATTENTION_SHARE]
        return {"lines": [line], "results": asdict(speed), "copy_gb": self.models.copy_gb}

    def framework(self, batch: int) -> Record:
        """Plain decoding of `transformers` with a static cache, which it compiles on CUDA, beside ours."""
        name, shape = self.size.models[0]
        ours, _, _ = self._plain_step(name, self.numerics, batch)
        self.models.free()  # the engine; there is room for the same weights twice
        prompts = Beginnings(self.models.texts, []).prompts([self.size.plain_context] * batch)
        model = plain_with_random_weights(self.models.config(shape), torch.float16, self.device.type).eval()
        run = FrameworkRun("transformers", model, batch, cache_implementation="static")
        params = greedy(self.size.plain_steps + 2)
        run.run(prompts, params)  # compiles
        tokens, seconds = run.run(prompts, params).decode
        theirs = tokens / seconds
        how = "compiled" if self.device.type == "cuda" else "not compiled"
        figures = f"{theirs:,.0f} tokens/s; ours {batch / ours:,.0f}"
        lines = [[f"transformers, static cache, {how}, {name}, batch {batch}", figures, "", None]]
        return {"lines": lines, "tokens_per_second": theirs, "ours": batch / ours}


def step_often(llm: LLM, count: int) -> None:
    for _ in range(count):
        llm.engine.step()


def tests() -> Record:
    """Those that need a device; other files may want packages that a server has."""
    side_by_side = ["-n", "5"] if find_spec("xdist") else []  # most of their time is compiling
    files = ["tests/ops/test_triton.py", "tests/promises/test_on_device.py"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--no-header", *side_by_side, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TEST_SECONDS)
    said = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "")
    print(done.stdout[-2000:], flush=True)
    return {"lines": [["pytest -m gpu", said, "all pass", done.returncode == 0]], "output": done.stdout[-4000:]}


def is_alike(record: Record, other: Record) -> bool:
    """Measured alike: settings, commit and device."""
    return all(record[k] == other[k] for k in ("settings", "device")) and is_committed(record, other["environment"]["commit"])


def main(arguments: list[str] | None = None) -> int:
    options = parser_of(
        __doc__,
        {
            "cells": {"nargs": "*", "metavar": "PREFIX", "help": "measure only cells whose names begin so"},
            "--device": {"choices": ("cuda", "cpu"), "default": "cuda"},
            "--small": {"action": "store_true", "help": "tiny models and runs: does everything work?"},
            "--numerics": {"choices": ("invariant", "fast"), "default": "invariant", "help": "of linear layers in EMS-SD's table"},
            "--minutes": {"type": float, "default": 8.5, "help": "begin no cell after these"},
            "--fresh": {"action": "store_true", "help": "measure again what was measured"},
            "--output": {"type": Path, "help": f"file of records; {OUTPUT}, or where no card measures at full size, {ELSEWHERE}"},
        },
    ).parse_args(arguments)
    try:
        device = chosen_device(options.device)
    except ConfigError as error:
        print(f"nothing was measured: {error}")
        return 2
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    size, where = SMALL if options.small else DeviceSize(), environment()
    settings = json.loads(json.dumps(asdict(size) | {"numerics": options.numerics}))
    common = {"settings": settings, "device": where.get("gpu", "") if device.type == "cuda" else "cpu", "environment": where}
    output = options.output or (OUTPUT if device.type == "cuda" and not options.small else ELSEWHERE)
    cells = chosen(DeviceCells(size, device, options.numerics).all, options.cells)
    found = run_cells(
        cells,
        Records(output),
        common,
        lambda _, record: not options.fresh and is_alike(record, common),
        60 * options.minutes,
        lambda name, r: print(gpu_table([name], {name: r})[0], flush=True),
    )
    text, holds = gpu_table([cell.name for cell in cells], found)
    print(f"\n{described(where)}\n\n{text}")
    return 0 if holds else 1


if __name__ == "__main__":
    logging.getLogger("echelon").setLevel(logging.ERROR)  # replayed texts mean nothing, and nobody reads them
    sys.exit(main())
