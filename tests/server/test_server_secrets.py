"""Whatever fails, no secret is shown: not in errors, logs, answers to others, metrics, or what a validator says."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import servers
import test_server_faults as faults
from pydantic import SecretStr, ValidationError
from servers import Running

from echelon.cli import main
from echelon.demo import TARGET
from echelon.errors import ConfigError
from echelon.server.config import ServerConfig, read_keys

MARK = "hunter2"  # part of every secret here
GOOD = f"{MARK}-a-key-of-thirty-two-characters"
KEY_FILES: dict[str, bytes] = {
    "short": f"{MARK}\n".encode(),
    "short beside good ones": f"{GOOD}\n{MARK}\n{GOOD}x\n".encode(),
    "spaces": f"{MARK} and a passphrase of words\n".encode(),
    "an assignment": f"export API_KEY = {GOOD}\n".encode(),
    "a comment": f"# {GOOD}\n{GOOD}\n".encode(),
    "json": json.dumps({"keys": [GOOD, MARK]}, indent=1).encode(),
    "accents": f"{MARK}-é-and-long-enough-to-be-a-key\n".encode(),
    "control characters": f"{MARK}-\x07\x1b[31m-long-enough-to-be-a-key\n".encode(),
    "zero bytes": f"{MARK}\0{GOOD}\n".encode(),
    "latin-1": f"{GOOD}-é\n".encode("latin-1"),
    "utf-16": f"{GOOD}\n".encode("utf-16"),
    "a byte-order mark": f"\ufeff{GOOD}\n".encode(),
    "binary": b"\xff\xfe\x00" + GOOD.encode(),
}


def config_from(path: Path) -> ServerConfig:
    return ServerConfig(api_keys=read_keys(path))


def everything_about(error: BaseException) -> str:
    """What any log or debugger-free report would show of an exception and of those behind it."""
    shown = "".join(traceback.format_exception(error))
    behind: BaseException | None = error
    while behind is not None:
        shown += f"{behind} {behind!r} {behind.args}" if not isinstance(behind, ValidationError) else f"{behind} {behind!r}"
        behind = behind.__cause__
    return shown


@pytest.mark.parametrize("form", KEY_FILES)
def test_no_form_of_a_bad_keys_file_shows_a_key(form: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(KEY_FILES[form])
    with pytest.raises(ConfigError) as failure:
        config_from(path)
    assert MARK not in everything_about(failure.value)


@pytest.mark.parametrize("path", [GOOD, f"{GOOD}/x", f"{GOOD}\0", MARK * 200, "."])
def test_a_key_in_the_place_of_its_file_is_not_shown(path: str) -> None:
    with pytest.raises(ConfigError, match="one key a line") as failure:
        config_from(Path(path))
    assert MARK not in everything_about(failure.value)


@pytest.mark.parametrize(
    "values",
    [
        {"api_keys": (MARK,)},
        {"api_keys": GOOD},
        {"api_keys": {GOOD: 1}},
        {"api_keys": (GOOD, 5, MARK.encode())},
        {"api_keys": (SecretStr(MARK),)},
        {"api_keys": (GOOD,), "port": -1},
        {"api_keys": (GOOD,), "unknown": 1},
        {"api_key": GOOD},
    ],
)
def test_no_bad_value_beside_a_key_shows_it(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as failure:
        ServerConfig(**values)
    assert MARK not in everything_about(failure.value)
    with pytest.raises(Exception, match="ServerConfig") as unexplained:
        ServerConfig.__pydantic_validator__.validate_python(values)
    assert MARK not in str(unexplained.value)


def test_a_configuration_does_not_print_its_keys() -> None:
    config = ServerConfig(api_keys=(GOOD,))
    for shown in (repr(config), str(config), f"{config.model_dump()}", config.model_dump_json()):
        assert MARK not in shown


COMMANDS: dict[str, list[str]] = {
    "a short key": ["--api-key-file", "keys"],
    "a key as its file": ["--api-key-file", GOOD],
    "an option that is none": [f"--api-key={GOOD}"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_shows_no_key(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither does it show what stands in the environment."""
    (tmp_path / "keys").write_text(f"{MARK}\n")
    monkeypatch.chdir(tmp_path)
    for secret in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY", "API_KEY", "ECHELON_API_KEY"):
        monkeypatch.setenv(secret, f"{MARK}-{secret}")
    monkeypatch.setattr(sys, "argv", ["echelon", "serve", str(TARGET), "--port", "0", *COMMANDS[name]])
    with pytest.raises(SystemExit) as end:
        main()
    shown = "".join(capfd.readouterr())
    assert end.value.code == 2 and "rror" in shown
    assert MARK not in shown + caplog.text


