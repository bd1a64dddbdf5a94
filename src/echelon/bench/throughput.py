"""Tokens per second of several methods on the same prompts, interleaved, with a check that the text is the same."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from echelon import LLM, SamplingParams
from echelon.target.loading import LoadedModel

Prompts = SequenceOf[SequenceOf[int]]


@dataclass(frozen=True)
class Method:
    """A name for the table and what drafts."""

    name: str
    config: Mapping[str, Any] | None


def default_methods(num_ngram_tokens: int = 7, num_draft_tokens: int = 4) -> list[Method]:
    """Plain decoding, LLMA with the paper's match length, and a draft model."""
    return [
        Method("plain", None),
        Method("LLMA", {"method": "ngram", "num_speculative_tokens": num_ngram_tokens, "prompt_lookup_max": 2}),
        Method("draft model", {"method": "draft_model", "num_speculative_tokens": num_draft_tokens}),
    ]


@dataclass(frozen=True)
class Result:
    """One method at one batch size. Tokens per second count new tokens over the whole call, prefill included."""

    method: str
    batch_size: int
    tokens_per_second: list[float]  # one a round
    tokens_per_step: float
    acceptance_rate: float
    num_identical: int  # rows whose token ids equal plain decoding alone
    num_rows: int
    acceptance: list[list[int]] = field(default_factory=list)  # a histogram as `replay` takes it

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)

    @property
    def spread(self) -> str:
        return f"{min(self.tokens_per_second):,.0f}–{max(self.tokens_per_second):,.0f}"


def plain_outputs(target: LoadedModel, prompts: Prompts, params: SamplingParams) -> list[list[int]]:
    """Token ids of plain decoding, each prompt alone: what everything else is compared with."""
    llm = LLM(target, max_num_seqs=1)
    return [llm.generate([p], params)[0].outputs[0].token_ids for p in prompts]


def measure(
    target: LoadedModel,
    draft: LoadedModel,
    methods: SequenceOf[Method],
    prompts: Prompts,
    params: SamplingParams,
    batch_size: int,
    rounds: int,
    truth: list[list[int]] | None = None,
    on_run: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Run every method `rounds` times in turn, after one warm-up each."""
    truth = plain_outputs(target, prompts, params) if truth is None else truth
    engines = [LLM(target, m.config, draft, max_num_seqs=batch_size) for m in methods]
    warm_up = params.model_copy(update={"max_tokens": 4})
    for llm in engines:
        llm.generate(list(prompts[:batch_size]), warm_up)
    speeds: list[list[float]] = [[] for _ in methods]
    outputs: list[list[list[int]]] = [[] for _ in methods]
    for _ in range(rounds):
        for i, llm in enumerate(engines):
            start = time.perf_counter()
            done = llm.generate(list(prompts), params)
            seconds = time.perf_counter() - start
            outputs[i] = [o.outputs[0].token_ids for o in done]
            speeds[i].append(sum(map(len, outputs[i])) / seconds)
            on_run(methods[i].name)
    return [
        Result(
            method.name,
            batch_size,
            speeds[i],
            engines[i].stats.tokens_per_step,
            engines[i].stats.acceptance_rate,
            sum(a == b for a, b in zip(outputs[i], truth, strict=True)),
            len(truth),
            engines[i].stats.histogram(),
        )
        for i, method in enumerate(methods)
    ]


def cpu_name() -> str:
    """The processor as the system names it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def environment() -> dict[str, str]:
    """What the figures were measured on."""
    return {
        "cpu": f"{cpu_name()} ({os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()})",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def commit() -> str:
    """The commit of the working tree this package runs from, if it is one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def as_json(results: SequenceOf[Result]) -> dict[str, Any]:
    return {"environment": environment(), "results": [asdict(r) | {"median": r.median} for r in results]}


def from_json(value: dict[str, Any]) -> list[Result]:
    """The results that `as_json` wrote."""
    return [Result(**{k: v for k, v in entry.items() if k != "median"}) for entry in value["results"]]


def as_markdown(results: SequenceOf[Result]) -> str:
    """One line a method and batch size."""
    lines = ["| batch | method | tokens/s (min–max) | tokens_per_step | acceptance_rate | identical |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r.batch_size} | {r.method} | {r.median:,.0f} ({r.spread}) | {r.tokens_per_step:.2f} | {r.acceptance_rate:.2f} "
        f"| {r.num_identical} of {r.num_rows} rows |"
        for r in results
    ]
    return "\n".join(lines)
