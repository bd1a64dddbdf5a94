"""A head that does not know its target is named when it is attached; one that does is not."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

import heads
from echelon import LLM, SamplingParams
from echelon.drafters.head_selftest import LENGTH, NUM_TEXTS, Familiarity, _own_text, familiarity
from echelon.drafters.heads import attach_head
from echelon.model.hidden_states import HiddenStateReader
from echelon.model.load.loading import LoadedModel


def target() -> LoadedModel:
    return toys.adopted(toys.llama())


def knowing(loaded: LoadedModel, kind: str) -> heads.Knowing:
    """A head that has read what the self-test asks, except after one token in five."""
    with torch.inference_mode():
        text, _ = _own_text(loaded, HiddenStateReader(loaded.model, ("last",)), LENGTH)
    return heads.Knowing(heads.KINDS[kind](toys.llama()), text.tolist(), toys.VOCABULARY).eval()


class Scrambled(heads.Knowing):
    """The same with another draft vocabulary: every token is taken for its neighbour."""

    def logits(self, states: Tensor, depth: int) -> Tensor:
        return super().logits(states, depth).roll(1, -1)


class Refusing(heads.Knowing):
    def logits(self, states: Tensor, depth: int) -> Tensor:
        if len(states) > 1:
            raise ValueError("one state only")
        return super().logits(states, depth)


def llm(loaded: LoadedModel, head: Any) -> LLM:
    config = {"method": head.method, "num_speculative_tokens": 3}
    return LLM(loaded, config, draft_head=head, kv_cache_memory_bytes=1 << 20)


@pytest.mark.parametrize("kind", heads.KINDS)
def test_only_a_head_of_another_target_is_warned_of(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    loaded = target()
    own = knowing(loaded, kind)
    llm(loaded, own)
    assert "chance" not in caplog.text
    own.__class__ = Scrambled
    built = llm(loaded, own)
    warning = next(r.getMessage() for r in caplog.records if "chance" in r.getMessage())
    assert own.method in warning and "'toy'" in warning and "%" in warning and own.hidden_state_names[0] in warning
    assert built.stats.num_steps == built.stats.target.num_passes == 0, "the self-test leaves no trace"
    toys.assert_all_blocks_free(built)


def test_the_share_is_that_of_the_targets_own_tokens() -> None:
    """What the test reads is the target's greedy text, and a head that knows all of it is right wherever one token tells the next."""
    loaded = target()
    own = knowing(loaded, "autoregressive")
    own.knows[:] = True
    own.inner.output.data.zero_()  # type: ignore[union-attr]
    with torch.inference_mode():
        text, features = _own_text(loaded, HiddenStateReader(loaded.model, ("last",)), LENGTH)
    assert features.shape == (NUM_TEXTS * (LENGTH - 1), 64)
    plain = LLM(loaded, kv_cache_memory_bytes=1 << 20)
    for row in text.tolist():
        assert plain.generate([row[:1]], [SamplingParams(temperature=0.0, max_tokens=LENGTH - 1)])[0].outputs[0].token_ids == row[1:]
    attached = attach_head(own, loaded)
    found = familiarity(loaded, own, attached.reader, attached.shapes)
    follows = own.follows[0]
    best = sum(float(follows[a].argmax() == b) for row in text.tolist() for a, b in pairwise(row[1:]))
    assert found is not None
    assert found.share == pytest.approx(best / (NUM_TEXTS * (LENGTH - 2)))


def test_what_a_head_does_wrong_is_only_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    loaded = target()
    own = knowing(loaded, "independent")
    own.__class__ = Refusing
    llm(loaded, own)
    assert "one state only" in caplog.text


@pytest.mark.parametrize(("share", "by_chance", "is_chance"), [(0.0, 0.0, True), (0.3, 0.28, True), (0.3, 0.1, False), (0.9, 0.9, False)])
def test_a_monotonous_text_does_not_count(share: float, by_chance: float, is_chance: bool) -> None:
    assert Familiarity(share, by_chance).is_chance == is_chance
