"""Every sampling parameter means the same with speculation as without, alone as in a batch."""

from __future__ import annotations

import threading
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import toys
from tokenizer_kinds import KINDS

from echelon import LLM, CompletionOutput, RequestError, SamplingParams
from echelon.demo import TARGET
from echelon.model.load.loading import LoadedModel, adopt_model, load_model
from echelon.sampling import Sampler, logprobs_of

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 1.1, "top_p": 0.9},
    "top_k": {"temperature": 0.8, "top_k": 20},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.9},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "logit_bias": {"logit_bias": {5: 3.0, 9: -4.0}},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(10, 60))},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": tuple(range(0, 96, 3))},
    "stop_token_ids": {"stop_token_ids": (17, 40, 41)},
    "n": {"n": 3},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "num_speculative_tokens": {"num_speculative_tokens": 2},
    "logits_processors": {"logits_processors": (lambda ids, logits: logits * (1.0 - 0.01 * (len(ids) % 3)),)},
}
PAIRS = list(combinations(OPTIONS, 2))
LENGTHS = (1, 4, 30, 17, 90)
NUM_TOKENS = 20


@cache
def loaded(kind: str) -> LoadedModel:
    model = toys.llama(spread=0.25)
    return toys.adopted(model if kind == "target" else toys.noisy_copy(model, 0.05))


def params(pair: tuple[str, str], row: int) -> SamplingParams:
    return SamplingParams(**({"max_tokens": NUM_TOKENS, "seed": row} | OPTIONS[pair[1]] | OPTIONS[pair[0]]))


def everything(llm: LLM, prompts: list[list[int]], chosen: list[SamplingParams]) -> list[Any]:
    outputs = llm.generate(prompts, chosen)
    return [
        [(o.token_ids, o.finish_reason, o.logprobs, o.cumulative_logprob) for o in out.outputs] + [out.prompt_logprobs] for out in outputs
    ]


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_pairs_of_parameters_with_speculation_equal_those_without(pair: tuple[str, str]) -> None:
    prompts = toys.prompts(LENGTHS)
    chosen = [params(pair, row) for row in range(len(LENGTHS))]
    plain = LLM(loaded("target"), max_num_seqs=1, kv_cache_memory_bytes=1 << 21)
    expected = [everything(plain, [p], [q])[0] for p, q in zip(prompts, chosen, strict=True)]
    method = ("ngram", "draft_model")[PAIRS.index(pair) % 2]
    config = {"method": method, "num_speculative_tokens": 4}
    llm = toys.watch(LLM(loaded("target"), config, loaded("draft"), max_num_seqs=8, block_size=8, kv_cache_memory_bytes=1 << 22))
    assert everything(llm, prompts, chosen) == expected
    toys.assert_all_blocks_free(llm)


