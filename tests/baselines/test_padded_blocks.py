"""The field's strategies on our attention: the text of plain decoding, and as much padding as in a rectangle."""

from __future__ import annotations

from typing import Any

import pytest
import test_strategies as rectangles
import toys
from test_draft_trees import GROWN, draft
from test_heads_lossless import TREES, head, params, target, truth

import heads
from echelon import LLM
from echelon.baselines.padded_blocks import PaddedBlocksRunner
from echelon.baselines.strategies import on_our_attention
from echelon.stats import Usage


def usage_of(llm: LLM) -> Usage:
    usage: Usage = llm.engine.target.usage
    return usage


@pytest.mark.parametrize("mode", ["greedy", "sampled"] if toys.PROVE else ["sampled"])
@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
@pytest.mark.parametrize("strategy", rectangles.RECTANGLES)
def test_a_strategy_changes_no_token_on_our_attention(strategy: str, drafter: str, mode: str) -> None:
    with on_our_attention():
        llm = rectangles.build(strategy, drafter, 4)
    assert isinstance(llm.engine.target, PaddedBlocksRunner)
    assert rectangles.texts(llm, mode) == rectangles.truth(mode)
    toys.assert_all_blocks_free(llm)


@pytest.mark.parametrize("refill", [True, False])
@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
@pytest.mark.parametrize("strategy", ["padded", "pad kv", "realign", "grouped"])
def test_as_much_is_padded_as_in_a_rectangle(strategy: str, drafter: str, refill: bool) -> None:
    """Inputs, and keys that are loaded without being of any use, over a whole run."""
    there = rectangles.build(strategy, drafter, 4, refill=refill)
    with on_our_attention():
        here = rectangles.build(strategy, drafter, 4, refill=refill)
    for llm in (there, here):
        rectangles.texts(llm, "greedy")
    one, other = usage_of(there), usage_of(here)
    assert (one.num_passes, one.num_tokens, one.num_inputs) == (other.num_passes, other.num_tokens, other.num_inputs)
    assert one.num_live == other.num_live
    assert other.num_touched == pytest.approx(one.num_touched, rel=0.01)


def test_what_is_padded_alone() -> None:
    with on_our_attention():
        found = {name: rectangles.build(name, "ngram", 4) for name in ("pad kv", "pad inputs", "realign")}
    for llm in found.values():
        rectangles.texts(llm, "greedy")
    assert usage_of(found["pad kv"]).padded_input_share == 0.0 < usage_of(found["pad kv"]).padded_kv_share
    assert usage_of(found["pad inputs"]).padded_kv_share == 0.0 < usage_of(found["pad inputs"]).padded_input_share
    assert usage_of(found["realign"]).layout_seconds > 0.0


def test_one_row_has_nothing_padded() -> None:
    with on_our_attention():
        llm = rectangles.build("padded", "ngram", 1)
    assert rectangles.texts(llm, "greedy") == rectangles.truth("greedy")
    assert usage_of(llm).padded_kv_share == usage_of(llm).padded_input_share == 0.0


@pytest.mark.parametrize("strategy", ["padded", "realign"])
def test_rows_wait_for_all_the_blocks_that_they_may_take(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody is preempted here, and five rows would outgrow the pool."""
    config = {"method": "draft_model", **GROWN["dynamic"]}
    settings: dict[str, Any] = {"max_num_seqs": 5, "strategy": strategy}
    block = LLM(toys.adopted(target()), config, toys.adopted(draft()), **settings).memory_plan.block_bytes
    llm = toys.watch(LLM(toys.adopted(target()), config, toys.adopted(draft()), kv_cache_memory_bytes=25 * block, **settings))
    rows: list[int] = []
    llm.engine.observers.append(lambda record: rows.append(len(record.rows)))
    outputs = llm.generate(toys.prompts(), params("greedy"))
    assert [o.outputs[0].token_ids for o in outputs] == truth("greedy")
    assert max(rows) == 2 and "runs 2 rows at once instead of 5" in caplog.text
    toys.assert_all_blocks_free(llm)


@pytest.mark.parametrize("strategy", rectangles.RECTANGLES if toys.PROVE else ["padded", "realign"])
@pytest.mark.parametrize("tree", TREES if toys.PROVE else ["dynamic"])
@pytest.mark.parametrize("kind", heads.KINDS)
def test_heads_in_every_strategy(kind: str, tree: str, strategy: str) -> None:
    """Outside, too: heads and trees need blocks, and there the field's strategies are on ours."""
    own, settings = head(kind, "sampled"), rectangles.STRATEGIES[strategy]
    llm = toys.watch(LLM(toys.adopted(target()), {"method": own.method, **TREES[tree]}, draft_head=own, max_num_seqs=3, **settings))
    few = toys.few(is_slow=True)
    outputs = llm.generate(toys.prompts()[few], params("sampled")[few])
    assert [o.outputs[0].token_ids for o in outputs] == truth("sampled")[few]
    assert llm.stats.num_accepted_tokens > 0
    toys.assert_all_blocks_free(llm)


@pytest.mark.parametrize("strategy", ["padded", "realign"])
@pytest.mark.parametrize("tree", GROWN)
def test_trees_of_a_draft_model(tree: str, strategy: str) -> None:
    config = {"method": "draft_model", **GROWN[tree]}
    llm = toys.watch(LLM(toys.adopted(target()), config, toys.adopted(draft()), max_num_seqs=4, strategy=strategy))
    outputs = llm.generate(toys.prompts(), params("greedy"))
    assert [o.outputs[0].token_ids for o in outputs] == truth("greedy")
    assert usage_of(llm).padded_kv_share > 0.1
    toys.assert_all_blocks_free(llm)
