"""Which device, and which backend: on CUDA devices `ops.triton`, on the CPU `ops.cpu`, or `ops.reference` where no kernels were built."""

from __future__ import annotations

import platform
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.errors import ConfigError
from echelon.ops import compiled, cpu, reference
from echelon.ops.contract import Backend


def by_triton(tensor: Tensor) -> bool:
    """Triton serves calls on this tensor."""
    return tensor.is_cuda


def backend_of(tensor: Tensor) -> Backend:
    """The module that serves operations on this tensor: the one place that decides."""
    if by_triton(tensor):
        from echelon.ops import triton  # imports Triton

        return triton
    return reference if compiled.kernels is compiled.MISSING else cpu


def has_kernels(tensor: Tensor) -> bool:
    """Kernels of ours, of either kind, serve calls on this tensor."""
    return compiled.is_built() or by_triton(tensor)


def chosen_device(name: str) -> torch.device:
    """ "auto": the CUDA device where there is one.

    Raises
    ------
    ConfigError  a CUDA device is asked for, and PyTorch sees none
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = 'cuda', and PyTorch sees no CUDA device; install a CUDA build of it, or use device = 'cpu'")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def current(device: torch.device) -> AbstractContextManager[Any]:
    """While inside, `device` is this thread's current one, on which kernels are launched, whatever tensors they are given."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_host(tensor: Tensor) -> NDArray[np.float32]:
    """float32 values for NumPy: a view where they lie in the host's memory as such, else a copy that waits for the device."""
    return tensor.float().cpu().numpy()


def cpu_name() -> str:
    """The processor as the system names it, with its family and model where it says them: under a hypervisor many are named alike."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().partition("\n\n")[0].splitlines() if info.exists() else []
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = said.get("model name") or platform.processor() or platform.machine()
    return f"{name} family {said['cpu family']} model {said['model']}" if {"cpu family", "model"} <= said.keys() else name
