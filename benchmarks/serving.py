"""What HTTP costs: throughput through the server beside `LLM.generate`, and how long a short request waits beside a long prompt.

`python -m benchmarks.serving [--parameters N] [--rounds N] [--output FILE]`

Both engines hold the same weights; rounds are interleaved, so that a slow moment of the machine meets both. The load comes from a
process of its own, as clients do.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.options import parser_of
from echelon import LLM, SamplingParams
from echelon.bench.report import table, write_json
from echelon.bench.serve import ask
from echelon.bench.throughput import environment
from echelon.bench.workloads import code_texts
from echelon.cli.measured import load_target
from echelon.demo import DRAFT, TARGET, held_out_files
from echelon.model.load.loading import load_model
from echelon.server.app import create_app
from echelon.server.config import ServerConfig
from echelon.server.http import serving_in_thread
from echelon.stats import StepRecord

NUM_PROMPTS, NUM_CHARACTERS, CONCURRENCY = 64, 300, 32
LONG_PROMPT = 1500  # tokens
SECONDS = 60.0


@dataclass(frozen=True)
class ShortWait:
    """Seconds from asking to the first token of a short request that comes while a long prompt is read; of a step that read a piece of
    that prompt; and how many steps ran in between."""

    ttft: float
    mixed_step: float
    num_steps: int


def measure_throughput(direct: LLM, url: str, max_tokens: int, rounds: int) -> list[tuple[float, float]]:
    """New tokens a second by `generate` and over HTTP, the same prompts in turns; a round before the first is not counted."""
    texts = code_texts(held_out_files(), NUM_PROMPTS, NUM_CHARACTERS)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    results = []
    for _ in range(1 + rounds):
        start = time.perf_counter()
        outputs = direct.generate(texts, params)
        speed = sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - start)
        results.append((speed, _load(url, max_tokens)["tokens_per_second"]))
    return results[1:]


def _load(url: str, max_tokens: int) -> dict[str, Any]:
    """`echelon bench serve` in a process of its own."""
    sizes = {"num-prompts": NUM_PROMPTS, "prompt-characters": NUM_CHARACTERS, "max-tokens": max_tokens, "max-concurrency": CONCURRENCY}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "echelon", "bench", "serve", "--base-url", url, "--ignore-eos", "--json", *options]
    return dict(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout))


def measure_short_waits(llm: LLM, url: str, rounds: int) -> list[ShortWait]:
    """A short request is asked for once the first piece of a long prompt has been read."""
    source = "".join(code_texts(held_out_files(), 40, 400))
    steps: list[tuple[float, float, int]] = []  # start, end, tokens fed
    has_read = threading.Event()

    def note(step: StepRecord) -> None:
        end = time.perf_counter()
        steps.append((end - sum(step.seconds.values()), end, step.num_input_tokens))
        has_read.set()

    with llm.engine.observed(note):
        prompts = [llm.inputs.encode(f"# {i}\n{source}")[:LONG_PROMPT] for i in range(1 + rounds)]
        return [asyncio.run(_short_wait(prompt, url, steps, has_read)) for prompt in prompts][1:]


async def _short_wait(long: list[int], url: str, steps: list[tuple[float, float, int]], has_read: threading.Event) -> ShortWait:
    steps.clear()
    has_read.clear()
    body = {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS, trust_env=False) as client:
        reading = asyncio.create_task(ask(client, body | {"prompt": long, "max_tokens": 4}))
        await asyncio.to_thread(has_read.wait, SECONDS)
        start = time.perf_counter()
        short = await ask(client, body | {"prompt": "def main(argv):\n", "max_tokens": 4})
        problem = short.problem or (await reading).problem
    assert problem is None, problem
    between = [s for s in steps if s[1] > start and s[0] < start + short.ttft]
    widest = max(fed for _, _, fed in steps)
    mixed = [end - begun for begun, end, fed in steps if 4 * fed > widest]  # where the long prompt is done early, none lies in between
    return ShortWait(short.ttft, statistics.median(mixed), len(between))


def as_json(throughput: SequenceOf[tuple[float, float]], waits: SequenceOf[ShortWait]) -> dict[str, Any]:
    """Medians with the least and the largest of all rounds."""
    return {
        "concurrency": CONCURRENCY,
        "generate_tokens_per_second": _spread([generate for generate, _ in throughput]),
        "http_tokens_per_second": _spread([http for _, http in throughput]),
        "http_over_generate": _spread([http / generate for generate, http in throughput]),
        "long_prompt_tokens": LONG_PROMPT,
        "short_ttft_ms": _spread([1e3 * w.ttft for w in waits]),
        "mixed_step_ms": _spread([1e3 * w.mixed_step for w in waits]),
        "short_ttft_in_mixed_steps": _spread([w.ttft / w.mixed_step for w in waits]),
        "steps_until_first_token": _spread([float(w.num_steps) for w in waits]),
    }


def _spread(values: SequenceOf[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "largest": max(values), "rounds": len(values)}


def as_markdown(report: dict[str, Any]) -> str:
    rows = [
        (name.replace("_", " "), *(f"{v[k]:,.3g}" for k in ("median", "least", "largest")))
        for name, v in report.items()
        if isinstance(v, dict)
    ]
    return table(["", "median", "least", "largest"], rows)


def main() -> None:
    asked = parser_of(
        __doc__,
        {
            "--parameters": {"type": int, "default": 500_000_000, "help": "grow the embedded target to so many; 0: as it is"},
            "--max-tokens": {"type": int, "default": 32, "help": "new tokens a prompt"},
            "--rounds": {"type": int, "default": 5, "help": "of each measurement, interleaved"},
            "--output": {"type": Path},
        },
    ).parse_args()
    target = load_target(str(TARGET), asked.parameters)
    draft = load_model(str(DRAFT), device=target.device.type)
    config = {"method": "draft_model", "num_speculative_tokens": 4}
    direct, behind = (
        LLM(target, config, draft, max_num_seqs=CONCURRENCY, max_num_batched_tokens=512, enable_prefix_caching=False) for _ in range(2)
    )
    server = ServerConfig(port=0)
    with serving_in_thread(create_app(behind, server), server) as (url, _):
        report = as_json(measure_throughput(direct, url, asked.max_tokens, asked.rounds), measure_short_waits(behind, url, asked.rounds))
    print(as_markdown(report))
    if asked.output is not None:
        write_json(asked.output, {"environment": environment(), "model": target.name, "parameters": asked.parameters, "results": report})


if __name__ == "__main__":
    main()
