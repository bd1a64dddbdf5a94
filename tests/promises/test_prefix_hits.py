"""The promise with prefix caching: a text that is found in part has the bits of one that is read from its first token on, whatever was
drafted, cut short, preempted or forgotten in between.
"""

from __future__ import annotations

import gc
from functools import cache
from typing import Any

import numpy as np
import pytest
import toys
from test_heads_lossless import checked

import heads
from echelon import LLM, RequestOutput, SamplingParams
from echelon.drafters.heads import HeadDrafter

LLAMA = cache(toys.llama)
TREE = {"tree": "dynamic", "num_speculative_tokens": 8, "tree_top_k": 3, "tree_depth": 4}
CHAIN = {"num_speculative_tokens": 3}
DRAFTERS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", **CHAIN},
    "draft_model": {"method": "draft_model", **CHAIN},
    "draft_model_tree": {"method": "draft_model", **TREE},
    **dict.fromkeys(heads.KINDS, CHAIN),
    **{f"{kind}_tree": TREE for kind in heads.KINDS if kind != "independent"},
}
NUM_HISTORIES = 455 if toys.PROVE else 2  # of 6 rounds, for each drafter and temperature: 10,010 in all
NUM_CONVERSATIONS = 10_000 if toys.PROVE else 80  # for each drafter
NUM_ROUNDS, BLOCK = 6, 8


def engine(name: str, acceptance: str = "exact", **settings: Any) -> LLM:
    config, draft, head = DRAFTERS[name], None, None
    if name.startswith("draft_model"):
        draft = toys.adopted(toys.noisy_copy(LLAMA(), 0.05))
    elif config is not None and name != "ngram":
        head = heads.KINDS[name.removesuffix("_tree")](LLAMA()).eval()
        config = {"method": head.method, "acceptance": acceptance, **config}
    llm = LLM(toys.adopted(LLAMA()), config, draft, head, block_size=BLOCK, **settings)
    toys.watch(llm)
    return checked(llm) if head is not None and isinstance(llm.engine.drafter.unguarded, HeadDrafter) else llm


def said(output: RequestOutput) -> list[Any]:
    """All that a request has said, to the bits of its log-probabilities."""
    return [
        (o.token_ids, o.finish_reason, [{t: p.logprob for t, p in found.items()} for found in o.logprobs or []]) for o in output.outputs
    ]


class History:
    """Requests that begin like earlier ones, a few of them cut short."""

    def __init__(self, hot: LLM, cold: LLM, temperature: float, seed: int) -> None:
        self.hot, self.cold, self.temperature = hot, cold, temperature
        hot.engine.scheduler.piece_sizes = toys.WholePrompts()
        self.reads_whole = hot.config.max_num_batched_tokens >= toys.CONTEXT  # a last piece of one token may be drafted for
        self.rng = np.random.default_rng(seed)
        self.texts: list[list[int]] = [self.rng.integers(0, toys.VOCABULARY, n).tolist() for n in (1, 17, 40)]

    def request(self) -> tuple[list[int], SamplingParams]:
        rng, old = self.rng, self.texts[int(self.rng.integers(len(self.texts)))]
        cut = int(rng.choice([0, 0, 1, BLOCK, rng.integers(len(old))]))
        tokens = old[: max(1, len(old) - cut)] + rng.integers(0, toys.VOCABULARY, int(rng.choice([0, 1, 5, 20]))).tolist()
        params = SamplingParams(
            n=int(rng.choice([1, 1, 2])), temperature=self.temperature, seed=int(rng.integers(99)), max_tokens=int(rng.integers(1, 25)),
            logprobs=1, prompt_logprobs=[None, None, None, 0][int(rng.integers(4))],
        )  # fmt: skip
        return tokens[: toys.CONTEXT - 26], params

    def round(self) -> None:
        asked = [self.request() for _ in range(int(self.rng.integers(1, 5)))]
        self.cut_short(*self.request())
        before = self.hot.stats.num_preemptions
        prompts, params = [p for p, _ in asked], [q for _, q in asked]
        outputs, expected = self.hot.generate(prompts, params), [self.cold.generate([p], [q])[0] for p, q in asked]
        for found, true in zip(outputs, expected, strict=True):
            assert said(found) == said(true)
            assert found.prompt_logprobs == true.prompt_logprobs
            if self.reads_whole and self.hot.stats.num_preemptions == before:
                assert found.metrics == true.metrics, "a hit changes what is drafted, or kept"
            self.texts.append(found.prompt_token_ids + found.outputs[0].token_ids)

    def cut_short(self, tokens: list[int], params: SamplingParams) -> None:
        """A request whose reader leaves after some steps."""
        stream = self.hot.stream([tokens], params)
        for _ in range(int(self.rng.integers(0, 6))):
            next(stream, None)
        stream.close()


@pytest.mark.parametrize(("temperature", "piece"), [(0.0, 2048), (0.9, 24)])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_hit_has_the_bits_of_a_cold_start(name: str, temperature: float, piece: int) -> None:
    hot = engine(name, max_num_seqs=3, max_num_batched_tokens=piece, kv_cache_memory_bytes=hot_bytes(name))
    cold = engine(name, max_num_seqs=1, enable_prefix_caching=False)
    for seed in range(NUM_HISTORIES):
        history = History(hot, cold, temperature, seed)
        for _ in range(NUM_ROUNDS):
            history.round()
        toys.assert_all_blocks_free(hot)
    metrics = hot.get_counters()
    assert 0.1 < metrics["num_prefix_hits"] / metrics["num_prefix_queries"] < 1.0
    assert cold.get_counters()["num_prefix_hits"] == 0


