"""One copy of what two models have alike: a model and its own copy in fewer bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echelon.model.load.loading import LoadedModel
from echelon.model.patches import PatchedForward
from echelon.model.patches.weights import PackedParameter
from echelon.ops.contract import PackedWeight


def share_weights(owner: LoadedModel, copy: LoadedModel) -> None:
    """Let embeddings, norms and output layer of `copy` be those of `owner` wherever they are the same, bit for bit, under the same name."""
    theirs = dict(owner.model.named_modules())
    for name, module in copy.model.named_modules():
        other = theirs.get(name)
        if other is None:
            continue
        for key, parameter in module._parameters.items():
            kept = other._parameters.get(key)
            if parameter is not None and kept is not None and _is_same(kept, parameter):
                module._parameters[key] = kept
        forward, kept_forward = vars(module).get("forward"), vars(other).get("forward")
        if isinstance(forward, PatchedForward) and isinstance(kept_forward, PatchedForward) and len(forward.args) == len(kept_forward.args):
            pairs = zip(forward.args, kept_forward.args, strict=True)
            module.forward = PatchedForward(forward.func, *(b if _is_same_packed(a, b) else a for a, b in pairs), **forward.keywords)


def _is_same(a: Tensor, b: Tensor) -> bool:
    if isinstance(a, PackedParameter) or isinstance(b, PackedParameter):
        is_matrix = isinstance(a, PackedParameter) and isinstance(b, PackedParameter) and not (a.is_stack or b.is_stack)
        return is_matrix and _is_same_packed(a.packed, b.packed)  # type: ignore[attr-defined]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _is_same_packed(a: Any, b: Any) -> bool:
    if not isinstance(a, PackedWeight) or not isinstance(b, PackedWeight):
        return False
    is_alike = (a.columns, a.depth, a.integers, a.dtype) == (b.columns, b.depth, b.integers, b.dtype)
    return is_alike and torch.equal(a.data, b.data)
