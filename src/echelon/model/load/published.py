"""Weights that a checkpoint publishes in integers, packed while they are read.

Layouts, each of a weight [N, K] with scales for every column, or for every group of G entries of its K:

compressed-tensors  int-quantized: weight int8 [N, K], weight_scale [N, 1] or [1]
                    pack-quantized: weight_packed int32 [N, K / 8], weight_scale [N, K / G], weight_zero_point int32 [N / 8, K / G]
GPTQ                qweight int32 [K / 8, N], scales [K / G, N], qzeros int32 [K / G, N / 8], one less than the zero, g_idx int32 [K]
AWQ                 qweight int32 [K, N / 8], scales [K / G, N], qzeros int32 [K / G, N / 8], columns of a word in the order 0 2 4 6 1 3 5 7

Words of 32 bits hold eight entries of 4 bits, the first in the lowest. Sources: compressed-tensors (`pack_quantized.py`), AutoGPTQ and
AutoAWQ (`pack` of their linear layers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from echelon.checkpoint.quantization import Scheme
from echelon.checkpoint.tensors import StoredTensor, Weights
from echelon.errors import ModelLoadError, UnsupportedModelError
from echelon.inputs import shown
from echelon.model.patches.weights import PackedParameter
from echelon.ops import cpu
from echelon.ops.contract import GROUPS, PackedWeight, QuantisedWeight

HALVES = (0, 1, 2, 3, 4, 5, 6, 7)


def kernel_group(size: int) -> int:
    """Entries that share a scale in the kernels, where `size` do in a checkpoint of 4 bits; what no group of theirs divides is refused when
    it is read.
    """
    return next((group for group in GROUPS if size % group == 0), GROUPS[-1])


class PublishedLayout(NamedTuple):
    """How a format has a weight [N, K]: names of its tensors after that of the layer, and how they lie."""

    values: str
    scales: str
    zeros: str | None
    order: str | None  # the group of every entry of K
    is_transposed: bool = False  # [K, N], and scales [G, N]
    is_along_k: bool = True  # what the entries of a word are neighbours along
    entries: tuple[int, ...] = HALVES  # where a word has its first entry, its second …
    least_zero: int = 0  # what a stored zero of 0 is

    @property
    def parts(self) -> dict[str, str]:
        """Names of the tensors by what they are."""
        named = {"values": self.values, "scales": self.scales, "zeros": self.zeros, "order": self.order}
        return {role: name for role, name in named.items() if name is not None}


LAYOUTS = {
    "int-quantized": PublishedLayout("weight", "weight_scale", None, None),
    "pack-quantized": PublishedLayout("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
    "gptq": PublishedLayout("qweight", "scales", "qzeros", "g_idx", is_transposed=True, least_zero=1),
    "gptq_v2": PublishedLayout("qweight", "scales", "qzeros", "g_idx", is_transposed=True),
    "awq": PublishedLayout("qweight", "scales", "qzeros", None, is_transposed=True, is_along_k=False, entries=(0, 4, 1, 5, 2, 6, 3, 7)),
}
UNREAD = "weight_shape"  # says what the shapes of the parts say


@dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """A weight that is packed while it is read; what the framework is given stands for it and takes no memory beside it."""

    pack: Callable[[torch.dtype], PackedWeight]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Tensor:  # noqa: ARG002
        """A parameter [N, K] that multiplies by the packed weight."""
        return PackedParameter.of(self.pack(dtype or self.dtype), None)


def with_published(weights: Weights, scheme: Scheme) -> Weights:
    """The tensors with one for each weight that is published in integers, in the place of its parts.

    Raises
    ------
    ModelLoadError  parts are missing, or fit neither each other nor the configuration
    """
    layout, left, made = LAYOUTS[scheme.layout], dict(weights.tensors), {}
    layers = [k.removesuffix(f".{layout.scales}") for k in left if k.endswith(f".{layout.scales}")]
    if not layers:
        raise ModelLoadError(
            f"config.json of {weights.folder.shown} says that it is quantised ({scheme.layout}), and no tensor is named .{layout.scales}; "
            "copy the checkpoint again"
        )
    for layer in layers:
        names = {role: f"{layer}.{name}" for role, name in layout.parts.items()}
        parts = {role: left.pop(name) for role, name in names.items() if name in left}
        left.pop(f"{layer}.{UNREAD}", None)
        if "values" not in parts:
            raise ModelLoadError(
                f"{parts['scales'].file} has {shown(names['scales'])} without {shown(names['values'])}; copy the checkpoint again"
            )
        for role in scheme.also_needs:
            if role not in parts:
                raise ModelLoadError(
                    f"{parts['scales'].file} has {shown(names['scales'])} without {shown(names[role])}, which its config.json says is "
                    "there; copy the checkpoint again"
                )
        made[f"{layer}.weight"] = PublishedWeight(scheme, layout, parts).tensor(f"{layer}.weight")
    return replace(weights, tensors=left | made)


def without_empty_biases(weights: Weights, model: nn.Module) -> Weights:
    """The tensors without the biases of zeros that GPTQ's writers give to every layer, where the model has none."""
    own = [f".{name}" for name, _ in model.named_parameters() if name.endswith("bias")]
    left = dict(weights.tensors)
    for name in [n for n in left if n.endswith(".bias") and not any(known.endswith(f".{n}") for known in own)]:
        if isinstance(left.get(name.removesuffix("bias") + "weight"), PackedTensor) and not left[name].to().any():
            del left[name]
    return replace(weights, tensors=left)


