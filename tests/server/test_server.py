"""The server as its clients meet it: OpenAI's own client, plain HTTP, and sockets that misbehave."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import psutil
import pytest
import servers
from pydantic import BaseModel, ValidationError
from servers import MODEL, PROMPTS, Gate, Running

from echelon import ConfigError, SamplingParams
from echelon.aio.engine_thread import EngineThread
from echelon.aio.limits import Limits, RequestObserver
from echelon.bench import serve as bench_serve
from echelon.cli import main
from echelon.sampling import Logprobs
from echelon.sequence import state_of
from echelon.server import serializers
from echelon.server.config import ServerConfig, id_of, read_keys
from echelon.server.protocol import ChatMessage, ChatRequest, CompletionRequest, DetokenizeRequest, StreamOptions
from echelon.server.serializers import GenerationJob, Serializer, StreamSerializer
from echelon.text import num_shown

KEY = "a-key-of-thirty-two-characters-x"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "def main(argv):\n"}]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with servers.serving(servers.build("draft_model")) as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client


@pytest.fixture
def official(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.url + "/v1", api_key="unused", max_retries=0, timeout=60.0) as client:
        yield client


# The same text


def bodies(count: int) -> list[dict[str, Any]]:
    """Greedy and seeded requests of different lengths, stops and penalties."""
    made = []
    for i in range(count):
        body: dict[str, Any] = {"prompt": PROMPTS[i % 4] * (1 + i % 3), "max_tokens": 6 + i % 11, "seed": i, "temperature": 0.9 * (i % 2)}
        if i % 5 == 0:
            body |= {"stop": ["\n\n", "self"], "frequency_penalty": 0.5}
        if i % 7 == 0:
            body |= {"top_p": 0.8, "n": 2}
        made.append(body)
    return made


async def ask(client: openai.AsyncOpenAI, gate: asyncio.Semaphore, body: dict[str, Any], stream: bool) -> list[str]:
    """Texts of all samples."""
    async with gate:
        if not stream:
            answer = await client.completions.create(model=MODEL, **body)
            return [c.text for c in answer.choices]
        texts = [""] * body.get("n", 1)
        async for chunk in await client.completions.create(model=MODEL, stream=True, **body):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        return texts


async def ask_all(url: str, asked: list[dict[str, Any]], concurrency: int, stream: bool) -> list[list[str]]:
    gate = asyncio.Semaphore(concurrency)
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0, timeout=60.0) as client:
        return await asyncio.gather(*(ask(client, gate, body, stream) for body in asked))


@pytest.mark.parametrize("method", servers.SPECULATIVE)
def test_texts_are_those_of_generate(method: str) -> None:
    """Greedy and seeded, at concurrency 1, 8 and 64, streamed and not."""
    asked = bodies(64)
    plain = servers.build("plain", max_num_seqs=4)
    truth = [[c.text for c in o.outputs] for o in plain.generate([b["prompt"] for b in asked], [servers.params(b) for b in asked])]
    with servers.serving(servers.build(method)) as running:
        for concurrency in (1, 8, 64):
            for stream in (False, True):
                some = slice(0, None) if concurrency == 64 else slice(concurrency, 3 * concurrency + 5)
                assert asyncio.run(ask_all(running.url, asked[some], concurrency, stream)) == truth[some]
        assert (running.llm.stats.num_draft_tokens > 0) == (method != "plain")


def test_chat_is_that_of_the_library(running: Running, official: openai.OpenAI) -> None:
    truth = servers.build("plain").chat(MESSAGES, SamplingParams(temperature=0.7, seed=3, max_tokens=20))[0].outputs[0].text
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0.7, "seed": 3, "max_completion_tokens": 20}
    assert official.chat.completions.create(**asked).choices[0].message.content == truth
    chunks = list(official.chat.completions.create(**asked, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == truth
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[-2:]] == [None, "length"]
    said = official.chat.completions.create(**asked).choices[0].message.model_dump()  # with every field that the client knows
    turns = [*MESSAGES, said, MESSAGES[0]]
    assert official.chat.completions.create(**(asked | {"messages": turns})).choices[0].message.role == "assistant"
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    assert official.chat.completions.create(**(asked | {"messages": parts})).choices[0].message.content == truth


def test_an_answer_without_a_limit_ends_with_the_context() -> None:
    with servers.serving(servers.build("ngram", max_model_len=48)) as running, running.client() as client:
        answer = client.post(CHAT, json={"messages": MESSAGES, "ignore_eos": True, "temperature": 0}).json()
        assert answer["usage"]["total_tokens"] == 48
        assert answer["choices"][0]["finish_reason"] == "length"


# Parameters


def test_models_and_versions(official: openai.OpenAI, client: httpx.Client) -> None:
    assert [m.id for m in official.models.list()] == [MODEL]
    assert client.get("/v1/models").json()["data"][0]["root"] == "target", "which clients made for vLLM read"
    assert official.models.retrieve(MODEL).id == MODEL
    assert client.get("/version").json()["version"]
    for path in ("/health", "/livez", "/readyz"):
        assert client.get(path).status_code == 200
        assert client.head(path).status_code == 200, "as supervisors ask"


def test_logprobs_and_echo(client: httpx.Client) -> None:
    """What evaluation harnesses ask for: the prompt's logprobs, scored and not continued."""
    body = {"prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0, "logprobs": 3, "echo": True}
    choice = client.post(COMPLETIONS, json=body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(p <= 0.0 for p in logprobs["token_logprobs"][1:])
    assert all(
        len(t) in (3, 4) and max(t.values()) >= p for t, p in zip(logprobs["top_logprobs"][1:], logprobs["token_logprobs"][1:], strict=True)
    )
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"][offset:].startswith(token)
    scored = client.post(COMPLETIONS, json=body | {"max_tokens": 0}).json()
    assert scored["choices"][0]["text"] == PROMPTS[0]
    assert scored["usage"]["completion_tokens"] == 0
    count = scored["usage"]["prompt_tokens"]
    assert scored["choices"][0]["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:count]
    text, streamed = "", []
    for event in events(client, body | {"stream": True}):
        text += event["choices"][0]["text"]
        streamed += event["choices"][0]["logprobs"]["token_logprobs"]
    assert (text, streamed) == (choice["text"], logprobs["token_logprobs"])


def events(client: httpx.Client, body: dict[str, Any], path: str = COMPLETIONS) -> list[dict[str, Any]]:
    with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_chat_logprobs(official: openai.OpenAI) -> None:
    answer = official.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2, temperature=0, max_tokens=5)  # type: ignore[arg-type]
    entries = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert entries is not None and len(entries) == 5
    assert "".join(e.token for e in entries) == answer.choices[0].message.content
    assert all(e.top_logprobs[0].logprob == e.logprob and bytes(e.bytes or []).decode() == e.token for e in entries)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_requests_without_parameters_have_those_of_the_model(
    running: Running, client: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `vllm serve` has them; a request's own go before."""
    body: dict[str, Any] = {"prompt": PROMPTS[2]} if path == COMPLETIONS else {"messages": MESSAGES}
    body |= {"max_tokens": 20, "seed": 5}

    def text(**more: Any) -> Any:
        answer = client.post(path, json=body | more).json()
        choice = answer["choices"][0]
        return choice["text"] if path == COMPLETIONS else choice["message"]["content"]

    drawn, likeliest = text(), text(temperature=0)
    assert drawn != likeliest
    settings = running.llm.target.model.generation_config
    for name, value in {"top_k": 1, "max_new_tokens": 3}.items():
        monkeypatch.setattr(settings, name, value)
    assert text() == likeliest
    assert text(top_k=-1) == drawn
    del body["max_tokens"]
    assert client.post(path, json=body).json()["usage"]["completion_tokens"] == (16 if path == COMPLETIONS else 3)
    monkeypatch.setattr(settings, "top_k", -5)
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and "top_k = -5" in answer.json()["error"]["message"]
    assert text(top_k=-1, max_tokens=20) == drawn, "a request's own goes before, whatever the model's is"


def test_without_a_key_only_loopback_is_asked(client: httpx.Client) -> None:
    """Whatever of its addresses the server is asked by; never by a name that a stranger can lead here."""
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.2:80", "[::1]:8000"):
        assert client.get("/version", headers={"Host": host}).status_code == 200, host
    for host in ("example.org", "10.0.0.1", "127.0.0.1.example.org", "[::2]:8000", "127.1", ""):
        assert client.get("/version", headers={"Host": host}).status_code in (400, 403), host


def test_usage_streams_and_speculation_is_reported(client: httpx.Client) -> None:
    body = {"prompt": PROMPTS[2], "max_tokens": 30, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(client, body)
    whole = client.post(COMPLETIONS, json={"prompt": PROMPTS[2], "max_tokens": 30, "temperature": 0}).json()
    assert last["choices"] == [] and last["usage"] == whole["usage"] and last["metrics"] == whole["metrics"]
    assert all("usage" not in c for c in chunks)
    counted = events(client, body | {"stream_options": {"continuous_usage_stats": True}})
    counts = [c["usage"]["completion_tokens"] for c in counted]
    assert counts == sorted(counts) and counts[0] > 0, "a chunk counts its own tokens"
    ended = next(c for c in counted if c["choices"] and c["choices"][0]["finish_reason"])
    assert ended["usage"] == whole["usage"]
    assert whole["metrics"]["acceptance"] == "exact"
    spec = whole["metrics"]["speculative_decoding"]
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"] > 0
    assert sum(i * n for i, n in enumerate(spec["acceptance_histogram"])) == spec["num_accepted_draft_tokens"] > 0
    assert spec["mean_acceptance_length"] == 1 + spec["num_accepted_draft_tokens"] / spec["num_spec_steps"]
    assert (
        client.post(COMPLETIONS, json=body | {"stream": False, "stream_options": None, "n": 2}).json()["metrics"]["speculative_decoding"]
        is None
    )
    plain = client.post(COMPLETIONS, json={"prompt": PROMPTS[2], "max_tokens": 30, "temperature": 0, "num_speculative_tokens": 0}).json()
    assert plain["choices"] == whole["choices"]
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_tokens_say_who_proposed_them(client: httpx.Client, path: str) -> None:
    """As `is_accepted` of the library does; streamed and whole, of every sample, and only where that is asked for."""
    llm, params = servers.build("draft_model"), SamplingParams(temperature=0.0, max_tokens=30)
    asked: dict[str, Any] = {"prompt": PROMPTS[2]} if path == COMPLETIONS else {"messages": MESSAGES}
    truth = (llm.generate(PROMPTS[2], params) if path == COMPLETIONS else llm.chat(MESSAGES, params))[0].outputs[0]
    body = asked | {"max_tokens": 30, "temperature": 0, "return_tokens": True}
    (choice,) = client.post(path, json=body).json()["choices"]
    assert "".join(t["text"] for t in choice["tokens"]) == truth.text
    assert [t["is_accepted"] for t in choice["tokens"]] == truth.is_accepted
    assert {True, False} == set(truth.is_accepted)
    streamed = [t for e in events(client, body | {"stream": True}, path) for t in e["choices"][0].get("tokens", [])]
    assert streamed == choice["tokens"]
    silent = asked | {"max_tokens": 3}
    assert client.post(path, json=silent).json()["choices"][0]["tokens"] is None
    assert not any("tokens" in e["choices"][0] for e in events(client, silent | {"stream": True}, path))
    for more in ({"stop": ["self", "\n\n"]}, {"n": 2, "seed": 3, "temperature": 1.0}, {"stop": ["):"], "include_stop_str_in_output": True}):
        whole = client.post(path, json=body | more).json()["choices"]
        texts = [c["text"] if path == COMPLETIONS else c["message"]["content"] for c in whole]
        assert ["".join(t["text"] for t in c["tokens"]) for c in whole] == texts
        for event in events(client, body | more | {"stream": True}, path):
            for part in event["choices"]:
                text = part["text"] if path == COMPLETIONS else part["delta"]["content"]
                assert "".join(t["text"] for t in part.get("tokens", [])) == text


def test_tokens_are_those_of_the_output_and_not_of_an_echo(client: httpx.Client) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0, "echo": True, "return_tokens": True}
    choice = client.post(COMPLETIONS, json=body).json()["choices"][0]
    assert PROMPTS[0] + "".join(t["text"] for t in choice["tokens"]) == choice["text"]
    assert client.post(COMPLETIONS, json=body | {"max_tokens": 0}).json()["choices"][0]["tokens"] == []


@pytest.mark.parametrize("stop", [["\n"], ["    ", "def"], ["zzzz"], ["retur", "return x"]])
def test_nothing_after_a_stop_string_is_ever_sent(client: httpx.Client, stop: list[str]) -> None:
    body = {"prompt": PROMPTS[3], "max_tokens": 40, "temperature": 0, "stop": stop}
    whole = client.post(COMPLETIONS, json=body).json()["choices"][0]
    chunks = events(client, body | {"stream": True})
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["text"]
    assert not any(s in whole["text"] for s in stop)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_stopped_a_text_is_said(client: httpx.Client, path: str) -> None:
    """As the library says it, and vLLM's server: a stop string, a stop token, or nothing where a limit did."""
    llm = servers.build("plain")
    asked: dict[str, Any] = {"prompt": PROMPTS[3]} if path == COMPLETIONS else {"messages": MESSAGES}
    found, plain = [], SamplingParams(temperature=0.0, max_tokens=6)
    third = (llm.generate(PROMPTS[3], plain) if path == COMPLETIONS else llm.chat(MESSAGES, plain))[0].outputs[0].token_ids[2]
    for more in ({"stop": ["e", "zz"]}, {"stop_token_ids": [third]}, {}):
        params = SamplingParams(temperature=0.0, max_tokens=6, **more)
        truth = (llm.generate(PROMPTS[3], params) if path == COMPLETIONS else llm.chat(MESSAGES, params))[0].outputs[0]
        body = asked | {"max_tokens": 6, "temperature": 0, **more}
        whole, chunks = client.post(path, json=body).json()["choices"][0], events(client, body | {"stream": True}, path)
        assert whole["stop_reason"] == truth.stop_reason
        assert [c["choices"][0]["stop_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [truth.stop_reason]
        found.append(truth.stop_reason)
    assert found[1:] == [third, None]


def test_best_of_returns_the_likeliest(client: httpx.Client) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 6, "temperature": 1.0, "seed": 5, "logprobs": 0}
    drawn = client.post(COMPLETIONS, json=body | {"n": 4}).json()["choices"]
    means = [sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["token_logprobs"]) for c in drawn]
    best = client.post(COMPLETIONS, json=body | {"best_of": 4}).json()
    assert [c["text"] for c in best["choices"]] == [drawn[means.index(max(means))]["text"]]


def test_every_parameter_is_served_with_speculation_on(client: httpx.Client) -> None:
    for more in (
        {"min_p": 0.1}, {"top_k": 3}, {"logit_bias": {"5": 2.5}}, {"presence_penalty": 1.0}, {"frequency_penalty": -1.0}, {"user": "me"},
        {"repetition_penalty": 1.2}, {"min_tokens": 4, "ignore_eos": True}, {"stop_token_ids": [9]}, {"allowed_token_ids": [5, 6, 7]},
        {"bad_words": ["self"]}, {"seed": -1}, {"top_p": 0.0}, {"n": 3}, {"include_stop_str_in_output": True, "stop": "\n"}, {"best_of": 1},
    ):  # fmt: skip
        answer = client.post(COMPLETIONS, json={"prompt": PROMPTS[0], "max_tokens": 5, "temperature": 0.8} | more)
        assert answer.status_code == 200, (more, answer.text)
    accepted: dict[str, Any] = {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True, "tools": []}
    accepted |= {"reasoning_effort": "low", "tool_choice": "none", "response_format": {"type": "text"}, "prediction": {"type": "content"}}
    accepted |= {"verbosity": "low", "modalities": ["text"], "prompt_cache_key": "k", "safety_identifier": "s"}
    accepted |= {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"}}
    assert client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 2} | accepted).status_code == 200


def test_tokens_and_back(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"prompt": PROMPTS[0], "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": PROMPTS[0]}
    chat = client.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": False}).json()
    assert client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1}).json()["usage"]["prompt_tokens"] == chat["count"]
    by_ids = client.post(COMPLETIONS, json={"prompt": tokens["tokens"], "max_tokens": 5, "temperature": 0}).json()
    by_text = client.post(COMPLETIONS, json={"prompt": [PROMPTS[0]], "max_tokens": 5, "temperature": 0}).json()
    assert by_ids["choices"] == by_text["choices"]


