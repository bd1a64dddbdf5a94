"""What a model takes in memory: from its configuration and the headers of its files, with no weight read, or from the loaded model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from echelon.checkpoint.facts import context_of
from echelon.checkpoint.folder import Folder
from echelon.checkpoint.quantization import Scheme, scheme_of
from echelon.checkpoint.tensors import weight_headers
from echelon.errors import UnsupportedModelError
from echelon.kv.cache import LayerShape
from echelon.model.attention import IMPLEMENTATION, LayerCall, record_layers
from echelon.model.load.loading import LoadedModel
from echelon.model.load.published import PackedTensor, kernel_group, with_published
from echelon.model.load.reading import TOKENIZER_FILES, built_without_memory, read_config, served_dtype, settings_of
from echelon.model.patches.experts import STACKED, has_plain_gate, is_experts
from echelon.model.patches.linear import LINEAR, bits_for, is_plain_linear, routers_of, weight_bytes
from echelon.model.patches.packing import BITS, grouped
from echelon.model.patches.rotary_tables import table_bytes
from echelon.ops import compiled, cpu
from echelon.ops.contract import QuantisedWeight

HOST = torch.device("cpu")
TOKENIZER_GROWTH = 12  # bytes of a tokenizer in memory for each in its files


@dataclass(frozen=True)
class Footprint:
    """Bytes and shapes of a model as it is served.

    weights       bytes of its weights, packed ones, scales and tables
    loading       bytes that it takes besides, at most, while it is read
    tokenizer     bytes of its tokenizer
    layers        what each attention layer stores per token
    dtype         of its activations, keys and values
    pass_bytes    bytes that a pass holds for each token fed
    vocab_size    width of a row of logits
    max_len       its context, in tokens
    quantization  "int8" or "int4" where its linear layers are integers, rounded at load or published so
    """

    name: str
    weights: int
    loading: int
    tokenizer: int
    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    pass_bytes: int
    vocab_size: int
    max_len: int
    quantization: str | None

    def bytes_per_token(self, is_rounded: bool = False) -> int:
        """Bytes of keys and values of one token in all layers."""
        return sum(s.bytes_per_token(self.dtype, is_rounded) for s in self.layers)


class Matrix(NamedTuple):
    """A weight [columns, depth] that linear layers multiply by: `copies` of such in one parameter, each packed in `parts`."""

    columns: int
    depth: int
    bits: int
    copies: int = 1
    parts: int = 1
    is_output: bool = False


@dataclass(frozen=True)
class Outline:
    """A model without its weights.

    model      its modules, on the meta device
    scheme     how the checkpoint has its weights in integers, if it has
    published  names of the weights that it has so
    has_zeros  whether their groups have zeros of their own
    tokenizer  bytes of its tokenizer, where it lies on the device that is planned for
    device     that it is to be served on
    """

    name: str
    model: PreTrainedModel
    dtype: torch.dtype
    scheme: Scheme | None
    published: frozenset[str]
    has_zeros: bool
    tokenizer: int
    device: torch.device = HOST

    @classmethod
    def of(cls, name: str, dtype: str = "auto", device: torch.device = HOST) -> Outline:
        """The model in the folder, or of the hub name, `name`; errors as of `load_model`."""
        folder = Folder.locate(name, "model")
        raw = settings_of(folder)
        scheme = scheme_of(folder.shown, raw)
        with weight_headers(folder) as stored:
            weights = stored if scheme is None else with_published(stored, scheme)
            config = read_config(folder)
            model = built_without_memory(folder, config, weights)
            wanted = served_dtype(folder, config, weights, dtype)
            published = frozenset(key for key, tensor in weights.tensors.items() if isinstance(tensor, PackedTensor))
            has_zeros = any("zero" in key.rpartition(".")[2] for key in stored.tensors)
        files = sum(p.stat().st_size for p in folder.path.iterdir() if p.name.startswith(TOKENIZER_FILES)) if device.type == "cpu" else 0
        model.set_attn_implementation(IMPLEMENTATION)
        model.to(torch.bfloat16)  # the one type that all kinds of experts can be recorded in; it says nothing of how the model is served
        return cls(name, model.eval(), wanted, scheme, published, has_zeros, files * TOKENIZER_GROWTH, device)

    @property
    def is_packed(self) -> bool:
        """Whether kernels lay its weights out anew: those of a device read them as they are."""
        return is_packed_on(self.device)

    @property
    def lookup_bytes(self) -> int:
        """Bytes of its embeddings, which a copy in fewer bits shares."""
        return sum(m.weight.numel() * self.dtype.itemsize for m in self.model.modules() if isinstance(m, nn.Embedding))

    @cached_property
    def _recorded(self) -> tuple[tuple[LayerShape, ...], int]:
        try:
            return attention_shapes(self.model)
        except NotImplementedError as error:  # its forward asks for values, which nothing has here
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot be planned before its weights are read, as its forward pass depends on their values; "
                "give max_num_seqs, max_model_len and kv_cache_memory_bytes instead of a budget"
            ) from error

    def footprint(self, quantization: str | None = None) -> Footprint:
        """The model as it is served with the setting `quantization`; a published one as it is published."""
        quantization = self.scheme.quantization if self.scheme is not None else quantization
        layers, num_heads = self._recorded
        weights, loading = self._weights(BITS[quantization])
        config = self.model.config.get_text_config()
        return Footprint(
            self.name,
            weights,
            loading,
            self.tokenizer,
            layers,
            self.dtype,
            pass_bytes(self.model, layers, num_heads, self.dtype),
            int(self.model.get_output_embeddings().weight.shape[0]),
            context_of(config),
            quantization,
        )

    def _weights(self, bits: int) -> tuple[int, int]:
        """Bytes once the model is served, and at most beside them while it is read."""
        itemsize, held, most = self.dtype.itemsize, 0, 0
        late: list[tuple[int, int, int]] = []  # what is packed once all is read: bytes as read, while it is rounded, and packed
        for parameter, matrix in _parameters(self.model, bits, self.published if self.scheme is not None else None):
            raw = parameter.numel() * itemsize
            if matrix is None:
                held += raw + self._beside(parameter)
                continue
            packed = matrix.copies * self._packed_bytes(matrix)
            if not matrix.bits or matrix.is_output:
                held += raw
                late.append((raw, matrix.columns * matrix.depth if matrix.bits else 0, packed))
                continue
            stays = 2 if matrix.copies > 1 else 1  # experts are read one by one, and stacked
            most = max(most, held + (0 if self.scheme else stays * raw) + packed + matrix.columns * matrix.depth)
            held += packed
        for raw, rounded, packed in late:
            most = max(most, held + (0 if raw == packed else packed + rounded))  # of the same size it is packed in place
            held += packed - raw
        held += sum(b.numel() * b.element_size() for b in self.model.buffers())
        held += table_bytes(self.model, self.dtype) if self.is_packed else 0
        return held, max(0, most - held)

    def _beside(self, parameter: nn.Parameter) -> int:
        """Bytes of what is made of a parameter that is no matrix of a linear layer: norms and biases are kept in float32 too, and routers
        packed when they are first used.
        """
        holder = next(m for m in self.model.modules() if any(parameter is p for p in m.parameters(recurse=False)))
        if parameter.ndim == 1 or is_experts(holder):
            return 4 * parameter.numel()
        is_read = isinstance(holder, nn.Embedding) or not self.is_packed
        return 0 if is_read or parameter.ndim > 2 else self._packed_bytes(Matrix(len(parameter), parameter.shape[1], 0))

    def _packed_bytes(self, matrix: Matrix) -> int:
        if not self.is_packed:
            return matrix.columns * matrix.depth * self.dtype.itemsize
        published = self.scheme is not None and matrix.bits == 4
        group = kernel_group(self.scheme.group_size or matrix.depth) if self.scheme is not None and published else None
        columns = matrix.columns // matrix.parts
        tiles = matrix.parts * -(-columns // cpu.TILE)
        return tiles * tile_bytes(matrix.depth, matrix.bits, self.dtype, group, published and self.has_zeros)


def is_packed_on(device: torch.device) -> bool:
    """Whether kernels on this device lay weights out anew, beside or in the place of what was read."""
    return device.type == "cpu" and compiled.is_built()


def footprint_of(loaded: LoadedModel) -> Footprint:
    """A model that is loaded: what its weights take is known. Of layers that other ranks have, each stores what the last one here does."""
    shapes, num_heads = attention_shapes(loaded.model)
    if loaded.stage is not None:
        shapes += shapes[-1:] * (loaded.stage.num_layers - len(shapes))
    return Footprint(
        loaded.name,
        weight_bytes(loaded.model),
        0,
        0,
        shapes,
        loaded.model.dtype,
        pass_bytes(loaded.model, shapes, num_heads, loaded.model.dtype),
        loaded.vocab_size,
        loaded.max_len,
        loaded.quantization,
    )


def attention_shapes(model: nn.Module) -> tuple[tuple[LayerShape, ...], int]:
    """What each attention layer stores per token, and the largest number of query heads."""
    heads: list[int] = []

    def look(call: LayerCall) -> None:
        heads.append(int(call.query.shape[1]))

    return tuple(record_layers(model, look)), max(heads, default=0)


def pass_bytes(model: PreTrainedModel, layers: tuple[LayerShape, ...], num_heads: int, dtype: torch.dtype) -> int:
    """Bytes that a pass holds for each token fed, at most: the residual and what is made of it, queries, keys and values before and after
    their rotary embedding, and what the widest layer between holds.
    """
    config = model.config.get_text_config()
    attention = max(
        2 * num_heads * s.key_size + num_heads * s.value_size + 2 * s.num_kv_heads * (s.key_size + s.value_size) for s in layers
    )
    output = model.get_output_embeddings()
    widest, experts = 0, 1
    for module in model.modules():
        if is_experts(module):
            experts = max(experts, int(getattr(config, "num_experts_per_tok", None) or 1))
            widest = max(widest, *(max(p.shape[1:]) for p in module.parameters(recurse=False) if p.ndim == 3))
        elif isinstance(module, LINEAR) and module is not output:
            widest = max(widest, module.weight.shape[0] if isinstance(module, nn.Linear) else module.weight.shape[1])
    return int(dtype.itemsize * (6 * config.hidden_size + attention + 3 * widest * experts))


@lru_cache(maxsize=4096)
def tile_bytes(depth: int, bits: int, dtype: torch.dtype, group_size: int | None = None, has_zeros: bool = False) -> int:
    """Bytes of 32 columns of a packed weight of `depth`, as the kernels lay it out; `group_size` and zeros of published ones."""
    weight = torch.zeros(cpu.TILE, depth, dtype=dtype)
    if bits == 0:
        return int(cpu.pack(weight).data.nbytes)
    bits, group = (bits, group_size) if group_size else grouped(depth, bits)
    groups = depth // group if bits == 4 else 1
    values = torch.zeros(cpu.TILE, depth, dtype=torch.uint8)
    zeros = torch.zeros(cpu.TILE, groups, dtype=torch.uint8) if has_zeros and bits == 4 else None
    packed = cpu.pack_integers(QuantisedWeight(values, torch.ones(cpu.TILE, groups), zeros, bits), dtype)
    return int(packed.data.nbytes)


def _parameters(model: PreTrainedModel, bits: int, published: frozenset[str] | None) -> Iterator[tuple[nn.Parameter, Matrix | None]]:
    """Every parameter once, with what linear layers multiply by where they do: `patch_linear` decides alike. Of a checkpoint in integers
    the `published` weights are so, and experts, whose names in a file are others.
    """
    output, routers, seen = model.get_output_embeddings(), routers_of(model), set[int]()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(module)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            matrix = _matrix(module, name, parameter, holders[id(parameter)], output, routers, bits)
            if matrix is not None and published is not None and matrix.copies == 1:
                matrix = matrix._replace(bits=bits if names[id(parameter)] in published else 0, is_output=False)
            yield parameter, matrix


def _matrix(
    module: Any, name: str, parameter: nn.Parameter, sharing: list[nn.Module], output: Any, routers: frozenset[nn.Linear], bits: int
) -> Matrix | None:
    if name in STACKED and is_experts(module):
        count, columns, depth = parameter.shape
        columns, depth = (depth, columns) if module.is_transposed else (columns, depth)
        return Matrix(columns, depth, bits, count, 2 if name == "gate_up_proj" and has_plain_gate(module) else 1)
    linear = next((m for m in sharing if is_plain_linear(m)), None)
    if name != "weight" or linear is None:
        return None
    columns, depth = parameter.shape if isinstance(linear, nn.Linear) else reversed(parameter.shape)
    return Matrix(int(columns), int(depth), bits_for(bits, sharing, output, routers), is_output=any(m is output for m in sharing))
