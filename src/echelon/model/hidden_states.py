"""Hidden states of the target that a drafter asks for, taken by hooks that exist during a pass alone.

Where each lies is found by trying: a pass over one token shows which modules produce what the output layer reads, and which are the
decoder layers. `heads.base.HiddenStateName` says what the names mean.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from echelon.errors import UnsupportedModelError
from echelon.heads.base import HiddenStateName
from echelon.model.attention import RecordingAttention, run_one_token
from echelon.model.patches.causal_lm import CausalLMForward

LAYER = "layer:"


class HiddenStateReader:
    """Reads the hidden states `names` of a served causal language model.

    Raises
    ------
    UnsupportedModelError  one is not in this model
    """

    def __init__(self, model: Any, names: Sequence[HiddenStateName]) -> None:
        self.names = tuple(names)
        self._model, self._name = model, type(model).__name__
        self._last, self._norm, self._layers = _found(model)
        for name in self.names:
            self._check(name)

    def _check(self, name: HiddenStateName) -> None:
        if name == "last" and self._last is None:
            raise UnsupportedModelError(
                f"what the output layer of {self._name} reads is no module's output, so it has no hidden state 'last'"
            )
        if name == "last_unnormed" and self._norm is None:
            raise UnsupportedModelError(f"{self._name} has no norm at its end, so it has no hidden state 'last_unnormed'")
        if name.startswith(LAYER):
            if not self._layers:
                raise UnsupportedModelError(f"the decoder layers of {self._name} cannot be found, so it has no hidden state {name!r}")
            if not (number := name.removeprefix(LAYER)).isdecimal() or int(number) >= len(self._layers):
                raise UnsupportedModelError(f"{self._name} has layers 0 to {len(self._layers) - 1}, so it has no hidden state {name!r}")
        elif name not in ("last", "last_unnormed"):
            raise UnsupportedModelError(f"there is no hidden state {name!r}; there are 'last', 'last_unnormed' and 'layer:i'")

    def example(self) -> Tensor:
        """Read the hidden states [1, len(names) · d] of a text of one token."""
        with self.reading() as states:
            run_one_token(self._model, RecordingAttention())
        return self.joined(states, 1)

    @contextmanager
    def reading(self) -> Iterator[dict[HiddenStateName, Tensor]]:
        """Collect hidden states [B, T', d] by name during a pass of the model."""
        states: dict[HiddenStateName, Tensor] = {}
        handles = [self._hook(name, states) for name in dict.fromkeys(self.names)]
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: HiddenStateName, states: dict[HiddenStateName, Tensor]) -> Any:
        here = get_ident()  # hooks hang on modules, which another engine may run at the same time

        def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if get_ident() == here:
                states[name] = _first(output)

        def before(_module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if get_ident() == here:
                states[name] = inputs[0] if inputs else keywords["hidden_states"]

        if name == "last":
            assert self._last is not None
            return self._last.register_forward_hook(after)
        module = self._norm if name == "last_unnormed" else self._layers[int(name.removeprefix(LAYER))]
        assert module is not None
        return module.register_forward_pre_hook(before, with_kwargs=True)

    def joined(self, states: dict[HiddenStateName, Tensor], num_tokens: int) -> Tensor:
        """Concatenate hidden states to [T, len(names) · d], in the order of `names`; a single one stays where it is."""
        parts = [states[name][0, :num_tokens] for name in self.names]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _found(model: Any) -> tuple[nn.Module | None, nn.Module | None, list[nn.Module]]:
    """Watch a pass over one token: which module's output the output layer reads, the norm that makes it, and the decoder layers."""
    called: list[tuple[nn.Module, Tensor]] = []
    read: list[Tensor] = []
    here = get_ident()

    def note(module: nn.Module, _inputs: Any, output: Any) -> None:
        if get_ident() == here and isinstance(first := _first(output), Tensor):
            called.append((module, first))

    def note_read(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if get_ident() == here:
            read.append(inputs[0])

    output_layer = model.get_output_embeddings()
    handles = [m.register_forward_hook(note) for m in model.modules() if m is not model and m is not output_layer]
    handles.append(output_layer.register_forward_pre_hook(note_read))
    try:
        run_one_token(model, RecordingAttention())
    finally:
        for handle in handles:
            handle.remove()
    last = [m for m, output in called if output.data_ptr() == read[0].data_ptr()]  # nothing is freed before
    norms = [m for m in last if _is_norm(m)]
    if norms and isinstance(vars(model).get("forward"), CausalLMForward):
        last = norms  # a hook further out would keep the layers from running as one call
    return last[-1] if last else None, norms[-1] if norms else None, _layers(model, {id(m) for m, _ in called})


def _layers(model: Any, called: Container[int]) -> list[nn.Module]:
    """The decoder layers: as many modules in a list as the model has, all of them `called`."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count and all(id(x) in called for x in m))
    return list(next(lists, []))


def _first(output: Any) -> Any:
    """The hidden state in what a module returns."""
    return output if isinstance(output, Tensor) else output[0] if isinstance(output, (tuple, ModelOutput)) and len(output) else None


def _is_norm(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(True for _ in module.children()) and all(p.ndim == 1 for p in parameters)
