"""Load on any OpenAI-compatible server: latencies, throughput, goodput, and what speculation did meanwhile.

TTFT is the time to the first token, TPOT the time a token after the first, ITL the time between events of a stream, which carry several
tokens where drafts are accepted. Token counts are the server's own.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from echelon.errors import ConfigError, MissingExtraError, RequestError

if TYPE_CHECKING:
    import httpx

SECONDS = 600.0
PERCENTILES = (50, 90, 99)
COUNTERS = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")


@dataclass(frozen=True)
class Traffic:
    """What is asked for, and how fast: `request_rate` a second (Poisson; 0: all at once), at most `concurrency` of them open (0: any)."""

    prompts: SequenceOf[str]
    max_tokens: int
    concurrency: int = 0
    request_rate: float = 0.0
    params: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def arrivals(self) -> list[float]:
        """Seconds from the start, one a prompt."""
        rng = random.Random(self.seed)
        gaps = [rng.expovariate(self.request_rate) if self.request_rate else 0.0 for _ in self.prompts]
        return list(accumulate(gaps[:-1], initial=0.0))


@dataclass
class RequestTiming:
    """One request: seconds, tokens, or why it failed."""

    ttft: float = 0.0
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    problem: str | None = None

    @property
    def tpot(self) -> float | None:
        return (self.seconds - self.ttft) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass(frozen=True)
class Goal:
    """Milliseconds that a request may take to count as good; `None`: any."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def is_met(self, answer: RequestTiming) -> bool:
        is_prompt = self.ttft_ms is None or answer.ttft * 1e3 <= self.ttft_ms
        return is_prompt and (self.tpot_ms is None or (answer.tpot or 0.0) * 1e3 <= self.tpot_ms)


async def measure(url: str, key: str | None, model: str | None, traffic: Traffic, goal: Goal) -> dict[str, Any]:
    """Send the requests to the server at `url` (with or without `/v1`).

    Raises
    ------
    ConfigError   the server cannot be reached, or names no model
    RequestError  no request succeeded; with the first reason
    """
    try:
        import httpx
    except ImportError:
        raise MissingExtraError("httpx is not installed; run: pip install 'echelon[server]'") from None
    headers = {"authorization": f"Bearer {key}"} if key else {}
    base = url.rstrip("/").removesuffix("/v1")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    try:
        client = httpx.AsyncClient(base_url=base, headers=headers, timeout=SECONDS, limits=limits, trust_env=False)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--base-url {url!r} is no address ({error}); write http://127.0.0.1:8000") from None
    except UnicodeEncodeError:
        raise ConfigError("the key in OPENAI_API_KEY is not ASCII, and cannot be sent") from None
    async with client:
        model = model or await _first_model(client)
        before = await counters(client)
        start = time.perf_counter()
        answers = await _run(client, model, traffic)
        seconds = time.perf_counter() - start
        after = await counters(client)
    if all(a.problem for a in answers):
        raise RequestError(f"no request succeeded; the first: {answers[0].problem}")
    return report(answers, seconds, goal, {name: after[name] - before[name] for name in before.keys() & after.keys()})


async def _first_model(client: httpx.AsyncClient) -> str:
    import httpx

    try:
        answer = await client.get("/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"{client.base_url} does not name a model ({type(error).__name__}: {error}); check --base-url, or give --model"
        ) from None


