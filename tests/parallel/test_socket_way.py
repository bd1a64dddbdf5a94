"""The socket between rank 0 and a worker: messages come whole, in whatever pieces, or not at all."""

from __future__ import annotations

import fcntl
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from echelon.parallel import serving
from echelon.parallel.children import ChildRanks
from echelon.parallel.serving import SocketWay

LARGE = 3_000_000  # bytes, more than a socket holds


@pytest.fixture(params=[0, 1], ids=["sleeps", "looks first"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, SocketWay]]:
    """Rank 0's end of a socket pair, and a worker's way to it, which an application's default timeout has made one that does not wait."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with monkeypatch.context() as patch:
        patch.setattr(serving.os, "dup", lambda _: theirs.detach())
        way = SocketWay(1, 2, -1, request.param)
    with ours, way._socket:
        yield ours, way


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(8, "big") + message


@pytest.mark.parametrize("size", [1, 300, LARGE])
def test_messages_come_in_order_and_whole(ends: tuple[socket.socket, SocketWay], size: int) -> None:
    ours, way = ends
    messages = [bytes([i]) * (size + i) for i in range(3)]
    writer = threading.Thread(target=lambda: [ours.sendall(framed(message)) for message in messages])
    writer.start()
    assert [way.message() for _ in messages] == messages
    writer.join()


def test_a_message_in_pieces_of_one_byte(ends: tuple[socket.socket, SocketWay]) -> None:
    ours, way = ends
    writer = threading.Thread(target=lambda: [ours.send(bytes([each])) for each in framed(b"a plan")])
    writer.start()
    assert way.message() == b"a plan"
    writer.join()


@pytest.mark.parametrize("num_bytes", [0, 3, 8, 500])
def test_a_socket_that_is_closed_ends_with_nothing(ends: tuple[socket.socket, SocketWay], num_bytes: int) -> None:
    ours, way = ends
    ours.sendall(framed(bytes(1000))[:num_bytes])
    ours.close()
    assert way.message() == b""


def test_a_socket_that_is_closed_over_an_unread_answer_ends_with_nothing(ends: tuple[socket.socket, SocketWay]) -> None:
    ours, way = ends
    way.answer({"error": "none"})
    ours.close()
    assert way.message() == b""


def test_a_message_that_finds_no_room_is_sent_as_room_is_made() -> None:
    """To a descriptor that `select` would refuse; rank 0 looks meanwhile whether its workers live."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], 4096) if limits[1] > 0 else 4096, limits[1]))
    group, looks, came = ChildRanks.__new__(ChildRanks), [], bytearray()
    ours, theirs = socket.socketpair()
    with theirs, socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD, 1100)) as high:
        ours.close()
        high.setblocking(False)
        group._connections = [high]

        def read() -> None:
            while len(came) < LARGE + 8:
                came.extend(theirs.recv(2**16))

        reader = threading.Thread(target=read)

        def check() -> None:
            looks.append(len(came))
            if not reader.is_alive() and not came:
                reader.start()

        group.check = check  # type: ignore[method-assign]
        group._send(bytes(LARGE))
        reader.join()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert looks and bytes(came) == framed(bytes(LARGE))
