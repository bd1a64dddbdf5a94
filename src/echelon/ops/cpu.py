"""The operations on the CPU by compiled kernels (csrc); `contract.Backend` says what each computes. It serves where they are built.

A row's result is the same bits whatever the number of rows and threads, on every processor except for sums of linear layers and attention,
whose order follows the processor's features (`compiled.isa`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.batch import RaggedBatch
from echelon.errors import UnsupportedModelError
from echelon.ops import compiled
from echelon.ops.contract import Activation, Float64, Int64, Integers, PackedWeight, QuantisedWeight, RmsWeight
from echelon.sampling import Sampler

TILE = 32  # columns of a packed tile; in bfloat16 K is filled up to as many
PIECE = 2**16  # entries packed at a time where a weight is packed in place


def ragged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: RaggedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [T, H, D], keys and values [blocks, Hkv, block_size, D or Dv], sinks [H] → [T, H, Dv]. Keys and values of a row are read once
    for all heads of a group and up to 64 (token, head) pairs.
    """
    where = (batch.positions, batch.indptr, batch.block_table)
    trees = (batch.parents, batch.node_indptr, batch.text_lens)
    return compiled.kernels.ragged_attention(query, keys, values, *where, scale, window, softcap, sinks, *trees)


def pack(weight: Tensor, is_fast: bool = False, in_place: bool = False) -> PackedWeight:
    """The weight [N, K] in tiles of 32 columns."""
    data = _pack_over(weight) if in_place and _fills_its_tiles(weight) else compiled.kernels.pack_linear(weight)
    return PackedWeight(data, len(weight), weight.shape[1], is_fast)