def test_pieces_of_a_text_are_called_as_the_vocabulary_calls_them(running: Running, client: httpx.Client) -> None:
    """As vLLM has them: with a space and a line break as letters of their own."""
    answer = client.post("/tokenize", json={"prompt": PROMPTS[2], "return_token_strs": True}).json()
    tokenizer: Any = running.llm.target.tokenizer
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(answer["tokens"])
    assert "".join(answer["token_strs"]) == PROMPTS[2].replace(" ", "Ġ").replace("\n", "Ċ")


# What is refused

BAD: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {}, "prompt"),
    *[
        (COMPLETIONS, {"prompt": "a"} | more, words)
        for more, words in [
            ({"prompt": ""}, "empty"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [[]]}, "empty"),
            ({"prompt": [99999]}, "vocabulary"),
            ({"prompt": [-1]}, "prompt"),
            ({"prompt": 5}, "prompt"),
            ({"prompt": ["a"] * 33}, "prompt"),
            ({"prompt": "a " * 3000}, "context"),
            ({"prompt": "x" * 500_000}, "characters"),
            ({"max_tokens": -1}, "max_tokens"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": 2.5}, "max_tokens"),
            ({"max_tokens": "5"}, "max_tokens"),
            ({"max_tokens": True}, "max_tokens"),
            ({"n": 0}, "n"),
            ({"n": 17}, "n"),
            ({"best_of": 1, "n": 2}, "best_of"),
            ({"best_of": 3, "stream": True}, "best_of"),
            ({"logprobs": 21}, "logprobs"),
            ({"temperature": -0.1}, "temperature"),
            ({"temperature": 1e400}, "temperature"),
            ({"top_p": 1.1}, "top_p"),
            ({"top_k": -2}, "top_k"),
            ({"min_p": 2}, "min_p"),
            ({"seed": 2**64}, "seed"),
            ({"stop": ""}, "stop"),
            ({"stop": ["a"] * 17}, "stop"),
            ({"stop": "a" * 257}, "stop"),
            ({"logit_bias": {"99999": 1}}, "vocabulary"),
            ({"logit_bias": {"a": 1}}, "logit_bias"),
            ({"logit_bias": {"1": 101}}, "logit_bias"),
            ({"stop_token_ids": [-1]}, "stop_token_ids"),
            ({"allowed_token_ids": []}, "allowed_token_ids"),
            ({"min_tokens": 17}, "min_tokens"),
            ({"presence_penalty": 3}, "presence_penalty"),
            ({"repetition_penalty": 0}, "repetition_penalty"),
            ({"suffix": "x"}, "suffix"),
            ({"stream_options": {"include_usage": True}}, "stream"),
            ({"stream": "yes"}, "stream"),
            ({"guided_regex": "a"}, "structured output"),
            ({"lora_request": {}}, "LoRA"),
            ({"response_format": {"type": "json_object"}}, "structured output"),
            ({"no_such": 1}, "no_such"),
            ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
            ({"temperature": 1e-50}, "temperature"),
            ({"allowed_token_ids": [0], "min_tokens": 1}, "forbid"),
        ]
    ],
    *[
        (CHAT, {"messages": MESSAGES} | more, words)
        for more, words in [
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "robot", "content": "a"}]}, "role"),
            ({"top_logprobs": 2}, "logprobs"),
            ({"tools": [{"type": "function"}]}, "tool calling"),
            ({"response_format": {"type": "json_schema"}}, "structured output"),
            ({"modalities": ["audio"]}, "text"),
            ({"audio": {}}, "audio"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"prompt": "a"}, "prompt"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "content"),
            ({"chat_template": "{{ 1 }}"}, "template"),
            ({"moderation": {}}, "moderation is not supported"),
            ({"prompt_logprobs": 1}, "which `echo` with `logprobs` gives"),
            ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs cannot set tools"),
            ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ]
    ],
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
    ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs belong to messages"),
    ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt"),
    ("/detokenize", {"tokens": [99999]}, "vocabulary"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_values_are_named(client: httpx.Client, running: Running, stream: bool) -> None:
    for path, body, words in BAD:
        if stream and words == "stream":
            continue
        sent = {"stream": True} | body if stream and path in (COMPLETIONS, CHAT) else body
        answer = client.post(path, content=json.dumps(sent).replace("Infinity", "1e400"), headers={"content-type": "application/json"})
        assert answer.status_code == 400, (body, answer.text)
        error = answer.json()["error"]
        assert words in error["message"] or words == error["param"], (body, error)
        assert "constrained" not in error["message"] and "function-" not in error["message"], "a name that only the checker knows"
        assert error["type"] == "invalid_request_error"


NAMED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt[1] is empty"),
    (COMPLETIONS, {"prompt": ["a", "a " * 3000]}, "prompt[1] has "),
    (COMPLETIONS, {"prompt": ["x" * 500_000, "a"]}, "prompt[0] has 500,000 characters"),
    (COMPLETIONS, {"prompt": [[70], [99999]]}, "prompt[1]: token id 99999 is outside"),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 3000}]}, "messages has "),
]


