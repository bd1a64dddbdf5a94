"""The compiled kernels, where they were built."""

from __future__ import annotations

import importlib
from typing import Any

kernels: Any  # the module `echelon._kernels` (csrc/*_torch.cpp), or None
REASON = ""  # why they are not there
try:
    kernels = importlib.import_module("echelon._kernels")
except ImportError as error:  # no compiler at installation, or another PyTorch than the one they were built against
    kernels, REASON = None, str(error).splitlines()[0]


def is_built() -> bool:
    """The extension is there and fits the PyTorch that is running."""
    return kernels is not None


def isa() -> str:
    """The instruction family that serves: generic, avx2, avx512, avx512_bf16 or amx."""
    return str(kernels.isa())


def set_isa(name: str) -> None:
    """Use a lesser family than the machine offers; ValueError for one that it lacks."""
    kernels.set_isa(name)
