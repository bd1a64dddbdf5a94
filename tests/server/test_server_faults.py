"""Whatever goes wrong in or around one request, the server lives, and others do not notice.

`make test` injects a part of what PROVE=1 does.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import servers
import torch
import toys
from servers import PROMPTS, Gate, Running

import echelon.engine
from echelon.engine import HostStep
from echelon.errors import RequestError
from echelon.llm import LLM
from echelon.sampling import Sampler
from echelon.server.metrics import ServerMetrics
from echelon.server.serializers import Serializer, StreamSerializer
from echelon.text import Detokenizer

NUM_INJECTIONS = 25 if toys.PROVE else 3  # a site
NUM_DISCONNECTS = 500 if toys.PROVE else 24
NUM_DRAINS = 20 if toys.PROVE else 2
OVERLOAD_SECONDS = 60.0 if toys.PROVE else 0.0  # of bursts of ten times what the server takes
COMPLETIONS = "/v1/completions"
VICTIM = "def victim():\n    return None\n"
VICTIM_SEED = 271828
VICTIM_STOP = "never in a text"

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch, LLM], None]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with servers.serving(servers.build("draft_model", max_num_seqs=16, kv_cache_memory_bytes=2**23)) as server:
        yield server


@pytest.fixture(scope="module")
def truth() -> list[str]:
    """Texts of the neighbours and of the victim, from the library."""
    asked = [*neighbours(), victim(False)]
    outputs = servers.build("plain").generate([b["prompt"] for b in asked], [servers.params(b) for b in asked])
    return [o.outputs[0].text for o in outputs]


def is_victim(tokens: Any, llm: LLM) -> bool:
    marks = llm.target.tokenizer.encode(VICTIM)  # type: ignore[union-attr]
    return list(tokens[: len(marks)]) == marks


def failing(patch: Patch, owner: Any, name: str, is_hit: Callable[..., bool], error: Exception) -> None:
    """`owner.name` raises where `is_hit` says so of its arguments."""
    original = getattr(owner, name)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if is_hit(*args):
            raise error
        return original(*args, **kwargs)

    patch.setattr(owner, name, fails)


def rows_hold_victim(rows: Any, llm: LLM) -> bool:
    return any(is_victim(r.sequence.tokens, llm) for r in rows)


def at_run(is_hit: Callable[[Any], bool]) -> Fault:
    """The forward pass of a step fails while the victim has a span that is hit."""

    def fault(patch: Patch, llm: LLM) -> None:
        target, spans = llm.engine.target, []
        pack, run = target.pack, target.run

        def packed(given: Any) -> Any:
            spans[:] = given
            return pack(given)

        def ran(batch: Any) -> Any:
            rows = {s.id for s in llm.engine.scheduler.running if is_victim(s.tokens, llm)}
            if any(s.row in rows and is_hit(s) for s in spans):
                raise RuntimeError("a forward pass failed")
            return run(batch)

        patch.setattr(target, "pack", packed)
        patch.setattr(target, "run", ran)

    return fault


def nan_logits(patch: Patch, llm: LLM) -> None:
    verify = echelon.engine.verify

    def poisoned(draft: Any, logits: Any, logit_indptr: Any, rows: Any, rule: Any) -> Any:
        logits = logits.clone()
        for i, row in enumerate(rows):
            if is_victim(row.sequence.tokens, llm) and row.sequence.num_output_tokens >= 2:
                logits[logit_indptr[i] : logit_indptr[i + 1], 7] = torch.nan
        return verify(draft, logits, logit_indptr, rows, rule)

    patch.setattr(echelon.engine, "verify", poisoned)


def torn_detokenizer(patch: Patch, llm: LLM) -> None:
    failing(patch, Detokenizer, "push", lambda self, _: VICTIM_STOP in self._stop, UnicodeError("torn"))


# site → (how it fails, whether the victim is answered all the same)
SITES: dict[str, tuple[Fault, bool]] = {
    "tokenize": (lambda p, llm: failing(p, llm.inputs, "encode", lambda text, *_: text == VICTIM, KeyError("piece")), False),
    "validate": (
        lambda p, llm: failing(p, llm.inputs, "check_prompt", lambda tokens, *_: is_victim(tokens, llm), ZeroDivisionError()),
        False,
    ),
    "admit": (lambda p, llm: failing(p, llm.engine.scheduler, "add", lambda s: is_victim(s.tokens, llm), RequestError("no")), False),
    "plan": (
        lambda p, llm: failing(p, llm.engine.scheduler, "_plan_row", lambda s, *_: is_victim(s.tokens, llm), IndexError("row")),
        False,
    ),
    "prefill": (at_run(lambda span: span.start == 0), False),
    "forward": (at_run(lambda span: span.start > 0), True),  # alone, its text is fed from the start, and that does not fail
    "draft": (
        lambda p, llm: failing(p, llm.engine.drafter.unguarded, "propose", lambda r: rows_hold_victim(r, llm), MemoryError()),
        True,
    ),
    "verify": (
        lambda p, llm: failing(p, echelon.engine, "verify", lambda _d, _l, _p, r, _a: rows_hold_victim(r, llm), ValueError("shape")),
        False,
    ),
    "nan": (nan_logits, False),
    "sample": (lambda p, _: failing(p, Sampler, "checked", lambda self, *_: self.seed == VICTIM_SEED, FloatingPointError()), False),
    "penalties": (lambda p, _: failing(p, Sampler, "_penalise", lambda self, *_: self.seed == VICTIM_SEED, IndexError("token")), False),
    "commit": (
        lambda p, llm: failing(p, HostStep, "commit", lambda _, row, *__: rows_hold_victim([row], llm), AssertionError("blocks")),
        False,
    ),
    "detokenize": (torn_detokenizer, False),
    "stop match": (lambda p, _: failing(p, Detokenizer, "_extend", lambda self, _: VICTIM_STOP in self._stop, RecursionError()), False),
    "metrics": (
        lambda p, _: failing(p, ServerMetrics, "grew", lambda _s, row, *_: row.sequence.sampler.seed == VICTIM_SEED, KeyError("label")),
        True,
    ),
    "write": (
        lambda p, _: (
            failing(p, StreamSerializer, "chunks", lambda self, _: self._job.sequences[0].sampler.seed == VICTIM_SEED, OSError("pipe")),
            failing(p, Serializer, "response", lambda _s, job, _: job.sequences[0].sampler.seed == VICTIM_SEED, TypeError("json")),
        )[0],
        False,
    ),
}


def neighbours() -> list[dict[str, Any]]:
    return [
        {"prompt": p, "max_tokens": 7, "temperature": 0.8 * (i % 2), "seed": i, "frequency_penalty": 0.1 * (i % 3), "ignore_eos": True}
        for i, p in enumerate(PROMPTS)
    ]


def victim(stream: bool) -> dict[str, Any]:
    return {"prompt": VICTIM, "max_tokens": 7, "temperature": 0.7, "seed": VICTIM_SEED, "frequency_penalty": 0.3, "stop": [VICTIM_STOP],
            "ignore_eos": True, "stream": stream}  # fmt: skip


def text_of(answer: httpx.Response) -> str | None:
    """What a whole or streamed answer says; `None` where it is an error."""
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        return None
    if "event-stream" not in answer.headers["content-type"]:
        return str(answer.json()["choices"][0]["text"])
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    chunks = [json.loads(e) for e in events]
    return None if any("error" in c for c in chunks) else "".join(c["choices"][0]["text"] for c in chunks)


@pytest.mark.parametrize("site", SITES)
def test_an_exception_ends_one_request(running: Running, truth: list[str], site: str) -> None:
    fault, is_answered = SITES[site]
    with servers.unharmed(running):
        for i in range(NUM_INJECTIONS):
            with pytest.MonkeyPatch.context() as patch:
                fault(patch, running.llm)
                *others, hurt = asyncio.run(servers.together(running.url, [*neighbours(), victim(i % 2 == 0)]))
                servers.settle(running)
            assert [text_of(a) for a in others] == truth[:-1]
            assert text_of(hurt) == (truth[-1] if is_answered else None), hurt.text
            assert hurt.status_code in (200, 500) or site == "admit"
            _reset(running)


def _reset(running: Running) -> None:
    """A drafter that was cut off is given back at once, so that every injection meets it."""
    guard: Any = running.llm.engine.drafter
    guard._num_failures, guard._resumes_at = 0, -1.0


def test_clients_that_leave_take_their_rows_along(running: Running) -> None:
    rng = random.Random(11)
    with servers.unharmed(running):
        for i in range(NUM_DISCONNECTS):
            body = {"prompt": rng.choice(PROMPTS) * rng.randint(1, 20), "max_tokens": 400, "n": rng.randint(1, 4), "ignore_eos": True}
            whole = servers.request_bytes(json.dumps(body | {"stream": rng.random() < 0.6, "seed": i}))
            with running.connect() as connection:
                cut = len(whole) if rng.random() < 0.8 else rng.randrange(1, len(whole))
                connection.sendall(whole[:cut])
                if cut == len(whole) and b'"stream": true' in whole:
                    for _ in range(rng.randint(0, 4)):
                        assert connection.recv(rng.randint(1, 4096))
                if rng.random() < 0.5:  # reset instead of an orderly end
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        servers.settle(running)


def test_overload_is_answered() -> None:
    """Ten times as many requests as the server takes: all are answered, and those that are served rightly so."""
    body = {"prompt": PROMPTS[1], "max_tokens": 6, "temperature": 0}
    with servers.serving(servers.build("ngram", max_num_seqs=4), max_queue=4) as running, servers.unharmed(running):
        until, is_first = time.monotonic() + OVERLOAD_SECONDS, True
        while is_first or time.monotonic() < until:
            is_first = False
            answers = asyncio.run(servers.together(running.url, [body | {"stream": i % 2 == 0} for i in range(80)]))
            served = [text_of(a) for a in answers if a.status_code == 200]
            assert len(set(served)) == 1 and len(served) >= 8
            refused = [a for a in answers if a.status_code != 200]
            assert all((a.status_code, a.headers["retry-after"]) == (429, "1") for a in refused)
            assert refused


def test_an_engine_that_dies_is_told_to_all() -> None:
    """Nothing can be saved then; but everyone is answered, and the server ends by itself, with a status that says so."""
    with servers.serving(servers.build("plain"), max_queue=8) as running:

        def die() -> Any:
            while running.service.engine_thread.num_in_flight < len(neighbours()):
                time.sleep(0.01)
            raise SystemExit("the worst")

        running.llm.engine.step = die  # type: ignore[method-assign]
        answers = asyncio.run(servers.together(running.url, neighbours()))
        assert {a.status_code for a in answers} <= {500, 503}
        assert running.server.has_ended.wait(60.0)
        assert running.server.exit_status == 1


# Ending the process


# Once every stream has begun, the engine waits for somebody to write into a pipe.
HELD = """
from echelon.aio.engine_thread import EngineThread
tick, begun, has_waited = EngineThread._tick, set(), False