def round_weight(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """A weight [N, K], by rows, in integers of 8 bits, or of 4 in groups of 32, 64 or 128: values uint8 [N, K], scales float32 [N, G] of
    `QuantisedWeight`. RuntimeError for a group that does not divide K.
    """
    values, scales = compiled.kernels.round_weight(weight, bits, group_size)
    return values, scales


def pack_integers(weight: QuantisedWeight, dtype: torch.dtype) -> PackedWeight:
    """The weight in tiles of 32 columns, in place of one of `dtype`. RuntimeError for shapes that `QuantisedWeight` excludes."""
    data = compiled.kernels.pack_integers(weight.values, weight.scales, weight.zeros, weight.bits)
    integers = Integers(weight.bits, weight.group_size if weight.bits == 4 else 0, weight.zeros is not None)
    columns, depth = weight.values.shape
    return PackedWeight(data, columns, depth, integers=integers, stands_for=dtype)


def columns_of(packed: PackedWeight, first: int, last: int) -> PackedWeight:
    """Columns first … last − 1 of a packed weight, in its memory; both are multiples of 32, `last` unless it is the end."""
    assert first % TILE == 0 and (last % TILE == 0 or last == packed.columns), (first, last)
    return replace(packed, data=packed.data[first // TILE : -(-last // TILE)], columns=last - first)


def side_by_side(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Packed weights of one K and kind as one, [ΣN, K].

    Raises
    ------
    UnsupportedModelError  one that is not the last does not fill its tiles of 32 columns
    """
    if any(w.columns % TILE for w in weights[:-1]):
        raise UnsupportedModelError(
            f"weights of {weights[0].columns} columns cannot be put side by side in integers, which takes multiples of {TILE}; use the "
            "checkpoint in bfloat16"
        )
    return replace(weights[0], data=torch.cat([w.data for w in weights]), columns=sum(w.columns for w in weights))


def _fills_its_tiles(weight: Tensor) -> bool:
    """Whether [N, K] takes as much memory packed as it does now (csrc/linear/linear.h)."""
    return weight.is_contiguous() and len(weight) % TILE == 0 and (weight.dtype != torch.bfloat16 or weight.shape[1] % TILE == 0)


def _pack_over(weight: Tensor) -> Tensor:
    """Pack [N, K] into its own memory, some tiles at a time: each is made of rows that stand where it will stand."""
    columns, depth = weight.shape
    grain = 2 if weight.dtype == torch.bfloat16 else 1
    packed = weight.view(columns // TILE, depth // grain, TILE, grain)
    rows = max(1, PIECE // (depth * TILE)) * TILE
    for first in range(0, columns, rows):
        piece = compiled.kernels.pack_linear(weight[first : first + rows])
        packed[first // TILE : first // TILE + len(piece)] = piece
    return packed


def packed_linear(
    x: Tensor, packed: PackedWeight, bias: Tensor | None = None, activation: Activation = Activation.NONE, float32: bool = False
) -> Tensor:
    """x [..., K], bias float32 [N] → [..., N]."""
    return compiled.kernels.packed_linear(x, packed.data, packed.columns, *packed.integers, bias, int(activation), float32)


def packed_rows(packed: PackedWeight, ids: Tensor) -> Tensor:
    """int64 [...] → [..., K]."""
    return compiled.kernels.packed_rows(packed.data, packed.columns, packed.depth, ids)


def rms_norm(x: Tensor, weight: Tensor, eps: float, how: RmsWeight) -> Tensor:
    """x [..., N], weight [N] → [..., N]."""
    return compiled.kernels.rms_norm(x, weight, eps, int(how))


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., N], weight and bias [N] → [..., N]."""
    return compiled.kernels.layer_norm(x, weight, bias, eps)


def activate(x: Tensor, kind: Activation, other: Tensor | None = None) -> Tensor:
    """x and other [..., N] → [..., N]."""
    return compiled.kernels.activate(x, int(kind), other)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [1, H, T, D], cos and sin [1, T, R] → [1, H, T, D]."""
    return compiled.kernels.rotate(x, cos, sin)


def write_slots(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """keys [T, Hkv, D] and values [T, Hkv, Dv] to `slots` int64 [T]."""
    compiled.kernels.write_slots(keys, values, key_cache, value_cache, slots)


class RankArguments(NamedTuple):
    """How ranks that share layers reach one another while these run; the defaults where the other ranks do not run this pass, so that what
    they would give is zeros.

    numbers      address of all ranks' own numbers
    slots        address of two, one behind the other, of `slot_bytes`
    num_gathers  so far; `is_owed`: was the last one not awaited?
    plan         hash of the running plan, to be compared where `has_plan`
    spins        looks at a number before the processor is given up
    gives_up     address of what says whether this rank gives up, asked with the number of a rank that runs something else, or −1
    """

    numbers: int = 0
    slots: int = 0
    slot_bytes: int = 0
    rank: int = 0
    size: int = 1
    num_gathers: int = 0
    is_owed: bool = False
    has_plan: bool = False
    plan: int = 0
    spins: int = 0
    gives_up: int = 0


def decoder_layer(
    norms: Sequence[tuple[Tensor, float, RmsWeight] | None],
    projections: Sequence[tuple[PackedWeight, Tensor | None]],
    activation: Activation,
    num_heads: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    share: Sequence[tuple[int, int]] = (),
) -> Tensor:
    """Weights of a decoder layer as `run_layers` takes them: norms [N], each with its epsilon, of its input, of its MLP's, of the heads of
    queries and keys (or None); projections to query, key, value, output, gate, up and down, each with its bias float32 [N] or None. Of a
    layer that ranks share, projections have this rank's columns, and `share` says for what attention gives, output, activation and down
    which column is the first, and how many all ranks have. Its bytes are the kernels' own.
    """
    none = torch.empty(0)
    parts = [(none, 0.0, RmsWeight.AFTER_ROUNDING) if norm is None else norm for norm in norms]
    weights, biases = [packed for packed, _ in projections], [none if bias is None else bias for _, bias in projections]
    ((bits, has_zeros),) = {(packed.integers.bits, packed.integers.has_zeros) for packed in weights}
    return compiled.kernels.decoder_layer(
        *map(list, zip(*parts, strict=True)),
        [packed.data for packed in weights],
        [packed.columns for packed in weights],
        [packed.depth for packed in weights],
        bits,
        [packed.integers.group_size for packed in weights],
        has_zeros,
        biases,
        activation,
        num_heads,
        scale,
        window,
        softcap,
        sinks,
        [number for pair in share for number in pair],
    )


def run_layers(
    layers: Sequence[Tensor],
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    slots: Tensor,
    batch: RaggedBatch,
    ranks: RankArguments | None = None,
) -> Tensor:
    """Decoder layers one after the other, each with its own keys and values, to which those of the new tokens go at `slots` int64 [T]:
    hidden [1, T, d], cos and sin [1, T, R] → [1, T, d]. `ranks`: of layers that several share.
    """
    where = (slots, batch.positions, batch.indptr, batch.block_table, batch.parents, batch.node_indptr, batch.text_lens)
    return compiled.kernels.run_layers(layers, hidden, cos, sin, keys, values, *where, [] if ranks is None else [int(n) for n in ranks])


def seconds_in_kernels() -> tuple[float, float]:
    """Seconds that this thread has spent so far in linear layers and in attention."""
    return compiled.kernels.seconds_in()


def sample_rows(logits: Sequence[Tensor], samplers: Sequence[Sampler], positions: Sequence[int]) -> list[int]:
    """The token of every row of logits float32 [V]: thresholds of top-k and top-p without a sort, noise only for tokens that can win."""
    drawn = [i for i, sampler in enumerate(samplers) if not sampler.params.is_greedy]
    columns = _columns([samplers[i] for i in drawn], [positions[i] for i in drawn])
    tokens = dict(zip(drawn, compiled.kernels.sample_rows([logits[i] for i in drawn], *columns), strict=True))
    return [tokens[i] if i in tokens else _first_largest(values) for i, values in enumerate(logits)]


def likeliest_rows(
    logits: Tensor,
    samplers: Sequence[Sampler],
    positions: Sequence[int],
    width: int,
    count: int,
    only_ranks: bool,
    sharpness: float = 1.0,
) -> tuple[Int64, Float64]:
    """logits [M, V] → int64 and float64 [M, width], without a sort, in two passes over a row."""
    columns = _columns(samplers, positions)
    tokens, scores = compiled.kernels.likeliest_rows(logits.float().contiguous(), width, count, sharpness, only_ranks, *columns)
    return tokens.numpy(), scores.numpy()


def read_memory(tensor: Tensor) -> None:
    """Read every byte once, with all threads."""
    compiled.kernels.read_memory(tensor)


def linear_family(dtype: torch.dtype, bits: int = 0, rows: int = 1) -> str:
    """Name the kernels that serve linear layers of this dtype, or over weights of so many bits, where `rows` tokens go through."""
    return compiled.kernels.linear_family(torch.empty(rows, 1, dtype=dtype), bits)


def _first_largest(logits: Tensor) -> int:
    """The first of the largest of float32 [V]; −1 where that is not finite."""
    values = logits.numpy()
    token = int(values.argmax())  # of the first NaN, if there is one
    return token if abs(values[token]) < float("inf") else -1


def signed(number: int) -> int:
    """A number of 64 bits as the kernels' lists hold it."""
    return number - 2**64 if number >= 2**63 else number


def _columns(samplers: Sequence[Sampler], positions: Sequence[int]) -> tuple[Sequence[Any], ...]:
    """temperature, top_k, top_p, min_p, seed, index and position of every row."""
    params = [s.params for s in samplers]
    return (
        [p.temperature for p in params],
        [p.top_k for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        [signed(s.seed) for s in samplers],
        [s.index for s in samplers],
        list(positions),
    )
