"""One request, one text: through `generate`, streams, the server and chat, with tokenizers of every kind, however it ends."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import toys
from servers import MODEL, Running, serving
from tokenizer_kinds import ADDED, KINDS

from echelon import LLM, SamplingParams
from echelon.model.load.loading import LoadedModel, adopt_model
from echelon.outputs import CompletionOutput

PROMPTS = ([5, 9, 11, 20], [1], [7, 8, 2, 1, 2, 2, 1, 2, 2])
SEEDS = range(4 if toys.PROVE else 1)
SPECIAL_OFTEN = {1: 3.0, 2: 3.0}
OPTIONS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}


def model(kind: str) -> LoadedModel:
    """A toy with a tokenizer of this kind; "</s>" ends its text. Ids past the tokenizer's have no text."""
    return adopt_model(toys.llama(eos_token_id=2, spread=0.1), KINDS[kind](), "toy")


def engine(loaded: LoadedModel) -> LLM:
    return LLM(loaded, OPTIONS, max_num_seqs=16, kv_cache_memory_bytes=2**22)


def endings(whole: CompletionOutput) -> dict[str, dict[str, Any]]:
    """Parameters by how they end a text, or change what of it is shown; `whole` is the text that no end cuts short."""
    ids, text = whole.token_ids, whole.text
    middle = len(text) // 2
    across = text[max(0, middle - 4) : middle + 1] or "zz"
    return {
        "length": {},
        "length, specials shown": {"skip_special_tokens": False, "logit_bias": SPECIAL_OFTEN},
        "length, specials skipped": {"logit_bias": SPECIAL_OFTEN},
        "eos": {"ignore_eos": False, "logit_bias": {2: 4.0}},
        "eos, specials shown": {"ignore_eos": False, "skip_special_tokens": False, "logit_bias": {2: 4.0}},
        "eos, included": {"ignore_eos": False, "skip_special_tokens": False, "include_stop_str_in_output": True, "logit_bias": {2: 4.0}},
        "stop token": {"stop_token_ids": (ids[8],)},
        "stop token, included": {"stop_token_ids": (ids[8],), "include_stop_str_in_output": True},
        "stop token or string": {"stop_token_ids": (ids[14],), "stop": ("zz", across)},
        "stop string": {"stop": (text[middle] if text else "zz",)},
        "stop string across tokens": {"stop": (across, across + "never")},
        "stop string, included": {"stop": (across,), "include_stop_str_in_output": True},
        "stop string held back to the end": {"stop": (text[-5:] + "never",)},
        "stop string after min_tokens": {"stop": (text[:1] or "zz",), "min_tokens": 9},
        "stop token after min_tokens": {"stop_token_ids": (ids[3],), "min_tokens": 9},
        "replacement character": {"stop": ("\ufffd\ufffd",)},
        "two samples": {"n": 2, "stop": (across,)},
        "two samples and stop tokens": {"n": 2, "stop_token_ids": (ids[8], ids[9])},
    }


def requests(llm: LLM) -> list[tuple[str, list[int], SamplingParams]]:
    """With PROVE=1 every ending after every prompt; otherwise the prompts take turns."""
    found = []
    for seed in SEEDS:
        for turn, prompt in enumerate(PROMPTS):
            base: dict[str, Any] = {"max_tokens": 24, "seed": seed, "ignore_eos": True, "logprobs": 1, "temperature": 1.0}
            whole = llm.generate([prompt], SamplingParams(**base))[0].outputs[0]
            named = list(endings(whole).items())[slice(None) if toys.PROVE else slice(turn, None, len(PROMPTS))]
            found += [(name, prompt, SamplingParams(**(base | changes))) for name, changes in named]
    return found


def body(prompt: list[int], params: SamplingParams) -> dict[str, Any]:
    values = params.model_dump(exclude_unset=True) | {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)}
    return values | {"model": MODEL, "prompt": prompt}


def streamed(client: httpx.Client, asked: dict[str, Any], path: str = "/v1/completions") -> dict[int, list[dict[str, Any]]]:
    """Choices of the chunks, by sample."""
    lines = client.post(path, json=asked | {"stream": True}).text.split("\n\n")
    found: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        if line.startswith("data: {"):
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            found.setdefault(choice["index"], []).append(choice)
    return found


