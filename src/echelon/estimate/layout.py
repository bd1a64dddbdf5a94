"""Which numbers of a model each of several devices holds: layers split among stages, and each stage among tensor ranks.

Tensor ranks have the columns that `model.patches.split` gives them, and gather where it gathers. Stages have consecutive layers; the first
one, which is the engine's, has embeddings, the last norm and the output layer too, and gets the hidden states of the last stage back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import nn

from echelon.errors import ConfigError
from echelon.estimate.devices import Device, Work
from echelon.estimate.roofline import ModelShape
from echelon.estimate.shapes import PaperModel
from echelon.kv.cache import LayerShape
from echelon.memory.footprint import attention_shapes
from echelon.memory.plan import LOGIT_BYTES
from echelon.model.patches.architectures import BACK
from echelon.model.patches.experts import STACKED, is_experts
from echelon.model.patches.linear import LINEAR
from echelon.model.patches.split import Cutter, Part, check_split, part_of, plan_of
from echelon.model.patches.stages import layers_of_stage
from echelon.ops import cpu

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


class Pass(NamedTuple):
    """A pass over `rows` rows with `tokens` new tokens each, on average, after `context` others."""

    rows: int
    tokens: float
    context: int

    @property
    def num_tokens(self) -> float:
        """Of all rows."""
        return self.rows * self.tokens


class Gather(NamedTuple):
    """Numbers of each token that ranks bring together, the rank's own among them; `for_first`: only rank 0 waits for them."""

    columns: int
    own: int
    bytes_each: int
    for_first: bool = False

    def received(self, rank: int) -> int:
        """Bytes of each token that a rank gets from others."""
        return 0 if self.for_first and rank else (self.columns - self.own) * self.bytes_each


@dataclass(frozen=True)
class Held:
    """What a device has of a layer, or of several.

    numbers     entries of all parameters
    matrices    of these, entries of linear layers, by which every token is multiplied
    features    numbers that go into and out of these, a token
    experts     entries of stacks of experts, of which a token goes through the part `chosen`
    query_size  query heads × (size of a key + size of a value)
    kv_bytes    bytes of a token's keys and values as they are kept
    spared      bytes that matrices take less in integers; `spared_experts`: likewise
    layers      number of layers
    """

    numbers: int = 0
    matrices: int = 0
    features: int = 0
    experts: int = 0
    chosen: float = 0.0
    query_size: int = 0
    kv_bytes: int = 0
    spared: float = 0.0
    spared_experts: float = 0.0
    layers: int = 0
    gathers: tuple[Gather, ...] = ()

    def __add__(self, other: Held) -> Held:
        counts = {name: getattr(self, name) + getattr(other, name) for name in Held.__dataclass_fields__ if name != "chosen"}
        return Held(**counts, chosen=max(self.chosen, other.chosen))

    def seconds(self, device: Device, dtype: str, bytes_each: int, run: Pass, rank: int = 0) -> dict[str, float]:
        """What a pass takes on the device, by its parts, each bound by operations or bytes."""
        tokens, multiplied = run.num_tokens, device.multiplied_in(dtype, bool(self.spared or self.spared_experts))
        linear = ModelShape(self.matrices, self.features, 0, 0, bytes_each)
        attention = ModelShape(0, 0, self.query_size, 0, bytes_each)
        touched = 1.0 - (1.0 - self.chosen) ** tokens
        works = {
            "linear layers": Work(linear.flops(run.rows, run.tokens, 0), linear.bytes(run.rows, run.tokens, 0) - self.spared),
            "experts": Work(2.0 * tokens * self.experts * self.chosen, (bytes_each * self.experts - self.spared_experts) * touched),
            "attention": Work(
                attention.flops(run.rows, run.tokens, run.context), run.rows * (run.context + run.tokens) * float(self.kv_bytes)
            ),
        }
        found = {name: device.seconds(work, dtype if name == "attention" else multiplied) for name, work in works.items() if work.flops}
        if self.layers * device.layer_us:
            found["between kernels"] = self.layers * device.layer_us * 1e-6
        if self.gathers:
            found["gathers"] = sum(device.seconds_to_send(tokens * gather.received(rank)) for gather in self.gathers)
        return found


