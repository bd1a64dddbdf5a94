"""The interface of heads.

A head reads the target's hidden states of known tokens (`encode`) and then goes on alone, one drafted token at a time (`extend`). Position
t's state says what comes after token t + 1: the target has emitted that one itself, so a draft begins with the token after it. The head's
attention layers, where it has any, are called with the keywords of `context`, as those of a target are; `positions` count from the start of
each row's own text.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

# hidden states of the target, [T, d] each: `last` after the final norm, `last_unnormed` before it, `layer:i` the input of decoder layer i
HiddenStateName = str


@dataclass(frozen=True)
class Recipe:
    """How a head is trained: the weights of its loss (`train.losses`) and its defaults.

    `depth`: how many tokens ahead training looks; a head of fewer heads looks as far as it can. `first_depth`: no further than that in
    the first part of a run, `first_part`, whose batches cost less. `rate`: peak learning rate, reached after `warm_up` steps (few: a head
    starts on hidden states that mean something already) and falling to zero over the last part, `fall`, of a run; for these optimisers the
    papers give none. A method that `pretrains` learns from raw text first, at a constant rate, and then, while the rate falls, from what
    the target says itself; others learn from both at once.
    """

    depth: int
    decay: float
    tokens: float
    feature: float = 0.0
    is_soft: bool = False
    noise: float = 0.0
    rate: float = 3e-3
    warm_up: int = 20
    fall: float = 0.25
    first_part: float = 0.0
    first_depth: int = 1
    pretrains: bool = False


class Head(nn.Module):
    """Legend: T packed tokens, M drafted nodes, d the target's hidden size, s the size of the head's state, V the target's vocabulary.

    method              name in a speculative configuration
    options_class       dataclass of its options; a head is made from (config of its layer, what it shares with the target, options)
    recipe              how it is trained
    num_features        hidden states that it reads, `hidden_state_names`; the features are these, concatenated
    is_by_place         each place of a draft has a network of its own, and `keep` drops those that are not used
    max_depth           longest path it can draft; None: any
    """

    method: ClassVar[str]
    options_class: ClassVar[type]
    recipe: ClassVar[Recipe]
    num_features: ClassVar[int] = 1
    is_by_place: ClassVar[bool] = False
    config: LlamaConfig
    options: Any
    hidden_state_names: tuple[HiddenStateName, ...]
    max_depth: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the head's weights."""
        return next((p.dtype for p in self.parameters()), torch.float32)

    @property
    def draft_ids(self) -> Tensor | None:
        """int64[W], increasing: the target's ids of the tokens it drafts; None: all V."""
        return None

    @classmethod
    def default_options(cls, target: PreTrainedModel) -> dict[str, Any]:  # noqa: ARG003
        """Options that depend on the target, as training sets them where they are not given."""
        return {}

    @classmethod
    def options_for(cls, depth: int) -> dict[str, Any]:
        """Options of a head that drafts paths of this length."""
        return {"num_heads": depth} if "num_heads" in (f.name for f in fields(cls.options_class)) else {}

    @abstractmethod
    def encode(self, features: Tensor, tokens: Tensor, positions: Tensor, **context: Any) -> Tensor:
        """Return states [T, s] from features [T, len(hidden_state_names) · d] at `positions` int64[T] and the tokens that follow them."""

    @abstractmethod
    def extend(self, states: Tensor, tokens: Tensor, positions: Tensor, depth: int, **context: Any) -> Tensor:
        """Return states [M, s] of drafted nodes from those of their parents [M, s] and the nodes' tokens int64[M]; `depth` ≥ 1 is that of
        the tokens drafted next: 1 after the first drafted token.
        """

    @abstractmethod
    def logits(self, states: Tensor, depth: int) -> Tensor:
        """Return logits [M, V] of the token at `depth` of the draft, 0 first; −inf for tokens that the head never drafts."""

    def draft_logits(self, states: Tensor, depth: int) -> Tensor:
        """Return logits [M, W] of the tokens `draft_ids` alone."""
        return self.logits(states, depth)

    def choose_vocabulary(self, counts: Tensor) -> None:
        """Before training, choose the tokens to draft by how often the target says each, counts int[V]; nothing, where it drafts all."""

    def start_from(self, target: nn.Module) -> None:
        """Before training, take initial weights from the target, where the paper does; after `choose_vocabulary`."""

    def keep(self, depth: int) -> None:
        """Drop what only tokens behind the first `depth` of a draft need, where there is such a thing."""

    def check(self, name: str) -> None:
        """Raise `ModelLoadError` where tensors read from the checkpoint `name` contradict each other."""
