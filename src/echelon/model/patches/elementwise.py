"""Norms, rotary embeddings and activations of a loaded model, served by our kernels where they are seen to compute the same.

What a module computes is found by trying, not by its name: its own forward and our candidates run on the same inputs
(`model.patches.trials`),
in float32 whatever the model's dtype, since coarser rounding would hide what differs; a candidate serves if it agrees everywhere. What
agrees with none stays with the framework. `forward` is replaced on the existing modules, and nothing outside the model is touched.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from echelon.model.patches import PatchedForward, trials
from echelon.ops import devices
from echelon.ops.contract import Activation, RmsWeight

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}  # relative to the largest value
ROTARY = "apply_rotary_pos_emb"  # what attention modules of `transformers` call
ROWS, WIDTH = 6, 64  # of a trial; the width of norms that have no weight is whatever comes
Forward = Callable[..., Any]


@torch.no_grad()
def patch_elementwise(model: nn.Module) -> dict[str, int]:
    """Patch what can be served; returns how many modules of each class now run our operations."""
    first = next(model.parameters(), torch.empty(0))
    if not devices.has_kernels(first):
        return {}
    replaced: dict[str, int] = {}
    find = _Finder(first.dtype, first.device)
    for module in model.modules():
        if "forward" not in vars(module) and (forward := find(module)) is not None:
            module.forward = PatchedForward(forward)
            name = type(module).__name__
            replaced[name] = replaced.get(name, 0) + 1
    return replaced


def gate_of(mlp: nn.Module) -> Activation | None:
    """The activation of a gated MLP with separate projections that `patch_elementwise` serves."""
    forward = vars(mlp).get("forward")
    return forward.args[1] if isinstance(forward, PatchedForward) and forward.func is _split_mlp else None


def rms_norm_of(forward: Forward) -> tuple[Tensor, float, RmsWeight] | None:
    """Weight [N], epsilon and kind of a root-mean-square norm that `patch_elementwise` serves."""
    if not isinstance(forward, PatchedForward) or forward.func is not _rms_norm:
        return None
    how, module, eps = forward.args
    return module.weight, eps, how


class _Finder:
    """Module → a forward of ours that computes the same, or None. What depends on a class alone is tried once."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator().manual_seed(0)
        self._rotary: dict[Forward, bool] = {}

    def __call__(self, module: nn.Module) -> Forward | None:
        return self._norm(module) or self._gated_mlp(module) or self._attention(module) or self._activation(module)

    def _random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return (torch.randn(shape, generator=self._generator) * 2).to(self._device, dtype)

    def _norm(self, module: nn.Module) -> Forward | None:
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if weight is None and isinstance(eps, float) and not module._parameters and not module._buffers and not module._modules:
            return self._norm_without_weight(module, eps)
        if not (isinstance(weight, Tensor) and weight.ndim == 1 and isinstance(eps, float)) or weight.dtype != self._dtype:
            return None
        trial = copy.deepcopy(module).float()  # its own weights may be ones or zeros, and hide what is done with them
        for parameter in trial.parameters():
            parameter.copy_(self._random(*parameter.shape, dtype=torch.float32))
        x = trials.rows(len(weight), self._device)
        fitting = [
            c
            for c in _norms(bias is None)
            if trials.is_same(functools.partial(type(trial).forward, trial), functools.partial(c, trial, eps), x)
        ]
        if not fitting:
            return None
        trial.to(self._dtype)  # in float32 they may differ by nothing
        x = self._random(ROWS, len(weight), dtype=self._dtype)
        expected = type(trial).forward(trial, x)
        best = min(fitting, key=lambda candidate: _error(expected, candidate(trial, eps, x)))
        return functools.partial(best, module, eps) if _error(expected, best(trial, eps, x)) <= TOLERANCE[self._dtype] else None

    def _norm_without_weight(self, module: nn.Module, eps: float) -> Forward | None:
        theirs, ours = functools.partial(type(module).forward, module), functools.partial(_bare_rms_norm, eps)
        if not trials.is_same(theirs, ours, trials.rows(WIDTH, self._device)):
            return None
        x = self._random(ROWS, WIDTH, dtype=self._dtype)
        return ours if _error(theirs(x), ours(x)) <= TOLERANCE[self._dtype] else None

    def _activation(self, module: nn.Module) -> Forward | None:
        origin = type(module).__module__
        if not origin.startswith(("transformers.activations", "torch.nn.modules.activation")):
            return None
        kind = trials.activation_of(module, self._device)
        return None if kind is None else functools.partial(_activate, kind)

    def _gated_mlp(self, module: nn.Module) -> Forward | None:
        act = getattr(module, "act_fn", getattr(module, "activation_fn", None))
        is_split = all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj"))
        is_joint = all(hasattr(module, name) for name in ("gate_up_proj", "down_proj"))
        projections = [module._modules.get(name) for name in ("gate_proj", "up_proj", "gate_up_proj", "down_proj")]
        if act is None or not (is_split or is_joint) or not any(isinstance(p, nn.Linear) for p in projections):
            return None
        if (kind := trials.activation_of(act, self._device)) is None or not trials.is_gated_mlp(module, kind, self._device):
            return None
        return functools.partial(_split_mlp if is_split else _joint_mlp, module, kind)

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
        """Try it with every value of a head rotated and with half of them; a function that refuses one of these is never called so."""
        verdicts = []
        for rotary, dtype in itertools.product((32, 16), {torch.float32, self._dtype}):
            query, key = self._random(1, 3, ROWS, 32, dtype=dtype), self._random(1, 1, ROWS, 32, dtype=dtype)
            angles = torch.rand(1, ROWS, rotary // 2, generator=self._generator).mul(torch.pi * 2).repeat(1, 1, 2)
            cos, sin = (x.to(self._device, dtype) for x in (angles.cos(), angles.sin()))
            try:
                expected = theirs(query, key, cos, sin)
            except (RuntimeError, TypeError):
                continue
            got = rotate_both(query, key, cos, sin)
            verdicts += [a.shape == b.shape and _error(a, b) <= TOLERANCE[dtype] for a, b in zip(expected, got, strict=True)]
        return bool(verdicts) and all(verdicts)


def rotate_both(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Query [1, H, T, D] and key [1, Hkv, T, D] with their rotary embedding."""
    backend = devices.backend_of(query)
    return backend.rotate(query, cos, sin), backend.rotate(key, cos, sin)


def _norms(is_rms: bool) -> list[Forward]:
    """Candidates, functions of a module, its epsilon and x."""
    return [*(functools.partial(_rms_norm, how) for how in RmsWeight), _layer_norm] if is_rms else [_layer_norm]


def _rms_norm(how: RmsWeight, module: Any, eps: float, x: Tensor) -> Tensor:
    return devices.backend_of(x).rms_norm(x, module.weight, eps, how)


def _bare_rms_norm(eps: float, x: Tensor) -> Tensor:
    return devices.backend_of(x).rms_norm(x, torch.ones(x.shape[-1], dtype=x.dtype, device=x.device), eps, RmsWeight.AFTER_ROUNDING)


def _layer_norm(module: Any, eps: float, x: Tensor) -> Tensor:
    return devices.backend_of(x).layer_norm(x, module.weight, getattr(module, "bias", None), eps)


def _activate(kind: Activation, x: Tensor) -> Tensor:
    return devices.backend_of(x).activate(x, kind)


def _split_mlp(module: Any, kind: Activation, x: Tensor) -> Tensor:
    out: Tensor = module.down_proj(devices.backend_of(x).activate(module.gate_proj(x), kind, module.up_proj(x)))
    return out


def _joint_mlp(module: Any, kind: Activation, x: Tensor) -> Tensor:
    gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
    out: Tensor = module.down_proj(devices.backend_of(x).activate(gate, kind, up))
    return out


def _error(expected: Tensor, got: Tensor) -> float:
    """Largest difference, relative to the largest value; infinite where shapes or dtypes differ."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf")
    expected, got = expected.double(), got.double()
    return float((expected - got).abs().max() / expected.abs().max().clamp_min(1e-30))
