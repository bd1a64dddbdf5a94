"""Models built without memory, to see what a configuration asks for before anything is read; stopped when it asks for too much."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.errors import ModelLoadError

SPARE_NUMEL, SPARE_BUFFERS = 2**22, 2**26  # entries beside those of the file: toys, and tables that are computed
SPARE_TENSORS = 4096


@dataclass
class _Count:
    """Counts what has been built so far, and what may be."""

    what: str
    limit: int
    sofar: int = 0

    def add(self, count: int) -> None:
        self.sofar += count
        if self.sofar > self.limit:
            raise ModelLoadError(
                f"config.json asks for more than {self.limit:,} {self.what}, which its weights cannot fill; it does not fit its weights"
            )


@contextmanager
def without_memory(num_tensors: int, numel: int) -> Iterator[None]:
    """Modules that this thread builds inside lie on the meta device, and may be little more than so many tensors and entries fill.

    Raises
    ------
    ModelLoadError  they are more
    """
    owner = threading.get_ident()
    tensors, modules = _Count("parameters", 4 * num_tensors + SPARE_TENSORS), _Count("modules", 32 * num_tensors + 8 * SPARE_TENSORS)
    entries, buffers = _Count("entries", 2 * numel + SPARE_NUMEL), _Count("entries of tables", 2 * numel + SPARE_BUFFERS)

    def on_parameter(_: nn.Module, __: str, parameter: Any) -> None:
        if threading.get_ident() == owner and parameter is not None:
            tensors.add(1)
            entries.add(parameter.numel())

    def on_buffer(_: nn.Module, __: str, buffer: Any) -> None:
        if threading.get_ident() == owner and buffer is not None:
            buffers.add(buffer.numel())

    def on_module(_: nn.Module, __: str, ___: Any) -> None:
        if threading.get_ident() == owner:
            modules.add(1)

    registered = nn.modules.module
    handles = [
        registered.register_module_parameter_registration_hook(on_parameter),
        registered.register_module_buffer_registration_hook(on_buffer),
        registered.register_module_module_registration_hook(on_module),
    ]
    try:
        with torch.device("meta"):
            yield
    finally:
        for handle in handles:
            handle.remove()
