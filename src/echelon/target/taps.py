"""Hidden states of the target that a drafter asks for, taken by hooks that exist during a pass alone.

Where a tap lies is found by trying: a pass over one token shows which module produces the base model's last hidden state, and which
modules its decoder layers are. `heads.base.Tap` says what the names mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from echelon.errors import UnsupportedModelError
from echelon.heads.base import Tap
from echelon.target.attention import STEP_KEYWORD, RecordingStep

LAYER = "layer:"


class Taps:
    """The taps `names` of a served causal language model.

    Raises
    ------
    UnsupportedModelError  a tap cannot be found in this model
    """

    def __init__(self, model: Any, names: Sequence[Tap]) -> None:
        self.names = tuple(names)
        self._model, self._base = model, model.base_model
        self._name = type(model).__name__
        if self._base is model:
            raise UnsupportedModelError(f"{self._name} has no base model apart from its output layer, so no hidden states can be tapped")
        seen = _Trial(model)
        self._norm = seen.norm
        self._layers = seen.layers
        for name in self.names:
            self._check(name)

    def _check(self, name: Tap) -> None:
        if name == "last_unnormed" and self._norm is None:
            raise UnsupportedModelError(f"{self._name} has no norm at its end, so it has no tap 'last_unnormed'")
        if name.startswith(LAYER):
            if not self._layers:
                raise UnsupportedModelError(f"the decoder layers of {self._name} cannot be found, so it has no tap {name!r}")
            if not (number := name.removeprefix(LAYER)).isdecimal() or int(number) >= len(self._layers):
                raise UnsupportedModelError(f"{self._name} has layers 0 to {len(self._layers) - 1}, so it has no tap {name!r}")
        elif name not in ("last", "last_unnormed"):
            raise UnsupportedModelError(f"there is no tap {name!r}; taps are 'last', 'last_unnormed' and 'layer:i'")

    def example(self) -> Tensor:
        """[1, len(names) · d] of a text of one token."""
        zero = torch.zeros(1, 1, dtype=torch.int64)
        with torch.inference_mode(), self.reading() as found:
            self._model(input_ids=zero, position_ids=zero, use_cache=False, **{STEP_KEYWORD: RecordingStep()})
        return self.joined(found, 1)

    @contextmanager
    def reading(self) -> Iterator[dict[Tap, Tensor]]:
        """During a pass of the model, its hidden states [T', d] by name."""
        found: dict[Tap, Tensor] = {}
        handles = [self._hook(name, found) for name in dict.fromkeys(self.names)]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: Tap, found: dict[Tap, Tensor]) -> Any:
        def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
            found[name] = output[0][0]

        def before(_module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            found[name] = (inputs[0] if inputs else keywords["hidden_states"])[0]

        if name == "last":
            return self._base.register_forward_hook(after)
        module = self._norm if name == "last_unnormed" else self._layers[int(name.removeprefix(LAYER))]
        assert module is not None
        return module.register_forward_pre_hook(before, with_kwargs=True)

    def joined(self, found: dict[Tap, Tensor], num_tokens: int) -> Tensor:
        """[T, len(names) · d] in the order of `names`."""
        return torch.cat([found[name][:num_tokens] for name in self.names], -1)


class _Trial:
    """A pass over one token, watched: the norm that makes the last hidden state, and the decoder layers in order."""

    def __init__(self, model: Any) -> None:
        called: list[tuple[nn.Module, Tensor]] = []
        last: list[Tensor] = []
        base = model.base_model

        def note(module: nn.Module, _inputs: Any, output: Any) -> None:
            first = output if isinstance(output, Tensor) else output[0] if isinstance(output, tuple) and output else None
            if isinstance(first, Tensor):
                called.append((module, first))

        handles = [m.register_forward_hook(note) for m in base.modules() if m is not base]
        handles.append(base.register_forward_hook(lambda _module, _inputs, output: last.append(output[0])))
        try:
            zero = torch.zeros(1, 1, dtype=torch.int64)
            with torch.inference_mode():
                model(input_ids=zero, position_ids=zero, use_cache=False, **{STEP_KEYWORD: RecordingStep()})
        finally:
            for handle in handles:
                handle.remove()
        self.norm = next((m for m, output in reversed(called) if output is last[0] and _is_norm(m)), None)
        modules = {id(m): m for m, _ in called}
        count = model.config.get_text_config().num_hidden_layers
        lists = [m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) == count and all(id(x) in modules for x in m)]
        self.layers = list(lists[0]) if lists else []


def _is_norm(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(True for _ in module.children()) and all(p.ndim == 1 for p in parameters)
