"""Drafts that end where the drafter is no longer sure: by the definition, and without a changed token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import toys
from test_heads_lossless import TREES, drafter_of, head, truth
from test_heads_lossless import params as head_params
from test_lossless import params, target
from test_lossless import truth as plain_truth

import heads
from echelon import LLM, ConfigError, SamplingParams
from echelon.draft import Draft
from echelon.sequence import PlannedRow

LENGTH = 6


def draft_model() -> Any:
    return toys.noisy_copy(target(), 0.05)


def llm_with(threshold: float, batch_size: int) -> LLM:
    config = {"method": "draft_model", "num_speculative_tokens": LENGTH, "confidence_threshold": threshold}
    small = toys.adopted(draft_model())
    return toys.watch(LLM(toys.adopted(target()), config, small, max_num_seqs=batch_size, block_size=8, kv_cache_memory_bytes=1 << 22))


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("batch_size", [1, 8, 17])
@pytest.mark.parametrize("threshold", [1e-6, 0.5, 0.999])
def test_a_confident_draft_changes_no_token(threshold: float, batch_size: int, mode: str) -> None:
    rows, llm = toys.few(batch_size == 1), llm_with(threshold, batch_size)
    outputs = llm.generate(toys.prompts()[rows], params(mode)[rows])
    assert [o.outputs[0].token_ids for o in outputs] == plain_truth(mode)[rows]
    toys.assert_all_blocks_free(llm)
    assert llm.stats.num_draft_tokens > 0 or threshold > 0.9


@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.3, "presence_penalty": 0.4}, {"logit_bias": {3: 5.0}}, {"min_tokens": 9}])
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_requests_with_parameters_of_their_own_change_no_token(mode: str, changes: dict[str, Any]) -> None:
    asked = [p.model_copy(update=changes) for p in params(mode)]
    plain = LLM(toys.adopted(target()), max_num_seqs=8, kv_cache_memory_bytes=1 << 22).generate(toys.prompts(), asked)
    llm = llm_with(0.3, 8)
    found = llm.generate(toys.prompts(), asked)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in plain]
    assert llm.stats.tokens_per_step > 1.0


def expected_chain(model: Any, tokens: list[int], most: int, threshold: float) -> list[int]:
    """Greedy tokens of the draft model as long as the product of their probabilities is large enough, from whole texts in float64."""
    chain: list[int] = []
    chance = 1.0
    while len(chain) < most:
        with torch.inference_mode():
            logits = model(torch.tensor([[*tokens, *chain]])).logits[0, -1].double()
        token = int(logits.argmax())
        chance *= float(logits.softmax(-1)[token])
        if chance < threshold:
            break
        chain.append(token)
    return chain


def test_a_chain_ends_where_the_definition_says() -> None:
    threshold = 0.03
    llm, model = llm_with(threshold, 5), draft_model().double()
    propose, lengths = llm.engine.drafter.propose, []

    def compared(rows: list[PlannedRow]) -> Draft:
        draft = propose(rows)
        for i, row in enumerate(rows):
            expected = expected_chain(model, row.sequence.tokens, row.max_draft_tokens, threshold)
            assert draft.row(i) == expected
            lengths.append(len(expected))
        return draft

    llm.engine.drafter.propose = compared  # type: ignore[method-assign]
    asked = [p.model_copy(update={"max_tokens": 12}) for p in params("greedy")]
    llm.generate(toys.prompts(), asked)
    assert {0, 1, 2, 3, LENGTH} <= set(lengths)


def test_unlikely_tokens_are_not_fed_to_the_target() -> None:
    sure, all_of_them = llm_with(0.5, 8), llm_with(0.0, 8)
    for llm in (sure, all_of_them):
        llm.generate(toys.prompts(), params("greedy"))
    assert sure.stats.acceptance_rate > all_of_them.stats.acceptance_rate
    assert sure.stats.target.num_tokens < all_of_them.stats.target.num_tokens


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", heads.KINDS)
def test_confident_heads_change_no_token_and_propose_no_unlikely_path(kind: str, tree: str, mode: str) -> None:
    own, threshold = head(kind, mode), 0.2
    config = {"method": own.method, "confidence_threshold": threshold, **TREES[tree]}
    llm = toys.watch(LLM(toys.adopted(target()), config, draft_head=own, max_num_seqs=3, block_size=8, kv_cache_memory_bytes=1 << 22))
    growth = drafter_of(llm).growth
    kept, forests = growth.kept, []

    def watched(forest: Any) -> Any:
        forests.append(forest)
        return kept(forest)

    growth.kept = watched  # type: ignore[method-assign]
    outputs = [o.token_ids for r in llm.generate(toys.prompts(), head_params(mode)) for o in r.outputs]
    assert outputs == truth(mode)
    scores = np.concatenate([f.scores[f.parents >= 0] for f in forests])
    assert scores.min() >= math.log(threshold)
    assert scores.max() <= 0.0


def test_the_parameter_is_refused_where_it_means_nothing() -> None:
    model = toys.adopted(toys.llama())
    for config, message in (
        ({"method": "ngram", "confidence_threshold": 0.3}, "needs a drafter with probabilities"),
        ({"method": "draft_model", "confidence_threshold": 0.3, "acceptance": "rejection"}, "leave one of them out"),
        ({"method": "draft_model", "confidence_threshold": 1.0}, "less than 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(model, config, model)


def test_a_sampled_request_is_drafted_for_with_the_targets_noise() -> None:
    """The draft model being the target itself, a confident draft is always right, also where the noise favours an unlikely token."""
    model = toys.llama(vocab_size=1000, spread=0.1)
    config = {"method": "draft_model", "num_speculative_tokens": LENGTH, "confidence_threshold": 0.05}
    llm = toys.watch(LLM(toys.adopted(model), config, toys.adopted(model), max_num_seqs=8, kv_cache_memory_bytes=1 << 22))
    asked = [SamplingParams(max_tokens=20, temperature=1.0, seed=i) for i in range(len(toys.prompts()))]
    llm.generate(toys.prompts(), asked)
    assert llm.stats.acceptance_rate == 1.0
    assert llm.stats.tokens_per_step > 1.5


def test_a_processor_that_fails_in_a_draft_ends_that_draft_alone() -> None:
    """It fails in the middle of a text: plain decoding ends there with an error, and so must speculation, its neighbours untouched."""

    def broken(ids: list[int], logits: Any) -> Any:
        if len(ids) == 8:
            raise ValueError("broken")
        return logits

    llm = llm_with(0.05, 4)
    asked = [SamplingParams(temperature=0.0, max_tokens=20, logits_processors=(broken,) if i == 1 else ()) for i in range(4)]
    outputs = llm.generate([[5, 6, 7], [8, 9], [10], [11, 12, 13]], asked)
    alone = LLM(toys.adopted(target()), max_num_seqs=1).generate([[5, 6, 7], [8, 9], [10], [11, 12, 13]], asked)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in alone]
    assert outputs[1].outputs[0].finish_reason == "error"
    assert not llm.stats.drafter_faults
