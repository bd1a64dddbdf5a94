"""The published losses. Depth i of the draft counts decay**i times

    tokens · (cross-entropy with the text, or with the target's distribution)  +  feature · SmoothL1(predicted, the target's hidden state)

method   | source
---------|-----------------------------------------------------------------------------------------------------------------------------
medusa   | Cai et al. 2024, Medusa-1: 0.8^k
clover   | the first paper gives none; Medusa's, along the text
clover2  | the authors' code: 0.7^i · (10 · SmoothL1 + soft cross-entropy)
eagle    | Li et al. 2024: SmoothL1 + 0.1 · soft cross-entropy at one depth, features noised by U(−0.1, 0.1) · 512 / length
eagle3   | Li et al. 2025: 0.8^i over seven simulated steps, no feature loss, soft targets renormalised over the draft vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.heads.base import Head
from echelon.heads.eagle3 import Eagle3Head
from echelon.train.lessons import Lesson


@dataclass(frozen=True)
class Recipe:
    """`depth`: how many tokens ahead training looks; a head of fewer heads looks as far as it can."""

    depth: int
    decay: float
    tokens: float
    feature: float = 0.0
    is_soft: bool = False
    noise: float = 0.0


RECIPES = {
    "medusa": Recipe(depth=16, decay=0.8, tokens=1.0),
    "clover": Recipe(depth=16, decay=0.8, tokens=1.0),
    "clover2": Recipe(depth=5, decay=0.7, tokens=1.0, feature=10.0, is_soft=True),
    "eagle": Recipe(depth=1, decay=1.0, tokens=0.1, feature=1.0, is_soft=True, noise=0.1),
    "eagle3": Recipe(depth=7, decay=0.8, tokens=1.0, is_soft=True),
}


def depth_loss(head: Head, states: Tensor, given: Lesson, depth: int, recipe: Recipe) -> Tensor:
    """The weighted loss of one depth, nats a place."""
    if isinstance(head, Eagle3Head):
        loss = _in_draft_vocabulary(head, states, given, depth, recipe.is_soft)
    else:
        logits = head.logits(states, depth).float()
        loss = soft(logits, given.target_logits(depth)).mean() if recipe.is_soft else F.cross_entropy(logits, given.token(2 + depth))
    loss = recipe.tokens * loss
    if recipe.feature:
        predictor: Any = head
        loss = loss + recipe.feature * F.smooth_l1_loss(predictor.features(states).float(), given.target_feature(depth).float())
    return recipe.decay**depth * loss


def soft(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Cross-entropy [M] of logits [M, V] with the distributions of `target_logits` [M, V]."""
    return -(target_logits.float().softmax(-1) * logits.log_softmax(-1)).sum(-1)


def _in_draft_vocabulary(head: Eagle3Head, states: Tensor, given: Lesson, depth: int, is_soft: bool) -> Tensor:
    """Places whose right token cannot be drafted count as zero: the mean is over all places, as in the authors' code."""
    logits = head.draft_logits(states).float()
    target_logits = given.target_logits(depth)
    if is_soft:
        return (soft(logits, target_logits[:, head.draft_ids]) * head.t2d[target_logits.argmax(-1)]).mean()
    token = given.token(2 + depth)
    place = torch.searchsorted(head.draft_ids, token).clamp_max(len(head.draft_ids) - 1)
    return (F.cross_entropy(logits, place, reduction="none") * head.t2d[token]).mean()


def noised(features: Tensor, recipe: Recipe, length: int, generator: torch.Generator) -> Tensor:
    """Features as training sees them."""
    if not recipe.noise:
        return features
    noise = (torch.rand(features.shape, generator=generator) - 0.5) * 2 * recipe.noise * 512 / length
    return features + noise.to(features.dtype)
