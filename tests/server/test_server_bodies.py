"""However a body arrives, reading it costs the server a bounded amount of work, and others are served meanwhile."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import h11
import pytest
import servers
from servers import Running

from echelon.server.connection import READ_BYTES, CountingConnection, TooManyPiecesError

HEAD = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{}\r\n\r\n"
CHUNKED, COUNTED = "Transfer-Encoding: chunked", "Content-Length: 1000000"
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/livez")
MILLION = 1_000_000
ONE_BYTE = b"1\r\nx\r\n"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with servers.serving(servers.build()) as server:
        yield server


def loop_seconds() -> float:
    """Processor time of the thread that serves."""
    thread = next(t for t in threading.enumerate() if t.name == "server")
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def send_all(connection: socket.socket, data: bytes) -> None:
    """As much as the server takes."""
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(data)


def status_of(connection: socket.socket) -> int:
    return int(connection.recv(100).split()[1])


@pytest.mark.parametrize("path", PATHS)
def test_a_body_of_a_million_chunks_costs_little_processor_time(running: Running, path: str) -> None:
    """Before: 10.8 s. Every chunk costs the parser about 10 µs, however small it is."""
    with running.connect() as connection:
        before = loop_seconds()
        connection.sendall(HEAD.format(path, CHUNKED).encode())
        send_all(connection, ONE_BYTE * MILLION)
        status = status_of(connection)
        assert loop_seconds() - before <= 3.0
        assert status == 413
    servers.settle(running)


@pytest.mark.parametrize("piece", [b"x", ONE_BYTE], ids=["bytes", "chunks"])
def test_a_body_is_refused_after_so_many_reads_or_chunks(piece: bytes) -> None:
    """One byte a segment: each is a read of its own. Counted from each request's head."""
    connection = CountingConnection(2**15, 1024)
    framing = COUNTED if piece == b"x" else CHUNKED
    connection.receive_data(HEAD.format(PATHS[0], framing).encode())
    assert isinstance(connection.next_event(), h11.Request)

    def feed() -> None:
        connection.receive_data(piece)
        while connection.next_event() is not h11.NEED_DATA:
            pass

    for _ in range(512):  # a read and a piece of data each
        feed()
    with pytest.raises(TooManyPiecesError, match="1024 pieces"):
        feed()


def test_others_are_served_while_a_body_of_many_chunks_is_read(running: Running) -> None:
    """The loop parses no more than one small read at a time."""
    longest = []
    with running.connect() as slow, running.client() as client:
        protocol = running.server.config.http_protocol_class
        original = protocol.data_received  # type: ignore[union-attr]

        def measured(self: object, data: bytes) -> None:
            longest.append(len(data))
            original(self, data)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(protocol, "data_received", measured)
            slow.sendall(HEAD.format(PATHS[0], CHUNKED).encode())
            sender = threading.Thread(target=send_all, args=(slow, ONE_BYTE * (MILLION // 10)))
            sender.start()
            assert client.get("/livez").status_code == 200
            assert client.post(PATHS[0], json={"prompt": "a", "max_tokens": 2}).status_code == 200
            sender.join()
        assert max(longest) <= READ_BYTES
        assert status_of(slow) == 413


def chunks_of(body: bytes, size: int) -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(f"{len(p):x}\r\n".encode() + p + b"\r\n" for p in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 1000])
def test_a_body_in_few_chunks_is_read_however_small_they_are(running: Running, size: int) -> None:
    """A serializer that writes token by token stays welcome; and the next request on the connection counts anew."""
    config = running.service.config
    filler = " " * min(config.max_body_pieces // 2 * size, config.max_body_bytes - 1000)
    body = json.dumps({"prompt": "import os\n", "max_tokens": 2, "temperature": 0}) + filler
    with running.connect() as connection, running.client() as client:
        expected = client.post(PATHS[0], content=body.rstrip(), headers={"content-type": "application/json"}).json()["choices"]
        for _ in range(2):
            connection.sendall(HEAD.format(PATHS[0], CHUNKED).encode() + chunks_of(body.encode(), size))
            received = b""
            while b'"metrics"' not in received:
                received += connection.recv(2**16)
            assert json.loads(received.partition(b"\r\n\r\n")[2])["choices"] == expected


def test_the_largest_body_is_read_in_one_piece_as_in_many(running: Running) -> None:
    limit = running.service.config.max_body_bytes
    body = json.dumps({"prompt": "a", "max_tokens": 1})
    with running.client() as client:
        answer = client.post(PATHS[0], content=body + " " * (limit - len(body)), headers={"content-type": "application/json"})
        assert answer.status_code == 200