@pytest.mark.parametrize(("path", "body", "words"), NAMED, ids=[words for *_, words in NAMED])
def test_errors_say_which_of_the_prompts_is_meant(client: httpx.Client, path: str, body: dict[str, Any], words: str) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(words)


def test_a_key_of_the_metadata_is_no_field(client: httpx.Client) -> None:
    """Whatever it is called."""
    answer = client.post(CHAT, json={"messages": MESSAGES, "metadata": {"tools": 5}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "metadata")
    assert error["message"].startswith("metadata.tools: ") and "not supported" not in error["message"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"NaN", b'{"prompt": "\\ud800"}', b'{"prompt": "a\x00"', b"[" * 200_000, b"\xff\xfe", b"9" * 5000],
)
def test_bodies_that_are_no_json_are_refused(client: httpx.Client, content: bytes) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        answer = client.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_errors_are_those_the_official_client_knows(official: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        official.completions.create(model=MODEL, prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError) as missing:
        official.completions.create(model="gpt-17", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        official.embeddings.create(model=MODEL, input="a")


HEAPS: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (CompletionRequest, {"prompt": ["a", *[1] * 50_000]}),
    (CompletionRequest, {"prompt": [1.5] * 50_000}),
    (CompletionRequest, {"prompt": [["x"] * 100] * 500}),
    (CompletionRequest, {"prompt": "a", "stop": [1] * 50_000}),
    (CompletionRequest, {"prompt": "a", "logit_bias": {f"k{i}": i for i in range(50_000)}}),
    (CompletionRequest, {f"k{i}": i for i in range(50_000)}),
    (ChatRequest, {"messages": [{"role": "robot", "content": [{"type": "no"}] * 50}] * 1000}),
    (ChatRequest, {"messages": MESSAGES, "metadata": {f"k{i}": i for i in range(50_000)}}),
    (DetokenizeRequest, {"tokens": ["a"] * 50_000}),
]


@pytest.mark.parametrize(("kind", "body"), HEAPS)
def test_a_heap_of_mistakes_makes_no_heap_of_errors(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """A million errors hold the event loop for seconds; the client is told the first."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 10


def conversation(running: Running, request: bytes) -> bytes:
    """What a socket reads until the server closes."""
    with running.connect() as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_what_is_no_http_is_answered_like_any_mistake(running: Running) -> None:
    for request, status in (
        (b"GET /version\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 2**15, 431),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ):
        head, _, body = conversation(running, request).partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode()), head
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_a_request_hidden_in_a_body_is_not_read(running: Running) -> None:
    """By a body's length it is part of the body, by its chunks a request of its own: two readers in a row may disagree."""
    hidden = b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 52\r\n\r\n"
    answer = conversation(running, head + hidden)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1
    assert b"ambiguous" in answer


def test_bodies_that_are_no_json_are_told_so(client: httpx.Client) -> None:
    answer = client.post(COMPLETIONS, content=b'{"prompt": a}', headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, None)
    assert "not JSON" in answer.json()["error"]["message"] and "character 11" in answer.json()["error"]["message"]
    answer = client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert answer.status_code == 400 and "application/json" in answer.json()["error"]["message"]
    answer = client.post("/detokenize", json={"tokens": [9] * 100_000})
    assert answer.status_code == 400 and "context" in answer.json()["error"]["message"]


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_an_echo_begins_when_its_prompt_has_been_read(client: httpx.Client, max_tokens: int) -> None:
    """Samples come one by one; the logprobs of a prompt are there with its first token, not before."""
    body = {"prompt": [PROMPTS[0], PROMPTS[2] * 30], "max_tokens": max_tokens, "n": 3, "seed": 1, "echo": True, "logprobs": 2}
    whole = client.post(COMPLETIONS, json=body).json()["choices"]
    texts, logprobs = [""] * 6, [list[Any]() for _ in range(6)]
    for event in events(client, body | {"stream": True}):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            logprobs[choice["index"]] += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    assert texts == [c["text"] for c in whole]
    assert logprobs == [c["logprobs"]["token_logprobs"] for c in whole]


def test_sizes_are_bounded_while_reading(running: Running) -> None:
    limit = running.service.config.max_body_bytes
    with running.client() as client:
        assert client.post(COMPLETIONS, content=b" " * (limit + 1)).status_code == 413
        assert client.post(COMPLETIONS, content=b"{}", headers={"content-encoding": "gzip"}).status_code == 415
        assert client.get("/version", headers={"x-long": "a" * 2**16}).status_code == 431
    with running.connect() as connection:  # chunk by chunk, and never the last: refused at the limit, not at the end
        connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"10000\r\n" + b"x" * 2**16 + b"\r\n"
        for _ in range(limit // 2**16 + 1):
            connection.sendall(chunk)
        assert b" 413 " in connection.recv(100)
    with running.connect() as connection:
        connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n".encode())
        assert b" 413 " in connection.recv(100)


def test_clients_that_dawdle_are_cut() -> None:
    with servers.serving(servers.build(), header_timeout=0.2, body_timeout=0.2) as running:
        for start in (b"", b"GET /version HTTP/1.1\r\nHost: local", b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\nGET /li"):
            with connected(running, start) as connection:
                received = b""
                while part := _recv(connection):  # ends when the server closes
                    received += part
                assert received.count(b"200 OK") == start.count(b"\r\n\r\n")
        start = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode()
        with connected(running, start) as connection:
            assert b" 408 " in connection.recv(100)


def connected(running: Running, start: bytes) -> socket.socket:
    """A connection whose first bytes are there when the server comes to it."""
    may_go_on = threading.Event()
    running.server.servers[0].get_loop().call_soon_threadsafe(may_go_on.wait, 60.0)
    connection = running.connect()
    connection.sendall(start)
    may_go_on.set()
    return connection


def _recv(connection: socket.socket) -> bytes:
    try:
        return connection.recv(2**16)
    except ConnectionResetError:
        return b""


def test_a_reader_that_does_not_read_is_bounded_and_cut() -> None:
    """Its output stays within the buffers of one connection; others go on; and its rows leave when it is cut."""
    with servers.serving(servers.build("plain"), write_timeout=0.3) as running, servers.unharmed(running):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(running.address)
        body = json.dumps({"prompt": PROMPTS[0], "max_tokens": 200, "n": 8, "logprobs": 20, "stream": True, "ignore_eos": True, "seed": 1})
        connection.sendall(servers.request_bytes(body))
        with running.client() as client:
            assert client.post(COMPLETIONS, json={"prompt": "import", "max_tokens": 3}).status_code == 200
        servers.settle(running)  # it does not wait for the reader
        received = b""
        while part := _recv(connection):
            received += part
        assert received.startswith(b"HTTP/1.1 200") and b"[DONE]" not in received
        connection.close()


# Who may come in


def routes(running: Running) -> list[tuple[str, str]]:
    with running.client(headers={"authorization": f"Bearer {KEY}"}) as client:
        paths = client.get("/openapi.json").json()["paths"]
    listed = [(method.upper(), path.replace("{model}", "x")) for path, methods in paths.items() for method in methods]
    return [
        *listed,
        ("GET", "/openapi.json"),
        ("GET", "/docs"),
        ("GET", "/"),
        ("OPTIONS", COMPLETIONS),
        ("HEAD", "/v1/models"),
        ("DELETE", "/x"),
    ]


def test_every_route_asks_for_a_key() -> None:
    with servers.serving(servers.build(), api_keys=(KEY, "another-key-that-is-long")) as running:
        with running.client() as client:
            for method, path in routes(running):
                expected = 200 if path in ("/livez", "/readyz") else 401
                for given in ("Bearer wrong", KEY, f"Basic {KEY}", f"Bearer {KEY.upper()}", f"Bearer {KEY}x", "", None):
                    headers = {"x-api-key": KEY} if given is None else {"authorization": given}
                    answer = client.request(method, path, headers=headers)
                    assert answer.status_code == expected, (method, path, headers)
                    assert KEY not in answer.text
            for given in (KEY, "another-key-that-is-long"):
                assert client.get("/v1/models", headers={"authorization": f"Bearer {given}"}).status_code == 200
        for target in ("/livez/", "//livez", "/livez/../v1/models", "/%6civez/../version", "/livez%2f..%2fversion", "/LIVEZ", "http://x/version",
                       "/version?/livez", "/version#/livez", "/readyz;/version", "/./version", "/version%00/livez"):  # fmt: skip
            for host in ("localhost", "x/livez?", "/livez"):
                assert raw(running, f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n").split(b" ")[1] in (b"401", b"400"), target
        twice = f"GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\nAuthorization: Bearer {KEY}\r\n\r\n"
        assert b" 401 " in raw(running, twice)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=running.url + "/v1", api_key="wrong", max_retries=0).models.list()


def raw(running: Running, text: str) -> bytes:
    """The head of the answer to exactly these bytes."""
    with running.connect() as connection:
        connection.sendall(text.encode())
        return connection.recv(2000)


def test_strangers_are_kept_out_without_a_key(running: Running) -> None:
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "", "[::1].x"):
        assert b" 403 " in raw(running, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n")
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:80", "[::1]"):
        assert b" 200 " in raw(running, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n")
    answer = raw(
        running,
        "OPTIONS /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\nAccess-Control-Request-Method: GET\r\n\r\n",
    )
    assert b"access-control" not in answer.lower()


def test_other_addresses_need_a_key(tmp_path: Any) -> None:
    for host in ("0.0.0.0", "::", "192.168.0.3", "example.org"):
        with pytest.raises(ConfigError, match="--api-key-file"):
            ServerConfig(host=host)
        ServerConfig(host=host, api_keys=(KEY,))
    for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost"):
        ServerConfig(host=host)
    with pytest.raises(ConfigError, match="16 characters"):
        ServerConfig(api_keys=("short",))
    (tmp_path / "keys").write_text(f"{KEY}\n\n  second-key-is-long-too \n")
    assert [key.get_secret_value() for key in read_keys(tmp_path / "keys")] == [KEY, "second-key-is-long-too"]
    for content in (None, "\n"):
        path = tmp_path / "missing"
        if content:
            path.write_text(content)
        with pytest.raises(ConfigError, match=r"one key a line|holds no key"):
            read_keys(path)


CONNECTED: list[Any] = []  # addresses that anything in this process connects to


@pytest.fixture(scope="module")
def audit() -> list[Any]:
    """A hook cannot be taken away again, so there is one, which only writes down."""
    sys.addaudithook(lambda name, arguments: CONNECTED.append(arguments[1]) if name == "socket.connect" else None)
    return CONNECTED


def test_nothing_but_loopback_is_connected_to_or_listened_on(audit: list[Any]) -> None:
    audit.clear()
    with servers.serving(servers.build("draft_model")) as running:
        asyncio.run(servers.together(running.url, bodies(4)))
        with running.client() as client:
            client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 3})
            client.post("/tokenize", json={"prompt": "http://example.org/model.safetensors"})
        listeners = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert set(listeners) == {"127.0.0.1"}
    assert audit and {address[0] for address in audit} == {"127.0.0.1"}


def test_request_ids_are_echoed(client: httpx.Client) -> None:
    assert client.get("/version", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for bad in ("", "a" * 129, "a b"):
        assert "x-request-id" not in client.get("/version", headers={"x-request-id": bad}).headers


def test_no_prompt_output_or_key_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with (
        servers.serving(servers.build("ngram"), api_keys=(KEY,)) as running,
        running.client(headers={"authorization": f"Bearer {KEY}"}) as client,
    ):
        body = {"prompt": "xylophone", "max_tokens": 5, "user": "marmalade", "temperature": 0}
        text = client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
        client.post(COMPLETIONS, json=body | {"stream": True})
        client.post(COMPLETIONS, json=body | {"n": -1})
        client.post(COMPLETIONS, json=body | {"allowed_token_ids": [0], "min_tokens": 1})
        client.get("/v1/models/xylophone?key=marmalade")
    assert text
    logged = "\n".join(r.getMessage() for r in caplog.records if not r.name.startswith("httpx"))
    assert "rror" in logged or "running on" in logged
    assert not any(word in logged for word in ("xylophone", "marmalade", KEY, text))


# Load, health, metrics


def in_background(call: Any) -> tuple[threading.Thread, list[httpx.Response]]:
    results: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_answer_is_built_beside_the_event_loop(client: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with many log-probabilities takes its time, in which others are served."""
    threads: list[str] = []
    whole = Serializer.response

    def noted(self: Serializer, *given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return whole(self, *given)

    monkeypatch.setattr(Serializer, "response", noted)
    body: dict[str, Any] = {"prompt": PROMPTS[0], "logprobs": 0} if path == COMPLETIONS else {"messages": MESSAGES, "logprobs": True}
    assert client.post(path, json=body | {"max_tokens": 2}).status_code == 200
    del body["logprobs"]
    assert client.post(path, json=body | {"max_tokens": 2}).status_code == 200
    assert [name.partition("_")[0] == "echelon-text" for name in threads] == [True, False]


def test_an_echo_is_streamed_from_beside_the_event_loop(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probabilities of a long prompt take their time; where its tokens lie is found once for all samples."""
    threads, found = list[str](), list[int]()
    head, offsets = StreamSerializer._head, serializers.text_offsets

    def noted(self: StreamSerializer, *given: Any) -> Any:
        threads.append(threading.current_thread().name.partition("_")[0])
        return head(self, *given)

    def counted(decoder: Any, tokens: Any, text: str) -> list[int]:
        found.append(len(tokens))
        return offsets(decoder, tokens, text)

    monkeypatch.setattr(StreamSerializer, "_head", noted)
    monkeypatch.setattr(serializers, "text_offsets", counted)
    body = {"prompt": PROMPTS[0], "max_tokens": 2, "n": 3, "stream": True}
    events(client, body | {"echo": True, "logprobs": 0})
    assert threads == ["echelon-text"] * 3 and len(found) == 1
    events(client, body | {"logprobs": 0})
    assert "echelon-text" not in threads[3:]


def test_an_echo_waits_for_its_prompt_in_every_strategy() -> None:
    """Rows of a rectangle read a prompt side by side, and the one without log-probabilities is done with it sooner."""
    body = {"prompt": PROMPTS[2] * 30, "max_tokens": 3, "n": 2, "seed": 1, "echo": True, "logprobs": 1}
    with servers.serving(servers.build(strategy="padded", max_num_seqs=2)) as running, running.client() as client:
        whole = client.post(COMPLETIONS, json=body).json()["choices"]
        streamed = [list[Any]() for _ in range(2)]
        for event in events(client, body | {"stream": True}):
            for choice in event["choices"]:
                streamed[choice["index"]] += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    assert streamed == [c["logprobs"]["token_logprobs"] for c in whole] and len(streamed[0]) > 70


def test_of_tokens_with_one_text_the_chosen_one_is_told(running: Running) -> None:
    serializer = Serializer(running.llm)
    serializer._pieces.update({1: "the", 2: "the", 3: "a"})
    assert serializer._top(Logprobs(2, -3.0, 2, {1: -0.1, 3: -4.0})) == {"the": -3.0, "a": -4.0}
    assert serializer._top(Logprobs(3, -4.0, 3, {1: -0.1, 2: -3.0})) == {"a": -4.0, "the": -0.1}


def test_a_full_server_says_so() -> None:
    with servers.serving(servers.build("plain", max_num_seqs=2), max_queue=1) as running, running.client() as client:
        gate = Gate(running)
        body = {"prompt": PROMPTS[0], "max_tokens": 3, "temperature": 0}
        held, answers = in_background(lambda: client.post(COMPLETIONS, json=body | {"n": 3}))
        assert gate.reached.wait(60.0)
        for stream in (False, True):
            refused = client.post(COMPLETIONS, json=body | {"stream": stream})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "overloaded"
        assert client.post(COMPLETIONS, json=body | {"n": 4}).status_code == 400  # would never fit
        assert client.get("/health").status_code == 200
        gate.open()
        held.join()
        assert answers[0].status_code == 200
        servers.settle(running)
        assert client.post(COMPLETIONS, json=body | {"n": 3}).status_code == 200


def test_waiting_and_running_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = servers.Clock(monkeypatch)
    with servers.serving(servers.build(max_num_seqs=1), stall_timeout=1e6) as running, running.client() as client:
        body = {"prompt": PROMPTS[0], "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
        limits, engine_thread = running.service.config, running.service.engine_thread

        def given_up(stream: bool, has_come: Callable[[], Any], seconds: float) -> httpx.Response:
            asking, answers = in_background(lambda: client.post(COMPLETIONS, json=body | {"stream": stream}))
            assert has_come()
            clock.ahead += seconds
            asking.join()
            assert f"longer than {seconds:.0f} s" in answers[0].text
            return answers[0]

        def is_waiting() -> bool:
            end = time.monotonic() + 60.0
            while not engine_thread.num_in_flight and time.monotonic() < end:
                time.sleep(0.01)
            return engine_thread.num_in_flight > 0

        gate = Gate(running)
        for stream in (False, True):
            late = given_up(stream, is_waiting, limits.queue_timeout)
            assert (late.status_code, late.headers["retry-after"]) == (503, "1")
            assert "waited" in late.json()["error"]["message"]
        gate.open()
        servers.settle(running)
        for stream in (False, True):
            gate = Gate(running, 1)
            late = given_up(stream, lambda gate=gate: gate.reached.wait(60.0), limits.total_timeout)
            gate.open()
            servers.settle(running)
            *_, error, done = [line for line in late.text.split("\n") if line] if stream else ("", late.text, "data: [DONE]")
            assert "ran longer" in error and done == "data: [DONE]"
        assert blocks_are_free(running)


def blocks_are_free(running: Running) -> bool:
    return servers.blocks_free(running.llm) == [running.llm.engine.target.cache.tables.pool.num_blocks]


@pytest.mark.parametrize("stall_timeout", [0.1, 0.5, 60.0])
def test_an_idle_engine_is_not_taken_for_one_that_hangs(stall_timeout: float) -> None:
    """It says that it lives more often than within what is taken for a stall."""
    thread, waited = EngineThread(servers.build(), Limits(stall_timeout=stall_timeout), RequestObserver()), []

    class Nothing:
        def get(self, timeout: float) -> Any:
            waited.append(timeout)
            raise queue.Empty

        def get_nowait(self) -> Any:
            raise queue.Empty

    thread._commands = Nothing()  # type: ignore[assignment]
    thread._tick(thread.llm.engine)
    assert len(waited) == 1 and 0.0 < waited[0] <= min(1.0, stall_timeout / 2)


def test_a_hanging_engine_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = servers.Clock(monkeypatch)
    with servers.serving(servers.build()) as running, running.client() as client:
        gate = Gate(running)
        held, answers = in_background(lambda: client.post(COMPLETIONS, json={"prompt": PROMPTS[0], "max_tokens": 3}))
        assert gate.reached.wait(60.0)
        assert client.get("/readyz").status_code == 200
        clock.ahead += 61.0
        assert client.get("/readyz").status_code == 503
        assert client.get("/health").status_code == 503
        assert client.get("/livez").status_code == 200
        assert client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 503
        held.join()  # answered while the engine still hangs
        assert answers[0].status_code == 503
        gate.open()
        servers.settle(running)
        assert client.get("/health").status_code == client.get("/readyz").status_code == 200


def test_metrics_have_the_names_of_vllm() -> None:
    with servers.serving(servers.build("ngram"), metrics_prefix="vllm:") as running, running.client() as client:
        body = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
        used = [client.post(COMPLETIONS, json=body | {"prompt": p * 3}).json() for p in PROMPTS]
        servers.settle(running)
        text = client.get("/metrics").text
        values = {line.split("{")[0].split(" ")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if not line.startswith("#")}
        specs = [u["metrics"]["speculative_decoding"] for u in used]
        assert values["vllm:spec_decode_num_drafts_total"] == sum(s["num_spec_steps"] for s in specs) > 0
        assert values["vllm:spec_decode_num_draft_tokens_total"] == sum(s["num_draft_tokens"] for s in specs)
        assert values["vllm:spec_decode_num_accepted_tokens_total"] == sum(s["num_accepted_draft_tokens"] for s in specs)
        assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="pair",position="0"}' in text
        assert 'vllm:spec_decode_info{acceptance="exact",model_name="pair"} 1.0' in text
        assert values["vllm:generation_tokens_total"] == sum(u["usage"]["completion_tokens"] for u in used)
        assert values["vllm:prompt_tokens_total"] == sum(u["usage"]["prompt_tokens"] for u in used)
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_time_per_output_token"):
            assert values[f"vllm:{name}_seconds_count"] == len(PROMPTS), name
        assert values["vllm:inter_token_latency_seconds_count"] > 0
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert values[f"vllm:{name}"] == 0.0
        assert 'vllm:request_success_total{finished_reason="length",model_name="pair"} 4.0' in text
        before = {line.rsplit(" ", 1)[0] for line in client.get("/metrics").text.splitlines()}
        for i in range(50):
            client.request(f"GET{i}", f"/no/such/{i}", headers={"x-request-id": str(i)})
            client.post(COMPLETIONS, json={"prompt": "a", "model": f"m{i}", "user": str(i)})
        assert {line.rsplit(" ", 1)[0] for line in client.get("/metrics").text.splitlines()} == before


def test_a_request_has_waited_until_its_first_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    with servers.serving(servers.build("plain")) as running, running.client() as client:
        engine, observer = running.llm.engine, running.service.engine_thread._observer
        began_at: list[float] = []
        started_at: list[float] = []
        step, started = engine.step, observer.started

        def stepped() -> Any:
            began_at.append(time.monotonic())
            return step()

        def noted(row: Any) -> None:
            started_at.append(row.started_at)
            started(row)

        monkeypatch.setattr(engine, "step", stepped)
        monkeypatch.setattr(observer, "started", noted)
        assert client.post(COMPLETIONS, json={"prompt": "import os", "max_tokens": 4}).status_code == 200
        assert len(started_at) == 1 and started_at[0] <= began_at[0]


def test_a_long_prompt_does_not_stall_others() -> None:
    """A short request beside a prompt of 1,500 tokens has its first token within three steps."""
    with servers.serving(servers.build("plain", max_num_batched_tokens=256)) as running, running.client() as client:
        gate = Gate(running)
        steps, step = [0], gate._step
        prompt = list(range(300, 400)) * 15

        def counted() -> Any:
            steps[0] += 1
            grown = step()
            if any(s.num_prompt_tokens < 100 and s.num_output_tokens == 1 for s in grown):
                first.append(steps[0])
            return grown

        first: list[int] = []
        gate._step = counted
        long, _ = in_background(lambda: client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 2}))
        assert gate.reached.wait(60.0)
        short, _ = in_background(lambda: client.post(COMPLETIONS, json={"prompt": PROMPTS[0], "max_tokens": 2}))
        while running.service.engine_thread.num_in_flight < 2 or running.service.engine_thread._commands.empty():
            client.get("/livez")
        gate.open()
        long.join()
        short.join()
        assert len(first) == 1
        assert first[0] <= 3 + 1  # the step that was under way when it came does not count
        assert steps[0] >= 6


# Text


@pytest.mark.parametrize(
    ("text", "stop", "held"),
    [
        ("abc", ["cd"], 1),
        ("abc", ["bcd", "cx"], 2),
        ("abc", ["abc"], 0),
        ("", ["a"], 0),
        ("aaa", ["aaaa"], 3),
        ("ab", ["x"], 0),
        ("ab", [], 0),
    ],
)
def test_only_beginnings_of_stop_strings_are_held_back(text: str, stop: list[str], held: int) -> None:
    assert num_shown(text, stop, is_whole=False) == len(text) - held
    assert num_shown(text, stop, is_whole=True) == len(text)


STREAMED: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, "stream": True, "stop": ["ac"]}
BODIES: dict[str, CompletionRequest | ChatRequest] = {
    "logprobs": CompletionRequest(prompt=[70], logprobs=1, **STREAMED),
    "no others": CompletionRequest(prompt=[70], logprobs=0, **STREAMED),
    "logprobs of chat": ChatRequest(messages=[ChatMessage(role="user", content="a")], logprobs=True, **STREAMED),
    "counts": CompletionRequest(prompt=[70], stream_options=StreamOptions(continuous_usage_stats=True), **STREAMED),
    "text": CompletionRequest(prompt=[70], **STREAMED),
}


def said_after_each(running: Running, tokens: list[int], body: CompletionRequest | ChatRequest) -> list[list[dict[str, Any]]]:
    """The choices that a stream sends after each token of a text."""
    samples = running.llm.inputs.samples([70], body.sampling_params(100, {}), watch_text=True)
    stream, sequence = StreamSerializer(running.service.serializer, GenerationJob(MODEL, [samples], body)), samples[0]
    said = []
    for token in tokens:
        sequence.append(token, False, Logprobs(token, -1.0, 1, {token: -1.0}))
        chunks = [json.loads(chunk.removeprefix(b"data: ")) for chunk in stream.chunks([state_of(sequence)])]
        said.append([choice | {"usage": chunk.get("usage")} for chunk in chunks for choice in chunk["choices"]])
    return said


@pytest.mark.parametrize("kind", BODIES)
def test_who_counts_tokens_is_told_of_those_without_a_text(running: Running, kind: str) -> None:
    """At once, though special ones are left out of the text; but those that wait with the beginning of a stop string wait on."""
    tokenizer: Any = running.llm.target.tokenizer
    user, a, b, c = tokenizer.convert_tokens_to_ids(["<|user|>", "a", "b", "c"])
    said = said_after_each(running, [user, a, user, b, c, user], BODIES[kind])
    if kind == "logprobs of chat":
        assert said[0].pop(0)["delta"]["role"] == "assistant"
    texts = [[choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices] for choices in said]
    assert texts == ([[], [], [], ["ab"], ["c"], []] if kind == "text" else [[""], [], [], ["ab"], ["c"], [""]])
    sent = [choice for choices in said for choice in choices]
    if kind == "counts":
        assert [choice["usage"]["completion_tokens"] for choice in sent] == [1, 4, 5, 6]
    elif kind in ("logprobs", "no others"):
        assert [choice["logprobs"]["tokens"] for choice in sent] == [["<|user|>"], ["a", "<|user|>", "b"], ["c"], ["<|user|>"]]
    elif kind == "logprobs of chat":
        assert [len(choice["logprobs"]["content"]) for choice in sent] == [1, 3, 1, 1]


def test_the_text_of_a_token_is_decoded_once() -> None:
    decoded: list[list[int]] = []

    def decode(tokens: list[int], skip_special_tokens: bool) -> str:
        decoded.append(tokens)
        return f"{tokens[0]}, {skip_special_tokens}"

    llm: Any = SimpleNamespace(target=SimpleNamespace(tokenizer=SimpleNamespace(decode=decode)))
    serializer = Serializer(llm)
    assert [serializer.piece(token) for token in (5, 7, 5, 5)] == ["5, False", "7, False", "5, False", "5, False"]
    assert decoded == [[5], [7]]


# The benchmark client


def test_a_server_is_measured(running: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    def bench(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["echelon", "bench", "serve", "--base-url", running.url, *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), capsys.readouterr().out

    code, out = bench(
        "--num-prompts", 6, "--max-tokens", 8, "--ignore-eos", "--request-rate", 500, "--max-concurrency", 2, "--json", "--ttft-goal", 6e4
    )
    value = json.loads(out)
    assert (code, value["num_requests"], value["num_failed"], value["completion_tokens"]) == (0, 6, 0, 48)
    assert value["goodput_requests_per_second"] == value["requests_per_second"] > 0
    assert 1.0 < value["mean_acceptance_length"] <= 4.0 and 0.0 < value["acceptance_rate"] < 1.0
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "end_to_end_ms"):
        assert 0 < value[name]["p50"] <= value[name]["p99"]
    assert value["ttft_ms"]["mean"] < value["end_to_end_ms"]["mean"]
    code, out = bench("--num-prompts", 2, "--max-tokens", 2, "--ttft-goal", 0, "--output", tmp_path / "serve.json")
    assert code == 0 and "| ttft |" in out
    assert json.loads((tmp_path / "serve.json").read_text())["goodput_requests_per_second"] == 0.0
    assert bench("--model", "nothing-like-it")[0] == 2
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a " * 5000}) + "\n" + json.dumps({"prompt": "import os"}) + "\n")
    code, out = bench("--input", tmp_path / "prompts.jsonl", "--max-tokens", 2, "--json")
    assert code == 3 and json.loads(out)["num_failed"] == 1 and "context" in json.loads(out)["problems"][0]


def test_answers_without_text_have_their_time() -> None:
    """A text whose first token ends it, and percentiles as `bench latency` has them."""

    async def asked() -> bench_serve.RequestTiming:
        chunk = {"choices": [{"text": "", "finish_reason": "stop"}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
        stream = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        answers = httpx.MockTransport(lambda _: httpx.Response(200, text=stream))
        async with httpx.AsyncClient(transport=answers, base_url="http://localhost") as client:
            return await bench_serve.ask(client, {})

    answer = asyncio.run(asked())
    assert answer.problem is None and answer.num_tokens == 1 and 0.0 < answer.ttft == answer.seconds
    found = bench_serve.spread([i / 1000 for i in range(1, 101)])
    assert found["p50"] == pytest.approx(50.5) and found["p99"] == pytest.approx(99.01) and found["mean"] == pytest.approx(50.5)
    assert bench_serve.spread([]) == {}


def test_what_http_costs_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "serving.json"
    sizes = ["--parameters", "0", "--rounds", "1", "--max-tokens", "4"]
    command = [sys.executable, "-m", "benchmarks.serving", *sizes, "--output", str(path)]
    answer = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "http over generate" in answer.stdout
    results = json.loads(path.read_text("utf-8"))["results"]
    assert results["http_over_generate"]["rounds"] == 1 and results["http_over_generate"]["median"] > 0.0
    assert results["steps_until_first_token"]["median"] >= 1


def test_a_model_is_called_by_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert [id_of(name) for name in (str(folder), f"{folder}/", "org/model")] == ["my-model", "my-model", "org/model"]
    llm = servers.build()
    llm.target = replace(llm.target, name=str(folder))
    with servers.serving(llm, served_model_name=None) as running, running.client() as client:
        assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["my-model"]
        assert client.post("/v1/completions", json={"model": "my-model", "prompt": [1, 2], "max_tokens": 2}).status_code == 200
        assert client.post("/v1/completions", json={"model": str(folder), "prompt": [1, 2], "max_tokens": 2}).status_code == 404
