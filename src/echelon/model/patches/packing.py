"""How the weights of a model are packed: as they are, or rounded to integers of 8 or 4 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.errors import ConfigError
from echelon.ops import compiled, cpu, devices
from echelon.ops.contract import GROUPS, PackedWeight, QuantisedWeight

BITS = {None: 0, "int8": 8, "int4": 4}  # of weights by the setting `quantization`; 0: as they are


@dataclass(frozen=True)
class Packing:
    """`is_fast` as in `PackedWeight`; `bits`: 8 or 4, or 0 for weights as they are."""

    is_fast: bool = False
    bits: int = 0

    def pack(self, weight: Tensor, in_place: bool = False) -> PackedWeight:
        """A weight [N, K] for the kernels; as many bits as its K allows. `in_place` as in `Backend.pack`."""
        if self.bits == 0:
            return devices.backend_of(weight).pack(weight, self.is_fast, in_place)
        return cpu.pack_integers(rounded(weight, self.bits), weight.dtype)


def packing_of(quantization: str | None, is_fast: bool, device: torch.device) -> Packing:
    """What the setting `quantization` means on a device.

    Raises
    ------
    ConfigError  nothing here multiplies integers
    """
    if quantization is None:
        return Packing(is_fast)
    check_integers(f"quantization = {quantization!r}", "leave it out there", device)
    return Packing(is_fast, BITS[quantization])


def check_integers(what: str, instead: str, device: torch.device) -> None:
    """Raise ConfigError where nothing multiplies weights of integers; `what` has them, `instead` of which something else is served."""
    if device.type != "cpu":
        raise ConfigError(f"{what} is served on the CPU, and the model is on {device}; {instead}")
    compiled.check_built(what)


def grouped(depth: int, bits: int) -> tuple[int, int]:
    """Bits and entries that share a scale of a weight [N, depth] that is rounded to `bits`: 8 where no group of 4 bits divides it."""
    group_size = next((size for size in GROUPS if depth % size == 0), 0)
    return bits if group_size else 8, group_size


def rounded(weight: Tensor, bits: int) -> QuantisedWeight:
    """A weight [N, K] in integers: 8 bits by the largest entry of each row, 4 bits in groups of `GROUPS` by least squared error (8 where
    none divides K).
    """
    bits, group_size = grouped(weight.shape[1], bits)
    values, scales = cpu.round_weight(weight if weight.stride(1) == 1 else weight.contiguous(), bits, group_size)
    return QuantisedWeight(values, scales, None, bits)
