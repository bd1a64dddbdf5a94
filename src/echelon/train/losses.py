"""The published losses. Depth i of the draft counts decay**i times

    tokens · (cross-entropy with the text, or with the target's distribution)  +  feature · SmoothL1(predicted, the target's hidden state)

method   | source
---------|-----------------------------------------------------------------------------------------------------------------------------
medusa   | Cai et al. 2024, Medusa-1: 0.8^k
clover   | the first paper gives none; Medusa's, along the text
clover2  | the authors' code: 0.7^i · (10 · SmoothL1 + soft cross-entropy)
eagle    | Li et al. 2024: SmoothL1 + 0.1 · soft cross-entropy at one depth, features noised by U(−0.1, 0.1) · 512 / length
scylla   | Yan et al. 2025: EAGLE's
eagle3   | Li et al. 2025: 0.8^i over seven simulated steps, no feature loss, soft targets renormalised over the draft vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.heads.base import Head, Recipe
from echelon.train.examples import Examples


def depth_loss(head: Head, states: Tensor, examples: Examples, depth: int, recipe: Recipe) -> Tensor:
    """The weighted loss of one depth, nats a position.

    Positions whose right token the head cannot draft count as zero: the mean is over all positions, as in EAGLE-3's code.
    """
    weight = recipe.decay**depth
    logits = head.draft_logits(states, depth)
    if recipe.is_soft:
        probs, is_drafted = examples.wanted(depth)
        loss = soft(logits.view(*is_drafted.shape, -1), probs, is_drafted * (weight * recipe.tokens / len(logits)))
    else:
        loss = weight * recipe.tokens * _hard(head, logits.float(), examples.token(2 + depth))
    if recipe.feature:
        predictor: Any = head
        distance = F.smooth_l1_loss(predictor.features(states).float(), examples.target_feature(depth).float())
        loss = loss + weight * recipe.feature * distance
    return loss


def _hard(head: Head, logits: Tensor, tokens: Tensor) -> Tensor:
    if (ids := head.draft_ids) is None:
        return F.cross_entropy(logits, tokens)
    index = torch.searchsorted(ids, tokens).clamp_max(len(ids) - 1)
    return (F.cross_entropy(logits, index, reduction="none") * (ids[index] == tokens)).mean()


def soft(logits: Tensor, probs: Tensor, weights: Tensor) -> Tensor:
    """Σ weights · cross-entropy of logits [B, M, W] with the distributions `probs` [B, M, W]; weights [B, M]."""
    loss: Tensor = _Soft.apply(logits, probs, weights)  # type: ignore[no-untyped-call]
    return loss


class _Soft(torch.autograd.Function):
    """Makes the gradient, weight · (softmax(logits) − probs) in the dtype of the logits, along with the loss: a text at a time, so that
    nothing in float32 is as large as the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probs: Tensor, weights: Tensor) -> Tensor:
        loss, ctx.gradient = weights.new_zeros(()), torch.empty_like(logits)
        for text, wanted, weight, gradient in zip(logits, probs, weights, ctx.gradient, strict=True):
            predicted = text.log_softmax(-1, torch.float32)
            loss -= ((wanted * predicted).sum(-1) * weight).sum()
            gradient.copy_(predicted.exp_().sub_(wanted).mul_(weight[:, None]))
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient * upstream, None, None


def noised(features: Tensor, recipe: Recipe, length: int, generator: torch.Generator) -> Tensor:
    """Features [B·M, F] with the recipe's noise."""
    if not recipe.noise:
        return features
    noise = (torch.rand(features.shape, generator=generator) - 0.5) * 2 * recipe.noise * 512 / length
    return features + noise.to(features)