async def _run(client: httpx.AsyncClient, model: str, traffic: Traffic) -> list[RequestTiming]:
    gate = asyncio.Semaphore(traffic.concurrency or len(traffic.prompts))
    start = time.perf_counter()

    async def one(prompt: str, at: float) -> RequestTiming:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        async with gate:
            body = {"model": model, "prompt": prompt, "max_tokens": traffic.max_tokens, "stream": True}
            return await ask(client, body | {"stream_options": {"include_usage": True}} | traffic.params)

    return await asyncio.gather(*(one(p, at) for p, at in zip(traffic.prompts, traffic.arrivals(), strict=True)))


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> RequestTiming:
    """One streamed completion."""
    import httpx

    answer, start = RequestTiming(), time.perf_counter()
    last = 0.0
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.problem = f"{response.status_code}: {(await response.aread()).decode('utf-8', 'replace')[:200]}"
                return answer
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    answer.problem = str(chunk["error"])[:200]
                    return answer
                if usage := chunk.get("usage"):
                    answer.num_prompt_tokens, answer.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                if chunk["choices"] and (chunk["choices"][0]["text"] or chunk["choices"][0].get("finish_reason")):
                    now = time.perf_counter() - start
                    answer.ttft = answer.ttft or now
                    answer.gaps += [now - last] if last else []
                    answer.seconds = last = now
    except (httpx.HTTPError, ValueError, KeyError) as error:
        answer.problem = f"{type(error).__name__}: {error}"
    answer.problem = answer.problem or (None if answer.num_tokens else "no tokens came")
    return answer


async def counters(client: httpx.AsyncClient) -> dict[str, float]:
    """The server's counters of speculation by vLLM's names, whatever their prefix; none where it has none."""
    import httpx

    try:
        text = (await client.get("/metrics")).text
    except httpx.HTTPError:
        return {}
    return {name: total for name, total in totals(text).items() if name in COUNTERS}


def totals(text: str) -> dict[str, float]:
    """Counters of a page of metrics by their names without a prefix, over all labels."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, value in re.findall(r"^(?:\w+:)?(\w+?)_total(?:\{[^}]*\})? (\S+)", text, re.MULTILINE):
        found[name] += float(value)
    return found


def report(answers: SequenceOf[RequestTiming], seconds: float, goal: Goal, counted: dict[str, float]) -> dict[str, Any]:
    """Figures of a run; latencies in milliseconds."""
    good = [a for a in answers if a.problem is None]
    drafts, drafted, accepted = (counted.get(name, 0.0) for name in COUNTERS)
    return {
        "num_requests": len(answers),
        "num_failed": len(answers) - len(good),
        "problems": sorted({a.problem for a in answers if a.problem})[:5],
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "prompt_tokens": sum(a.num_prompt_tokens for a in good),
        "completion_tokens": sum(a.num_tokens for a in good),
        "tokens_per_second": sum(a.num_tokens for a in good) / seconds,
        "goal": asdict(goal),
        "goodput_requests_per_second": sum(goal.is_met(a) for a in good) / seconds,
        "ttft_ms": spread([a.ttft for a in good]),
        "tpot_ms": spread([a.tpot for a in good if a.tpot is not None]),
        "itl_ms": spread([gap for a in good for gap in a.gaps]),
        "end_to_end_ms": spread([a.seconds for a in good]),
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,  # of steps that drafted, as vLLM has it
        "acceptance_rate": accepted / drafted if drafted else None,
    }


def spread(seconds: SequenceOf[float]) -> dict[str, float]:
    """Mean and percentiles, in milliseconds; nothing of nothing."""
    if not seconds:
        return {}
    points = {f"p{p}": 1e3 * float(np.quantile(seconds, p / 100)) for p in PERCENTILES}
    return {"mean": 1e3 * sum(seconds) / len(seconds), **points}


def as_markdown(value: dict[str, Any]) -> str:
    """Two tables."""
    lines = ["| | |", "|---|---|"]
    counts = ("num_requests", "num_failed", "seconds", "requests_per_second", "goodput_requests_per_second", "tokens_per_second")
    lines += [f"| {name} | {value[name]:,.2f} |".replace(".00 |", " |") for name in counts]
    shares = {name: value[name] for name in ("mean_acceptance_length", "acceptance_rate")}
    lines += [f"| {name} | {'not reported' if share is None else f'{share:.2f}'} |" for name, share in shares.items()]
    lines += ["", "| ms | mean | " + " | ".join(f"p{p}" for p in PERCENTILES) + " |", "|---|---|" + "---|" * len(PERCENTILES)]
    spreads = {name: value[f"{name}_ms"].values() for name in ("ttft", "tpot", "itl", "end_to_end")}
    lines += [f"| {name} | " + " | ".join(f"{v:,.1f}" for v in spread) + " |" for name, spread in spreads.items() if spread]
    return "\n".join(lines)
