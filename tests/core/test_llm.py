"""Engines that share weights, an `LLM` that is closed, and what a stream costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys

import echelon
from echelon import LLM, EchelonError, EngineConfig, SamplingParams
from echelon.demo import DRAFT
from echelon.errors import ClosedError
from echelon.kv.cache import KVCache

GREEDY = SamplingParams(temperature=0, max_tokens=8)
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
PROMPTS = ["def main(", "import os\nimport"]


def texts(llm: LLM) -> list[str]:
    return [o.outputs[0].text for o in llm.generate(PROMPTS, GREEDY)]


def test_engines_on_one_loaded_model_share_its_weights_and_its_texts() -> None:
    loaded = echelon.load_model(DRAFT, dtype="float32")
    one, two = (
        LLM(loaded, max_num_seqs=2),
        LLM(loaded, {"method": "draft_model", "num_speculative_tokens": 5}, loaded, max_num_seqs=1, block_size=4),
    )
    pairs = zip(one.target.model.parameters(), two.target.model.parameters(), strict=True)
    assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)
    assert one.storage.runners[0].cache is not two.storage.runners[0].cache
    assert texts(one) == texts(two) == texts(LLM(DRAFT, dtype="float32")) and texts(one)[0]
    assert [p.loaded for p in two.storage.runners] == [loaded, loaded]
    one.close()
    assert texts(two) == texts(LLM(loaded)), "the weights are the other's still"


@pytest.mark.parametrize("strategy", ["unpadded", "padded", "realign"])
def test_closing_frees_keys_and_values(strategy: Any) -> None:
    with LLM(toys.adopted(toys.llama()), NGRAM, strategy=strategy) as llm:
        storages = [(r.cache.keys, r.cache.values) for r in llm.storage.runners]
        assert all(t.numel() for keys, values in storages for t in (*keys, *values))
        llm.generate([[1, 2, 3]], GREEDY)
        engine = llm.engine
    assert not any(keys or values for keys, values in storages), "even where something still holds the engine"
    assert not engine.has_work
    llm.close()


USES: dict[str, Any] = {
    "generate": lambda llm: llm.generate([[1]], GREEDY),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "x"}]),
    "stream": lambda llm: next(llm.stream([[1]])),
    "run": lambda llm: next(llm.run([])),
    "get_counters": lambda llm: llm.get_counters(),
    "get_metrics": lambda llm: llm.get_metrics(),
    "stats": lambda llm: llm.stats,
    "encode": lambda llm: llm.inputs.encode("x"),
    "enter": lambda llm: llm.__enter__().generate([[1]]),
}


@pytest.mark.parametrize("use", USES)
def test_a_closed_engine_says_so(use: str) -> None:
    llm = LLM(toys.adopted(toys.llama()))
    llm.close()
    with pytest.raises(ClosedError, match=r"has been closed.*make a new one"):
        USES[use](llm)
    assert issubclass(ClosedError, EchelonError) and llm.config == EngineConfig()


def test_a_stream_ends_where_its_engine_is_closed() -> None:
    llm = LLM(toys.adopted(toys.llama()), max_num_seqs=1)
    stream = llm.stream([[1, 2], [3]], GREEDY)
    next(stream)
    pool = llm.engine.target.cache.tables.pool
    assert pool.num_free < pool.num_blocks
    llm.close()
    assert pool.num_free == pool.num_blocks, "rows that run and rows that wait are gone"
    assert list(stream) == []


def test_closing_from_a_callback_ends_generate_in_our_words() -> None:
    llm = LLM(toys.adopted(toys.llama()), NGRAM)
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=40)]
    with pytest.raises(ClosedError, match="while requests were running"):
        llm.generate([[1, 2], [3]], params, on_finish=lambda *_: llm.close())


def test_an_error_inside_a_stream_closes_and_is_not_hidden() -> None:
    llm = LLM(toys.adopted(toys.llama()))

    def fail() -> None:
        with llm:
            for _ in llm.stream([[1, 2]], GREEDY):
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(ClosedError):
        llm.generate([[1]])


def test_memory_is_given_back_when_engines_come_and_go() -> None:
    loaded = toys.adopted(toys.llama())
    held = []
    for _ in range(3):
        with LLM(loaded, kv_cache_memory_bytes=2**22) as llm:
            cache = llm.engine.target.cache
            assert isinstance(cache, KVCache)
            held.append(cache)
    assert sum(t.numel() for cache in held for t in (*cache.keys, *cache.values)) == 0


class CountingDecoder:
    """A tokenizer's `decode` that counts what it is asked for alone."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.num_alone = tokenizer, 0

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        self.num_alone += 1
        return str(self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))


def test_a_stream_with_logprobs_decodes_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(DRAFT, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2, prompt_logprobs=1)
    whole = llm.generate(PROMPTS, params)
    decoders = []
    requests = llm._requests

    def counted(*arguments: Any, **named: Any) -> Any:
        builders = requests(*arguments, **named)
        for builder in builders:
            builder._decoder = CountingDecoder(builder._decoder)
            decoders.append(builder._decoder)
        return builders

    monkeypatch.setattr(llm, "_requests", counted)
    last: dict[int, Any] = {}
    num_outputs = 0
    for i, output in llm.stream(PROMPTS, params):
        last[i], num_outputs = output, num_outputs + 1
    assert num_outputs > 40
    for i, output in enumerate(whole):
        assert last[i].outputs[0].logprobs == output.outputs[0].logprobs and last[i].prompt_logprobs == output.prompt_logprobs
        entries = [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]  # type: ignore[misc,index]
        assert decoders[i].num_alone == sum(map(len, entries))


def test_outputs_of_a_stream_are_not_changed_by_later_steps() -> None:
    llm = LLM(toys.adopted(toys.llama()))
    seen = [(o, len(o.outputs[0].token_ids), len(o.outputs[0].logprobs)) for _, o in llm.stream([[1]], SamplingParams(logprobs=0))]  # type: ignore[arg-type]
    assert [n for _, n, _ in seen] == [len(o.outputs[0].token_ids) for o, _, _ in seen] == list(range(1, 17))
    assert [n for *_, n in seen] == [len(o.outputs[0].logprobs) for o, _, _ in seen]  # type: ignore[arg-type]


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_a_prompt_whose_logits_overflow_fails_though_a_token_can_be_chosen(max_tokens: int) -> None:
    loaded = toys.adopted(toys.llama())

    def overflow(_module: Any, _inputs: Any, output: Any) -> Any:
        if output.logits.shape[-2] > 1:  # a prompt whose every token is asked for
            output.logits = output.logits.index_fill(-2, torch.tensor([1]), torch.inf)
        return output

    handle = loaded.model.register_forward_hook(overflow)
    try:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=1)
        (sample,) = LLM(loaded).generate([[3, 1, 4, 1, 5]], params)[0].outputs
    finally:
        handle.remove()
    assert sample.finish_reason == "error" and not sample.token_ids
    assert "overflowed" in str(sample.error)
