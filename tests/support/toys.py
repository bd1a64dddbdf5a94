"""Tiny models, drafters that are wrong or right on purpose, and an engine whose every step is checked and poisoned."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from echelon import LLM
from echelon.draft import Draft, Verdict
from echelon.drafters.base import Drafter
from echelon.kv.cache import KVCache
from echelon.model.load.loading import LoadedModel, adopt_model
from echelon.ops.slots import by_slot
from echelon.sequence import PlannedRow
from echelon.stats import StepRecord
from echelon.step_costs import StepCosts

PROVE = bool(os.environ.get("PROVE"))  # the full sizes of what is proven
VOCABULARY = 96
CONTEXT = 128
NUM_TOKENS = 48
PROMPT_LENGTHS = (1, 2, 3, 1, 7, 15, 16, 17, 18, 31, 32, 33, 47, 5, 64, 79, 126)


def few(is_slow: bool) -> slice:
    """The prompts of a cell; without PROVE=1 every fourth of a slow one, from that of one token to that which fills the context."""
    return slice(None, None, 4 if is_slow and not PROVE else 1)


def llama(seed: int = 0, spread: float = 0.35, **changes: Any) -> PreTrainedModel:
    """Two layers of random weights, wide enough that the largest logits lie far apart."""
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return randomised(LlamaForCausalLM, LlamaConfig(**(values | changes)), seed, spread)


def randomised(cls: Any, config: Any, seed: int, spread: float) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data = torch.randn(parameter.shape, generator=generator) * spread
    return model.eval()


def noisy_copy(model: PreTrainedModel, amount: float, seed: int = 1) -> PreTrainedModel:
    """A draft model that agrees with `model` often, but not always."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        if parameter.ndim >= 2:
            parameter.data += torch.randn(parameter.shape, generator=generator) * amount * parameter.std()
    return draft


def adopted(model: PreTrainedModel) -> LoadedModel:
    """`model` as the engine serves it; the argument stays as it is."""
    return adopt_model(copy.deepcopy(model), None, "toy")


def prompts(lengths: SequenceOf[int] = PROMPT_LENGTHS, vocabulary: int = VOCABULARY, seed: int = 5) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, n).tolist() for n in lengths]


class ScriptedDrafter(Drafter):
    """Knows the true continuations; proposes them (`shift=0`), something else (`shift=1`), or noise (`shift=None`)."""

    hidden_state_names: tuple[str, ...] = ()

    def __init__(self, truth: dict[tuple[int, ...], list[int]], shift: int | None) -> None:
        self._truth, self._shift = truth, shift
        self.observed: list[tuple[int, int]] = []

    def propose(self, rows: SequenceOf[PlannedRow]) -> Draft:
        return Draft.chains([self._row(row) for row in rows])

    def _row(self, row: PlannedRow) -> list[int]:
        if self._shift is None:
            rng = np.random.default_rng([row.sequence.id, len(row.sequence)])
            return rng.integers(0, VOCABULARY, rng.integers(0, row.max_draft_tokens + 1)).tolist()
        return [(t + self._shift) % VOCABULARY for t in self._truth_of(row)[: row.max_draft_tokens]]

    def _truth_of(self, row: PlannedRow) -> list[int]:
        """What is left of the row's text."""
        sequence = row.sequence
        return self._truth[tuple(sequence.tokens[: sequence.num_prompt_tokens])][sequence.num_output_tokens :]

    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict, hidden_states: Tensor | None) -> None:
        self.observed += [(kept.num_draft_tokens, len(kept.path)) for kept, r in zip(verdict, rows, strict=True) if r.is_sampled]

    def forget(self, row: int) -> None: ...