def held(self, engine):
    global has_waited
    begun.update(row.id for row in engine.scheduler.running if row.watcher.text)
    if len(begun) == {num_streams} and not has_waited:
        has_waited = True
        open({pipe!r}).read()
    tick(self, engine)

EngineThread._tick = held
"""


@pytest.mark.parametrize("round_", range(NUM_DRAINS))
def test_a_shutdown_lets_running_streams_finish(round_: int, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    method = ("draft_model", "ngram")[round_ % 2]
    asked = [{"prompt": p * 2, "max_tokens": 200, "temperature": 0.5, "seed": i, "ignore_eos": True} for i, p in enumerate(PROMPTS * 2)]
    outputs = servers.build("plain").generate([b["prompt"] for b in asked], [servers.params(b) for b in asked])
    with servers.process(method, prelude=HELD.format(num_streams=len(asked), pipe=str(pipe))) as (server, url, log):
        have_begun = threading.Barrier(len(asked) + 1)
        texts = [""] * len(asked)

        def read(i: int) -> None:
            with (
                httpx.Client(base_url=url, timeout=60.0) as client,
                client.stream("POST", COMPLETIONS, json=asked[i] | {"stream": True}) as answer,
            ):
                lines = (line for line in answer.iter_lines() if line)
                first = next(lines)
                have_begun.wait(60.0)
                events = [line.removeprefix("data: ") for line in (first, *lines)]
            assert events[-1] == "[DONE]"
            texts[i] = "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1])

        readers = [threading.Thread(target=read, args=(i,)) for i in range(len(asked))]
        for reader in readers:
            reader.start()
        have_begun.wait(60.0)
        server.send_signal(signal.SIGTERM)
        with httpx.Client(base_url=url, timeout=60.0) as client:
            while client.get("/readyz").status_code == 200:
                pass
            refused = client.post(COMPLETIONS, json=asked[0])
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert client.get("/livez").status_code == 200
        assert server.poll() is None
        pipe.write_text("go on")
        for reader in readers:
            reader.join()
        assert texts == [o.outputs[0].text for o in outputs]
        assert server.wait(60.0) == 0, "".join(log)


def test_a_second_signal_ends_at_once() -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 2000, "n": 8, "ignore_eos": True, "stream": True, "seed": 1}
    with (
        servers.serving(servers.build("ngram")) as running,
        running.client() as client,
        running.client() as other,
        ExitStack() as stack,
    ):
        gate = Gate(running, 4)
        answer = stack.enter_context(client.stream("POST", COMPLETIONS, json=body))
        lines = answer.iter_lines()
        next(lines)
        running.server.handle_exit(signal.SIGTERM, None)
        assert other.get("/readyz").status_code == 503
        running.server.handle_exit(signal.SIGTERM, None)
        *_, error, done = [line for line in lines if line]
        assert "shutting_down" in error and done == "data: [DONE]"
        gate.open()
        assert running.server.has_ended.wait(60.0)
        running.service.engine_thread._thread.join(60.0)  # which is not waited for after a second signal
