"""Training examples of a head: a frozen target's hidden states and distributions over a batch of texts, computed as they are needed.

Legend: B texts of N tokens; a head starts at M = N − 1 − K positions of each and looks K tokens ahead, so that each has all its answers; it
drafts W of the V tokens. Position t is fed the token at t + 1, as when drafting; depth k predicts the one at t + 2 + k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon.heads.base import Head
from echelon.model.attention import CONTEXT_KEYWORD, LayerCall
from echelon.model.hidden_states import HiddenStateReader


@dataclass(frozen=True)
class Examples:
    """Training examples from one pass of the target over `ids` int64[B, N].

    features    [B·M, F]           hidden states that the head reads
    last        [B, N, d]          hidden states after the final norm
    probs       float32[B, N, W]   the target's distributions over the tokens that the head drafts, if they were wanted
    is_drafted  bool[B, N]         whether the target's likeliest token is one of those
    """

    ids: Tensor
    features: Tensor
    last: Tensor
    num_positions: int
    probs: Tensor | None = None
    is_drafted: Tensor | None = None

    def _at(self, values: Tensor, shift: int) -> Tensor:
        return values[:, shift : shift + self.num_positions]

    def token(self, shift: int) -> Tensor:
        """int64[B·M]: the token `shift` after each position."""
        return self._at(self.ids, shift).flatten()

    def wanted(self, depth: int) -> tuple[Tensor, Tensor]:
        """[B, M, W] and bool[B, M]: `probs` and `is_drafted` of the token at this depth."""
        assert self.probs is not None and self.is_drafted is not None
        return self._at(self.probs, depth + 1), self._at(self.is_drafted, depth + 1)

    def target_feature(self, depth: int) -> Tensor:
        """[B·M, d]: the hidden state that predicts the token at this depth."""
        return self._at(self.last, depth + 1).flatten(0, 1)


class Teacher:
    """A frozen target with the head that learns from it."""

    def __init__(self, target: Any, head: Head) -> None:
        self.target, self.head = target, head
        self._reader = HiddenStateReader(target, (*head.hidden_state_names, "last"))

    @property
    def device(self) -> torch.device:
        """Where the target computes, and the head is trained."""
        return torch.device(self.target.device)

    @torch.no_grad()
    def examples(self, ids: Tensor, depth: int, is_soft: bool) -> Examples:
        """One pass of the target over `ids` int64[B, N]; with its distributions if `is_soft`."""
        with self._reader.reading() as states:
            logits = self.target(input_ids=ids, use_cache=False, logits_to_keep=0 if is_soft else 1).logits
        num_positions = ids.shape[1] - 1 - depth
        features = torch.cat([states[name][:, :num_positions] for name in self.head.hidden_state_names], -1).flatten(0, 1)
        targets = soft_targets(logits, self.head.draft_ids) if is_soft else ()
        return Examples(ids, features, states["last"], num_positions, *targets)


def soft_targets(logits: Tensor, draft_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """`probs` and `is_drafted` of examples from logits [B, N, V], a text at a time."""
    num_tokens = logits.shape[-1] if draft_ids is None else len(draft_ids)
    probs = torch.empty(*logits.shape[:2], num_tokens, device=logits.device)
    for text, row in zip(logits, probs, strict=True):
        torch.softmax(text if draft_ids is None else text.index_select(-1, draft_ids), -1, torch.float32, out=row)
    if draft_ids is None:
        return probs, torch.ones_like(logits[..., 0], dtype=torch.bool)
    return probs, torch.isin(logits.max(-1).indices, draft_ids)


class TrainingAttention:
    """Answers a head's attention for `num_rows` texts laid end to end: the first pass is causal, later ones are as when drafting.

    In pass i a position sees the keys of the first pass up to itself and its own of passes 1 to i: EAGLE-3's training-time test.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._passes: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend(self, call: LayerCall) -> Tensor:
        """Attention [B·M, H, D] of one layer and pass."""
        query, key, value = (x.reshape(self._num_rows, -1, *x.shape[1:]) for x in (call.query, call.key, call.value))
        passes = self._passes.setdefault(call.layer, [])
        passes.append((key, value))
        return _simulated(query, passes, call.scale).flatten(0, 1)


def _simulated(query: Tensor, passes: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """query [B, M, H, D] over the first pass, causally, and the position's own key of each later one; keys and values [B, M, H', D]."""
    (num_rows, length, _, size), (first, later) = query.shape, (passes[0], passes[1:])
    key, value = (x.transpose(1, 2) for x in first)  # [B, H', M, D]
    query = (query * scale).reshape(num_rows, length, key.shape[1], -1, size)  # [B, M, H', G, D]
    future = torch.full((length, length), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
    text = query.permute(0, 2, 3, 1, 4).flatten(2, 3) @ key.transpose(-1, -2)
    scores = [text.reshape(num_rows, key.shape[1], -1, length, length) + future]  # [B, H', G, M, M]
    if later:
        own_keys, own_values = (torch.stack(x, 3) for x in zip(*later, strict=True))  # [B, M, H', passes, D]
        scores.append((query @ own_keys.transpose(-1, -2)).permute(0, 2, 3, 1, 4))
    with torch.autocast(query.device.type, enabled=False):  # softmax sums in float32 as it is, and needs no float32 copy
        weights, own_weights = torch.split(torch.cat(scores, -1).softmax(-1), [length, len(later)], -1)
    out = (weights.flatten(2, 3).contiguous() @ value).reshape(num_rows, key.shape[1], -1, length, size).permute(0, 3, 1, 2, 4)
    if later:
        out = out + own_weights.permute(0, 3, 1, 2, 4) @ own_values
    return out.flatten(2, 3)


def unroll(head: Head, examples: Examples, features: Tensor, depth: int) -> Iterator[Tensor]:
    """States [B·M, s] at depths 0 to `depth` − 1, drafting along the text itself from `features` in place of the examples' own."""
    num_rows = len(examples.ids)
    context = {CONTEXT_KEYWORD: TrainingAttention(num_rows)}
    positions = torch.arange(examples.num_positions, device=examples.ids.device).repeat(num_rows)
    states = head.encode(features, examples.token(1), positions, **context)
    yield states
    for k in range(1, depth):
        states = head.extend(states, examples.token(1 + k), positions + k, k, **context)
        yield states
