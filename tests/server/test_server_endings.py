"""A request that cannot be finished is told so, at every stage of its way: the server ends, or its engine hangs or dies."""

from __future__ import annotations

import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import servers
import toys
from servers import PROMPTS, Gate, Running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDLESS = {"max_tokens": 2000, "ignore_eos": True, "temperature": 0}
TEXT = ENDLESS | {"prompt": PROMPTS[0]}
TALK = ENDLESS | {"messages": [{"role": "user", "content": "hello"}]}
STREAM = {"stream": True}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETIONS, TEXT),
    "completion stream": (COMPLETIONS, TEXT | STREAM),
    "samples": (COMPLETIONS, TEXT | {"n": 2}),
    "samples stream": (COMPLETIONS, TEXT | STREAM | {"n": 2}),
    "prompts stream": (COMPLETIONS, TEXT | STREAM | {"prompt": PROMPTS[:2]}),
    "chat": (CHAT, TALK),
    "chat stream": (CHAT, TALK | STREAM | {"n": 2}),
}
NUM_ROWS = 11  # of these
QUEUED: dict[str, tuple[str, dict[str, Any]]] = {
    "queued completion": (COMPLETIONS, TEXT),
    "queued stream": (COMPLETIONS, TEXT | STREAM),
    "queued chat": (CHAT, TALK),
    "queued chat stream": (CHAT, TALK | STREAM),
}


class Asked:
    """A request in a thread of its own, and what came back."""

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        self.url, self.path, self.body = url, path, body
        self.has_begun, self.status, self.text = threading.Event(), 0, ""
        self.headers: httpx.Headers = httpx.Headers()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        with (
            httpx.Client(base_url=self.url, timeout=60.0, verify=servers.CERTIFICATES) as client,
            client.stream("POST", self.path, json=self.body) as answer,
        ):
            self.status, self.headers = answer.status_code, answer.headers
            for part in answer.iter_text():
                self.text += part
                self.has_begun.set()

    def error(self) -> dict[str, Any]:
        """Why it ended: from its body, or, of a stream that had begun, from its last event before the end."""
        self._thread.join()
        if self.status == 200:
            *events, error, done = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line]
            assert done == "[DONE]" and events
            assert all(choice["finish_reason"] is None for e in events for choice in json.loads(e)["choices"])
        else:
            error = self.text
            assert self.headers["retry-after"] == "1"
        problem: dict[str, Any] = json.loads(error)["error"]
        assert set(problem) == {"message", "type", "param", "code"}
        return problem


def ask_all(running: Running) -> dict[str, Asked]:
    """Every kind of request: streams have begun, and those that are queued wait."""
    asked = {name: Asked(running.url, *request) for name, request in REQUESTS.items()}
    for name, each in asked.items():
        if "stream" in name:
            assert each.has_begun.wait(60.0)
    while running.llm.engine.scheduler.waiting or len(running.llm.engine.scheduler.running) < NUM_ROWS:
        time.sleep(0.01)
    asked |= {name: Asked(running.url, *request) for name, request in QUEUED.items()}
    while running.service.engine_thread.num_in_flight < NUM_ROWS + len(QUEUED):
        time.sleep(0.01)
    return asked


def ended(running: Running) -> None:
    """Wait for the server and for the engine's last step, which the server does not wait for after a second signal."""
    assert running.server.has_ended.wait(60.0)
    running.service.engine_thread._thread.join(60.0)


def slow(running: Running) -> None:
    """Every step takes so long that no request ends by itself."""
    step = running.llm.engine.step
    running.llm.engine.step = lambda: (time.sleep(0.03), step())[1]  # type: ignore[method-assign]


@pytest.fixture
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    caplog.set_level(logging.INFO)
    yield caplog
    assert not [r for r in caplog.records if r.exc_info or "Traceback" in r.getMessage()]


