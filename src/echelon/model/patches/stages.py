"""A rank's stage of a model: some layers that follow one another. Rank 0 has the first, and what comes before and after all layers.

A worker's model is one of as few layers, read under the names that these have there, with a vocabulary of one: what the stage before hands
on stands in for its embeddings. Rank 0's model keeps all its places; layers of other ranks are empty ones that give back what they get. Its
pass is run twice: up to its own layers, and then, when the last stage has handed on what its layers give, from there to the logits. In the
second run every layer gives what the stages have found, so that who reads hidden states finds them where they always are.

Outside a pass of all ranks, as when a model is tried or looked at, there are no other layers than a rank's own.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from echelon.checkpoint.tensors import Weights
from echelon.errors import ConfigError
from echelon.model.patches import PatchedForward
from echelon.model.patches.architectures import architecture_of

SETTING = "pipeline_parallel_size"
NUMBERED = re.compile(r"(.*\blayers\.)(\d+)(\..+)")
OF_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
PROJECTED = ("project_in.weight", "project_out.weight")  # between embeddings of another width and OPT's hidden states


def check_stages(cls: type[PreTrainedModel], config: Any, name: str, size: int) -> None:
    """Refuse a model whose layers cannot be told from what is around them, and one of fewer layers than stages.

    Raises
    ------
    ConfigError, UnsupportedModelError
    """
    architecture_of(cls, SETTING)
    num_layers = config.get_text_config().num_hidden_layers
    if size > num_layers:
        raise ConfigError(f"{SETTING} = {size} is more than the {num_layers} layers of {name!r}; choose at most {num_layers}")


def layers_of_stage(num_layers: int, stage: int, stages: int) -> range:
    """Numbers of the layers of one of several stages, as evenly as they can be shared out."""
    return range(*(num_layers * s // stages for s in (stage, stage + 1)))


class Stage:
    """One of `size` stages: `layers` of the `num_layers` that the model has, known once it is read. The way to the others is in
    `echelon.parallel`.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.num_layers, self.layers = rank, size, 0, range(0)
        self._entering: Tensor | None = None
        self._is_inside = False
        self._leaving = torch.empty(0)
        self._found: dict[int, Tensor] = {}

    def layers_of(self, rank: int) -> range:
        """Numbers of the layers that a rank has."""
        return layers_of_stage(self.num_layers, rank, self.size)

    def part(self, config: Any, weights: Weights) -> tuple[Any, Weights]:
        """Configuration and tensors of a model of this stage's layers alone."""
        config = copy.deepcopy(config)
        text: Any = config.get_text_config()
        self.num_layers = int(text.num_hidden_layers)
        self.layers = self.layers_of(self.rank)
        text.num_hidden_layers = len(self.layers)
        if self.rank:
            _leave_vocabulary(text, self.layers)
        named = ((self._named(key), tensor) for key, tensor in weights.tensors.items())
        tensors = {name: tensor for name, tensor in named if name is not None}
        if self.rank:
            whole = [name for name in tensors if name.endswith(OF_VOCABULARY)]
            tensors |= {name: replace(tensors[name], shape=(1, text.hidden_size)) for name in whole}
        return config, Weights(weights.folder, tensors)

    def _named(self, key: str) -> str | None:
        """What a tensor is called in the model of this stage; None: it is another's."""
        if (match := NUMBERED.fullmatch(key)) is None:
            return None if self.rank and key.endswith(PROJECTED) else key
        number = int(match[2])
        return f"{match[1]}{number - self.layers.start}{match[3]}" if number in self.layers else None

    def enter(self, model: PreTrainedModel) -> None:
        """Let what the stage before hands on stand in for a worker's embeddings; before anything is patched."""
        if self.rank:
            known, config = architecture_of(type(model), SETTING), model.config.get_text_config()
            model.set_input_embeddings(_Entrance(self, config.hidden_size, model.dtype))
            if known.positions is not None:
                setattr(model.get_submodule(known.holder), known.positions, _NoPositions(config.hidden_size, model.dtype))

    def connect(self, model: Any) -> None:
        """Once all is patched, let the norm at the end keep what the stage's layers give, and on rank 0 places stand for other layers."""
        known = architecture_of(type(model), SETTING)
        holder = model.get_submodule(known.holder)
        norm: Any = getattr(holder, known.norm) or nn.Identity()
        norm.forward = PatchedForward(self._at_end, norm.forward)
        setattr(holder, known.norm, norm)
        if self.rank:
            return
        for number, layer in enumerate(holder.layers):
            layer.forward = PatchedForward(self._at_layer, number, layer.forward)
        holder.layers.extend(_Elsewhere(self, number) for number in range(len(holder.layers), self.num_layers))
        model.config.get_text_config().num_hidden_layers = self.num_layers
        model.forward = PatchedForward(self._at_model, model.forward, type(model).forward.__get__(model))

    @contextmanager
    def inside(self, entering: Tensor | None) -> Iterator[None]:
        """A run of the model is one from what enters, hidden states [T, d], to what `leaving` has after it; rank 0 begins with tokens."""
        self._entering, self._is_inside = entering, True
        try:
            yield
        finally:
            self._entering, self._is_inside = None, False

    @property
    def leaving(self) -> Tensor:
        """Hidden states [T, d] after the last layer of this stage, as the last run inside has left them."""
        return self._leaving[0]

    @contextmanager
    def behind(self, found: dict[int, Tensor]) -> Iterator[None]:
        """A run of rank 0's model is one from what all layers have given to logits: `found` has inputs [T, d] of layers by number, and
        under the number of layers what the last one gives.
        """
        self._found = found
        try:
            yield
        finally:
            self._found = {}

    def given(self, number: int, hidden: Tensor) -> Tensor:
        """What a layer gives in such a run: the input of the next, where it is known, else the one it got, [1, T, d]."""
        found = self._found.get(number + 1)
        return hidden if found is None else found[None]

    def entered(self, count: int) -> Tensor | None:
        """Hidden states [1, T, d] that stand in for the embeddings of `count` tokens, in a pass of all ranks."""
        assert self._entering is None or len(self._entering) == count
        return None if self._entering is None else self._entering[None]

    def _at_end(self, norm: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        if not self._is_inside:
            return norm(hidden)
        self._leaving = hidden
        return hidden

    def _at_layer(self, number: int, layer: Callable[..., Any], hidden_states: Tensor, **keywords: Any) -> Any:
        return self.given(number, hidden_states) if self._found else layer(hidden_states, **keywords)

    def _at_model(self, own: Callable[..., Any], whole: Callable[..., Any], **keywords: Any) -> Any:
        return whole(**keywords) if self._found else own(**keywords)


def _leave_vocabulary(config: Any, layers: Sequence[int]) -> None:
    """Of a worker: no tokens go in, and none come out."""
    config.vocab_size, config.pad_token_id = 1, None
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in layers]
    if hasattr(config, "word_embed_proj_dim"):
        config.word_embed_proj_dim = config.hidden_size


class _Entrance(nn.Module):
    """Stands for embeddings: what the stage before hands on; at rest, noise by which patches are tried."""

    def __init__(self, stage: Stage, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._stage, self._size, self._dtype = stage, size, dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        """[1, T] → [1, T, d]."""
        entered = self._stage.entered(input_ids.shape[1])
        if entered is not None:
            return entered
        generator = torch.Generator().manual_seed(0)
        return torch.randn(*input_ids.shape, self._size, generator=generator).to(self._dtype)


class _NoPositions(nn.Module):
    """Stands for embeddings of positions, which rank 0 has added: −0, which changes no number."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._size, self._dtype = size, dtype

    def forward(self, _mask: Tensor, _past: int = 0, position_ids: Tensor | None = None) -> Tensor:
        """[1, T, d] for position_ids [1, T]."""
        assert position_ids is not None
        return torch.full((1, 1, self._size), -0.0, dtype=self._dtype).expand(*position_ids.shape, -1)


class _Elsewhere(nn.Module):
    """The place of a layer that another rank has."""

    def __init__(self, stage: Stage, number: int) -> None:
        super().__init__()
        self._stage, self._number = stage, number

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """What the layer has given, where that is known."""
        return self._stage.given(self._number, hidden_states)