# While serving: the client's key, its headers, and prompts, of which docs/serving.md says that no log holds them


HEADERS = {
    "authorization": f"Bearer {GOOD}",
    "cookie": f"session={MARK}",
    "x-api-key": f"{MARK}-x",
    "proxy-authorization": f"Basic {MARK}",
}
PROMPT = f"{MARK} xylophone"
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": PROMPT, "n": -1}),
    ("/v1/completions", {"prompt": PROMPT, "stop": 5, "user": MARK}),
    ("/v1/completions", {"prompt": [PROMPT, 5]}),
    ("/v1/completions", {"prompt": PROMPT, "allowed_token_ids": [0], "min_tokens": 1, "max_tokens": 2}),
    ("/v1/completions", {"prompt": PROMPT * 10_000}),
    ("/v1/completions", {"prompt": PROMPT + "\ud800"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT, "name": 5}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT * 10_000}]}),
    ("/v1/chat/completions", {"messages": PROMPT}),
    ("/tokenize", {"prompt": PROMPT, "messages": []}),
    ("/tokenize", {"prompt": PROMPT * 10_000}),
    ("/detokenize", {"tokens": [PROMPT]}),
]
RAW = [
    f"GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {GOOD}\0\r\n\r\n",
    f"GET /version HTTP/1.1\r\nHost: localhost\r\n{GOOD}\r\n\r\n",
    f"{GOOD} / HTTP/9.9\r\n\r\n",
    f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {GOOD}\r\nTransfer-Encoding: {MARK}\r\n\r\n",
    f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {GOOD}\r\nContent-Length: {MARK}\r\n\r\n",
    f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {GOOD}\r\nTransfer-Encoding: chunked\r\n\r\n{MARK}\r\n",
]


def shown_by_server(running: Running, capture: pytest.LogCaptureFixture, streams: pytest.CaptureFixture[str]) -> str:
    """Logs, what the process wrote, and /metrics."""
    with running.client(headers={"authorization": f"Bearer {GOOD}"}) as client:
        metrics = client.get("/metrics").text
    assert "request_success" in metrics
    logged = [f"{r.getMessage()} {r.exc_text or ''} {r.args}" for r in capture.records if not r.name.startswith(("httpx", "httpcore"))]
    assert not any(r.exc_info for r in capture.records)
    return "\n".join(logged) + "".join(streams.readouterr()) + metrics


def test_no_failing_request_shows_a_secret(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.DEBUG)
    answers = []
    with servers.serving(servers.build(max_model_len=64), api_keys=(GOOD,)) as running:
        for key in ("wrong", MARK, GOOD + "x", GOOD):
            with running.client(headers=HEADERS | {"authorization": f"Bearer {key}"}) as client:
                asked = [*BODIES, *((path, body | {"stream": True}) for path, body in BODIES if path.startswith("/v1"))]
                answers += [
                    client.post(path, content=json.dumps(body), headers={"content-type": "application/json"}) for path, body in asked
                ]
                answers.append(client.get("/v1/models", params={"key": GOOD}, headers={"authorization": f"Basic {GOOD}"}))
                answers.append(client.post("/v1/completions", content=f'{{"prompt": "{PROMPT}'))
        for raw in RAW:
            with running.connect() as connection:
                connection.sendall(raw.encode())
                assert MARK not in connection.recv(2**16).decode()
        shown = shown_by_server(running, caplog, capfd)
    assert all(a.status_code >= 400 for a in answers), [(a.request.url, a.status_code) for a in answers if a.status_code < 400]
    assert MARK not in shown
    assert MARK not in "".join(a.text for a in answers) + "".join(str(a.headers) for a in answers)


@pytest.mark.parametrize("site", faults.SITES)
def test_no_fault_inside_shows_a_secret(site: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """The exception's own text holds the prompt, as those of tokenizers and drafters do."""
    caplog.set_level(logging.DEBUG)
    fault, _ = faults.SITES[site]
    failing = faults.failing

    def telling(patch: Any, owner: Any, name: str, is_hit: Callable[..., bool], error: Exception) -> None:
        failing(patch, owner, name, is_hit, type(error)(f"{GOOD} {PROMPT}"))

    with servers.serving(servers.build("draft_model", max_num_seqs=8), api_keys=(GOOD,)) as running, pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "failing", telling)
        fault(patch, running.llm)
        with running.client(headers=HEADERS) as client:
            answers = [client.post("/v1/completions", json=faults.victim(stream)) for stream in (False, True)]
        shown = shown_by_server(running, caplog, capfd)
    assert MARK not in shown
    if site != "admit":  # a refusal is worded for its own client
        assert MARK not in "".join(a.text for a in answers)
