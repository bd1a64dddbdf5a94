"""Latencies of requests that arrive one by one (Zhang et al. 2025, Table 4).

Arrivals are a Poisson process: every gap is a function of (seed, number of the request), so all methods see the same requests at the same
moments. Time is that of the engine's steps: a request that arrives during a step waits for its end, and while nothing runs the clock jumps
to the next arrival, so that nobody has to sleep.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from echelon import LLM, SamplingParams
from echelon.bench.report import columns, percent
from echelon.bench.throughput import DecodingMethod, Prompts, display_name, environment
from echelon.bench.verify import STRATEGY_SETTINGS
from echelon.model.load.loading import LoadedModel
from echelon.sampling import Sampler
from echelon.sequence import Sequence


@dataclass(frozen=True)
class Latency:
    """One method at one batch size and load. Seconds from arrival to the last token, and to the first, at three quantiles."""

    method: str
    strategy: str
    batch_size: int
    load: float  # arrivals a second over the requests a second that the reference method can serve
    requests_per_second: float  # that arrived
    tokens_per_second: float  # new tokens from the first arrival to the last token
    p50: float
    p90: float
    p99: float
    first_p50: float
    first_p99: float
    group_rate: float | None = None

    @property
    def name(self) -> str:
        return display_name(self.method, self.strategy)


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which requests arrive, the first at once; gaps are exponential with mean 1 / rate, keyed by request."""
    gaps = [0.0] + [-math.log1p(-np.random.default_rng([seed, i]).random()) / rate for i in range(1, count)]
    return list(accumulate(gaps))


@dataclass(frozen=True)
class RequestLatencies:
    """Seconds from arrival to first and last token of every request, and all in all."""

    first: list[float]
    last: list[float]
    seconds: float
    num_tokens: int


def sequence_of(llm: LLM, row: int, prompt: SequenceOf[int], params: SamplingParams) -> Sequence:
    """A request by number: `row` keys the draws of replayed acceptance, so that every method replays the same."""
    eos = llm.target.eos_token_ids
    sampler = Sampler(params, params.seed or 0, 0, len(prompt), eos | set(params.stop_token_ids))
    return Sequence(row, list(prompt), len(prompt), sampler, eos, llm.max_len)


def serve(
    llm: LLM, prompts: Prompts, params: SamplingParams, times: SequenceOf[float], clock: Callable[[], float] = time.perf_counter
) -> RequestLatencies:
    """Run requests as they arrive."""
    sequences = [sequence_of(llm, row, prompt, params) for row, prompt in enumerate(prompts)]
    first, last = dict[int, float](), dict[int, float]()
    now, num_added = 0.0, 0
    with llm.exclusive() as engine:
        while len(last) < len(sequences):
            if not engine.has_work:
                now = max(now, times[num_added])
            while num_added < len(sequences) and times[num_added] <= now:
                engine.add(sequences[num_added])
                num_added += 1
            start = clock()
            grown = engine.step()
            now += clock() - start
            for sequence in grown:
                first.setdefault(sequence.id, now)
                if sequence.is_finished:
                    last[sequence.id] = now
    waits = [[moments[i] - times[i] for i in range(len(sequences))] for moments in (first, last)]
    return RequestLatencies(waits[0], waits[1], now - times[0], sum(s.num_output_tokens for s in sequences))


def measure_latency(
    target: LoadedModel,
    draft: LoadedModel | None,
    methods: SequenceOf[DecodingMethod],
    prompts: Prompts,
    params: SamplingParams,
    batch_size: int,
    loads: SequenceOf[float],
    seed: int = 0,
    on_run: Callable[[str], None] = lambda _: None,
    **settings: Any,
) -> list[Latency]:
    """Every method under the same arrivals, at rates relative to what the first method serves when all requests are there at once."""
    settings |= {"max_num_seqs": batch_size, "enable_prefix_caching": False}
    engines = [LLM(target, m.config, m.unnamed(draft), **STRATEGY_SETTINGS[m.strategy], **settings) for m in methods]
    for llm in engines:  # all of them, so that none has pages that it has not touched
        serve(llm, prompts, params, [0.0] * len(prompts))
    capacity = len(prompts) / serve(engines[0], prompts, params, [0.0] * len(prompts)).seconds
    results = []
    for load in loads:
        times = arrivals(len(prompts), load * capacity, seed)
        for method, llm in zip(methods, engines, strict=True):
            before = llm.stats.num_group_choices, llm.stats.num_group_hits
            served = serve(llm, prompts, params, times)
            choices, hits = llm.stats.num_group_choices - before[0], llm.stats.num_group_hits - before[1]
            rate = hits / choices if choices else None
            results.append(_result(method, batch_size, load, load * capacity, served, rate))
            on_run(f"batch {batch_size}, load {load:.0%}, {results[-1].name}")
    return results


def _result(
    method: DecodingMethod, batch_size: int, load: float, arriving: float, served: RequestLatencies, group_rate: float | None
) -> Latency:
    p50, p90, p99 = (float(q) for q in np.quantile(served.last, (0.5, 0.9, 0.99)))
    first_p50, first_p99 = (float(q) for q in np.quantile(served.first, (0.5, 0.99)))
    speed = served.num_tokens / served.seconds
    return Latency(method.name, method.strategy, batch_size, load, arriving, speed, p50, p90, p99, first_p50, first_p99, group_rate)


def as_json(results: SequenceOf[Latency]) -> dict[str, Any]:
    return {"environment": environment(), "results": [asdict(r) for r in results]}


def as_markdown(results: SequenceOf[Latency]) -> str:
    """One line a batch size, load and method; milliseconds."""
    return columns(
        results,
        {
            "batch": lambda r: r.batch_size,
            "load": lambda r: f"{r.load:.0%}",
            "method": lambda r: r.name,
            "tokens/s": lambda r: f"{r.tokens_per_second:,.0f}",
            "P50 ms": lambda r: _milliseconds(r.p50),
            "P90 ms": lambda r: _milliseconds(r.p90),
            "P99 ms": lambda r: _milliseconds(r.p99),
            "first token P50 ms": lambda r: _milliseconds(r.first_p50),
            "first token P99 ms": lambda r: _milliseconds(r.first_p99),
            "group rate": lambda r: percent(r.group_rate),
        },
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}"
