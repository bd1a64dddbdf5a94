"""Weights that modules read themselves (`self.weight`), as parameters whose products run our kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.model.patches.packing import Packing
from echelon.ops import cpu, devices
from echelon.ops.contract import PackedWeight

SERVED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CONVERSIONS = {
    Tensor.float: torch.float32,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.to: None,
    Tensor.type: None,
}  # with the dtype that they give, where the call does not say


class PackedParameter(torch.Tensor):
    """Stands for a weight [N, K] where a module reads it: linear layers, of it or of its conversion to another dtype, and lookups use the
    packed one; of a stack [E, N, K] each weight[i] does. What else is made of it is a plain tensor.

    Everything else sees the shape and dtype, and `original` or NaN as the values.
    """

    original: nn.Parameter | None
    is_fast: bool
    is_stack: bool
    _packed: PackedWeight | None
    entries: dict[object, Tensor]  # this weight in other dtypes, or those of a stack by index

    @classmethod
    def of(cls, packed: PackedWeight, original: nn.Parameter | None, shape: tuple[int, ...] | None = None) -> nn.Parameter:
        """A weight that is packed already; `shape`: where its module has it otherwise than [N, K]."""
        data = absent(shape or (packed.columns, packed.depth), packed.data, packed.dtype) if original is None else original.data
        return cls._made(data, packed, original, packed.is_fast)

    @classmethod
    def lazy(cls, original: nn.Parameter, is_fast: bool) -> nn.Parameter:
        """A weight that is packed when a linear layer first uses it."""
        return cls._made(original.data, None, original, is_fast)

    @classmethod
    def stack(cls, stacked: nn.Parameter, keep_weights: bool, packing: Packing, is_transposed: bool = False) -> nn.Parameter:
        """Weights [E, N, K], or [E, K, N], all packed; the memory of `stacked` is given up unless it is to be kept."""
        data = stacked.data if keep_weights else absent(tuple(stacked.shape), stacked)
        parameter = cls._made(data, None, stacked if keep_weights else None, packing.is_fast)
        for i, weight in enumerate(stacked.detach()):
            parameter.entries[i] = cls.of(packing.pack(weight.t() if is_transposed else weight), None)  # type: ignore[attr-defined]
        return parameter

    @classmethod
    def stack_of(cls, weights: Sequence[PackedWeight]) -> nn.Parameter:
        """Weights [N, K] that are packed already, as [E, N, K]."""
        first = weights[0]
        parameter = cls._made(absent((len(weights), first.columns, first.depth), first.data, first.dtype), None, None, first.is_fast)
        parameter.entries.update((i, cls.of(weight, None)) for i, weight in enumerate(weights))  # type: ignore[attr-defined]
        return parameter

    @classmethod
    def _made(cls, data: Tensor, packed: PackedWeight | None, original: nn.Parameter | None, is_fast: bool) -> nn.Parameter:
        made: Any = nn.Parameter(data.as_subclass(cls), requires_grad=False)
        made._packed, made.original, made.entries, made.is_fast, made.is_stack = packed, original, {}, is_fast, data.ndim == 3
        parameter: nn.Parameter = made
        return parameter

    @property
    def packed(self) -> PackedWeight:
        """The packed weight, made at first use."""
        if self._packed is None:
            assert self.original is not None
            self._packed = devices.backend_of(self.original).pack(self.original.detach(), self.is_fast)
        return self._packed

    @property
    def all_packed(self) -> list[PackedWeight]:
        """The packed weight, or those of a stack."""
        return [w for part in self.entries.values() for w in part.all_packed] if self.is_stack else [self.packed]  # type: ignore[attr-defined]

    def converted(self, dtype: torch.dtype) -> Tensor:
        """Return this weight [N, K] in another dtype, packed once; one of integers as it is, for activations of that dtype. Where its
        values are at hand, so are those of what is returned: not everything that converts a weight multiplies by it.
        """
        if dtype not in self.entries and self.packed.integers.bits:
            self.entries[dtype] = PackedParameter.of(replace(self.packed, stands_for=dtype), None)
        if dtype not in self.entries:
            data = self.packed.data
            backend = devices.backend_of(data)
            values = backend.packed_rows(self.packed, torch.arange(self.packed.columns, device=data.device))
            original = None if self.original is None else nn.Parameter(self.original.detach().to(dtype), requires_grad=False)
            self.entries[dtype] = PackedParameter.of(backend.pack(values.to(dtype), self.is_fast), original)
        return self.entries[dtype]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        substitute = SUBSTITUTES.get(func)
        result = substitute(func, args, kwargs or {}) if substitute else None
        if result is not None:
            return result
        if func is Tensor.detach:  # called while a parameter is made
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _is_matrix(weight: Any) -> bool:
    return isinstance(weight, PackedParameter) and not weight.is_stack


def _linear(_: Any, args: Any, keywords: dict[str, Any]) -> Tensor | None:
    if len(args) < 2 or not _is_matrix(args[1]):
        return None
    bias = args[2] if len(args) > 2 else keywords.get("bias")
    packed = args[1].packed
    return devices.backend_of(packed.data).packed_linear(args[0], packed, None if bias is None else bias.float())


def _embedding(_: Any, args: Any, __: dict[str, Any]) -> Tensor | None:
    if len(args) < 2 or not _is_matrix(args[1]):
        return None
    packed = args[1].packed
    return devices.backend_of(packed.data).packed_rows(packed, args[0])


def _stacked(_: Any, args: Any, keywords: dict[str, Any]) -> Tensor | None:
    """Experts that a checkpoint has one by one, as their module has them."""
    is_whole = all(map(_is_matrix, args[0])) and keywords.get("dim", 0) == 0
    return PackedParameter.stack_of([w.packed for w in args[0]]) if is_whole else None


def _joined(_: Any, args: Any, keywords: dict[str, Any]) -> Tensor | None:
    """Columns of experts that a checkpoint has apart, such as gate and up."""
    stacks = args[0]
    if keywords.get("dim") != 1 or not all(isinstance(s, PackedParameter) and s.is_stack for s in stacks):
        return None
    return PackedParameter.stack_of([cpu.side_by_side([s.entries[i].packed for s in stacks]) for i in range(len(stacks[0].entries))])


def _convert(func: Any, args: Any, keywords: dict[str, Any]) -> Tensor | None:
    weight, dtype = args[0], _dtype_of(func, args[1:], keywords)
    if not _is_matrix(weight) or dtype not in SERVED_DTYPES:
        return None
    converted: Tensor = weight if dtype == weight.dtype else weight.converted(dtype)
    return converted


def _entry(_: Any, args: Any, __: dict[str, Any]) -> Tensor | None:
    """One weight of a stack."""
    weight, index = args
    return weight.entries.get(index) if isinstance(weight, PackedParameter) and isinstance(index, int) else None


# what runs in the place of a function of the framework; where it returns None, the framework's own does
SUBSTITUTES: dict[Any, Callable[[Any, Any, dict[str, Any]], Tensor | None]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    Tensor.__getitem__: _entry,
    torch.stack: _stacked,
    torch.cat: _joined,
    **dict.fromkeys(CONVERSIONS, _convert),
}


def _dtype_of(conversion: Any, args: Any, keywords: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype that a call of `Tensor.to` and its like gives, None where it changes none."""
    dtypes = [v for v in (*args, *keywords.values()) if isinstance(v, torch.dtype)]
    return dtypes[0] if dtypes else CONVERSIONS[conversion]


def absent(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """NaN of this shape that takes no memory, on the device of `like` and in its dtype unless told otherwise."""
    return torch.full((1,) * len(shape), torch.nan, dtype=dtype or like.dtype, device=like.device).expand(shape)
