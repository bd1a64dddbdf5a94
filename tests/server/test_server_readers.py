"""Clients that read late, or never: what waits for them is bounded, and what they are sent is whole or says why it is not."""

from __future__ import annotations

import gc
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import servers
from servers import PROMPTS, Running

from echelon.aio.request_handle import LOGPROB_BYTES
from echelon.sampling import Logprobs
from echelon.server import connection as connection_module
from echelon.server.serializers import SENT, StreamSerializer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_SAMPLES, NUM_TOKENS = 4, 120
LONG = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 1, "n": NUM_SAMPLES}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": (COMPLETIONS, LONG | {"prompt": PROMPTS[0], "logprobs": 20}),
    "chat": (CHAT, LONG | {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 20}),
}
NUM_LOGPROBS = NUM_SAMPLES * NUM_TOKENS


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system holds little, so that little output fills a connection."""
    monkeypatch.setattr(connection_module, "SEND_BYTES", 4096)


@contextmanager
def deaf_client(running: Running, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A client that has asked, and reads nothing by itself."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60.0)
        connection.connect(running.address)
        connection.sendall(servers.request_bytes(json.dumps(body), path))
        yield connection


def read(connection: socket.socket) -> str:
    """All that comes until the end of an answer, or of the connection."""
    received = b""
    try:
        while not received.endswith(b"0\r\n\r\n") and (part := connection.recv(2**16)):
            received += part
    except (ConnectionResetError, TimeoutError):
        pass
    return received.decode()


def events(received: str) -> list[dict[str, Any]]:
    """Of a stream in chunks; the last must be [DONE]."""
    body = received.partition("\r\n\r\n")[2]
    lines = [line.removeprefix("data: ") for line in body.split("\n") if line.startswith("data: ")]
    assert lines[-1].strip() == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def num_held() -> int:
    """Log-probabilities that are alive in this process."""
    gc.collect()
    return sum(type(each) is Logprobs and each is not SENT for each in gc.get_objects())


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)  # leaves the interpreter to the engine


def wait_until_finished(running: Running) -> None:
    """Until the engine has nothing to do, however much waits to be read."""
    while True:
        done = threading.Event()
        running.service.engine_thread._commands.put(lambda _engine, done=done: done.set())
        assert done.wait(60.0)
        if not running.llm.engine.has_work:
            return
        time.sleep(0.02)


def metric(running: Running, limit: str) -> float:
    with running.client() as client:
        lines = client.get("/metrics").text.splitlines()
    (line,) = [each for each in lines if each.startswith("echelon:unread_cut_total{") and f'limit="{limit}"' in each]
    return float(line.split()[-1])


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_reader_that_waits_for_the_engine_to_finish_gets_everything(kind: str) -> None:
    path, body = REQUESTS[kind]
    with servers.serving(servers.build(), max_unread_bytes=2**30) as running, running.client() as client:
        whole = client.post(path, json=body).json()["choices"]
        gate = servers.Gate(running)
        with deaf_client(running, path, body | {"stream": True}) as connection:
            assert gate.reached.wait(60.0)
            gate.open()
            wait_until_finished(running)
            chunks = events(read(connection))
        texts, reasons, num_logprobs = [""] * NUM_SAMPLES, [None] * NUM_SAMPLES, 0
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            texts[choice["index"]] += choice["text"] if kind == "completions" else choice["delta"]["content"]
            reasons[choice["index"]] = choice["finish_reason"]
            said = choice["logprobs"] or {}
            num_logprobs += len(said.get("tokens") or said.get("content") or ())
    assert texts == [c["text"] if kind == "completions" else c["message"]["content"] for c in whole]
    assert reasons == ["length"] * NUM_SAMPLES
    assert num_logprobs == NUM_LOGPROBS


@pytest.mark.parametrize("kind", REQUESTS)
def test_what_waits_for_a_reader_that_never_reads_is_bounded(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its rows leave, their log-probabilities are freed, and it is told why when it reads after all."""
    path, body = REQUESTS[kind]
    most = 40 * 21 * LOGPROB_BYTES  # the log-probabilities of forty tokens
    caplog.set_level(logging.WARNING)
    with servers.serving(servers.build(), max_unread_bytes=most) as running, servers.unharmed(running):
        before = num_held()
        with deaf_client(running, path, body | {"stream": True}) as connection:
            wait_for(lambda: metric(running, "stream") == 1)
            wait_until_finished(running)
            assert num_held() - before <= 40 + NUM_SAMPLES  # the bound, and a step's worth
            assert "does not read" in caplog.text
            *chunks, error = events(read(connection))
        assert error["error"]["code"] == "slow_reader"
        assert sum(len(chunk["choices"]) for chunk in chunks) < NUM_LOGPROBS
        assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


def test_time_that_the_server_takes_is_not_the_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part of an echo is not written before the engine has finished, and the answer is whole."""
    new = StreamSerializer.new
    path, body = REQUESTS["completions"]
    with servers.serving(servers.build(), max_unread_bytes=40 * 21 * LOGPROB_BYTES) as running, running.client() as client:

        def late(self: StreamSerializer, states: Any) -> Any:
            wait_until_finished(running)
            return new(self, states)

        monkeypatch.setattr(StreamSerializer, "new", late)
        lines = client.post(path, json=body | {"stream": True, "echo": True}).text.split("\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert all("error" not in chunk for chunk in chunks)
    told = [choice["logprobs"]["tokens"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert sum(map(len, told)) > NUM_LOGPROBS


def test_a_stream_that_is_read_holds_only_what_it_has_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    last = StreamSerializer.end

    def counted(self: StreamSerializer, states: Any) -> Any:
        held.append(sum(each is not SENT for s in self._job.sequences for each in s.logprobs))
        return last(self, states)

    monkeypatch.setattr(StreamSerializer, "end", counted)
    with servers.serving(servers.build()) as running, running.client() as client:
        for path, body in REQUESTS.values():
            assert client.post(path, json=body | {"stream": True}).status_code == 200
    assert held == [0, 0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_in_time_is_cut_visibly(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    path, body = REQUESTS["completions"]
    with servers.serving(servers.build(), write_timeout=0.3, max_unread_bytes=2**30) as running:
        with deaf_client(running, path, body | {"stream": stream}) as connection:
            wait_for(lambda: metric(running, "time") == 1)
            assert "[DONE]" not in read(connection)
        servers.settle(running)
    assert "a connection is cut" in caplog.text


def test_the_buffers_of_all_connections_are_bounded_together(caplog: pytest.LogCaptureFixture) -> None:
    """Whole answers that nobody reads: those that have waited longest are cut, so that the newest may wait."""
    caplog.set_level(logging.WARNING)
    path, body = REQUESTS["completions"]
    with servers.serving(servers.build(), max_buffer_bytes=2**17) as running:
        with deaf_client(running, path, body) as first, deaf_client(running, path, body) as second, deaf_client(running, path, body):
            wait_for(lambda: metric(running, "buffers") == 2)
            protocols = list(running.server.server_state.connections)
            assert sum(each.num_unread_bytes > 0 for each in protocols) <= 1  # type: ignore[union-attr]
        for connection in (first, second):
            connection.close()
        servers.settle(running)
    assert caplog.text.count("a connection is cut") == 2
