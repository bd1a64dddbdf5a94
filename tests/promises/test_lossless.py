"""The promise: token ids with speculation equal those without, of each row alone, whatever is drafted and whoever else is in the batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import toys

from echelon import LLM, SamplingParams
from echelon.stats import StepRecord

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "min_p": 0.01}
DRAFTERS = ["ngram", "draft_model", "always_wrong", "always_right", "random", "random_tree"]
NUM_SPECULATIVE_TOKENS = 4


@cache
def target() -> torch.nn.Module:
    return toys.llama()


def params(mode: str) -> list[SamplingParams]:
    chosen = GREEDY if mode == "greedy" else SAMPLED
    return [SamplingParams(max_tokens=toys.NUM_TOKENS, seed=100 + i, **chosen) for i in range(len(toys.PROMPT_LENGTHS))]


@cache
def truth(mode: str) -> list[list[int]]:
    """Plain decoding, each row alone in an engine of its own size."""
    llm = toys.watch(LLM(toys.adopted(target()), max_num_seqs=1, kv_cache_memory_bytes=1 << 21))
    return [llm.generate([p], [q])[0].outputs[0].token_ids for p, q in zip(toys.prompts(), params(mode), strict=True)]


def speculative_llm(drafter: str, mode: str, batch_size: int) -> LLM:
    size = 12 if drafter == "random_tree" else NUM_SPECULATIVE_TOKENS
    config = {"method": "draft_model" if drafter == "draft_model" else "ngram", "num_speculative_tokens": size}
    draft = toys.adopted(toys.noisy_copy(target(), 0.05)) if drafter == "draft_model" else None
    llm = LLM(toys.adopted(target()), config, draft_model=draft, max_num_seqs=batch_size, block_size=8, kv_cache_memory_bytes=1 << 22)
    shifts = {"always_wrong": 1, "always_right": 0, "random": None, "random_tree": None}
    if drafter in shifts:
        known = {tuple(p): t for p, t in zip(toys.prompts(), truth(mode), strict=True)}
        scripted = toys.ScriptedTreeDrafter if drafter == "random_tree" else toys.ScriptedDrafter
        llm.engine.drafter = scripted(known, shifts[drafter])
        if drafter == "random_tree":
            llm.engine.scheduler._drafts = replace(llm.engine.scheduler._drafts, grows_trees=True)
    return toys.watch(llm)


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("batch_size", [1, 3, 8, 17])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculation_changes_no_token(drafter: str, batch_size: int, mode: str, threads: int) -> None:
    rows, llm = toys.few(batch_size == 1), speculative_llm(drafter, mode, batch_size)
    outputs = llm.generate(toys.prompts()[rows], params(mode)[rows])
    assert [o.outputs[0].token_ids for o in outputs] == truth(mode)[rows]
    toys.assert_all_blocks_free(llm)
    rate = llm.stats.acceptance_rate
    if drafter == "always_right":
        assert rate == 1.0
        assert llm.stats.tokens_per_step > NUM_SPECULATIVE_TOKENS
    if drafter == "always_wrong":
        assert rate == 0.0
        assert llm.stats.tokens_per_step == 1.0
    if drafter == "draft_model":
        assert 0.2 < rate < 1.0, "the draft model should be right sometimes and wrong sometimes"
    if drafter == "random_tree":
        assert llm.stats.tokens_per_step > 1.5
        assert rate < 0.6, "about half of a tree is wrong on purpose"


def test_rows_are_long_enough_to_mean_something() -> None:
    lengths = [len(t) for t in truth("greedy")]
    assert lengths.count(toys.NUM_TOKENS) >= 14
    assert truth("greedy") != truth("sampled")
    assert len({tuple(t) for t in truth("greedy")}) == len(lengths)


def test_greedy_equals_transformers_generate() -> None:
    """In float32, the same ids as `model.generate` of transformers with its own eager attention."""
    for prompt, expected in zip(toys.prompts(), truth("greedy"), strict=True):
        ids = torch.tensor([prompt])
        room = min(toys.NUM_TOKENS, toys.CONTEXT - len(prompt))
        out = target().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=room, do_sample=False, pad_token_id=0)
        assert out[0, len(prompt) :].tolist() == expected


def test_top_two_logits_lie_apart() -> None:
    """So that equality of tokens across implementations is no accident of rounding."""
    prompt = torch.tensor([toys.prompts()[-1]])
    with torch.inference_mode():
        top = target()(input_ids=prompt).logits[0].topk(2).values
    assert (top[:, 0] - top[:, 1]).median() > 0.2


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_preemption_changes_no_token(drafter: str) -> None:
    """A pool far too small for the batch: rows are thrown out and computed again."""
    config = {"method": drafter, "num_speculative_tokens": NUM_SPECULATIVE_TOKENS}
    draft = toys.adopted(toys.noisy_copy(target(), 0.05)) if drafter == "draft_model" else None
    probe = LLM(toys.adopted(target()), config, draft_model=draft, block_size=8, kv_cache_memory_bytes=1 << 22)
    small = probe.memory_plan.block_bytes * 20
    llm = toys.watch(LLM(toys.adopted(target()), config, draft_model=draft, max_num_seqs=8, block_size=8, kv_cache_memory_bytes=small))
    outputs = llm.generate(toys.prompts(), params("sampled"))
    assert [o.outputs[0].token_ids for o in outputs] == truth("sampled")
    assert llm.stats.num_preemptions > 0
    toys.assert_all_blocks_free(llm)


@pytest.mark.parametrize(("chunk", "rows"), [(1, 1), (7, 4), (64, 8)])
@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_prompts_in_pieces_change_no_token(drafter: str, chunk: int, rows: int) -> None:
    config = {"method": drafter, "num_speculative_tokens": NUM_SPECULATIVE_TOKENS}
    draft = toys.adopted(toys.noisy_copy(target(), 0.05)) if drafter == "draft_model" else None
    settings = {"max_num_seqs": rows, "max_num_batched_tokens": chunk, "kv_cache_memory_bytes": 1 << 22}
    llm, fed = toys.watch(LLM(toys.adopted(target()), config, draft_model=draft, **settings)), toys.few(chunk == 1)
    outputs = llm.generate(toys.prompts()[fed], params("sampled")[fed])
    assert [o.outputs[0].token_ids for o in outputs] == truth("sampled")[fed]


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_preemption_at_every_step_changes_no_token(drafter: str, batch_size: int, mode: str) -> None:
    """60 runs: after every step the youngest row is thrown out, whatever it was doing, and comes back later."""
    llm = speculative_llm(drafter, mode, batch_size)
    scheduler = llm.engine.scheduler
    num_preempted = 0

    def preempt(_: StepRecord) -> None:
        nonlocal num_preempted
        if scheduler.running:
            llm.engine.drafter.forget(scheduler._preempt().id)
            num_preempted += 1
            llm.engine.check()

    llm.engine.observers.append(preempt)
    short = [p.model_copy(update={"max_tokens": 10}) for p in params(mode)]
    outputs = llm.generate(toys.prompts()[:12], short[:12])
    assert [o.outputs[0].token_ids for o in outputs] == [t[:10] for t in truth(mode)[:12]]
    assert num_preempted > 1
    toys.assert_all_blocks_free(llm)


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_stop_tokens_inside_an_accepted_block(mode: str) -> None:
    """A row that meets its stop token in the middle of an accepted block ends there, as in plain decoding."""
    for place in range(NUM_SPECULATIVE_TOKENS + 2):
        stops = [(t[min(place, len(t) - 1)],) for t in truth(mode)]
        expected = [t[: t.index(s[0]) + 1] for t, s in zip(truth(mode), stops, strict=True)]
        stopping = [p.model_copy(update={"stop_token_ids": s}) for p, s in zip(params(mode), stops, strict=True)]
        llm = speculative_llm("always_right", mode, 8)
        outputs = llm.generate(toys.prompts(), stopping)
        assert [o.outputs[0].token_ids for o in outputs] == expected
        toys.assert_all_blocks_free(llm)
