"""Trees of a draft model: the promise, and that every node sees the text and its own ancestors alone."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import toys
from test_heads_lossless import CHANGES, TREES
from test_lossless import params, target, truth

from echelon import LLM, ConfigError, SamplingParams
from echelon.drafters.draft_model import _ModelFrontier
from echelon.ops.compiled import is_built

GROWN = {name: tree for name, tree in TREES.items() if name != "chain"}
MODES = ["greedy", "sampled"]


@cache
def draft() -> Any:
    return toys.noisy_copy(target(), 0.05)


def tree_llm(tree: str, batch_size: int, small: Any = None, **settings: Any) -> LLM:
    settings = {"block_size": 8, "kv_cache_memory_bytes": 1 << 22} | settings
    config = {"method": "draft_model", **GROWN[tree]}
    small = toys.adopted(small or draft())
    return toys.watch(LLM(toys.adopted(target()), config, small, max_num_seqs=batch_size, **settings))


def generated(llm: LLM, given: list[list[int]], asked: list[SamplingParams]) -> list[list[int]]:
    outputs = [o.token_ids for r in llm.generate(given, asked) for o in r.outputs]
    toys.assert_all_blocks_free(llm)
    assert not llm.stats.drafter_faults
    return outputs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_size", [1, 3, 8, 17])
@pytest.mark.parametrize("tree", GROWN)
def test_trees_change_no_token(tree: str, batch_size: int, mode: str) -> None:
    llm = tree_llm(tree, batch_size)
    assert generated(llm, toys.prompts(), params(mode)) == truth(mode)
    assert llm.stats.tokens_per_step > 1.5
    assert llm.stats.acceptance_rate < 0.9, "a tree has branches that are not taken"


@pytest.mark.parametrize("tree", GROWN)
def test_a_node_has_the_logits_of_its_path_alone(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tree_llm(tree, 3)
    advance, num_compared = _ModelFrontier.advance, 0

    def compared(frontier: _ModelFrontier, nodes: Any, at: Any, depth: int) -> Any:
        nonlocal num_compared
        places = advance(frontier, nodes, at, depth)
        for node, place in zip(nodes.tolist(), places.tolist(), strict=True):
            text = frontier.rows[int(frontier.forest.rows[node])].sequence.tokens
            with torch.no_grad():
                expected = draft()(torch.tensor([[*text, *frontier.forest.path(node)]])).logits[0, -1]
            torch.testing.assert_close(frontier.logits(depth)[place].float(), expected.float(), rtol=1e-3, atol=1e-3)
            num_compared += 1
        return places

    monkeypatch.setattr(_ModelFrontier, "advance", compared)
    asked = [p.model_copy(update={"max_tokens": 10}) for p in params("greedy")]
    assert generated(llm, toys.prompts()[:5], asked[:5]) == [t[:10] for t in truth("greedy")[:5]]
    assert num_compared > 50


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tree", GROWN)
@pytest.mark.parametrize("change", CHANGES)
def test_requests_of_their_own_kind(change: str, tree: str, mode: str) -> None:
    asked = [p.model_copy(update={"max_tokens": 12} | (CHANGES[change] if i % 2 else {})) for i, p in enumerate(params(mode))][:8]
    plain = LLM(toys.adopted(target()), max_num_seqs=1)
    expected = [plain.generate([p], [q])[0].outputs[0].token_ids for p, q in zip(toys.prompts(), asked, strict=False)]
    assert generated(tree_llm(tree, 5), toys.prompts()[:8], asked) == expected


@pytest.mark.parametrize("tree", GROWN)
def test_a_full_pool_and_prompts_in_pieces_change_no_token(tree: str) -> None:
    block_bytes = tree_llm(tree, 8).memory_plan.block_bytes
    llm = tree_llm(tree, 8, max_num_batched_tokens=16, kv_cache_memory_bytes=block_bytes * 20)
    assert generated(llm, toys.prompts(), params("sampled")) == truth("sampled")
    assert llm.stats.num_preemptions > 0


@pytest.mark.parametrize("tree", GROWN)
def test_a_draft_model_with_a_shorter_context_drafts_as_far_as_it_reaches(tree: str) -> None:
    small = toys.noisy_copy(target(), 0.05)
    small.config.max_position_embeddings = 40
    llm = tree_llm(tree, 3, small)
    assert generated(llm, toys.prompts(), params("greedy")) == truth("greedy")
    assert llm.stats.num_draft_tokens > 0


@pytest.mark.skipif(not is_built(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_size", [3, 17])
@pytest.mark.parametrize("tree", GROWN)
def test_bfloat16_on_the_kernels(tree: str, batch_size: int, mode: str) -> None:
    big, small = (toys.adopted(copy.deepcopy(m).bfloat16()) for m in (target(), draft()))
    plain = [r.outputs[0].token_ids for r in LLM(big, max_num_seqs=4).generate(toys.prompts(), params(mode))]
    llm = toys.watch(LLM(big, {"method": "draft_model", **GROWN[tree]}, small, max_num_seqs=batch_size))
    assert generated(llm, toys.prompts(), params(mode)) == plain
    assert llm.stats.tokens_per_step > 1.2


def test_what_a_tree_cannot_be_combined_with() -> None:
    with pytest.raises(ConfigError, match="acceptance = 'rejection' is defined on chains"):
        LLM(toys.adopted(target()), {"method": "draft_model", "tree": "static", "acceptance": "rejection"}, toys.adopted(draft()))
