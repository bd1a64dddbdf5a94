"""The server's prefix cache: what requests of one API key share, and what those of another never learn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import servers

KEYS = ("key-of-the-first-tenant", "key-of-the-second-tenant")
PROMPT = servers.PROMPTS[2] * 6


@pytest.fixture(scope="module")
def running() -> Iterator[servers.Running]:
    with servers.serving(servers.build(), api_keys=KEYS) as running:
        yield running


def usage(running: servers.Running, prompt: str, key: str = KEYS[0], **more: Any) -> dict[str, Any]:
    with running.client(headers={"Authorization": f"Bearer {key}"}) as client:
        answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, "temperature": 0, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]  # type: ignore[no-any-return]


def cached(running: servers.Running, prompt: str, key: str = KEYS[0], **more: Any) -> int:
    return int(usage(running, prompt, key, **more)["prompt_tokens_details"]["cached_tokens"])


def test_a_key_finds_its_own_prompts_and_those_of_no_other(running: servers.Running) -> None:
    whole = (usage(running, "a" + PROMPT)["prompt_tokens"] - 1) // 16 * 16
    assert whole > 16
    assert [cached(running, "a" + PROMPT, key) for key in (*KEYS, *KEYS)] == [whole, 0, whole, whole]


def test_a_salt_narrows_what_a_key_shares(running: servers.Running) -> None:
    prompt = "b" + PROMPT
    salts: tuple[dict[str, Any], ...] = ({}, {"cache_salt": "x"}, {"cache_salt": "y"}, {"cache_salt": "x"}, {})
    hits = [cached(running, prompt, **salt) > 0 for salt in salts]
    assert hits == [False, False, False, True, True]
    assert cached(running, prompt, KEYS[1], cache_salt="x") == 0, "a salt names nothing of another key's"


@pytest.mark.parametrize("salt", ["", "x" * 257, 5, ["x"], {"x": 1}, True, "x" * 10**6])
def test_a_salt_that_is_none_is_refused(running: servers.Running, salt: Any) -> None:
    with running.client(headers={"Authorization": f"Bearer {KEYS[0]}"}) as client:
        answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "cache_salt": salt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"


def test_a_salt_without_keys_still_tells_callers_apart() -> None:
    with servers.serving(servers.build()) as running:
        salts: tuple[dict[str, Any], ...] = ({"cache_salt": "x"}, {"cache_salt": "y"}, {"cache_salt": "x"})
        assert [cached(running, PROMPT, **salt) > 0 for salt in salts] == [False, False, True]


def test_two_servers_do_not_make_the_same_salt() -> None:
    middlewares = []
    for _ in range(2):
        with servers.serving(servers.build(), api_keys=KEYS) as running:
            cached(running, PROMPT)
            middlewares.append(next(iter(running.llm.engine.target.cache.tables.pool._published)))
    assert middlewares[0] != middlewares[1]


def test_metrics_count_tokens_looked_up_and_found(running: servers.Running) -> None:
    def counts() -> list[float]:
        with running.client(headers={"Authorization": f"Bearer {KEYS[0]}"}) as client:
            lines = client.get("/metrics").text.splitlines()
        names = ("echelon:prefix_cache_queries_total{", "echelon:prefix_cache_hits_total{")
        return [float(next(line for line in lines if line.startswith(name)).split()[-1]) for name in names]

    before = counts()
    spent = [usage(running, "c" + PROMPT) for _ in range(2)]
    after = counts()
    assert after[0] - before[0] == sum(u["prompt_tokens"] for u in spent)
    assert after[1] - before[1] == sum(u["prompt_tokens_details"]["cached_tokens"] for u in spent) > 0


def test_a_server_without_it_finds_nothing() -> None:
    with servers.serving(servers.build(enable_prefix_caching=False)) as running:
        assert [cached(running, PROMPT) for _ in range(2)] == [0, 0]
