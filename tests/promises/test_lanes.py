"""The promise where rows take turns, some drafted for and verified while passes of others are under way: no text changes."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import toys
from lanes import in_lanes
from test_adaptive import CHEAP, DRAFTERS, adaptive_llm, frozen, texts
from test_heads_lossless import MODES, checked, params, truth

from echelon import LLM, SamplingParams
from echelon.sequence import Sequence

FIXED: dict[str, dict[str, Any]] = {
    name: {"num_speculative_tokens": 12 if "tree" in name else 4, "max_speculative_tokens": None} for name in DRAFTERS
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [2, 3, "any"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_lanes_change_no_token(drafter: str, count: int | str, mode: str, tmp_path: Path) -> None:
    """As many all the time, or in every step another number of them."""
    llm = adaptive_llm(drafter, mode, frozen(tmp_path, CHEAP), max_num_seqs=7)
    noted = in_lanes(llm, 3, Random(5)) if count == "any" else in_lanes(llm, int(count))
    assert texts(llm, slice(None), mode) == truth(mode)
    assert noted.most == (3 if count == "any" else count)
    assert not noted.under_way
    assert llm.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [None, 6], ids=["three", "any"])
@pytest.mark.parametrize("drafter", ["ngram", "model", "head, tree", "heads, tree"])
def test_lanes_of_fixed_drafts_and_rows_that_are_thrown_out(drafter: str, seed: int | None, mode: str) -> None:
    """In a pool far too small: what is under way is settled before anybody is preempted."""
    probe = adaptive_llm(drafter, mode, FIXED[drafter], max_num_seqs=8)
    small = probe.memory_plan.block_bytes * 24
    llm = adaptive_llm(drafter, mode, FIXED[drafter], max_num_seqs=8, kv_cache_memory_bytes=small, max_num_batched_tokens=16)
    noted = in_lanes(llm, 3, Random(seed) if seed else None)
    assert texts(llm, slice(None), mode) == truth(mode)
    assert noted.most == 3
    assert llm.stats.num_preemptions > 0
    assert llm.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("seed", [None, 7], ids=["three", "any"])
@pytest.mark.parametrize("drafter", ["ngram", "model", "head, tree", "heads, tree"])
def test_rows_that_leave_while_they_are_under_way(drafter: str, seed: int | None) -> None:
    """Aborted, and added again as they were, one by one; what lands then is not theirs any more. Others lose nothing by it."""
    llm = adaptive_llm(drafter, "sampled", FIXED[drafter], max_num_seqs=6)
    in_lanes(llm, 3, Random(seed) if seed else None)
    if drafter.startswith("head"):
        checked(llm)
    rows = [s for p, q in zip(toys.prompts(), params("sampled"), strict=True) for s in llm.inputs.samples(p, q, watch_text=False)]
    for sequence in rows:
        llm.engine.add(sequence)
    gone: list[Sequence] = []
    while llm.engine.has_work:
        llm.engine.step()
        under_way = [row.sequence for step in llm.engine.in_flight for row in step.plan.rows if step.plan.awaits(row)]
        for sequence in [s for s in under_way if s not in gone][:1]:
            gone.append(sequence)
            llm.engine.abort(sequence)
            llm.engine.add(sequence)
            llm.engine.check()
    assert len(gone) > len(rows) // 2
    assert [s.output_tokens for s in rows] == truth("sampled")
    toys.assert_all_blocks_free(llm)


def test_all_rows_leave_while_they_are_under_way() -> None:
    """Nobody waits for what they have begun."""
    llm = adaptive_llm("model", "greedy", FIXED["model"], max_num_seqs=6)
    noted = in_lanes(llm, 3)
    rows = [s for p, q in zip(toys.prompts(), params("greedy"), strict=True) for s in llm.inputs.samples(p, q, watch_text=False)]
    for sequence in rows:
        llm.engine.add(sequence)
    for _ in range(4):
        llm.engine.step()
    assert len(noted.under_way) == 2
    for sequence in rows:
        if not sequence.is_finished:
            llm.engine.abort(sequence)
    assert not llm.engine.has_work
    assert not llm.engine.in_flight
    assert texts(llm, slice(None), "greedy") == truth("greedy")
    assert not noted.under_way


def test_rows_are_dealt_to_lanes_alike() -> None:
    """Each takes its share of those that run, again after some have ended."""
    llm = toys.watch(LLM(toys.adopted(toys.llama()), max_num_seqs=8, kv_cache_memory_bytes=1 << 22))
    noted = in_lanes(llm, 4)
    lengths = [30, 30, 30, 30, 30, 4, 4, 4]
    llm.generate(toys.prompts([3] * 8), [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in lengths], use_tqdm=False)
    assert noted.num_rows[:4] == [2, 2, 2, 2]
    assert noted.num_rows[-60:-20].count(2) <= 12, "five rows in four lanes"
    assert max(noted.num_rows[-60:-20]) == 2


@pytest.mark.parametrize("refill", [True, False])
def test_samples_of_one_prompt_and_static_batches(refill: bool) -> None:
    """Rows fork from one that is under way, and a batch that takes nobody in is filled over several lanes."""
    prompts = toys.prompts([9, 17, 5])
    params = [SamplingParams(n=3, max_tokens=12, seed=5 + i, temperature=0.9) for i in range(3)]
    found = []
    for count in (1, 3):
        settings: dict[str, Any] = {"max_num_seqs": 6, "refill": refill, "block_size": 8, "kv_cache_memory_bytes": 1 << 22}
        llm = toys.watch(LLM(toys.adopted(toys.llama()), {"method": "ngram", "num_speculative_tokens": 3}, **settings))
        noted = in_lanes(llm, count)
        found.append([[o.token_ids for o in r.outputs] for r in llm.generate(prompts, params, use_tqdm=False)])
        assert noted.most == count
        toys.assert_all_blocks_free(llm)
    assert found[0] == found[1]
