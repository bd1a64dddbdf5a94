"""A device that is not there: tensors in the host's memory that count as lying on a card, so that what mixes host and card is found.

While `Card` is active, a tensor that is moved to CUDA, or made there, is a copy that is known by its memory; `device` and `is_cuda` say so;
what is computed from such tensors lies there too. Refused is what CUDA refuses: operands of host and card together (indices and scalars
apart), and NumPy's view of a tensor on the card. Triton's kernels take tensors of the card alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from echelon.model.patches.weights import PackedParameter
from echelon.ops import cpu, devices
from echelon.ops import triton as on_triton
from echelon.ops.triton import linear as triton_linear

CUDA = torch.device("cuda", 0)
MAKERS = {torch.empty, torch.zeros, torch.full, torch.arange, torch.tensor, torch.ones}
MOVERS = {Tensor.to, Tensor.cuda}
MIXED = {  # these may take both
    Tensor.__getitem__,
    Tensor.__setitem__,
    Tensor.copy_,
    Tensor.data.__set__,  # type: ignore[attr-defined]
    torch._has_compatible_shallow_copy_type,
}


class Card(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._memory: dict[int, Any] = {}  # what lies on the card, kept so that no address is used again

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._memory if tensor.numel() else getattr(tensor, "is_empty_there", False)

    def put(self, value: Any) -> Any:
        for tensor in tensors(value):
            if tensor.numel():
                self._memory[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            else:
                tensor.is_empty_there = True  # type: ignore[attr-defined]
        return value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.device.__get__, Tensor.is_cuda.__get__):  # type: ignore[attr-defined]
            is_here = self.holds(args[0])
            return is_here if func == Tensor.is_cuda.__get__ else CUDA if is_here else func(*args)  # type: ignore[attr-defined]
        if func in MAKERS or func in MOVERS:
            return self._placed(func, args, kwargs)
        if func in (F.embedding, F.linear) and isinstance(args[1], PackedParameter):  # which asks for devices in turn
            with self:
                return args[1].__torch_function__(func, types, args, kwargs)
        if func is Tensor.cpu:
            return args[0].clone() if self.holds(args[0]) else args[0]
        return self._computed(func, args, kwargs)

    def _placed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        wanted = [torch.device(a) for a in (*args, kwargs.get("device")) if isinstance(a, torch.device) or a in ("cuda", "cpu")]
        host = torch.device("cpu")
        args = [host if isinstance(a, torch.device) or (isinstance(a, str) and a == "cuda") else a for a in args]
        if "device" in kwargs:
            kwargs["device"] = host
        was_here = func in MOVERS and self.holds(args[0])
        is_here = wanted[0].type == "cuda" if wanted else was_here
        out = func(*args, **kwargs)
        if is_here != was_here and func in MOVERS and out is args[0]:
            out = out.clone()
        return self.put(out) if is_here else out

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(device := kwargs.get("device"), torch.device) and device.type == "cuda":
            kwargs["device"] = torch.device("cpu")  # new_empty and its like
        given = list(tensors((args, kwargs)))
        here = [self.holds(t) for t in given]
        if getattr(func, "__name__", "") in {"numpy", "__array__"} and any(here):
            raise TypeError("NumPy cannot see what lies on the card")
        if func not in MIXED and any(here) and not all(h or t.ndim == 0 or t.numel() == 0 for h, t in zip(here, given, strict=True)):
            raise RuntimeError(f"{resolve_name(func)} was given tensors of the host and of the card")
        out = func(*args, **kwargs)
        is_here = here[:1] == [True] if func in MIXED else any(here)
        return self.put(out) if is_here else out

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of `ops.triton`, interpreted; everything that it is given must lie on the card."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                assert all(self.holds(t) for t in tensors((args, kwargs)) if t.numel()), (
                    f"{function.__name__} was given a tensor of the host"
                )
                return self.put(function(*args, **kwargs))

        return run


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Card:
    """A card with kernels of the CPU in the place of Triton's; to be entered."""
    there = Card()

    def linear_of_the_cpu(x: Tensor, weight: Tensor, bias: Any = None, float32: bool = False) -> Tensor:
        return cpu.packed_linear(x, cpu.pack(weight), bias, float32=float32)

    monkeypatch.setattr(triton_linear, "linear_invariant", there.kernel(linear_of_the_cpu))
    for name in ("ragged_attention", "sample_rows", "rms_norm", "layer_norm", "activate", "rotate", "write_slots"):
        monkeypatch.setattr(on_triton, name, there.kernel(getattr(cpu, name)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1 << 30, 1 << 31))
    monkeypatch.setattr(devices, "current", lambda _device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    return there


def tensors(value: Any) -> Iterator[Tensor]:
    """Those in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors(one)
