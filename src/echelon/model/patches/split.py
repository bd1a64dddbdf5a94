"""A rank's share of a model: linear layers are cut by output columns, and activations are gathered where a layer reads all of them.

Every entry of a linear layer is a sum over all of K on one rank, in the order of the kernels; no sum crosses ranks, so that the bits are
those of one rank. Queries, keys and values are cut by heads, what lies between the projections of an MLP by columns. The projections back
to hidden states gather their input, give some columns of the output, and gather these. The output layer's columns go to rank 0 alone.
Embeddings, norms and routers are whole on every rank.

Outside a pass of all ranks (`Exchange.is_connected`), as when a model is tried or looked at, what the other ranks would give is zero.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from echelon.checkpoint.facts import num_heads_of
from echelon.errors import ConfigError, UnsupportedModelError
from echelon.model.attention import Ranks
from echelon.model.patches import PatchedForward
from echelon.model.patches.architectures import BACK, COLUMNS, architecture_of
from echelon.model.patches.experts import Experts, is_experts
from echelon.model.patches.linear import linear_parts
from echelon.model.patches.weights import absent
from echelon.ops import cpu, devices
from echelon.ops.contract import PackedWeight

WHOLE = ("replicated", "moe_tp_experts")  # beginnings of what needs nothing here


class Part(NamedTuple):
    """Columns first … last − 1 of `whole`."""

    first: int
    last: int
    whole: int


Parts = tuple[Part, ...]  # of all ranks, by their numbers


class Exchange(Protocol):
    """The way from rank to rank. What it returns is overwritten by the gather after the next, and belongs to nobody."""

    rank: int
    size: int

    @property
    def inside(self) -> Ranks | None:
        """The same for layers that run in one call of the kernels, which gather by themselves; None: they cannot."""

    @property
    def is_connected(self) -> bool:
        """Whether all ranks run the same pass now."""

    def gathered(self, own: Tensor, parts: Parts) -> Tensor:
        """This rank's columns [..., n] → [..., whole], those of all ranks."""

    def gathered_by_first(self, own: Tensor, parts: Parts) -> Tensor:
        """The same on rank 0; others need not wait, and what they get [..., whole] may be anything."""


@dataclass(frozen=True)
class Share:
    """What one of several ranks has of a model, and its way to the others."""

    exchange: Exchange

    @property
    def rank(self) -> int:
        """Its number; rank 0 is the engine's."""
        return self.exchange.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.exchange.size


