"""The page at `/` and what it reads, without a browser: who gets it, what it may do, and where its figures come from."""

from __future__ import annotations

import re
import threading
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import httpx
import pytest
import servers
from servers import MODEL, PROMPTS, Gate

from echelon.server.page import PAGE

KEY = "a-key-of-thirty-two-characters-x"
TEXT = PAGE.decode()


class Elements(HTMLParser):
    """Attributes of a page's elements, and the texts of those that are code."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.code: list[tuple[str, str]] = []
        self._tag = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.attributes += [(tag, *attribute) for attribute in attrs]

    def handle_data(self, data: str) -> None:
        if self._tag in self.CDATA_CONTENT_ELEMENTS and data.strip():
            self.code.append((self._tag, data))


@pytest.fixture(scope="module")
def elements() -> Elements:
    parsed = Elements()
    parsed.feed(TEXT)
    return parsed


def policy(answer: httpx.Response) -> dict[str, list[str]]:
    """Content-Security-Policy by directive."""
    words = [directive.split() for directive in answer.headers["content-security-policy"].split(";")]
    return {name: sources for name, *sources in words}


def test_the_page_is_behind_the_key_and_asks_for_it() -> None:
    """Refused, as every route is, but by a page: a browser cannot send a key with the first request."""
    with servers.serving(servers.build(), api_keys=(KEY,)) as running, running.client() as client:
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}):
            answer = client.get("/", headers=given)
            assert (answer.status_code, answer.content) == (401, PAGE)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "default-src" in policy(answer)
        for method, path in (("GET", "/stats"), ("GET", "/index.html"), ("POST", "/"), ("HEAD", "/")):
            answer = client.request(method, path)
            assert (answer.status_code, answer.headers["content-type"]) == (401, "application/json")
        opened = client.get("/", headers={"authorization": f"Bearer {KEY}"})
        assert (opened.status_code, opened.content) == (200, PAGE)


def test_strangers_get_no_page_without_a_key() -> None:
    with servers.serving(servers.build()) as running, running.client(headers={"host": "evil.example"}) as client:
        assert {client.get(path).status_code for path in ("/", "/stats")} == {403}


def test_a_browser_may_run_and_load_nothing_else(elements: Elements) -> None:
    with servers.serving(servers.build()) as running, running.client() as client:
        answer = client.get("/")
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for tag, code in elements.code:
        hashes[tag].append(f"'sha256-{b64encode(sha256(code.encode()).digest()).decode()}'")
    assert policy(answer) == {
        "default-src": ["'none'"],
        "script-src": hashes["script"],
        "style-src": hashes["style"],
        "connect-src": ["'self'"],
        "img-src": ["data:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
        "frame-ancestors": ["'none'"],
        "require-trusted-types-for": ["'script'"],
        "trusted-types": ["'none'"],
    }
    assert len(hashes["script"]) == len(hashes["style"]) == 1
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert (answer.headers["cache-control"], answer.headers["x-content-type-options"]) == ("no-store", "nosniff")


def test_the_page_names_no_other_host_and_makes_no_markup(elements: Elements) -> None:
    assert not re.search(r"https?:|[\"'`(]//|@import|url\(", TEXT)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|\beval\b", TEXT)
    loads = {(tag, value) for tag, name, value in elements.attributes if name in ("src", "href", "action", "data", "srcset")}
    assert loads == {("link", "data:,"), ("a", "openapi.json"), ("a", "metrics")}
    names = {name for _, name, _ in elements.attributes}
    assert not any(name.startswith("on") or name == "style" for name in names), "the policy lets none of them work"


def test_the_script_names_elements_that_there_are(elements: Elements) -> None:
    ids = [value for _, name, value in elements.attributes if name == "id"]
    used = re.findall(r"\$\(\"([\w-]+)\"\)|say\(\"([\w-]+)\"|draw\(\"([\w-]+)\"", TEXT)
    assert len(ids) == len(set(ids))
    assert {name for names in used for name in names if name} <= set(ids)


def test_stats_are_those_of_the_metrics() -> None:
    with servers.serving(servers.build("ngram")) as running, running.client() as client:
        body = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
        used = [client.post("/v1/completions", json=body | {"prompt": p * 6}).json() for p in (*PROMPTS, PROMPTS[0])]
        servers.settle(running)
        stats, text = client.get("/stats").json(), client.get("/metrics").text
        lines = [line.removeprefix("echelon:") for line in text.splitlines() if not line.startswith("#")]
        values = {line.rsplit(" ", 1)[0].replace('model_name="pair"', ""): float(line.rsplit(" ", 1)[1]) for line in lines}
        truth = running.llm.get_counters()
        assert {name: stats[name] for name in stats if name in truth} == {
            name: {str(k): n for k, n in truth[name].items()} if isinstance(truth[name], dict) else truth[name]
            for name in stats
            if name in truth
        }
    assert stats["num_emitted_tokens"] == values["generation_tokens_total{}"] == sum(u["usage"]["completion_tokens"] for u in used)
    assert stats["num_accepted_tokens"] == values["spec_decode_num_accepted_tokens_total{}"] == sum(stats["num_accepted_by_position"]) > 0
    assert stats["num_prefix_hits"] == values["prefix_cache_hits_total{}"] > 0
    assert sum(stats["num_steps_by_draft_length"].values()) == stats["num_row_steps"]
    assert (stats["model"]["id"], stats["status"], stats["max_num_seqs"]) == (MODEL, "ready", 64)
    assert stats["drafter"] == {"method": "ngram", "model": None, "num_speculative_tokens": 5}
    assert stats["uptime_seconds"] > 0.0


def test_stats_say_what_runs_and_what_waits() -> None:
    with servers.serving(servers.build("plain", max_num_seqs=2)) as running, running.client() as client:
        gate = Gate(running, num_steps=1)
        body = {"prompt": PROMPTS[:3], "max_tokens": 3, "ignore_eos": True}
        asking = threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": body})
        asking.start()
        assert gate.reached.wait(60.0)
        stats = client.get("/stats").json()
        assert (stats["num_running"], stats["num_waiting"], stats["drafter"]) == (2, 1, None)
        assert stats["num_free_kv_blocks"] < stats["num_kv_blocks"]
        gate.open()
        asking.join()
        servers.settle(running)
        running.service.engine_thread.is_draining = True
        assert client.get("/stats").json()["status"] == "draining"