def check_published(model: nn.Module, name: str) -> None:
    """Raise UnsupportedModelError for weights that were not left as they were packed: changed beside others, or looked up by rows."""
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            is_packed = isinstance(parameter, PackedParameter)
            if is_packed and isinstance(module, nn.Embedding):
                raise UnsupportedModelError(f"{name} has an embedding in integers, which is not served; use the checkpoint in bfloat16")
            if not is_packed and parameter.is_floating_point() and bool(parameter.isnan().any()):
                raise UnsupportedModelError(
                    f"{name} has {key} of {type(module).__name__} in integers, which transformers puts together in a way that is not "
                    "served; use the checkpoint in bfloat16 with quantization="
                )


@dataclass(frozen=True)
class PublishedWeight:
    """One weight [N, K] of a layout, in its tensors by role."""

    scheme: Scheme
    layout: PublishedLayout
    parts: dict[str, StoredTensor]

    def tensor(self, name: str) -> PackedTensor:
        """A tensor that is packed while it is read.

        Raises
        ------
        ModelLoadError  shapes that fit neither each other nor the configuration
        """
        columns, depth = self._shape()
        self._check_shapes(columns, depth)
        place = vars(self.parts["values"]) | {"name": name, "shape": (columns, depth), "code": self.parts["scales"].code}
        return PackedTensor(**place, pack=partial(self.read_packed, columns, depth))

    def read_packed(self, columns: int, depth: int, dtype: torch.dtype) -> PackedWeight:
        """The weight in tiles, in the place of one of `dtype`.

        Raises
        ------
        ModelLoadError         a scale that is 0, or not finite
        UnsupportedModelError  entries that are not in the order of their groups
        """
        self._check_order(depth)
        scales = self.parts["scales"].read(torch.float32)
        if bool((scales == 0).any()):
            raise ModelLoadError(
                f"tensor {shown(self.parts['scales'].name)} of {self.parts['scales'].file} has a scale of 0; copy the checkpoint again"
            )
        scales = (
            scales.t() if self.layout.is_transposed else scales.expand(columns, -1) if scales.ndim == 2 else scales.expand(columns)[:, None]
        )
        zeros = self._zeros(columns)
        if self.scheme.bits == 4:  # groups as the kernels have them
            size = depth // scales.shape[1]
            repeats = size // kernel_group(size)
            scales = scales.repeat_interleave(repeats, 1)
            zeros = None if zeros is None else zeros.repeat_interleave(repeats, 1).contiguous()
        return cpu.pack_integers(QuantisedWeight(self._values(), scales.contiguous(), zeros, self.scheme.bits), dtype)

    def _shape(self) -> tuple[int, int]:
        """N and K by the entries that the words hold."""
        values = self.parts["values"]
        wanted = "I8" if self.scheme.bits == 8 else "I32"
        if len(values.shape) != 2 or values.code != wanted:
            raise self._misfit("values", f"{wanted} of two dimensions for {self.scheme.bits} bits")
        first, last = values.shape
        many = 1 if self.scheme.bits == 8 else len(HALVES)
        if not self.layout.is_transposed:
            return first, last * many
        return (last, first * many) if self.layout.is_along_k else (last * many, first)

    def _check_shapes(self, columns: int, depth: int) -> None:
        size = depth if self.scheme.group_size is None else self.scheme.group_size
        if size <= 0 or depth % size or (self.scheme.bits == 4 and size % GROUPS[-1]):
            raise ModelLoadError(
                f"groups of {size} in config.json do not divide the {depth} entries of a row of {shown(self.parts['values'].name)}, or are "
                f"no multiple of {GROUPS[-1]}; use a checkpoint in groups of 32, 64 or 128, or the one in bfloat16"
            )
        groups, words = depth // size, -(-columns // len(HALVES))
        expected: dict[str, list[tuple[int, ...]]] = {
            "scales": [(columns, groups)],
            "zeros": [(words, groups)],
            "order": [(depth,)],
        }
        if self.layout.is_transposed:
            expected |= {"scales": [(groups, columns)], "zeros": [(groups, words)]}
        if self.scheme.bits == 8:
            expected["scales"] += [(columns,), (1,), (1, 1)]
        for role, shapes in expected.items():
            if role in self.parts and (self.parts[role].shape not in shapes or (role == "zeros" and self.parts[role].code != "I32")):
                raise self._misfit(
                    role, f"{'I32 ' if role == 'zeros' else ''}{list(shapes[0])} of a weight [{columns}, {depth}] in groups of {size}"
                )

    def _misfit(self, role: str, wanted: str) -> ModelLoadError:
        part = self.parts[role]
        return ModelLoadError(
            f"tensor {shown(part.name)} of {part.file} is {part.code} {list(part.shape)}, and quantization_config asks for {wanted}; it "
            "does not fit its config.json: copy the checkpoint again"
        )

    def _check_order(self, depth: int) -> None:
        if (order := self.parts.get("order")) is None:
            return
        size = depth if self.scheme.group_size is None else self.scheme.group_size
        if not torch.equal(order.read().long(), torch.arange(depth) // size):
            raise UnsupportedModelError(
                f"tensor {shown(order.name)} of {order.file} puts entries into groups out of order (desc_act, actorder), which is not "
                "served; use a checkpoint that was made without, or the one in bfloat16 with quantization='int4'"
            )

    def _values(self) -> Tensor:
        """uint8 [N, K]."""
        words = self.parts["values"].read()
        if self.scheme.bits == 8:
            return words.view(torch.uint8) ^ 128
        if self.layout.is_transposed and self.layout.is_along_k:
            words = words.t().contiguous()
        values = _halves(words, self.layout.entries)
        return values if self.layout.is_along_k else values.t().contiguous()

    def _zeros(self, columns: int) -> Tensor | None:
        """uint8 [N, G], where the weight has zeros of its own."""
        if (part := self.parts.get("zeros")) is None:
            return None
        words = part.read()
        by_groups = _halves(words if self.layout.is_transposed else words.t().contiguous(), self.layout.entries)
        return ((by_groups.t()[:columns] + self.layout.least_zero) & 15).contiguous()


def _halves(words: Tensor, entries: tuple[int, ...]) -> Tensor:
    """int32 [R, W] → uint8 [R, 8 W], the first entry of a word in its lowest bits unless `entries` has it elsewhere."""
    data = words.view(torch.uint8)
    both = torch.stack([data & 15, data >> 4], -1).view(len(words), -1, len(HALVES))
    return both[..., list(entries)].reshape(len(words), -1)