def part_of(columns: int, rank: int, size: int, unit: int = 1) -> Part:
    """A rank's columns, in whole tiles of the kernels where every rank gets one, else in multiples of `unit`."""
    unit = cpu.TILE if columns >= cpu.TILE * size else unit
    units = -(-columns // unit)
    first, last = (min(columns, unit * (units * r // size)) for r in (rank, rank + 1))
    return Part(first, last, columns)


def parts_of(columns: int, size: int, unit: int = 1) -> Parts:
    """`part_of` every rank."""
    return tuple(part_of(columns, rank, size, unit) for rank in range(size))


def heads_of(columns: int, num_heads: int, rank: int, size: int) -> Part:
    """A rank's columns of projections to `num_heads` heads; of fewer heads than ranks, several ranks have the same."""
    width = columns // num_heads
    first = rank * num_heads // size
    return Part(width * first, width * (first + max(1, num_heads // size)), columns)


def fitting_ranks(num_heads: int, num_kv_heads: int) -> list[int]:
    """Numbers of ranks that the heads can be shared out among, rising."""
    return [n for n in range(1, num_heads + 1) if num_heads % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0)]


def check_split(config: Any, name: str, size: int) -> None:
    """Refuse a number of ranks that does not divide the heads of a model.

    Raises
    ------
    ConfigError  with the numbers that do
    """
    heads, kv_heads = num_heads_of(config)
    fitting = fitting_ranks(heads, kv_heads)
    if size not in fitting:
        raise ConfigError(
            f"tensor_parallel_size = {size} does not divide the {heads} attention heads of {name!r} and their {kv_heads} of keys and "
            f"values; choose {', '.join(map(str, fitting))}"
        )


def plan_of(cls: type[PreTrainedModel], config: Any) -> dict[str, str]:
    """Names of modules and stacks below the base model, with "*" for the number of a layer, and how each is cut.

    Raises
    ------
    UnsupportedModelError  there is no plan for models of this class
    """
    plan = dict(architecture_of(cls, "tensor_parallel_size").plan or config.get_text_config().base_model_tp_plan)
    kinds = (COLUMNS, BACK, f"packed_{COLUMNS}")
    if strange := sorted(kind for kind in set(plan.values()) if kind not in kinds and not kind.startswith(WHOLE)):
        raise UnsupportedModelError(
            f"the plan of {cls.__name__} for several ranks has {', '.join(strange)}, which no rank serves; leave it out"
        )
    return plan


@dataclass(frozen=True)
class Cutter:
    """Which columns of a model's linear layers a rank has; layers are named by their path below the base model."""

    plan: dict[str, str]
    num_heads: int
    num_kv_heads: int
    rank: int
    size: int

    @classmethod
    def of(cls, model: type[PreTrainedModel], config: Any, share: Share) -> Cutter:
        """For a class of models and its configuration; as `plan_of`."""
        return cls(plan_of(model, config), *num_heads_of(config), share.rank, share.size)

    def everyone(self) -> list[Cutter]:
        """Those of all ranks, by their numbers."""
        return [replace(self, rank=rank) for rank in range(self.size)]

    def kind(self, name: str) -> str | None:
        """How the plan cuts a layer."""
        return self.plan.get(re.sub(r"\.\d+\.", ".*.", name))

    def columns(self, name: str, count: int) -> Part | None:
        """The rank's part of the `count` columns of a layer's output; None: all."""
        kind = self.kind(name)
        if kind not in (COLUMNS, BACK):
            return None
        if kind == COLUMNS and _is_attention(name):
            heads = self.num_heads if name.endswith("q_proj") else self.num_kv_heads
            return heads_of(count, heads, self.rank, self.size)
        return part_of(count, self.rank, self.size)

    def inner(self, name: str, depth: int) -> Part:
        """The rank's part of what goes into a projection back to hidden states, `depth` numbers."""
        return heads_of(depth, self.num_heads, self.rank, self.size) if _is_attention(name) else part_of(depth, self.rank, self.size)


def _is_attention(name: str) -> bool:
    return ".self_attn." in name


class Cuts(NamedTuple):
    """Of a model that has been cut: what goes into its projections back to hidden states, and which columns of the output each rank has."""

    linear: dict[nn.Module, tuple[Parts, Parts]]
    experts: dict[nn.Module, tuple[Parts, Parts]]


@torch.no_grad()
def cut_model(model: PreTrainedModel, share: Share) -> Cuts:
    """Leave a rank's columns of every weight that the plan names, in memory of their own."""
    cutter, cuts = Cutter.of(type(model), model.config, share), Cuts({}, {})
    module: Any
    for name, module in model.base_model.named_modules():
        if is_experts(module):
            cuts.experts[module] = _cut_experts(module, share.rank, share.size)
        elif isinstance(module, nn.Linear) and (part := cutter.columns(name, len(module.weight))) is not None:
            if cutter.kind(name) == BACK:
                count, depth = module.weight.shape
                cuts.linear[module] = tuple(one.inner(name, depth) for one in cutter.everyone()), parts_of(count, share.size)
            _cut(module, part)
        elif name.endswith(".self_attn") and getattr(module, "num_heads", None) == cutter.num_heads:
            module.num_heads = cutter.num_heads // share.size
    return cuts


def _cut(module: Any, part: Part) -> None:
    """Of a linear layer [N, K]."""
    for name in ("weight", "bias"):
        whole = module._parameters.get(name)
        if whole is not None:
            module._parameters[name] = nn.Parameter(whole[part.first : part.last].clone(), requires_grad=False)
    module.out_features = part.last - part.first


def _cut_experts(module: Any, rank: int, size: int) -> tuple[Parts, Parts]:
    """Of stacks [E, 2 I, K], whose gate stands before what it gates, and [E, K, I]."""
    joint, back = module.gate_up_proj, module.down_proj
    inner, outer = parts_of(joint.shape[1] // 2, size), parts_of(back.shape[1], size)
    halves = [half[:, inner[rank].first : inner[rank].last] for half in joint.chunk(2, 1)]
    module._parameters["gate_up_proj"] = nn.Parameter(torch.cat(halves, 1), requires_grad=False)
    module._parameters["down_proj"] = nn.Parameter(back[:, outer[rank].first : outer[rank].last].clone(), requires_grad=False)
    return inner, outer


def connect(model: PreTrainedModel, cuts: Cuts, share: Share) -> None:
    """Let layers that have been cut, and are served by the kernels, gather what they need and what they give."""
    exchange = share.exchange
    for module, (inner, outer) in cuts.linear.items():
        packed, bias, _ = linear_parts(module.forward)
        module.forward = PatchedForward(_back, packed, bias, exchange, inner, outer)
    for module, (inner, outer) in cuts.experts.items():
        forward: Any = module.forward
        module.forward = PatchedForward(_through_experts, forward.args[0], exchange, inner, outer)
    _connect_output(model, exchange)


def _connect_output(model: PreTrainedModel, exchange: Exchange) -> None:
    """Rank 0 keeps the whole output layer, which heads that draft read too; others what is theirs, unless an embedding shares it."""
    output: Any = model.get_output_embeddings()
    whole, bias, _ = linear_parts(output.forward)
    parts = parts_of(whole.columns, exchange.size, cpu.TILE)
    part = parts[exchange.rank]
    own = cpu.columns_of(whole, part.first, part.last)
    if exchange.rank and output.weight is not model.get_input_embeddings().weight:
        own = replace(own, data=own.data.clone())
        whole, output.weight = own, nn.Parameter(absent(tuple(output.weight.shape), own.data, own.dtype), requires_grad=False)
    output.forward = PatchedForward(_output, whole, own, bias, exchange, parts)


class BackProjection(NamedTuple):
    """A projection back to hidden states that has been cut: this rank's columns, of the input and of the output."""

    weight: PackedWeight
    bias: Tensor | None
    ranks: Ranks
    inner: Part
    outer: Part


def back_projection_of(forward: Any) -> BackProjection | None:
    """What a linear layer is that `connect` has connected; None too where the kernels cannot gather what it needs."""
    if not isinstance(forward, PatchedForward) or forward.func is not _back:
        return None
    packed, bias, exchange, inner, outer = forward.args
    ranks = exchange.inside
    return None if ranks is None else BackProjection(packed, bias, ranks, inner[exchange.rank], outer[exchange.rank])


def _back(packed: PackedWeight, bias: Tensor | None, exchange: Exchange, inner: Parts, outer: Parts, x: Tensor) -> Tensor:
    """This rank's part of x [..., K] → [..., N], from all of x. The models served add it to the residual before they gather again."""
    out = devices.backend_of(x).packed_linear(_gathered(exchange, x, inner), packed, bias)
    return _gathered(exchange, out, outer)


def _output(whole: PackedWeight, own: PackedWeight, bias: Tensor | None, exchange: Exchange, parts: Parts, x: Tensor) -> Tensor:
    """Logits float32 [..., V] of x [..., K], on rank 0."""
    backend, part = devices.backend_of(x), parts[exchange.rank]
    if not exchange.is_connected and whole.columns == part.whole:
        return backend.packed_linear(x, whole, bias, float32=True)
    given = None if bias is None else bias[part.first : part.last].contiguous()
    is_empty = part.first == part.last
    out = x.new_empty(*x.shape[:-1], 0, dtype=torch.float32) if is_empty else backend.packed_linear(x, own, given, float32=True)
    if not exchange.is_connected:
        return _beside_zeros(out, part)
    gathered = exchange.gathered_by_first(out, parts)
    return gathered if exchange.rank else gathered.clone()  # nobody reads those of other ranks


def _through_experts(
    experts: Experts, exchange: Exchange, inner: Parts, outer: Parts, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run hidden [T, K] through each token's experts, of index and weight [T, k] → [T, K], as `_back`."""
    return _gathered(exchange, experts.run(hidden, top_k_index, top_k_weights, lambda x: _gathered(exchange, x, inner)), outer)


def _gathered(exchange: Exchange, x: Tensor, parts: Parts) -> Tensor:
    return exchange.gathered(x, parts) if exchange.is_connected else _beside_zeros(x, parts[exchange.rank])


def _beside_zeros(x: Tensor, part: Part) -> Tensor:
    whole = x.new_zeros(*x.shape[:-1], part.whole)
    whole[..., part.first : part.last] = x
    return whole
