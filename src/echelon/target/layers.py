"""Layers of a loaded model that run our operations. `forward` is replaced on the existing modules, so hooks survive."""

from __future__ import annotations

import functools

from torch import Tensor, nn

from echelon import ops


def _linear(module: nn.Linear, counts: ops.RowCounts, x: Tensor) -> Tensor:
    return ops.fixed_rows_linear(x, module.weight, module.bias, counts)


def restore_layers(model: nn.Module) -> None:
    """Undo `replace_layers`."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and isinstance(vars(module).get("forward"), functools.partial):
            del module.forward


def replace_layers(model: nn.Module) -> dict[str, int]:
    """Patch every linear layer; returns how many modules of each class now run our operations."""
    replaced: dict[str, int] = {}
    by_shape: dict[tuple[int, ...], ops.RowCounts] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            counts = by_shape.setdefault((*module.weight.shape, module.bias is not None), ops.RowCounts())
            module.forward = functools.partial(_linear, module, counts)  # type: ignore[method-assign]
            name = type(module).__name__
            replaced[name] = replaced.get(name, 0) + 1
    return replaced
