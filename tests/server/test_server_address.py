"""Where a server listens: what is taken is said before a model is read, and what is free is said as it is."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

import pytest
import servers
from commands import in_process

import echelon.ray
from echelon import ConfigError
from echelon.demo import TARGET
from echelon.server.config import ServerConfig
from echelon.server.http import check_address


def test_a_port_that_is_taken_is_said_at_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.cli.serve.LLM", lambda *_, **__: pytest.fail("a model is read for nothing"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = in_process(capsys, monkeypatch)("serve", TARGET, "--port", port)
    assert done.returncode == 2
    assert f"nothing can listen on 127.0.0.1, port {port}: Address already in use; give another --port, or 0" in done.stderr


def test_no_address_of_this_machine_is_said() -> None:
    with pytest.raises(ConfigError, match=r"nothing can listen on 203\.0\.113\.7, port 8000: "):
        check_address(ServerConfig(host="203.0.113.7", api_keys=("k" * 16,)))
    check_address(ServerConfig(port=0))


@pytest.mark.parametrize("flags", [["--port", 0], ["--port", 8123, "--replicas", 2]], ids=["alone", "replicas"])
def test_a_name_with_brackets_is_printed_as_it_is(
    flags: list[object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(_llm: object, _config: ServerConfig, on_start: Callable[[str], None]) -> int:
        on_start("http://127.0.0.1:8123")
        return 0

    monkeypatch.setattr("echelon.cli.serve.LLM", lambda *_, **__: None)
    monkeypatch.setattr("echelon.server.http.serve_until_signal", serve)
    stand_ins = {
        "build_app": lambda *_, **__: None,
        "connect": lambda *_, **__: None,
        "run_until_signal": lambda _app, _config, on_start: on_start(),
    }
    for name, stand_in in stand_ins.items():  # which need Ray when they are asked for
        monkeypatch.setitem(vars(echelon.ray), name, stand_in)
    done = in_process(capsys, monkeypatch)("serve", TARGET, *flags, "--served-model-name", "my[b]model")
    assert done.returncode == 0
    assert "my[b]model on http://127.0.0.1:8123/v1, live at http://127.0.0.1:8123/" in done.stderr


def test_an_unknown_route_says_where_the_known_ones_are() -> None:
    with servers.serving(servers.build("ngram")) as running, running.client() as client:
        for method, path, status in (("POST", "/v1/responses", 404), ("GET", "/v1/completions", 405)):
            answer = client.request(method, path)
            assert answer.status_code == status and "GET /openapi.json" in answer.json()["error"]["message"]


def test_the_port_that_was_taken_is_printed() -> None:
    with servers.process("ngram") as (server, url, log):
        server.terminate()
        server.wait(60)
    said = "".join(log)
    assert re.search(rf" on {url}/v1, live at {url}/\n", said), said
    assert ":0/" not in said
