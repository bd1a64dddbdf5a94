"""What replicas answer, and a client gets of it: one answer, although several replicas gave parts of it. No cluster is needed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest
import servers
from prometheus_client.parser import text_string_to_metric_families

from echelon import LLM, SamplingParams
from echelon.demo import TARGET
from echelon.errors import MissingExtraError, UnavailableError
from echelon.ray.affinity import affinity_of
from echelon.ray.merged_metrics import merged
from echelon.ray.replica import Replica
from echelon.ray.resumption import ResumableAnswer
from echelon.sampling import seed_of
from echelon.server.config import ServerConfig
from echelon.server.middleware import Message, ResponseSender, Scope

ASKED: dict[str, Any] = {"prompt": servers.PROMPTS[2], "max_tokens": 24, "temperature": 0.9}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "def main():"}], "max_tokens": 12, "temperature": 0.9}


@contextmanager
def replicas(*methods: str) -> Iterator[list[Replica]]:
    """One for each method; another drafter cuts a stream into other chunks."""
    config = ServerConfig(served_model_name=servers.MODEL)
    made = [Replica(str(TARGET), servers.SPECULATIVE[m], {"max_num_seqs": 4, "dtype": "float32"}, config) for m in methods]
    try:
        yield made
    finally:
        for replica in made:
            asyncio.run(replica.close())


@pytest.fixture(scope="module")
def two() -> Iterator[list[Replica]]:
    with replicas("ngram", "plain") as made:
        yield made


def scope_of(path: str = "/v1/completions", **headers: str) -> Scope:
    named = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        *((key.replace("_", "-").encode(), value.encode()) for key, value in headers.items()),
    ]
    return {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": named}


def answer(replica: Replica, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> AsyncIterator[Message]:
    return replica.answer(scope_of(path, **headers), json.dumps(body).encode())


async def messages_of(messages: AsyncIterator[Message]) -> list[Message]:
    return [message async for message in messages]


def events_of(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in body.decode().split("\n\n") if line.startswith("data: {")]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for e in events for choice in e["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


class Client:
    """What is sent to it, as an ASGI server would send it."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages)


async def answered(parts: list[tuple[list[Message], int]]) -> Client:
    """A client that gets of each replica's messages only the first so many, then those of the next."""
    client = Client()
    resumable = ResumableAnswer(ResponseSender(client.send))
    for i, (messages, count) in enumerate(parts):
        if i:
            resumable.restart()
        for message in messages[:count]:
            await resumable.take(message)
    return client


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), 120.0))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stream_options": {"include_usage": True}}], ids=["one", "samples", "usage"])
def test_a_stream_goes_on_at_another_replica_wherever_the_first_ends(two: list[Replica], path: str, more: dict[str, Any]) -> None:
    body = (CHAT if "chat" in path else ASKED) | {"stream": True} | more

    async def work() -> None:
        first, second = [await messages_of(answer(replica, body, path, x_request_id="r1")) for replica in two]
        whole = events_of(b"".join(m.get("body", b"") for m in first))
        assert text_of(whole)
        for count in range(len(first)):
            client = await answered([(first, count), (second, len(second))])
            events = events_of(client.body)
            assert [text_of(events, i) for i in range(2)] == [text_of(whole, i) for i in range(2)], count
            assert len({e["id"] for e in events}) == 1, count
            assert client.body.count(b"[DONE]") == 1, count
            assert [m["type"] for m in client.messages].count("http.response.start") == 1
            reasons = [(c["index"], c["finish_reason"]) for e in events for c in e["choices"] if c["finish_reason"]]
            assert sorted(reasons) == sorted({*reasons}), count
            assert sum("usage" in e and not e["choices"] for e in events) == len(more.get("stream_options", {})), count

    run(work)


def test_a_whole_answer_is_sent_whole(two: list[Replica]) -> None:
    async def work() -> None:
        first, second = [await messages_of(answer(replica, ASKED, x_request_id="r2")) for replica in two]
        client = await answered([(first, 1), (second, len(second))])
        assert json.loads(client.body)["choices"] == json.loads(first[1]["body"])["choices"]

    run(work)