def hot_bytes(name: str) -> int:
    """A pool of 40 blocks: two rows of full length and a half, so that there is preemption and eviction."""
    return 40 * engine(name, max_num_seqs=1).memory_plan.block_bytes


@pytest.mark.parametrize("name", ["autoregressive", "deep", "autoregressive_tree", "draft_model"])
def test_a_drafter_loses_no_hit(name: str) -> None:
    """Two conversations of five turns: as many tokens are cached as without a drafter."""
    counts = []
    for llm in (engine(name, max_num_seqs=2), engine("plain", max_num_seqs=2)):
        texts = toys.prompts((21, 9))
        cached = []
        for turn in range(5):
            outputs = llm.generate(texts, SamplingParams(temperature=0.0, max_tokens=7))
            cached += [o.num_cached_tokens for o in outputs]
            texts = [o.prompt_token_ids + o.outputs[0].token_ids + [turn, 5] for o in outputs]
        counts.append(cached)
    assert counts[0] == counts[1]
    assert counts[0][-2:] == [(n + 3 * 9 + 6) // BLOCK * BLOCK for n in (21, 9)], "all but the last token of the turn before"


@pytest.mark.parametrize("name", ["plain", "draft_model", "autoregressive_tree"])
def test_many_conversations_leave_nothing_behind(name: str) -> None:
    """Four at a time, of three turns, from some of which a reader leaves: no block and no object stays, whatever is cached or forgotten."""
    llm = engine(name, max_num_seqs=3, kv_cache_memory_bytes=hot_bytes(name))
    rng = np.random.default_rng(0)
    objects = []
    for number in range(0, NUM_CONVERSATIONS, 4):
        texts = [rng.integers(0, toys.VOCABULARY, int(n)).tolist() for n in rng.integers(1, 30, 4)]
        for turn in range(3):
            params = SamplingParams(temperature=float(turn == 1), seed=number, max_tokens=int(rng.integers(1, 8)))
            if rng.integers(5) == 0:
                stream = llm.stream(texts, params)
                next(stream, None)
                stream.close()
            outputs = llm.generate(texts, params)
            texts = [o.prompt_token_ids + o.outputs[0].token_ids + [turn] for o in outputs]
        if (number + 4) % (NUM_CONVERSATIONS // 4) == 0:
            gc.collect()
            objects.append(len(gc.get_objects()))
    toys.assert_all_blocks_free(llm)
    # What is made once, here or by a library, counts in one quarter; what stays of a conversation counts in each.
    assert min(np.diff(objects)) < NUM_CONVERSATIONS / 16, "what is kept does not grow by the conversation"
    assert llm.get_counters()["num_prefix_hits"] > 0


def test_forgetting_makes_the_next_start_cold() -> None:
    llm = engine("plain", max_num_seqs=1)
    (prompt,) = toys.prompts((40,))
    cached = []
    for turn in range(4):
        if turn == 2:
            llm.reset_prefix_cache()
        cached.append(llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2))[0].num_cached_tokens)
    assert cached == [0, 32, 0, 32]


def test_prompt_logprobs_are_those_of_the_whole_prompt() -> None:
    llm = engine("plain", max_num_seqs=1)
    (prompt,) = toys.prompts((40,))
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    first, second = (llm.generate([prompt], params)[0] for _ in range(2))
    assert (first.prompt_logprobs, second.num_cached_tokens) == (second.prompt_logprobs, 0)


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("length", [2, 6, 2 * BLOCK + 2])
def test_samples_that_fork_behind_a_piece_of_one_token_are_no_hits(length: int, caches: bool) -> None:
    """The head has not read the parent's last piece when its second sample starts: that one is read anew, or not drafted for."""
    llm = engine("autoregressive", max_num_seqs=4, max_num_batched_tokens=4, enable_prefix_caching=caches)
    plain = engine("plain", max_num_seqs=1)
    params = SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=20)
    for turn in range(3):
        (prompt,) = toys.prompts((length,), seed=turn)
        found, true = (each.generate([prompt, prompt], params) for each in (llm, plain))
        assert [o.token_ids for r in found for o in r.outputs] == [o.token_ids for r in true for o in r.outputs]
    assert not llm.get_counters()["drafter_faults"]


@pytest.mark.parametrize("name", ["autoregressive", "autoregressive_tree"])
def test_under_typical_acceptance_the_pieces_of_a_prompt_change_no_text(name: str) -> None:
    """A last piece of one token, behind which the head has read all but that: the first token is no more drafted than of a whole prompt."""
    texts = []
    for budget in (4, 2048):
        llm = engine(name, acceptance="typical", max_num_seqs=1, max_num_batched_tokens=budget, enable_prefix_caching=False)
        asked = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True)
        texts.append([llm.generate([p], asked)[0].outputs[0].token_ids for p in toys.prompts((5, 9, 13) * 6)])
        assert llm.stats.num_accepted_tokens > 0
    assert texts[0] == texts[1]