@dataclass(frozen=True)
class ModelParts:
    """A rank's part of a model: what comes before its layers, each of these, what comes after, and bytes of each number."""

    before: Held
    layers: tuple[Held, ...]
    after: Held


def model_parts(planned: PaperModel, size: int = 1, is_rounded: bool = False) -> list[ModelParts]:
    """What each of `size` tensor ranks has of a model.

    Raises
    ------
    ConfigError            the number of ranks does not divide its heads
    UnsupportedModelError  nobody has said how models of this kind are split
    """
    model = planned.model
    shapes, num_heads = attention_shapes(model)
    attention = [_attention(shape, num_heads, size, planned.dtype, is_rounded) for shape in shapes]
    if size == 1:
        return [_parts(planned, attention, None)]
    check_split(model.config, type(model).__name__, size)
    plan = plan_of(type(model), model.config)
    return [_parts(planned, attention, Cutter(plan, num_heads, shapes[0].num_kv_heads, rank, size)) for rank in range(size)]


def _parts(planned: PaperModel, attention: list[Held], cutter: Cutter | None) -> ModelParts:
    before, after, layers = Held(), Held(), list(attention)
    of_text = set(map(id, planned.model.get_decoder().modules()))
    for name, module in planned.model.base_model.named_modules():
        found = reduce(Held.__add__, _held(name, module, cutter, planned), Held())
        layer = _LAYER.search(name)
        if id(module) not in of_text:  # what sees pictures is held, and no token goes through it
            before += Held(numbers=found.numbers)
        elif layer is not None:
            layers[int(layer[1])] += found
        elif isinstance(module, nn.Embedding):
            before += found
        else:
            after += found
    rank, size = (cutter.rank, cutter.size) if cutter is not None else (0, 1)
    return ModelParts(before, tuple(layers), after + _output(planned, rank, size))