def test_chunks_with_lists_of_tokens_are_not_cut(two: list[Replica]) -> None:
    async def work() -> None:
        body = ASKED | {"stream": True, "logprobs": 1}
        first = await messages_of(answer(two[0], body))
        with pytest.raises(UnavailableError, match="ask again"):
            await answered([(first, len(first) // 2), (first, 1)])

    run(work)


def test_a_request_without_a_seed_has_the_noise_of_its_id(two: list[Replica]) -> None:
    async def texts(replica: Replica, **headers: str) -> list[str]:
        found = [await messages_of(answer(replica, ASKED | {"prompt": servers.PROMPTS[:2]}, **headers))]
        return [choice["text"] for messages in found for choice in json.loads(messages[1]["body"])["choices"]]

    async def work() -> None:
        mine = await texts(two[0], x_request_id="mine")
        assert await texts(two[1], x_request_id="mine") == mine
        assert await texts(two[0], x_request_id="other") != mine
        with LLM(str(TARGET), max_num_seqs=4, dtype="float32") as llm:
            params = [SamplingParams(temperature=0.9, max_tokens=24, seed=seed_of("mine", i)) for i in range(2)]
            assert [out.outputs[0].text for out in llm.generate(servers.PROMPTS[:2], params)] == mine
        seeded = [await messages_of(answer(two[0], ASKED | {"seed": 1}, x_request_id=name)) for name in ("mine", "other")]
        assert len({json.loads(messages[1]["body"])["choices"][0]["text"] for messages in seeded}) == 1

    run(work)


def test_who_leaves_ends_the_work(two: list[Replica]) -> None:
    async def work() -> None:
        body = ASKED | {"stream": True, "max_tokens": 500, "ignore_eos": True}
        async with aclosing(answer(two[0], body)) as messages:  # type: ignore[type-var]
            async for message in messages:
                if message.get("body"):
                    break
        service = two[0]._app.service
        while service.llm.engine.has_work or service.engine_thread.num_in_flight:
            await asyncio.sleep(0)

    run(work)


def test_a_replica_is_healthy_while_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    with replicas("plain") as (replica,):
        replica.check_health()
        replica._app.service.engine_thread.is_draining = True
        with pytest.raises(UnavailableError):
            replica.check_health()


def chat(*texts: str, system: str = "") -> bytes:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return json.dumps({"messages": [{"role": "system", "content": system}, *turns] if system else turns}).encode()


def test_turns_of_a_conversation_have_one_session() -> None:
    scope = scope_of()
    assert affinity_of(scope, chat("a")) == affinity_of(scope, chat("a", "b", "c"))
    assert affinity_of(scope, chat("a", system="s")) == affinity_of(scope, chat("a", "b", "c", system="s"))
    assert affinity_of(scope, chat("a", system="s")) != affinity_of(scope, chat("b", system="s"))
    long = "word " * 100
    assert affinity_of(scope, json.dumps({"prompt": long}).encode()) == affinity_of(scope, json.dumps({"prompt": long + "more"}).encode())
    assert affinity_of(scope, json.dumps({"prompt": [1] * 64}).encode()) == affinity_of(scope, json.dumps({"prompt": [[1] * 65]}).encode())


def test_sessions_that_are_named_hold_whatever_is_asked_and_keys_are_apart() -> None:
    named = scope_of(x_session_id="s1")
    assert affinity_of(named, chat("a")) == affinity_of(named, chat("b"))
    assert affinity_of(named, b"") != affinity_of(scope_of(x_session_id="s2"), b"")
    assert affinity_of(scope_of(authorization="Bearer k1"), chat("a")) != affinity_of(scope_of(authorization="Bearer k2"), chat("a"))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"7", b'{"messages":7}', b'{"messages":[7]}', b'{"prompt":[]}', b'{"prompt":{}}', b"\xff"]
)
def test_what_is_no_request_has_a_session_too(body: bytes) -> None:
    assert len(affinity_of(scope_of(), body)) == 64


def test_metrics_of_replicas_stand_on_one_page(two: list[Replica]) -> None:
    pages = {name: replica.metrics_text() for name, replica in zip("ab", two, strict=True)}
    families = {family.name: family for family in text_string_to_metric_families(merged(pages).decode())}
    for name, page in pages.items():
        for family in text_string_to_metric_families(page):
            known = [(s.name, s.labels, s.value) for s in family.samples]
            of_one = [s for s in families[family.name].samples if s.labels["replica"] == name]
            assert [(s.name, {k: v for k, v in s.labels.items() if k != "replica"}, s.value) for s in of_one] == known
            assert (families[family.name].type, families[family.name].documentation) == (family.type, family.documentation)


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import echelon.ray

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name, name="ray")

    monkeypatch.setattr(echelon.ray, "import_module", missing)
    with pytest.raises(MissingExtraError, match=r"echelon\[ray\]"):
        _ = echelon.ray.build_app