@pytest.mark.parametrize("ending", ["drain timeout", "second signal"])
def test_every_request_that_is_cut_is_told_why(no_traceback: pytest.LogCaptureFixture, ending: str) -> None:
    timeout = 0.3 if ending == "drain timeout" else 3600.0
    may_end = threading.Event()
    with servers.serving(servers.build(max_num_seqs=NUM_ROWS), drain_timeout=timeout) as running:
        slow(running)
        asked = ask_all(running)
        running.service.tokenize = lambda _asked: may_end.wait(60.0)  # type: ignore[method-assign]
        asked["tokenize"] = Asked(running.url, "/tokenize", {"prompt": "a"})
        middleware = running.server._middleware
        while len(middleware._being_answered) < len(asked):
            time.sleep(0.01)
        with running.connect() as half, running.connect() as deaf:
            half.sendall(servers.request_bytes(json.dumps(TEXT))[:-10])
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.sendall(servers.request_bytes(json.dumps(TEXT)))  # waits, and never reads what it is told
            while not middleware._being_read or running.service.engine_thread.num_in_flight <= NUM_ROWS + len(QUEUED):
                time.sleep(0.01)  # a request that has no place yet would be refused, and not cut
            running.server.handle_exit(signal.SIGTERM, None)
            if ending == "second signal":
                assert not running.server.should_exit
                running.server.handle_exit(signal.SIGTERM, None)
            for name, each in asked.items():
                assert each.error()["code"] == "shutting_down", name
                assert (each.status == 200) == ("stream" in name and "queued" not in name), name
            assert b" 503 " in half.recv(100)
        may_end.set()
        ended(running)
    assert running.server.exit_status == 3
    assert f"{len(asked) + 1} requests were cut" in no_traceback.text


def test_a_drain_that_ends_in_time_cuts_nothing(no_traceback: pytest.LogCaptureFixture) -> None:
    with servers.serving(servers.build()) as running:
        gate = Gate(running, 4)
        each = Asked(running.url, COMPLETIONS, TEXT | STREAM | {"max_tokens": 50})
        assert each.has_begun.wait(60.0)
        running.server.handle_exit(signal.SIGTERM, None)
        gate.open()
        each._thread.join()
    assert each.text.endswith("data: [DONE]\n\n") and '"length"' in each.text
    assert running.server.exit_status == 0


@pytest.mark.parametrize("fault", ["hangs", "dies"])
def test_an_engine_that_fails_is_told_to_every_request(
    no_traceback: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    clock = servers.Clock(monkeypatch)
    with servers.serving(servers.build(max_num_seqs=NUM_ROWS)) as running:
        slow(running)
        asked = ask_all(running)
        if fault == "hangs":
            gate = Gate(running)
            assert gate.reached.wait(60.0)
            clock.ahead += 61.0
        else:
            running.llm.engine.step = lambda: (_ for _ in ()).throw(SystemExit("the worst"))  # type: ignore[method-assign]
        for name, each in asked.items():
            assert "engine" in each.error()["message"], name
            assert each.status == (200 if "stream" in name and "queued" not in name else 503), name
        end = time.monotonic() + 60.0
        while running.service.engine_thread.num_in_flight:  # a place is given back just after its client has read the end
            assert time.monotonic() < end
            time.sleep(0.02)
        if fault == "hangs":  # it might go on; one that has died ends the server
            with running.client() as client:
                assert client.get("/readyz").status_code == client.get("/health").status_code == 503
                assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200
            running.server.handle_exit(signal.SIGTERM, None)
        assert running.server.has_ended.wait(60.0)  # though the engine's thread still hangs
        assert running.server.exit_status == 1
        if fault == "hangs":
            gate.open()
            running.service.engine_thread._thread.join(60.0)


HANGING = """
import threading
from echelon.engine import Engine
from echelon.server.config import ServerConfig
step, num_steps, make = Engine.step, 0, ServerConfig.__init__

def hang(self):
    global num_steps
    num_steps += 1
    if num_steps > 5:
        threading.Event().wait(3600.0)
    return step(self)

Engine.step = hang
ServerConfig.__init__ = lambda self, **values: make(self, **values, stall_timeout={stall_timeout})
"""


PROCESSES = {"second signal": (2, 3600.0, 3), "hung engine": (1, 1.0, 1)}


@pytest.mark.parametrize(("signals", "stall_timeout", "status"), [*PROCESSES.values()][: 2 if toys.PROVE else 1])
def test_the_exit_status_says_that_work_was_cut(signals: int, stall_timeout: float, status: int) -> None:
    """The process ends though its engine is in the middle of a step of an hour."""
    with servers.process("ngram", prelude=HANGING.format(stall_timeout=stall_timeout)) as (server, url, log):
        each = Asked(url, COMPLETIONS, TEXT | STREAM)
        assert each.has_begun.wait(60.0)
        for _ in range(signals):
            server.send_signal(signal.SIGTERM)
            while signals > 1 and "shutting down" not in "".join(log):
                time.sleep(0.01)
        assert each.error()["type"] == "server_error"
        assert server.wait(60.0) == status, "".join(log)
    assert "Traceback" not in "".join(log)
