"""Many requests on the embedded pair, good, bad and abandoned ones, from a server in this process; then everything must be as before.

`python -m tools.soak [MINUTES]` runs for that long (10 by default) and for at least 2,000 requests a minute. It fails if an answer is
wrong, a bad request is not refused by a 4xx, a canary has changed, which is asked every minute, or blocks, threads, descriptors or memory
have been lost. Every run is a part of docs/evidence/soak.json, with how its memory grew: six hours may be as many parts as they like.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import servers

from benchmarks.cells import Record, Records
from echelon.bench.throughput import environment
from tools import ROOT

NUM_CLIENTS = 24
MINUTE = 60.0  # between two looks at memory and canaries
PARTS = ROOT / "docs" / "evidence" / "soak.json"
REQUESTS_PER_MINUTE = 2000
Look = tuple[float, float, float]  # minutes, MiB resident, MiB allocated
BAD: list[dict[str, Any]] = [
    {"temperature": -1}, {"prompt": ""}, {"prompt": [10**6]}, {"n": 99}, {"stop": ""}, {"no_such_field": 1}, {"max_tokens": -3},
    {"model": "x"}, {"logit_bias": {"99999": 1}}, {"response_format": {"type": "json_object"}}, {"allowed_token_ids": [0], "min_tokens": 1},
]  # fmt: skip


def kinds() -> list[dict[str, Any]]:
    """Forty requests whose texts are known."""
    return [
        {"prompt": p * (1 + i % 3), "max_tokens": 2 + 3 * i % 14, "temperature": 0.8 * (i % 2), "seed": i}
        for i in range(10)
        for p in servers.PROMPTS
    ]


async def client(url: str, truth: list[str], until: float, most: int, counts: Counter[str], seed: int) -> None:
    rng, asked = random.Random(seed), kinds()
    async with httpx.AsyncClient(base_url=url, timeout=120.0, verify=servers.CERTIFICATES) as http:
        while time.monotonic() < until or counts.total() < most:
            i, dice = rng.randrange(len(asked)), rng.random()
            if dice < 0.05:
                answer = await http.post("/v1/completions", json=asked[i] | rng.choice(BAD))
                counts["bad"] += 1
                assert 400 <= answer.status_code < 500, answer.text
            elif dice < 0.15:
                await abandon(url, asked[i] | {"max_tokens": 300, "ignore_eos": True, "stream": True}, rng)
                counts["abandoned"] += 1
            else:
                text = await ask(http, asked[i], stream=dice < 0.6)
                counts["good"] += 1
                assert text == truth[i], f"request {i}: {text!r} instead of {truth[i]!r}"


async def ask(http: httpx.AsyncClient, body: dict[str, Any], stream: bool) -> str:
    answer = await http.post("/v1/completions", json=body | {"stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        return str(answer.json()["choices"][0]["text"])
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]", events
    return "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1])


async def abandon(url: str, body: dict[str, Any], rng: random.Random) -> None:
    """A client that leaves at some point of its stream."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(servers.request_bytes(json.dumps(body)))
    for _ in range(rng.randint(0, 4)):
        if not await reader.read(512):
            break
    writer.close()


async def load(url: str, truth: list[str], minutes: float, counts: Counter[str]) -> None:
    """Clients until so many minutes have passed, each request noted in `counts`."""
    until, most = time.monotonic() + 60 * minutes, int(REQUESTS_PER_MINUTE * minutes)
    await asyncio.gather(*(client(url, truth, until, most, counts, seed) for seed in range(NUM_CLIENTS)))


async def watched(running: servers.Running, truth: list[str], minutes: float, memory: list[Look], counts: Counter[str]) -> None:
    """The load, with what is in use noted in `memory` and the canaries asked every minute."""
    start, before = time.monotonic(), await asyncio.to_thread(servers.canaries, running)

    async def look() -> None:
        while True:
            resident, allocated = psutil.Process().memory_info().rss, servers.Footprint.now().memory
            memory.append(((time.monotonic() - start) / 60, resident / 2**20, allocated / 2**20))
            await asyncio.sleep(MINUTE)
            assert await asyncio.to_thread(servers.canaries, running) == before, "a canary has changed"

    watch = asyncio.create_task(look())
    await load(running.url, truth, minutes, counts)
    watch.cancel()
    if watch.done() and not watch.cancelled():
        watch.result()


def part(minutes: float, counts: Counter[str], memory: list[Look], violations: int) -> Record:
    """What a run was worth: requests by kind, and slopes over time, in MiB an hour, of resident memory and of what is allocated."""
    times, *sizes = np.array(memory).T if len(memory) > 2 else np.zeros((3, 3))
    resident, allocated = (60 * float(np.polyfit(times, size, 1)[0]) if times.any() else 0.0 for size in sizes)
    figures = {"minutes": minutes, "requests": counts.total(), "kinds": dict(counts), "violations": violations}
    slopes = {"mib_an_hour": resident, "allocated_mib_an_hour": allocated, "memory": np.round(memory, 2).tolist()}
    return {"environment": environment(), **figures, **slopes}


def keep(path: Path, record: Record) -> None:
    """Add a part to those that are there."""
    records = Records(path)
    records.write(f"part-{len(records.read()) + 1:02d}", record)


def main(minutes: float) -> int:
    asked, memory, counts = kinds(), list[Look](), Counter[str]()
    outputs = servers.build("plain").generate([b["prompt"] for b in asked], [servers.params(b) for b in asked])
    truth = [o.outputs[0].text for o in outputs]
    with servers.serving(servers.build("draft_model", kv_cache_memory_bytes=2**23)) as running:
        asyncio.run(load(running.url, truth, 0.1 * minutes, Counter()))  # what is allocated once is allocated now
        start = time.monotonic()
        try:
            with servers.unharmed(running):
                asyncio.run(watched(running, truth, minutes, memory, counts))
        except Exception:
            keep(PARTS, part((time.monotonic() - start) / 60, counts, memory, 1))
            raise
        seconds = time.monotonic() - start
        keep(PARTS, part(minutes, counts, memory, 0))
        print(f"{counts.total()} requests in {seconds:.0f} s ({dict(counts)}), {running.llm.stats.num_preemptions} preemptions")
        print("all answers right; canaries, blocks, threads, descriptors and memory as before")
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0))
