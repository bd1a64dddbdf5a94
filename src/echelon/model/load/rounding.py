"""Weights that are rounded as soon as each is read, so that a model is never held whole as numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from echelon.model.patches.experts import STACKED, is_experts, splits_evenly
from echelon.model.patches.linear import is_indexed_stack, is_plain_linear, weight_of
from echelon.model.patches.packing import Packing
from echelon.model.patches.weights import SERVED_DTYPES, PackedParameter
from echelon.text_worker import give_memory_back

_ACTIVE = threading.local()


@contextmanager
def rounded_as_read(packing: Packing, later: frozenset[int]) -> Iterator[None]:
    """Weights of linear layers and stacks of experts that this thread sets inside are packed at once, and what was read is given up.

    What has so many columns as are in `later` stays for `patch_linear`, which sees whether it is an output layer, wherever in the model it
    lies, or a router: the one keeps more bits, and may share its weight with an embedding, the other all.
    """
    _ACTIVE.rounds = packing, later
    try:
        yield
    finally:
        del _ACTIVE.rounds
        give_memory_back()  # of weights as they were read, before the output layer is rounded


def _on_parameter(module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
    """What stands in for a parameter that this thread sets; None: itself."""
    rounds = getattr(_ACTIVE, "rounds", None)
    if rounds is None or parameter is None or parameter.is_meta or isinstance(parameter, PackedParameter):
        return None
    packing, later = rounds
    made = None
    if name == "weight" and is_plain_linear(module) and parameter.dtype in SERVED_DTYPES:
        made = _linear(parameter, module, packing, later)
    elif name in STACKED and is_experts(module) and splits_evenly(module, name, parameter):
        made = PackedParameter.stack(parameter, False, packing, bool(module.is_transposed))
    elif parameter.dtype in SERVED_DTYPES and is_indexed_stack(module, name, parameter):
        made = PackedParameter.stack(parameter, False, packing)
    if made is not None:
        made._is_hf_initialized = True  # type: ignore[attr-defined]  # or transformers would draw it anew
    return made


# once and for good: threads that load at the same time would change the framework's hooks under one another
nn.modules.module.register_module_parameter_registration_hook(_on_parameter)  # type: ignore[arg-type]  # which may replace it


def _linear(parameter: torch.Tensor, module: nn.Module, packing: Packing, later: frozenset[int]) -> nn.Parameter | None:
    weight = weight_of(module, parameter)
    if len(weight) in later:
        return None
    return PackedParameter.of(packing.pack(weight.detach()), None, tuple(parameter.shape))
