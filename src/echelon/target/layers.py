"""Layers of a loaded model that run our operations. `forward` is replaced on the existing modules, so hooks survive.

With kernels of ours (`devices.has_kernels`) a weight is packed once. A model of ours keeps the packed weight alone: what other modules
share with a linear layer (tied embeddings) reads the packed one, and in its place stands a NaN of the same shape without memory. A caller's
model keeps its own weights beside the packed ones, and gives those back on `restore_layers`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from echelon import ops
from echelon.ops import devices
from echelon.ops.linear import PackedWeight, packed_linear
from echelon.target.experts import is_experts, serve_experts

LINEAR = (nn.Linear, Conv1D)
GIVEN_UP = (nn.Linear, nn.Embedding)  # they read the packed weight in place of their own
SERVED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUTES = re.compile(r"F\.linear\(\w+, self\.weight(, (bias=)?self\.bias)?\)")  # how a router uses its weight


class PackedParameter(torch.Tensor):
    """Stands for a packed weight [N, K] where a module reads `self.weight` itself: linear layers and lookups use the packed one.

    Everything else sees the shape and dtype, and `original` or NaN as the values.
    """

    packed: PackedWeight
    original: nn.Parameter | None

    @classmethod
    def of(cls, packed: PackedWeight, original: nn.Parameter | None) -> nn.Parameter:
        data = absent((packed.columns, packed.depth), packed.data) if original is None else original.data
        parameter = nn.Parameter(data.as_subclass(cls), requires_grad=False)
        parameter.packed, parameter.original = packed, original  # type: ignore[attr-defined]
        return parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding and isinstance(args[1], cls):
            return args[1].packed.rows(args[0])
        if func is F.linear and isinstance(args[1], cls):
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            return _linear(args[1].packed, None if bias is None else bias.float(), False, args[0])
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def absent(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """NaN of this shape that takes no memory, in the dtype and on the device of `like`."""
    return torch.full((1,) * len(shape), torch.nan, dtype=like.dtype, device=like.device).expand(shape)


def _linear(packed: PackedWeight, bias: Tensor | None, float32: bool, x: Tensor) -> Tensor:
    """x [..., K] → [..., N]."""
    return packed_linear(x, packed, bias, float32=float32)


def _fixed(module: nn.Module, counts: ops.RowCounts, x: Tensor) -> Tensor:
    return ops.fixed_rows_linear(x, _weight(module), module.bias, counts)  # type: ignore[arg-type]


def _weight(module: nn.Module) -> Tensor:
    """[N, K]; Conv1D keeps its weight the other way round."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.t() if isinstance(module, Conv1D) else weight


def replace_layers(model: nn.Module, keep_weights: bool, is_fast: bool = False, in_place: bool = False) -> dict[str, int]:
    """Patch every linear layer, router and stack of experts; returns how many modules of each class now run our operations.

    The output layer gives float32. `keep_weights`: the model belongs to a caller. `is_fast` as in `PackedWeight`. `in_place`: a weight that
    is given up may be packed into its own memory.
    """
    replaced: dict[str, int] = {}
    is_served = devices.has_kernels(next(model.parameters(), torch.empty(0)))
    served = _serve_packed(model, keep_weights, is_fast, in_place) if is_served else _serve_fixed(model)
    for module in served:
        name = type(module).__name__
        replaced[name] = replaced.get(name, 0) + 1
    return replaced


def _serve_fixed(model: nn.Module) -> list[nn.Module]:
    """The fallback: framework matmuls in calls of fixed shape."""
    by_shape: dict[tuple[object, ...], ops.RowCounts] = {}
    served = [m for m in model.modules() if isinstance(m, LINEAR)]
    for module in served:
        shape = (type(module), *_weight(module).shape, module.bias is not None)
        module.forward = functools.partial(_fixed, module, by_shape.setdefault(shape, ops.RowCounts()))  # type: ignore[method-assign]
    return served