def naive(params: SamplingParams, logits: np.ndarray, prompt: list[int], output: list[int]) -> np.ndarray:
    """The penalties as OpenAI and CTRL write them, token by token."""
    out = logits.astype(np.float64).copy()
    for token in range(len(out)):
        if token in prompt or token in output:
            out[token] = out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        out[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
    return out


def test_penalties_are_the_textbook_ones() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        chosen = SamplingParams(
            repetition_penalty=float(rng.uniform(0.5, 2)),
            frequency_penalty=float(rng.uniform(-2, 2)),
            presence_penalty=float(rng.uniform(-2, 2)),
        )
        prompt, output, path = (rng.integers(0, 30, n).tolist() for n in (8, 5, 3))
        logits = rng.normal(0, 2, 30).astype(np.float32)
        sampler = Sampler(chosen, 0, 0, len(prompt))
        got = sampler.processed(logits, prompt + output, path)
        assert np.allclose(got, naive(chosen, logits, prompt, output + path), atol=1e-5)


def by_whole_text(params: SamplingParams, logits: np.ndarray, prompt: list[int], output: list[int]) -> np.ndarray:
    """The penalties in float32 from all tokens at once."""
    out = logits.copy()
    if params.repetition_penalty != 1.0:
        seen, penalty = np.unique(prompt + output), np.float32(params.repetition_penalty)
        out[seen] = np.where(out[seen] > 0, out[seen] / penalty, out[seen] * penalty)
    if output:
        seen, counts = np.unique(output, return_counts=True)
        out[seen] -= np.float32(params.frequency_penalty) * counts.astype(np.float32) + np.float32(params.presence_penalty)
    return out


PENALTIES = ({"repetition_penalty": 1.3}, {"frequency_penalty": 0.7}, {"presence_penalty": -0.4},
             {"repetition_penalty": 0.8, "frequency_penalty": -0.3, "presence_penalty": 1.1})  # fmt: skip


@pytest.mark.parametrize("values", PENALTIES)
def test_penalties_of_a_growing_text_have_the_bits_of_those_of_the_whole(values: dict[str, Any]) -> None:
    """Token by token, after drafted paths that were not kept, and when another text, or a shorter one, comes between."""
    rng = np.random.default_rng(2)
    for width in (12, 400):
        prompt = rng.integers(0, width, 9).tolist()
        sampler, tokens = Sampler(SamplingParams(**values), 0, 0, len(prompt)), list(prompt)
        for i in range(300):
            path, other = rng.integers(0, width, i % 5).tolist(), prompt + rng.integers(0, width, 4).tolist()
            for text in [tokens, other] if i % 7 == 0 else [tokens]:
                logits = rng.normal(0, 2, width).astype(np.float32)
                expected = by_whole_text(sampler.params, logits, prompt, (text + path)[len(prompt) :])
                assert sampler.processed(logits, text, path).tobytes() == expected.tobytes()
            if i == 200:
                del tokens[50:]
            tokens += rng.integers(0, width, int(rng.integers(1, 4))).tolist()


class Counted(list[int]):
    """A list that counts how many of its entries are read."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self) -> Any:
        self.num_read += len(self)
        return super().__iter__()


@pytest.mark.parametrize("values", [*PENALTIES, {"bad_words": ("x",)}])
def test_a_penalty_reads_only_the_new_tokens_of_a_text(values: dict[str, Any]) -> None:
    """However long it is; the first place reads all of it."""
    logits = np.random.default_rng(3).normal(0, 2, 50).astype(np.float32)
    for length in (100, 30_000):
        tokens = Counted(i % 50 for i in range(length))
        sampler = Sampler(SamplingParams(**values), 0, 0, 10, bad_words=((3, 4, 5),) if "bad_words" in values else ())
        sampler.processed(logits, tokens, [1])
        tokens.num_read = 0
        for i in range(20):
            tokens.append(i)
            sampler.processed(logits, tokens, [1, 2, 3][: i % 4])
        assert tokens.num_read <= 60


def test_bad_words_are_banned_where_they_would_be_completed() -> None:
    logits = np.zeros(10, np.float32)
    sampler = Sampler(SamplingParams(), 0, 0, 2, bad_words=((7,), (4, 5)))
    assert np.flatnonzero(np.isinf(sampler.processed(logits, [4, 4], []))).tolist() == [7], "the prompt does not count"
    assert np.flatnonzero(np.isinf(sampler.processed(logits, [4, 4, 1], [4]))).tolist() == [5, 7]
    assert np.flatnonzero(np.isinf(sampler.processed(logits, [4, 4, 4], [1]))).tolist() == [7]


def test_bad_words_that_the_model_cannot_say_forbid_nothing() -> None:
    """A tokenizer with more tokens than the model has: "a" is number 17 of it, "d" number 20."""
    tokenizer = KINDS["wordpiece"]()
    assert tokenizer.encode("a", add_special_tokens=False) == [17] and tokenizer.encode("d", add_special_tokens=False) == [20]
    llm = LLM(adopt_model(toys.llama(vocab_size=20), tokenizer, "toy"))
    asked = SamplingParams(temperature=0.0, max_tokens=2, bad_words=("d", "a"))
    assert llm.inputs.samples([1], asked, False)[0].sampler.bad_words == ((17,),)
    assert llm.generate([[1]], asked)[0].outputs[0].error is None


def test_an_end_outside_the_vocabulary_forbids_no_token() -> None:
    """−1, by which some configurations say that there is none, does not count from the last token on."""
    own, last = toys.adopted(toys.llama()), toys.VOCABULARY - 1
    own.model.generation_config.eos_token_id = -1
    asked = SamplingParams(temperature=0.0, max_tokens=3, min_tokens=3, logit_bias={last: 1e6})
    assert LLM(own).generate([[1, 2]], asked)[0].outputs[0].token_ids == [last] * 3


def test_logprobs_are_the_raw_log_softmax() -> None:
    logits = np.random.default_rng(1).normal(0, 3, 50).astype(np.float32)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    got = logprobs_of(logits, 11, 5)
    order = np.argsort(-exact)
    assert got.rank == 1 + order.tolist().index(11)
    assert list(got.top) == order[:5].tolist()
    assert np.isclose(got.logprob, exact[11], atol=1e-5)


def test_n_samples_share_the_blocks_of_their_prompt() -> None:
    llm = toys.watch(LLM(loaded("target"), max_num_seqs=8, block_size=8, kv_cache_memory_bytes=1 << 21))
    used = []
    pool = llm.engine.target.cache.tables.pool
    llm.engine.observers.append(lambda _: used.append(pool.num_blocks - pool.num_free))
    out = llm.generate([toys.prompts((80,))[0]], SamplingParams(n=4, max_tokens=8, seed=3))
    assert len({tuple(o.token_ids) for o in out[0].outputs}) > 1
    assert [o.index for o in out[0].outputs] == [0, 1, 2, 3]
    assert max(used) <= 10 + 4 * 2, "four samples of an 80-token prompt hold its ten blocks once"
    assert llm.stats.num_input_tokens < 80 + 4 * 9


def test_chat_stream_and_generate_agree() -> None:
    llm = LLM(load_model(str(TARGET), device="cpu"), {"method": "ngram", "num_speculative_tokens": 5})
    messages = [{"role": "user", "content": "write a class"}]
    chosen = SamplingParams(temperature=0.7, seed=5, max_tokens=24, logprobs=1)
    answer = llm.chat(messages, chosen)[0]
    parts = list(llm.stream([llm.inputs.encode_chat(messages)], chosen))
    assert parts[-1][1].outputs == answer.outputs
    assert parts[-1][1].finished
    texts = [out.outputs[0].text for _, out in parts]
    assert all(answer.outputs[0].text.startswith(text) for text in texts)
    assert len(parts) == answer.metrics.num_steps
    assert answer.outputs[0].logprobs is not None
    assert answer.outputs[0].logprobs[0][answer.outputs[0].token_ids[0]].decoded_token is not None


def test_an_abandoned_stream_frees_its_rows() -> None:
    llm = toys.watch(
        LLM(loaded("target"), {"method": "draft_model", "num_speculative_tokens": 5}, loaded("draft"), kv_cache_memory_bytes=1 << 21)
    )
    stream = llm.stream(toys.prompts((5, 60)), SamplingParams(max_tokens=40, seed=1))
    next(stream)
    with pytest.raises(RequestError, match="stream"):
        llm.generate([[1]])
    stream.close()
    toys.assert_all_blocks_free(llm)
    assert llm.get_counters()["num_running"] == llm.get_counters()["num_waiting"] == 0
    llm.generate([[1]])


def test_an_interrupt_frees_its_rows() -> None:
    def interrupt(ids: list[int], logits: Any) -> Any:
        if len(ids) == 3:
            raise KeyboardInterrupt
        return logits

    llm = toys.watch(
        LLM(loaded("target"), {"method": "draft_model", "num_speculative_tokens": 5}, loaded("draft"), kv_cache_memory_bytes=1 << 21)
    )
    with pytest.raises(KeyboardInterrupt):
        llm.generate(toys.prompts((5, 60)), SamplingParams(max_tokens=40, seed=1, logits_processors=(interrupt,)))
    toys.assert_all_blocks_free(llm)
    assert len(llm.generate([[1]])[0].outputs[0].token_ids) == 16


def test_two_threads_on_one_engine_take_turns() -> None:
    llm = LLM(loaded("target"), {"method": "ngram", "num_speculative_tokens": 5}, kv_cache_memory_bytes=1 << 21)
    chosen = SamplingParams(max_tokens=20, seed=1)
    expected = [o.outputs[0].token_ids for o in llm.generate(toys.prompts((5, 60)), chosen)]
    got: list[Any] = []

    def work() -> None:
        got.append([o.outputs[0].token_ids for o in llm.generate(toys.prompts((5, 60)), chosen)])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [expected] * 3


def test_a_drawn_seed_is_returned_and_repeats_the_text() -> None:
    llm = LLM(loaded("target"))
    first = llm.generate([[1, 2]], SamplingParams(max_tokens=12))[0].outputs[0]
    other = llm.generate([[1, 2]], SamplingParams(max_tokens=12))[0].outputs[0]
    again = llm.generate([[1, 2]], SamplingParams(max_tokens=12, seed=first.seed))[0].outputs[0]
    assert first.seed != other.seed
    assert again.token_ids == first.token_ids


def straddling(out: CompletionOutput, pieces: list[str], rng: np.random.Generator) -> str | None:
    """A stop string whose first hit ends inside an accepted block: the draft goes on after its last token. None: drawn badly."""
    ends = np.cumsum([len(p) for p in pieces])
    end, length = int(rng.integers(1, ends[-1] + 1)), int(rng.integers(1, 9))
    last = int(np.searchsorted(ends, end))
    stop = out.text[max(0, end - length) : end]
    is_inside = last + 1 < len(pieces) and out.is_accepted[last] and out.is_accepted[last + 1]
    return stop if is_inside and out.text.index(stop) + len(stop) == end else None


def test_stop_strings_cut_where_plain_decoding_cuts() -> None:
    """500 stop strings that end inside an accepted block, each cut at the same character as by plain decoding."""
    target = load_model(str(TARGET), device="cpu")
    plain = LLM(target, max_num_seqs=16)
    llm = LLM(target, {"method": "ngram", "num_speculative_tokens": 7}, max_num_seqs=16)
    tokenizer = target.tokenizer
    assert tokenizer is not None
    base = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    texts = ["class A:\n    def f(self):\n", "import os\nimport sys\n", "def main(argv):\n    parser = ", "x = 1\ny = 2\n", "if True:\n"]
    whole = [o.outputs[0] for o in llm.generate(texts, base)]
    pieces = [[tokenizer.decode([t]) for t in out.token_ids] for out in whole]
    assert ["".join(p) for p in pieces] == [out.text for out in whole]
    rng = np.random.default_rng(0)
    prompts: list[str] = []
    chosen: list[SamplingParams] = []
    while len(chosen) < 500:
        i = int(rng.integers(0, len(texts)))
        if (stop := straddling(whole[i], pieces[i], rng)) is not None:
            prompts.append(texts[i])
            chosen.append(base.model_copy(update={"stop": (stop,), "include_stop_str_in_output": len(chosen) % 2 == 1}))
    got, expected = ([o.outputs[0] for o in engine.generate(prompts, chosen)] for engine in (llm, plain))
    assert [(o.text, o.token_ids, o.finish_reason) for o in got] == [(o.text, o.token_ids, o.finish_reason) for o in expected]
    for out, prompt, params in zip(got, prompts, chosen, strict=True):
        text = whole[texts.index(prompt)].text
        end = text.index(params.stop[0]) + len(params.stop[0]) * params.include_stop_str_in_output
        assert (out.text, out.finish_reason) == (text[:end], "stop")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop_token_ids": (96,)}, "vocabulary"),
        ({"logit_bias": {-1: 1.0}}, "vocabulary"),
        ({"allowed_token_ids": (1, 500)}, "vocabulary"),
        ({"bad_words": ("x",)}, "tokenizer"),
        ({"stop": ("x",)}, "tokenizer"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        LLM(loaded("target")).generate([[1]], SamplingParams(**values))
