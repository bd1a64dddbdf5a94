"""Sets of instructions that kernels are written for; `compiled.offered_isas` are those that this machine has."""

from __future__ import annotations

FAMILIES = ("generic", "avx2", "avx512", "avx512_bf16", "amx")