def _serve_packed(model: nn.Module, keep_weights: bool, is_fast: bool, in_place: bool) -> list[nn.Module]:
    output = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None  # a head has none
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(module)
    packed: dict[int, PackedWeight] = {}  # by the parameter's identity
    alone = _alone_in_memory(model) if in_place and not keep_weights else frozenset[int]()
    served: list[nn.Module] = []
    for module in model.modules():
        if is_experts(module):
            serve_experts(module, None if keep_weights else absent, is_fast)
        elif isinstance(module, LINEAR) or _is_router(module):
            if not isinstance(module.weight, PackedParameter) and id(module.weight) not in packed:
                may_overwrite = id(module.weight) in alone and all(isinstance(m, GIVEN_UP) for m in holders[id(module.weight)])
                packed[id(module.weight)] = PackedWeight.pack(_weight(module).detach(), is_fast, may_overwrite)
            _serve_weight(module, packed, holders, keep_weights, module is output)
        else:
            continue
        served.append(module)
    return served


def _alone_in_memory(model: nn.Module) -> frozenset[int]:
    """Identities of the parameters whose memory holds nothing else of the model."""
    tensors = list(model.parameters()) + list(model.buffers())
    shares = Counter(t.untyped_storage().data_ptr() for t in tensors)
    return frozenset(
        id(t)
        for t in tensors
        if shares[t.untyped_storage().data_ptr()] == 1 and t.untyped_storage().nbytes() == t.numel() * t.element_size()
    )


def _serve_weight(
    module: nn.Module,
    packed: dict[int, PackedWeight],
    holders: dict[int, list[nn.Module]],
    keep_weights: bool,
    is_output: bool,
) -> None:
    """Serve the module from its packed weight."""
    parameter: nn.Parameter = module.weight  # type: ignore[assignment]
    weight = parameter.packed if isinstance(parameter, PackedParameter) else packed[id(parameter)]  # given up by a module before this one
    if not isinstance(module, LINEAR):  # a router
        module.weight = PackedParameter.of(weight, parameter)
        return
    bias: Tensor | None = module.bias
    own = None if bias is None else bias.detach() if weight.is_fast else bias.detach().float()
    module.forward = functools.partial(_linear, weight, own, is_output)  # type: ignore[method-assign]
    if not keep_weights and not isinstance(parameter, PackedParameter):
        _give_up(module, parameter, PackedParameter.of(weight, None), holders[id(parameter)])


def _give_up(module: nn.Module, parameter: nn.Parameter, stand_in: nn.Parameter, sharing: list[nn.Module]) -> None:
    """Free the parameter, where everything that shares it can read the packed weight instead."""
    if isinstance(module, Conv1D):
        module.weight = nn.Parameter(absent(tuple(parameter.shape), parameter), requires_grad=False)
    elif all(isinstance(m, GIVEN_UP) for m in sharing):
        for other in sharing:
            other.weight = stand_in


def _is_router(module: nn.Module) -> bool:
    """Its one matrix is its weight, and its forward uses that in F.linear alone."""
    matrices = [name for name, p in module.named_parameters(recurse=False) if p.ndim >= 2]
    if matrices != ["weight"] or isinstance(module, (*LINEAR, nn.Embedding)):
        return False
    source = inspect.getsource(type(module).forward)
    return len(ROUTES.findall(source)) == 1 and source.count("self.weight") == 1


def restore_layers(model: nn.Module) -> None:
    """Undo `replace_layers` with `keep_weights`."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), functools.partial):
            del module.forward
        weight: Any = module._parameters.get("weight")
        if isinstance(weight, PackedParameter) and weight.original is not None:
            module.weight = weight.original


def framework_layers(model: nn.Module) -> list[str]:
    """Classes that hold matrices of their own and still run the framework's code, whose rounding may depend on the batch."""
    names = {
        type(module).__name__
        for module in model.modules()
        if not isinstance(module, (*LINEAR, nn.Embedding))
        and not isinstance(vars(module).get("forward"), functools.partial)
        and any(p.ndim >= 2 and not isinstance(p, PackedParameter) for p in module.parameters(recurse=False))
    }
    return sorted(names)
