"""Norms, rotary embeddings and activations of a loaded model, served by our kernels where they are seen to compute the same.

What a module computes is found by trying, not by its name: its own forward and our candidates run on the same random input, and the
closest candidate serves if it agrees to rounding. What agrees with none stays with the framework. `forward` is replaced on the existing
modules, and nothing outside the model is touched.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from echelon.ops import devices, elementwise
from echelon.ops.elementwise import Activation, RmsWeight

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}  # relative to the largest value
ROTARY = "apply_rotary_pos_emb"  # what attention modules of `transformers` call
ROWS = 6
Forward = Callable[..., Any]


class Fused(functools.partial[Any]):
    """A forward of ours, so that `restore_fused` knows it."""


def fuse(model: nn.Module) -> dict[str, int]:
    """Patch what can be served; returns how many modules of each class now run our operations."""
    first = next(model.parameters(), torch.empty(0))
    if not devices.has_kernels(first):
        return {}
    replaced: dict[str, int] = {}
    find = _Finder(first.dtype, first.device)
    for module in model.modules():
        if "forward" not in vars(module) and (forward := find(module)) is not None:
            module.forward = Fused(forward)
            name = type(module).__name__
            replaced[name] = replaced.get(name, 0) + 1
    return replaced


def restore_fused(model: nn.Module) -> None:
    """Undo `fuse`."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), Fused):
            del module.forward


def gate_of(mlp: nn.Module) -> Activation | None:
    """The activation of a gated MLP with separate projections that `fuse` serves."""
    forward = vars(mlp).get("forward")
    return forward.args[1] if isinstance(forward, Fused) and forward.func is _split_mlp else None


class _Finder:
    """Module → a forward of ours that computes the same, or None. What depends on a class alone is tried once."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator().manual_seed(0)
        self._kinds: dict[object, Activation | None] = {}
        self._gated: dict[object, bool] = {}
        self._rotary: dict[Forward, bool] = {}

    def __call__(self, module: nn.Module) -> Forward | None:
        return self._norm(module) or self._gated_mlp(module) or self._attention(module) or self._activation(module)

    def _random(self, *shape: int) -> Tensor:
        return (torch.randn(shape, generator=self._generator) * 2).to(self._device, self._dtype)

    def _norm(self, module: nn.Module) -> Forward | None:
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not (isinstance(weight, Tensor) and weight.ndim == 1 and isinstance(eps, float)) or weight.dtype != self._dtype:
            return None
        candidates: list[Forward] = [functools.partial(_rms_norm, module, eps, how) for how in RmsWeight] if bias is None else []
        candidates.append(functools.partial(_layer_norm, module, eps))
        x = self._random(ROWS, len(weight))
        expected = module(x)
        errors = [_error(expected, candidate(x)) for candidate in candidates]
        best = min(range(len(candidates)), key=errors.__getitem__)
        return candidates[best] if errors[best] <= TOLERANCE[self._dtype] else None

    def _kind(self, function: Any) -> Activation | None:
        """Which of our activations a module or function is."""
        key = type(function) if isinstance(function, nn.Module) else function
        if key not in self._kinds:
            x = self._random(ROWS, 33)
            errors = {kind: _error(function(x), elementwise.activate(x, kind)) for kind in Activation}
            best = min(errors, key=errors.__getitem__)
            self._kinds[key] = best if errors[best] <= TOLERANCE[self._dtype] else None
        return self._kinds[key]

    def _activation(self, module: nn.Module) -> Forward | None:
        place = type(module).__module__
        if not place.startswith(("transformers.activations", "torch.nn.modules.activation")) or any(True for _ in module.parameters()):
            return None
        kind = self._kind(module)
        return None if kind is None else functools.partial(elementwise.activate, kind=kind)

    def _gated_mlp(self, module: nn.Module) -> Forward | None:
        act = getattr(module, "act_fn", getattr(module, "activation_fn", None))
        is_split = all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj"))
        is_joint = all(hasattr(module, name) for name in ("gate_up_proj", "down_proj"))
        if act is None or not (is_split or is_joint) or (kind := self._kind(act)) is None:
            return None
        ours = functools.partial(_split_mlp if is_split else _joint_mlp, module, kind)
        key = (type(module), kind)
        if key not in self._gated:
            first = module.gate_proj if is_split else module.gate_up_proj
            x = self._random(ROWS, first.in_features) if isinstance(first, nn.Linear) else None
            self._gated[key] = x is not None and _error(type(module).forward(module, x), ours(x)) <= TOLERANCE[self._dtype]
        return ours if self._gated[key] else None

    def _attention(self, module: nn.Module) -> Forward | None:
        forward = inspect.unwrap(type(module).forward)
        theirs = getattr(forward, "__globals__", {}).get(ROTARY)
        if theirs is None or ROTARY not in forward.__code__.co_names:
            return None
        if theirs not in self._rotary:
            self._rotary[theirs] = self._rotates_like_ours(theirs)
        if not self._rotary[theirs]:
            return None
        ours = types.FunctionType(
            forward.__code__, forward.__globals__ | {ROTARY: rotate_both}, forward.__name__, forward.__defaults__, forward.__closure__
        )
        ours.__kwdefaults__ = forward.__kwdefaults__
        return functools.partial(ours, module)

    def _rotates_like_ours(self, theirs: Forward) -> bool:
        """Tried with every value of a head rotated and with half of them; a function that refuses one of these is never called so."""
        verdicts = []
        for rotary in (32, 16):
            query, key = self._random(1, 3, ROWS, 32), self._random(1, 1, ROWS, 32)
            angles = torch.rand(1, ROWS, rotary // 2, generator=self._generator).repeat(1, 1, 2)
            cos, sin = (x.to(self._device, self._dtype) for x in (angles.cos(), angles.sin()))
            try:
                expected = theirs(query, key, cos, sin)
            except RuntimeError:
                continue
            got = rotate_both(query, key, cos, sin)
            verdicts += [a.shape == b.shape and _error(a, b) <= TOLERANCE[self._dtype] for a, b in zip(expected, got, strict=True)]
        return bool(verdicts) and all(verdicts)


def rotate_both(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Query [1, H, T, D] and key [1, Hkv, T, D] with their rotary embedding."""
    return elementwise.rotate(query, cos, sin), elementwise.rotate(key, cos, sin)


def _rms_norm(module: nn.Module, eps: float, how: RmsWeight, x: Tensor) -> Tensor:
    return elementwise.rms_norm(x, module.weight, eps, how)  # type: ignore[arg-type]


def _layer_norm(module: nn.Module, eps: float, x: Tensor) -> Tensor:
    return elementwise.layer_norm(x, module.weight, getattr(module, "bias", None), eps)  # type: ignore[arg-type]


def _split_mlp(module: Any, kind: Activation, x: Tensor) -> Tensor:
    out: Tensor = module.down_proj(elementwise.activate(module.gate_proj(x), kind, module.up_proj(x)))
    return out


def _joint_mlp(module: Any, kind: Activation, x: Tensor) -> Tensor:
    gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
    out: Tensor = module.down_proj(elementwise.activate(gate, kind, up))
    return out


def _error(expected: Tensor, got: Tensor) -> float:
    """Largest difference, relative to the largest value; infinite where shapes or dtypes differ."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf")
    wanted, found = expected.double(), got.double()
    return float((wanted - found).abs().max() / wanted.abs().max().clamp_min(1e-30))