class ScriptedTreeDrafter(ScriptedDrafter):
    """Random trees with a piece of the true continuation somewhere among their nodes."""

    def propose(self, rows: SequenceOf[PlannedRow]) -> Draft:
        return Draft.trees([self._tree(row) for row in rows])

    def _tree(self, row: PlannedRow) -> tuple[list[int], list[int]]:
        rng = np.random.default_rng([row.sequence.id, len(row.sequence)])
        true, at = self._truth_of(row), -1  # `at`: where the true path has got to
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for _ in range(int(rng.integers(0, row.max_draft_tokens + 1))):
            parent = at if rng.random() < 0.5 else int(rng.integers(-1, len(tokens))) if tokens else -1
            depth = depths[parent] + 1 if parent >= 0 else 0
            is_true = parent == at and depth < len(true) and rng.random() < 0.7
            token = true[depth] if is_true else int(rng.integers(0, VOCABULARY))
            siblings = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
            if depth >= row.max_draft_depth or token in siblings:
                continue
            if parent == at and depth < len(true) and token == true[depth]:
                at = len(tokens)
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        return tokens, parents


def caches(llm: LLM) -> list[Any]:
    drafter = llm.engine.drafter.unguarded
    owners = [llm.engine.target, getattr(drafter, "_runner", None), drafter]
    return [cache for owner in owners if (cache := getattr(owner, "cache", None)) is not None]


def poison(cache: Any) -> float:
    """What a stale slot of this cache may hold: anything in blocks; anything finite in a rectangle, whose masks multiply by zero."""
    if isinstance(cache, KVCache) and cache.is_rounded:
        return -1  # of such bytes a scale is NaN
    return torch.nan if isinstance(cache, KVCache) else 1e4


def watch(llm: LLM, is_faulty: bool = False, are_settled: bool = True) -> LLM:
    """After every step: all invariants hold, and every slot that holds no cached token is poisoned.

    `is_faulty`: the drafter fails on purpose. `are_settled`: keys and values that wait to be moved are, so that more can be poisoned.
    """

    def watched(step: StepRecord) -> None:
        llm.engine.check()
        assert is_faulty or not getattr(llm.engine.drafter, "faults", None), "a wall hides what the drafter does wrong"
        for sequence in [row.sequence for row, count in zip(step.rows, step.num_emitted, strict=True) if count]:
            if sequence in llm.engine.scheduler.running:
                assert llm.engine.target.num_cached(sequence.id) in (0, len(sequence) - 1), "all tokens but the last have keys and values"
        for cache in caches(llm):
            cache.check()
            if are_settled:
                cache.apply_copies()
            is_known = are_settled and not llm.engine.in_flight  # rows in flight have more than is known yet
            stale = ~cache.held_slots() if is_known else free_slots(cache).contiguous()
            for sources, _ in getattr(cache.tables, "copies", ()):  # which are still to be read
                stale.view(-1)[torch.from_numpy(sources)] = False
            for storage in (*cache.keys, *cache.values):
                slots = by_slot(storage) if isinstance(cache, KVCache) else storage
                slots.masked_fill_(stale.to(slots.device).view(*stale.shape, *[1] * (slots.ndim - stale.ndim)), poison(cache))

    for cache in caches(llm):
        for storage in (*cache.keys, *cache.values):
            storage.fill_(poison(cache))
    llm.engine.observers.append(watched)
    return llm


def free_slots(cache: Any) -> Tensor:
    """bool [num_blocks, block_size]: of blocks that no row has, nor could find."""
    counts = torch.tensor(cache.tables.pool.counts() + [0] * (cache.num_blocks - cache.tables.pool.num_blocks))
    counts[cache.tables.pool.published] = 1
    return (counts == 0)[:, None].expand(-1, cache.block_size)


def assert_all_blocks_free(llm: LLM) -> None:
    for cache in caches(llm):
        assert cache.tables.num_free == cache.tables.num_blocks
        assert cache.tables.row_ids == []


def unpatch(model: torch.nn.Module, *kinds: type) -> None:
    """Take forwards of these kinds off again."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), kinds):
            del module.forward


class CostsByTokens(StepCosts):
    """How fast the machine is decides nothing: by a clock that counts tokens, a prompt is read beside one row in pieces of six."""

    def observe(self, record: StepRecord) -> None:
        super().observe(replace(record, seconds={"forward": 1.0 + 0.4 * record.num_input_tokens}))


class WholePrompts:
    """How fast the machine is decides nothing, and no prompt is cut."""

    def largest_piece(self, limit: int, num_decoding: int) -> int:
        return limit

    def observe(self, record: StepRecord) -> None: ...
