"""Functions of the framework that compute whole vectors of elements otherwise than the rest: sigmoid, GELU and their kin, on CPUs.

What is left over behind the last whole vector of a call has other last bits, so that a router's scores of 8 experts would depend on how
many tokens share a pass. Modules whose classes name such a function run with their calls filled up to whole vectors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VECTORS = 64  # elements: a multiple of what a loop of PyTorch takes at a time, two vectors, 2 · 32 of 16 bits with AVX-512
PIECE = 1 << 15  # elements that one thread computes whole
SENSITIVE = {torch.sigmoid, Tensor.sigmoid, F.sigmoid, F.silu, F.softplus, F.logsigmoid, F.mish, F.gelu}
SENSITIVE_NAMES = {function.__name__ for function in SENSITIVE}
Forward = Callable[..., Any]


class WholeVectors(TorchFunctionMode):
    """While it is on, sensitive functions see multiples of VECTORS elements, PIECE at most."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SENSITIVE and args and not is_whole(args[0]):
            return in_whole_vectors(functools.partial(func, **(kwargs or {})), *args)
        return func(*args, **(kwargs or {}))


def is_whole(x: Tensor) -> bool:
    """Whether an element-wise call over x, of any shape, ends with a whole vector, and is not shared out among threads."""
    return x.is_contiguous() and x.numel() % VECTORS == 0 and x.numel() <= PIECE


def in_whole_vectors(function: Callable[..., Tensor], x: Tensor, *others: Any) -> Tensor:
    """The element-wise `function` of x, of any shape, and of arguments that are no tensors."""
    flat = F.pad(x.reshape(-1), (0, -x.numel() % VECTORS))
    pieces: tuple[Tensor, ...] = torch.split(flat, PIECE)
    out = torch.cat([function(piece, *others) for piece in pieces])
    return out[: x.numel()].view(x.shape)


class WholeVectorForward:
    """A forward with `WholeVectors` on."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        with WholeVectors():
            return self.forward(*args, **keywords)


def patch_sensitive(model: nn.Module) -> None:
    """Patch the modules whose classes name such a function, but those without modules inside that our operations serve."""
    if any(p.device.type != "cpu" for p in model.parameters()):
        return
    for module in model.modules():
        own, kind = vars(module).get("forward"), cast("Any", type(module))
        is_served = own is not None and next(module.children(), None) is None
        if not is_served and not isinstance(own, WholeVectorForward) and _names(kind) & SENSITIVE_NAMES:
            module.forward = WholeVectorForward(module.forward)


@functools.cache
def _names(cls: Any) -> frozenset[str]:
    """Names that the methods of a class of modules use."""
    classes = [c for c in cls.__mro__ if c not in (nn.Module, object)]
    methods = [inspect.unwrap(f) for c in classes for f in vars(c).values() if inspect.isfunction(f)]
    return frozenset(name for f in methods for name in f.__code__.co_names)
