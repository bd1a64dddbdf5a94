"""The operations that the engine calls, typed once; `devices.backend_of` says which backend serves a tensor.

The contract, for every backend: the result of a row or query depends on that row, or on the position of the query and the keys and values
that it can see, and on nothing else in the call, bit for bit: not on other rows, the row's other new tokens, its length, chunking or
threads. Slots that are masked or stale are never multiplied. Everything is computed in float32 and rounded once, unless an operation says
otherwise. dtypes are float32, bfloat16 and float16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.batch import RaggedBatch
from echelon.sampling import Sampler

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


class RmsWeight(IntEnum):
    """How the weight w meets the normalised row y: w · round(y), round(w · y), round((1 + w) · y)."""

    AFTER_ROUNDING = 0
    IN_FLOAT32 = 1
    ONE_PLUS = 2


class Activation(IntEnum):
    """Functions of one number, numbered as in csrc/types.h."""

    NONE = 0
    RELU = 1
    SILU = 2
    GELU = 3
    GELU_TANH = 4


GROUPS = (128, 64, 32)  # entries of K that may share a scale at 4 bits; of what is rounded here the first that divides K do


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [N, K] of integers without a sign: scales · (values − zeros), a scale for each of G groups of K / G entries of a column.

    values uint8 [N, K], scales float32 [N, G], zeros uint8 [N, G] or None for all alike: 128 of 8 bits, which have one group, and 8 of
    4 bits, whose groups have 32, 64 or 128 entries.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int

    @property
    def group_size(self) -> int:
        """Entries of K that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]


class Integers(NamedTuple):
    """What a packed weight of integers is made of; 0 bits: numbers."""

    bits: int = 0
    group_size: int = 0  # of 4 bits
    has_zeros: bool = False


NUMBERS = Integers()


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] as `Backend.pack` lays it out. Compiled kernels have it in tiles of 32 columns (csrc/linear/linear.h); others as it
    was. `is_fast`: on CUDA the vendor's library may multiply (`EngineConfig.numerics`).
    """

    data: Tensor
    columns: int  # N
    depth: int  # K
    is_fast: bool = False
    integers: Integers = NUMBERS
    stands_for: torch.dtype | None = None  # the dtype of a weight of integers before it was one

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight that was packed."""
        return self.stands_for or self.data.dtype


class Backend(Protocol):
    """A module that implements every operation: `reference` defines them, `cpu` and `triton` are faster."""

    def ragged_attention(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: RaggedBatch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of every new token over its row's keys and values, which have been written already; in a tree, over those of
        the text and of its own ancestors.

        query [T, H, D], keys [blocks, Hkv, block_size, D], values [blocks, Hkv, block_size, Dv], sinks [H] or None → [T, H, Dv] in the
        query's dtype, which is that of the cache, or the cache is int8 with a scale behind each head (`write_slots`). Softmax runs online
        in float32 over key tiles at multiples of a fixed size from position 0 (Milakov and Gimelshein 2018).
        """

    def pack(self, weight: Tensor, is_fast: bool = False, in_place: bool = False) -> PackedWeight:
        """Lay out a weight [N, K] of any strides. `in_place`: the packed weight takes its memory where it fits."""

    def packed_linear(
        self, x: Tensor, packed: PackedWeight, bias: Tensor | None = None, activation: Activation = Activation.NONE, float32: bool = False
    ) -> Tensor:
        """activation(x [..., K] · weightᵀ + bias) → [..., N] in x's dtype, or float32 where asked.

        bias float32 [N] (on CUDA in x's dtype too). A weight that `is_fast` may round by the number of rows. For a weight of integers
        each row of x is rounded to integers in ±127 by its largest entry, ties to even; their products are summed exactly over each group,
        and groups times their scales in float32, in rising order: the same bits on every processor. NaN for a row that is not finite.
        """

    def packed_rows(self, packed: PackedWeight, ids: Tensor) -> Tensor:
        """Rows of the weight as an embedding table: int64 [...] → [..., K]. RuntimeError or IndexError for an index outside."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, how: RmsWeight) -> Tensor:
        """Root-mean-square norm: x [..., N], weight [N] → [..., N] (Zhang and Sennrich 2019)."""

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """Layer norm: x [..., N], weight and bias [N] or None → [..., N] (Ba et al. 2016)."""

    def activate(self, x: Tensor, kind: Activation, other: Tensor | None = None) -> Tensor:
        """kind(x), or kind(x) · other: [..., N] → [..., N]."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding by halves of the first R values of every head (Su et al. 2021): x [1, H, T, D], cos and sin [1, T, R] in x's
        dtype or float32 → [1, H, T, D].
        """

    def write_slots(self, keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        """Write keys [T, Hkv, D] and values [T, Hkv, Dv] to `slots` int64 [T] of the caches (`ops.slots`).

        Compiled kernels round for a cache of int8 [..., D + 4]: integers in ±127 by the largest entry of the head, ties to even, then their
        float32 scale, which is NaN for a head that is not finite.

        RuntimeError or IndexError for a slot outside; on CUDA slots are not checked, as that would wait for the device.
        """

    def sample_rows(self, logits: Sequence[Tensor], samplers: Sequence[Sampler], positions: Sequence[int]) -> list[int]:
        """One token for each row of logits float32 [V], by `Sampler.choose_processed` at its position; −1 where the largest is not finite
        or a logit is NaN. Logits have been through everything that changes them.
        """

    def likeliest_rows(
        self,
        logits: Tensor,
        samplers: Sequence[Sampler],
        positions: Sequence[int],
        width: int,
        count: int,
        only_ranks: bool,
        sharpness: float = 1.0,
    ) -> tuple[Int64, Float64]:
        """`sample.likeliest` of logits [M, V] from the `count` likeliest tokens of every row: tokens int64 and scores float64 [M, width].

        The last bits of greedy scores may differ with M, except by compiled kernels.
        """

    def read_memory(self, tensor: Tensor) -> None:
        """Read every byte of a contiguous tensor once: the baseline of operations that are bound by memory."""