def joined(chunks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Logprobs of the chunks of one sample, one after another."""
    return {key: [value for c in chunks if c["logprobs"] for value in c["logprobs"][key]] for key in ("tokens", "text_offset")}


def check_server(client: httpx.Client, prompt: list[int], params: SamplingParams, expected: list[CompletionOutput], echo: bool) -> None:
    """Whole and streamed: text, finish reason and the place of every token."""
    asked = body(prompt, params) | {"echo": echo}
    whole, parts = client.post("/v1/completions", json=asked).json()["choices"], streamed(client, asked)
    for out, choice in zip(expected, whole, strict=True):
        chunks = parts[out.index]
        assert choice["text"].endswith(out.text) and (echo or choice["text"] == out.text)
        assert "".join(c["text"] for c in chunks) == choice["text"]
        assert choice["finish_reason"] == chunks[-1]["finish_reason"] == out.finish_reason
        offsets = choice["logprobs"]["text_offset"]
        assert joined(chunks) == {"tokens": choice["logprobs"]["tokens"], "text_offset": offsets}
        assert offsets == sorted(offsets)
        assert len(offsets) == len(out.token_ids) + echo * len(prompt)
        assert not echo or offsets[len(prompt)] == len(choice["text"]) - len(out.text)


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_the_same_through_every_door(kind: str) -> None:
    loaded = model(kind)
    llm = engine(loaded)
    asked = requests(llm)
    prompts, params = [p for _, p, _ in asked], [q for _, _, q in asked]
    generated = [o.outputs for o in llm.generate(prompts, params)]
    few = slice(None) if toys.PROVE else slice(0, None, 4)
    alone = [llm.generate([p], q)[0].outputs for p, q in zip(prompts[few], params[few], strict=True)]
    assert [[o.text for o in outputs] for outputs in alone] == [[o.text for o in outputs] for outputs in generated[few]]
    seen: dict[tuple[int, int], list[str]] = {}
    for i, output in llm.stream(prompts, params):
        for sample in output.outputs:
            seen.setdefault((i, sample.index), []).append(sample.text)
    with serving(engine(loaded)) as server, server.client() as client:
        for i, outputs in enumerate(generated):
            for out in outputs:
                texts = seen[i, out.index]
                assert texts[-1] == out.text, asked[i]
                assert all(out.text.startswith(text) for text in texts), "a stream took back what it had shown"
            for echo in (False, True) if toys.PROVE else (i % 2 == 1,):
                check_server(client, prompts[i], params[i], outputs, echo)
        check_chat(client, server, llm)


def check_chat(client: httpx.Client, server: Running, llm: LLM) -> None:
    """The answer continues the conversation, whatever comes last in the template."""
    messages = [{"role": "user", "content": "the world"}]
    for changes in ({}, {"stop": ["e"]}, {"stop_token_ids": [20, 21, 22, 23]}):
        asked = {"model": MODEL, "messages": messages, "max_tokens": 20, "seed": 4, "temperature": 1.0, "ignore_eos": True, **changes}
        params = SamplingParams(max_tokens=20, seed=4, temperature=1.0, ignore_eos=True, **changes)
        expected = llm.chat(messages, params)[0].outputs[0]
        answer = client.post("/v1/chat/completions", json=asked).json()["choices"][0]
        chunks = streamed(client, asked, "/v1/chat/completions")[0]
        completed = client.post("/v1/completions", json=body(llm.inputs.encode_chat(messages), params)).json()["choices"][0]
        texts = answer["message"]["content"], "".join(c["delta"].get("content", "") for c in chunks), completed["text"]
        assert set(texts) == {expected.text}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_token_is_no_text_unless_included(kind: str) -> None:
    """As in vLLM, also where special tokens are shown."""
    loaded = model(kind)
    llm, tokenizer = engine(loaded), KINDS[kind]()
    base: dict[str, Any] = {"max_tokens": 30, "seed": 3, "temperature": 1.0, "skip_special_tokens": False}
    tool = tokenizer.convert_tokens_to_ids(ADDED)
    for end, changes in {2: {}, tool: {"stop_token_ids": (tool,), "ignore_eos": True}}.items():
        params = SamplingParams(**base, logit_bias={end: 5.0}, **changes)
        cut, shown = (
            llm.generate([PROMPTS[0]], params.model_copy(update={"include_stop_str_in_output": i}))[0].outputs[0] for i in (False, True)
        )
        assert cut.finish_reason == "stop" and cut.token_ids[-1] == end and cut.token_ids == shown.token_ids
        assert shown.text.endswith(tokenizer.decode([end]))
        assert cut.text == shown.text.removesuffix(tokenizer.decode([end])).removesuffix(" " if "wordpiece" in kind else "")
