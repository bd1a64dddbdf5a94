"""Layers of a loaded model that run our operations. `forward` is replaced on the existing modules, so hooks survive.

With kernels of ours (`devices.has_kernels`) a weight is packed once. A model of ours keeps the packed weight alone: what other modules
share with a linear layer (tied embeddings) reads the packed one, and in its place stands a NaN of the same shape without memory. A caller's
model keeps its own weights beside the packed ones.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from echelon import ops
from echelon.errors import Refusal, UnsupportedModelError
from echelon.model.patches import PatchedForward
from echelon.model.patches.experts import Experts, is_experts, patch_experts
from echelon.model.patches.packing import Packing
from echelon.model.patches.rotary_tables import tables_of
from echelon.model.patches.weights import SERVED_DTYPES, PackedParameter, absent
from echelon.ops import devices
from echelon.ops.contract import PackedWeight

LINEAR = (nn.Linear, Conv1D)
GIVEN_UP = (nn.Linear, nn.Embedding)  # they read the packed weight in place of their own
FORWARDS = {nn.Linear.forward, Conv1D.forward}
ROUTERS = re.compile(r"Router|TopKGating$|MoE\w*Gate$")  # classes whose linear layers choose experts
STACKED = re.compile(r"F\.linear\(\w+\[\w+\], self\.weight\[\w+\]\)")  # how experts outside `echelon.model.patches.experts` use theirs
TRIED = (1, 2, 3, 5, 8, 13, 16, 17, 32, 33, 63, 64)  # rows of calls that must give each row the same bits


def _linear(packed: PackedWeight, bias: Tensor | None, float32: bool, x: Tensor) -> Tensor:
    """x [..., K] → [..., N]."""
    return devices.backend_of(x).packed_linear(x, packed, bias, float32=float32)


def _looked_up(packed: PackedWeight, ids: Tensor) -> Tensor:
    """int [...] → [..., K]."""
    return devices.backend_of(ids).packed_rows(packed, ids)


def _fixed(module: nn.Module, counts: ops.RowCounts, x: Tensor) -> Tensor:
    return ops.fixed_rows_linear(x, _weight(module), module.bias, counts)  # type: ignore[arg-type]


def _weight(module: nn.Module) -> Tensor:
    return weight_of(module, module.weight)  # type: ignore[arg-type]


def weight_of(module: nn.Module, parameter: Tensor) -> Tensor:
    """The weight of a linear layer as [N, K]; Conv1D keeps it the other way round."""
    return parameter.t() if isinstance(module, Conv1D) else parameter


def patch_linear(model: nn.Module, keep_weights: bool, packing: Packing, in_place: bool = False) -> dict[str, int]:
    """Patch every linear layer, router and stack of experts; returns how many modules of each class now run our operations.

    The output layer gives float32, and has 8 bits where the packing has fewer. `keep_weights`: the model belongs to a caller. `in_place`: a
    weight that is given up may be packed into its own memory. What is shared with an embedding, routers, and what modules other than linear
    layers and experts hold, is never rounded.
    """
    replaced: dict[str, int] = {}
    is_served = devices.has_kernels(next(model.parameters(), torch.empty(0)))
    served = _serve_packed(model, keep_weights, packing, in_place) if is_served else _serve_fixed(model)
    for module in served:
        name = type(module).__name__
        replaced[name] = replaced.get(name, 0) + 1
    return replaced


def _serve_fixed(model: nn.Module) -> list[nn.Module]:
    """The fallback: framework matmuls in calls of fixed shape."""
    by_shape: dict[tuple[object, ...], ops.RowCounts] = {}
    served = [m for m in model.modules() if is_plain_linear(m)]
    for module in model.modules():
        if isinstance(module, LINEAR) and not is_plain_linear(module):
            _check_rows(module)
    for module in served:
        shape = (type(module), *_weight(module).shape, module.bias is not None)
        module.forward = PatchedForward(_fixed, module, by_shape.setdefault(shape, ops.RowCounts()))
    return served


def _serve_packed(model: nn.Module, keep_weights: bool, packing: Packing, in_place: bool) -> list[nn.Module]:
    output = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None  # a head has none
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(module)
    packed: dict[int, PackedWeight] = {}  # by the parameter's identity
    alone = _alone_in_memory(model) if in_place and not keep_weights else frozenset[int]()
    routers = routers_of(model)
    served: list[nn.Module] = []
    for module in model.modules():
        if is_experts(module):
            patch_experts(module, None if keep_weights else absent, packing)
        elif is_plain_linear(module):
            if not isinstance(module.weight, PackedParameter) and id(module.weight) not in packed:
                sharing = holders[id(module.weight)]
                may_overwrite = id(module.weight) in alone and all(isinstance(m, GIVEN_UP) for m in sharing)
                own = replace(packing, bits=bits_for(packing.bits, sharing, output, routers))
                packed[id(module.weight)] = own.pack(_weight(module).detach(), may_overwrite)
            _serve_weight(module, packed, holders, keep_weights, module is output)
        elif not _serve_own_forward(module, keep_weights, packing):
            continue
        served.append(module)
    return served


def bits_for(bits: int, sharing: list[nn.Module], output: nn.Module | None, routers: frozenset[nn.Linear]) -> int:
    """In how many bits a weight is kept that these modules share, where weights of linear layers are kept in `bits`; 0: as it is."""
    if not all(isinstance(m, LINEAR) and m not in routers for m in sharing):
        return 0
    return 8 if bits and any(m is output for m in sharing) else bits


def routers_of(model: nn.Module) -> frozenset[nn.Linear]:
    """Linear layers that choose experts; rounded ones would choose others."""
    routers = (module for module in model.modules() if ROUTERS.search(type(module).__name__))
    return frozenset(child for router in routers for child in router.children() if isinstance(child, nn.Linear) and is_plain_linear(child))


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
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    own = None if bias is None else bias.detach() if weight.is_fast else bias.detach().float()
    module.forward = PatchedForward(_linear, weight, own, is_output)
    if not keep_weights and not isinstance(parameter, PackedParameter):
        _give_up(module, parameter, PackedParameter.of(weight, None), holders[id(parameter)])


def _give_up(module: nn.Module, parameter: nn.Parameter, stand_in: nn.Parameter, sharing: list[nn.Module]) -> None:
    """Free the parameter, where everything that shares it can read the packed weight instead."""
    if isinstance(module, Conv1D):
        module.weight = nn.Parameter(absent(tuple(parameter.shape), parameter), requires_grad=False)
    elif all(isinstance(m, GIVEN_UP) for m in sharing):
        for other in sharing:
            other.weight = stand_in
            if type(other) is nn.Embedding and "forward" not in vars(other):
                other.forward = PatchedForward(_looked_up, stand_in.packed)  # type: ignore[attr-defined, method-assign]


def linear_parts(forward: Any) -> tuple[PackedWeight, Tensor | None, bool]:
    """Packed weight [N, K], float32 bias [N] and whether it gives float32, of a linear layer that `patch_linear` serves."""
    assert isinstance(forward, PatchedForward) and forward.func is _linear, forward
    packed, bias, is_float32 = forward.args
    return packed, bias, is_float32


def projection_of(forward: Any) -> tuple[PackedWeight, Tensor | None] | None:
    """Packed weight [N, K] and float32 bias [N] of a linear layer that `patch_linear` serves, in the dtype of its weight."""
    if not isinstance(forward, PatchedForward) or forward.func is not _linear:
        return None
    packed, bias, is_float32 = linear_parts(forward)
    return None if is_float32 else (packed, bias)


def packed_weights(model: nn.Module) -> list[PackedWeight]:
    """Return every packed weight of a patched model, once."""
    found: dict[int, PackedWeight] = {}
    for module in model.modules():
        forward = vars(module).get("forward")
        parts = forward.args if isinstance(forward, PatchedForward) else ()
        held = [
            w for part in parts for w in ([part] if isinstance(part, PackedWeight) else part.weights if isinstance(part, Experts) else [])
        ]
        own = [w for p in module.parameters(recurse=False) if isinstance(p, PackedParameter) for w in p.all_packed]
        found |= {w.data.data_ptr(): w for w in held + own}
    return list(found.values())


def weight_bytes(model: nn.Module) -> int:
    """Bytes that a patched model's weights take in memory, packed ones and tables included."""
    tensors = [*model.parameters(), *model.buffers(), *(w.data for w in packed_weights(model)), *tables_of(model)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def is_plain_linear(module: nn.Module) -> bool:
    """A linear layer, and not a subclass that computes something else."""
    return isinstance(module, LINEAR) and type(module).forward in FORWARDS and isinstance(module._parameters.get("weight"), nn.Parameter)


def _serve_own_forward(module: nn.Module, keep_weights: bool, packing: Packing) -> bool:
    """Let a module with matrices of its own run its own forward, with our kernels where that multiplies by them; false if it has none."""
    if isinstance(module, nn.Embedding):
        return False
    own = {n: p for n, p in module._parameters.items() if p is not None and p.ndim >= 2 and p.dtype in SERVED_DTYPES}
    for name, parameter in own.items():
        if isinstance(parameter, PackedParameter):
            continue
        if parameter.ndim == 2:
            module._parameters[name] = PackedParameter.lazy(parameter, packing.is_fast)
        elif is_indexed_stack(module, name, parameter):
            module._parameters[name] = PackedParameter.stack(parameter, keep_weights, packing)
    if isinstance(module, LINEAR):
        _check_rows(module)
    return bool(own)


def is_indexed_stack(module: nn.Module, name: str, parameter: Tensor) -> bool:
    """A stack of weights [E, N, K] whose one use is in a linear layer, expert by expert."""
    if parameter.ndim != 3 or name != "weight":
        return False
    source = inspect.getsource(type(module).forward)
    return len(STACKED.findall(source)) == 1 and source.count("self.weight") == 1


@torch.inference_mode()
def _check_rows(module: nn.Module) -> None:
    """Raise `UnsupportedModelError` unless a subclass of a linear layer gives a row the same bits whatever the number of rows."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    size = weight.shape[0] if isinstance(module, Conv1D) else int(getattr(module, "in_features", weight.shape[-1]))
    x = torch.randn(max(TRIED), size, generator=torch.Generator().manual_seed(0)).to(weight.device, _dtype_of(module))
    name = type(module).__name__
    try:
        whole = _tensors(module(x))
        alike = all(torch.equal(a[:n], b) for n in TRIED for a, b in zip(whole, _tensors(module(x[:n])), strict=True))
    except Exception as error:  # a layer of somebody else's: whatever it raises
        raise UnsupportedModelError.because(
            name, Refusal.INPUTS, f"a linear layer with a forward of its own, which failed: {error}"
        ) from error
    if not alike:
        raise UnsupportedModelError.because(name, Refusal.ROUNDING, "a linear layer with a forward of its own; convert it to nn.Linear")


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.dtype in SERVED_DTYPES), torch.float32)


def _tensors(out: Any) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else tuple(out)


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
