"""A server in this process, on a free port, and what must be true of it after whatever happened."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import toys

from echelon import LLM, AsyncLLM, SamplingParams
from echelon.demo import DRAFT, TARGET
from echelon.model.load.loading import LoadedModel, load_model
from echelon.server.app import Service, create_app
from echelon.server.config import ServerConfig
from echelon.server.http import Server, serving_in_thread

SPECULATIVE: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
}
PROMPTS = ["def main(argv):\n", "import os\nimport sys\n", "class Stack:\n    def __init__(self):\n", "for i in range(10):\n    print(i)\n"]
MODEL = "pair"
CERTIFICATES = False  # plain HTTP needs none; every client would hold about a megabyte of them, which would count as the server's
SMALL_BLOCK = 64  # bytes, about, of a block that Python counts and does not size


@dataclass(frozen=True)
class Running:
    """`url` without a slash; `llm` is the server's own, so never generate with it."""

    url: str
    service: Service
    server: Server
    recorded: list[Any] = field(default_factory=list)  # what its canaries said first

    @property
    def llm(self) -> LLM:
        return self.service.llm

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(**{"base_url": self.url, "timeout": 60.0, "verify": CERTIFICATES} | options)

    def connect(self) -> socket.socket:
        connection = socket.create_connection(self.address, timeout=60.0)
        connection.settimeout(60.0)
        return connection


_MODELS: list[LoadedModel] = []


def pair() -> tuple[LoadedModel, LoadedModel]:
    """The embedded target and draft model in float32, loaded once."""
    if not _MODELS:
        _MODELS.extend(load_model(str(path), dtype="float32", device="cpu") for path in (TARGET, DRAFT))
    return _MODELS[0], _MODELS[1]


def build(method: str = "plain", **settings: Any) -> LLM:
    target, draft = pair()
    defaults = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 2**25}
    return LLM(target, SPECULATIVE[method], draft if method == "draft_model" else None, **(defaults | settings))


@contextmanager
def serving(llm: LLM, **changes: Any) -> Iterator[Running]:
    """The server's loop and engine run in threads of their own until the end of the block."""
    config = ServerConfig(**({"port": 0, "served_model_name": MODEL, "max_queue": 512} | changes))
    app = create_app(llm, config)
    with serving_in_thread(app, config) as (url, server):
        yield Running(url, app.service, server)
    assert not app.service.engine_thread.is_healthy


class Clock:
    """What requests and the engine's thread take the time for: `ahead` seconds after the true one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        for module in ("echelon.aio.engine_thread", "echelon.server.app"):
            monkeypatch.setattr(f"{module}.time", SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + self.ahead))


class Gate:
    """Holds the engine's thread before a step, once `num_steps` have been made."""

    def __init__(self, running: Running | AsyncLLM, num_steps: int = 0) -> None:
        self._engine, self._step, self._num_left = running.llm.engine, running.llm.engine.step, num_steps
        self._open, self.reached = threading.Event(), threading.Event()
        self._engine.step = self._held  # type: ignore[method-assign]

    def _held(self) -> Any:
        self._num_left -= 1
        if self._num_left < 0:
            self.reached.set()
            assert self._open.wait(60.0)
        return self._step()

    def open(self) -> None:
        self._open.set()
        self._engine.step = self._step  # type: ignore[method-assign]


@contextmanager
def process(method: str, *options: str, prelude: str = "") -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """`echelon serve` in a process of its own, after the statements `prelude`: (process, url, lines of its log)."""
    configs = {"draft_model": {"model": str(DRAFT)}, "ngram": {}}
    config = configs[method] | {"method": method, "num_speculative_tokens": 5}
    drafts = ["--speculative-config", json.dumps(config)]
    start = f"{prelude}\nfrom echelon.cli import main\nmain()"
    command = [sys.executable, "-c", start, "serve", str(TARGET), "--port", "0", "--dtype", "float32", "--served-model-name", MODEL]
    log: list[str] = []
    with subprocess.Popen([*command, *drafts, *options], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = ""
        for line in server.stderr:
            log.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                url = found[1]
                break
        assert url, log
        reader = threading.Thread(target=lambda: log.extend(server.stderr or ()))
        reader.start()
        try:
            yield server, url, log
        finally:
            server.kill()
            reader.join()


def settle(running: Running) -> None:
    """Wait, by asking the engine's own queue, until nothing is in flight and every row has left; for a minute at most, since an idle engine
    answers thousands of times before another thread gets its turn.
    """
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        done = threading.Event()
        running.service.engine_thread._commands.put(lambda _engine, done=done: done.set())
        assert done.wait(60.0)
        if running.service.engine_thread.num_in_flight == 0 and not running.llm.engine.has_work:
            return
    raise AssertionError("requests are still in flight")


def blocks_free(llm: LLM) -> list[int]:
    """Free KV blocks of every cache."""
    return [cache.tables.num_free for cache in toys.caches(llm)]


@dataclass(frozen=True)
class Footprint:
    """Of this process. `memory` counts what is allocated, not what is resident: that also grows where freed memory is in pieces."""

    threads: int
    descriptors: int
    memory: int

    @classmethod
    def now(cls) -> Footprint:
        process, heap = psutil.Process(os.getpid()), psutil.heap_info()
        return cls(process.num_threads(), process.num_fds(), heap.heap_used + heap.mmap_used + sys.getallocatedblocks() * SMALL_BLOCK)

    def is_within(self, before: Footprint, growth: int) -> bool:
        has_others = self.threads > before.threads + 2 or self.descriptors > before.descriptors + 2
        return not has_others and self.memory <= before.memory + growth


CANARIES = [
    {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 24,
        "logprobs": 1,
        **({"temperature": 0} if greedy else {"temperature": 0.9, "seed": i}),
    }
    for greedy in (True, False)
    for i, prompt in enumerate(PROMPTS)
]


async def together(url: str, asked: list[dict[str, Any]]) -> list[httpx.Response]:
    """Answers to completions that are asked for at once."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60.0, limits=limits, verify=CERTIFICATES) as client:
        return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in asked))


def canaries(running: Running) -> list[Any]:
    """Texts and logprobs of four greedy and four seeded requests."""
    answers = asyncio.run(together(running.url, CANARIES))
    assert all(a.status_code == 200 for a in answers), [a.text for a in answers if a.status_code != 200]
    return [a.json()["choices"] for a in answers]


@contextmanager
def unharmed(running: Running, growth: int = 20 * 2**20) -> Iterator[None]:
    """What happens inside leaves canaries, KV blocks, threads, descriptors and memory as they were."""
    before = running.recorded or canaries(running)
    running.recorded[:] = before
    settle(running)
    free, footprint = blocks_free(running.llm), Footprint.now()
    yield
    settle(running)
    assert blocks_free(running.llm) == free
    assert canaries(running) == before
    with running.client() as client:
        assert client.get("/health").status_code == 200
    settle(running)
    assert blocks_free(running.llm) == free
    running.llm.engine.check()
    if not Footprint.now().is_within(footprint, growth):
        gc.collect()
    after = Footprint.now()
    assert after.is_within(footprint, growth), (footprint, after)


def request_bytes(body: str, path: str = "/v1/completions") -> bytes:
    """A whole request for a raw socket."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body.encode())}\r\n\r\n"
    return head.encode() + body.encode()


def params(body: dict[str, Any]) -> SamplingParams:
    """Of a request body with fields that `SamplingParams` has, too."""
    return SamplingParams(**{k: v for k, v in body.items() if k in SamplingParams.model_fields})