def _attention(shape: LayerShape, num_heads: int, size: int, dtype: torch.dtype, is_rounded: bool) -> Held:
    """Keys and values of a layer on one of `size` ranks; of fewer heads than ranks, several ranks have the same."""
    own = LayerShape(max(1, shape.num_kv_heads // size), shape.key_size, shape.value_size)
    width = own.key_size + own.value_size
    return Held(
        query_size=num_heads // size * width,
        kv_bytes=own.bytes_per_token(dtype, is_rounded),
        layers=1,
    )


def _held(name: str, module: Any, cutter: Cutter | None, planned: PaperModel) -> Iterator[Held]:
    """The parameters of one module."""
    if is_experts(module):
        yield from _experts(module, cutter, planned)
    elif isinstance(module, LINEAR):
        columns, depth = module.weight.shape if isinstance(module, nn.Linear) else reversed(module.weight.shape)
        part = cutter.columns(name, columns) if cutter is not None else None
        own = columns if part is None else part.last - part.first
        bias = 0 if module.bias is None else own
        yield Held(own * depth + bias, own * depth, own + depth, spared=planned.spared(depth, own * depth))
        if cutter is not None and part is not None and cutter.kind(name) == BACK:
            for gathered in (cutter.inner(name, depth), part):
                yield Held(gathers=(_gather(gathered, planned.dtype.itemsize),))
    else:
        yield Held(numbers=sum(p.numel() for p in module.parameters(recurse=False)))


def _experts(module: Any, cutter: Cutter | None, planned: PaperModel) -> Iterator[Held]:
    """Stacks [E, 2 I, K] and [E, K, I]; others are whole on every rank, as no others are split."""
    config = planned.model.config.get_text_config()
    stacks = [p for name, p in module.named_parameters(recurse=False) if name in STACKED]
    count, used = stacks[0].shape[0], int(getattr(config, "num_experts_per_tok", None) or 1)
    numbers, depth = sum(p.numel() for p in module.parameters(recurse=False)), module.gate_up_proj.shape[2]
    if cutter is None:
        own = sum(p.numel() for p in stacks)
        yield Held(numbers=numbers, experts=own, chosen=used / count, spared_experts=planned.spared(depth, own))
        return
    inner = part_of(module.gate_up_proj.shape[1] // 2, cutter.rank, cutter.size)
    outer = part_of(module.down_proj.shape[1], cutter.rank, cutter.size)
    own = count * (2 * (inner.last - inner.first) * depth + (outer.last - outer.first) * inner.whole)
    yield Held(numbers=own, experts=own, chosen=used / count, spared_experts=planned.spared(depth, own))
    yield Held(gathers=(_gather(inner, planned.dtype.itemsize, used), _gather(outer, planned.dtype.itemsize)))


def _gather(part: Part, bytes_each: int, copies: int = 1, for_first: bool = False) -> Gather:
    return Gather(copies * part.whole, copies * (part.last - part.first), bytes_each, for_first)


def _output(planned: PaperModel, rank: int, size: int) -> Held:
    """The output layer: rank 0 keeps all of it, and each rank multiplies by its tiles. One that embeddings share takes no memory."""
    model: Any = planned.model
    output = model.get_output_embeddings()
    vocabulary, hidden = output.weight.shape
    part = part_of(vocabulary, rank, size, cpu.TILE)
    own = part.last - part.first
    held = vocabulary if rank == 0 else own
    is_shared = output.weight is model.get_input_embeddings().weight
    bias = 0 if getattr(output, "bias", None) is None else vocabulary
    gathers = (_gather(part, LOGIT_BYTES, for_first=True),) if size > 1 else ()
    spared = 0.0 if is_shared else planned.spared(hidden, own * hidden, is_output=True)
    return Held(0 if is_shared else held * hidden + bias, own * hidden, own + hidden, spared=spared, gathers=gathers)


@dataclass(frozen=True)
class StagePart:
    """What one device has: rank `rank` of stage `stage`. The first stage runs `output` once the last one is done."""

    stage: int
    rank: int
    held: Held
    output: Held = field(default_factory=Held)

    @property
    def numbers(self) -> int:
        """Entries of all its parameters."""
        return self.held.numbers + self.output.numbers

    def weight_bytes(self, bytes_each: int) -> int:
        """Bytes of all its parameters, of so many each where they are not kept in integers."""
        spared = sum(held.spared + held.spared_experts for held in (self.held, self.output))
        return round(self.numbers * bytes_each - spared)


def stage_layers(num_layers: int, stages: int) -> list[range]:
    """The layers of every stage, as evenly as they can be split.

    Raises
    ------
    ConfigError  there are more stages than layers
    """
    if not 1 <= stages <= num_layers:
        raise ConfigError(f"pipeline_parallel_size = {stages} is not between 1 and the model's {num_layers} layers; choose one of these")
    return [layers_of_stage(num_layers, stage, stages) for stage in range(stages)]


def split_among(planned: PaperModel, ranks: int, stages: int, is_rounded: bool = False) -> list[list[StagePart]]:
    """By stage, what each of its tensor ranks has; errors as of `model_parts` and `stage_layers`."""
    whole = model_parts(planned, ranks, is_rounded)
    found = []
    for stage, layers in enumerate(stage_layers(len(whole[0].layers), stages)):
        held = [reduce(Held.__add__, parts.layers[layers.start : layers.stop]) for parts in whole]
        if stage == 0:
            found.append([StagePart(0, r, p.before + h, p.after) for r, (p, h) in enumerate(zip(whole, held, strict=True))])
        else:
            found.append([StagePart(stage, r, h) for r, h in enumerate(held)])
    return found
