"""Instruction families that kernels are written for, and those that this machine has."""

from __future__ import annotations

from echelon.ops import compiled

FAMILIES = ("generic", "avx2", "avx512", "avx512_bf16", "amx")


def offered() -> list[str]:
    return list(FAMILIES[: FAMILIES.index(compiled.isa()) + 1])
