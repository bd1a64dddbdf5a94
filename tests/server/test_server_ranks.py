"""A server whose model is split among processes: with one of them it ends, and everyone is told."""

from __future__ import annotations

import os
import signal

import httpx
import psutil
import pytest
import servers
import toys
from test_server_endings import COMPLETIONS, STREAM, TEXT, Asked

from echelon.ops import compiled

pytestmark = pytest.mark.skipif(not compiled.is_built(), reason="several ranks need the compiled kernels")
CASES = [("-pp", True), ("-pp", False), ("-tp", True), ("-tp", False)]


@pytest.mark.parametrize(("flag", "is_busy"), CASES if toys.PROVE else CASES[:1])
def test_a_server_ends_with_a_worker_that_is_killed(flag: str, is_busy: bool) -> None:
    """In the middle of a request, and while nothing runs."""
    with servers.process("ngram", flag, "2") as (server, url, log):
        (worker,) = psutil.Process(server.pid).children()
        asked = Asked(url, COMPLETIONS, TEXT | STREAM) if is_busy else None
        if asked is not None:
            assert asked.has_begun.wait(60.0)
        os.kill(worker.pid, signal.SIGKILL)
        if asked is not None:
            assert asked.error()["type"] == "server_error"
        assert server.wait(60.0) == 1, "".join(log)
    assert not worker.is_running()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/health")
    assert "Traceback" not in "".join(log)
