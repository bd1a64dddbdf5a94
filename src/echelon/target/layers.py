"""Layers of a loaded model that run our operations. `forward` is replaced on the existing modules, so hooks survive."""

from __future__ import annotations

import functools

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from echelon import ops

LINEAR = (nn.Linear, Conv1D)


def _weight(module: nn.Module) -> Tensor:
    """[N, K]; Conv1D keeps its weight the other way round."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.t() if isinstance(module, Conv1D) else weight


def _linear(module: nn.Module, counts: ops.RowCounts, x: Tensor) -> Tensor:
    return ops.fixed_rows_linear(x, _weight(module), module.bias, counts)  # type: ignore[arg-type]


def replace_layers(model: nn.Module) -> dict[str, int]:
    """Patch every linear layer; returns how many modules of each class now run our operations."""
    replaced: dict[str, int] = {}
    by_shape: dict[tuple[object, ...], ops.RowCounts] = {}
    for module in model.modules():
        if isinstance(module, LINEAR):
            name = type(module).__name__
            counts = by_shape.setdefault((name, *_weight(module).shape, module.bias is not None), ops.RowCounts())
            module.forward = functools.partial(_linear, module, counts)  # type: ignore[method-assign]
            replaced[name] = replaced.get(name, 0) + 1
    return replaced


def restore_layers(model: nn.Module) -> None:
    """Undo `replace_layers`."""
    for module in model.modules():
        if isinstance(module, LINEAR) and isinstance(vars(module).get("forward"), functools.partial):
            del module.forward


def framework_layers(model: nn.Module) -> list[str]:
    """Classes that hold matrices of their own and still run the framework's code, whose rounding may depend on the batch."""
    names = {
        type(module).__name__
        for module in model.modules()
        if not isinstance(module, (*LINEAR, nn.Embedding)) and any(p.ndim >= 2 for p in module.parameters(recurse=False))
    }
    return sorted(names)
