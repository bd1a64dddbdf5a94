"""One copy of what two models have alike: a model and its own copy in fewer bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echelon.model.load.loading import LoadedModel
from echelon.model.patches import PatchedForward
from echelon.ops.contract import PackedWeight


def share_weights(owner: LoadedModel, copy: LoadedModel) -> int:
    """Let `copy` use the weights of `owner` wherever its own are the same, bit for bit, under the same name; returns the bytes given up."""
    saved = 0
    theirs = dict(owner.model.named_modules())
    for name, module in copy.model.named_modules():
        other = theirs.get(name)
        if other is None:
            continue
        for key, parameter in module._parameters.items():
            kept = other._parameters.get(key)
            if parameter is not None and kept is not None and kept is not parameter and _is_same(kept, parameter):
                saved += _bytes(parameter)
                module._parameters[key] = kept
        forward, kept_forward = vars(module).get("forward"), vars(other).get("forward")
        if isinstance(forward, PatchedForward) and isinstance(kept_forward, PatchedForward) and len(forward.args) == len(kept_forward.args):
            pairs = list(zip(forward.args, kept_forward.args, strict=True))
            saved += sum(a.data.nbytes for a, b in pairs if _is_same_packed(a, b))
            module.forward = PatchedForward(forward.func, *(b if _is_same_packed(a, b) else a for a, b in pairs), **forward.keywords)
    return saved


def _is_same(a: Tensor, b: Tensor) -> bool:
    packed_a, packed_b = getattr(a, "packed", None), getattr(b, "packed", None)
    if packed_a is not None or packed_b is not None:
        return _is_same_packed(packed_a, packed_b)
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _is_same_packed(a: Any, b: Any) -> bool:
    if not isinstance(a, PackedWeight) or not isinstance(b, PackedWeight):
        return False
    is_alike = (a.columns, a.depth, a.integers, a.dtype) == (b.columns, b.depth, b.integers, b.dtype)
    return is_alike and a.data is not b.data and torch.equal(a.data, b.data)


def _bytes(parameter: Tensor) -> int:
    packed = getattr(parameter, "packed", None)
    return packed.data.nbytes if packed is not None else parameter.nbytes
