"""A server whose model is split among processes, its own or started by others: with one of them it ends, and everyone is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import httpx
import psutil
import pytest
import servers
import toys
from meetings import free_port
from test_server_endings import COMPLETIONS, STREAM, TEXT, Asked

from echelon import SamplingParams
from echelon.ops import compiled
from echelon.parallel.summons import TOKEN

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


@pytest.mark.parametrize("flag", ["-tp", "-pp"] if toys.PROVE else ["-tp"])
def test_ranks_that_others_have_started_serve(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are the same command, as `torchrun` starts it; they end with the server."""
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), TOKEN: "a token of this test"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen([sys.executable, "-m", "echelon", "serve", "elsewhere", flag, "2"], env=os.environ | {"RANK": "1"}) as worker:
        monkeypatch.setenv("RANK", "0")
        with servers.process("ngram", flag, "2") as (server, url, log):
            answer = httpx.post(url + COMPLETIONS, json=TEXT | {"max_tokens": 20}, timeout=60.0)
            server.send_signal(signal.SIGTERM)
            assert server.wait(60.0) == 0, "".join(log)
        assert worker.wait(60.0) == 0
    alone = servers.build("ngram").generate(TEXT["prompt"], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert answer.json()["choices"][0]["text"] == alone[0].outputs[0].text
