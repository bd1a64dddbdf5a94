"""Models built without memory, to see what a configuration asks for before anything is read; stopped when it asks for too much."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from echelon.errors import ModelLoadError

SPARE_NUMEL, SPARE_BUFFERS = 2**22, 2**26  # entries beside those of the file: toys, and tables that are computed
SPARE_TENSORS = 4096


@contextmanager
def without_memory(num_tensors: int, numel: int) -> Iterator[None]:
    """Modules that this thread builds inside lie on the meta device, and may be little more than so many tensors and entries fill.

    Raises
    ------
    ModelLoadError  they are more
    """
    owner, counts = threading.get_ident(), Counter[str]()
    limits = {
        "parameters": 4 * num_tensors + SPARE_TENSORS,
        "modules": 32 * num_tensors + 8 * SPARE_TENSORS,
        "entries": 2 * numel + SPARE_NUMEL,
        "entries of tables": 2 * numel + SPARE_BUFFERS,
    }

    def add(what: str, count: int) -> None:
        if threading.get_ident() != owner:
            return
        counts[what] += count
        if counts[what] > limits[what]:
            raise ModelLoadError(
                f"config.json asks for more than {limits[what]:,} {what}, which its weights cannot fill; it does not fit its weights"
            )

    def on_parameter(_: nn.Module, __: str, parameter: Any) -> None:
        if parameter is not None:
            add("parameters", 1)
            add("entries", parameter.numel())

    def on_buffer(_: nn.Module, __: str, buffer: Any) -> None:
        if buffer is not None:
            add("entries of tables", buffer.numel())

    registered = nn.modules.module
    handles = [
        registered.register_module_parameter_registration_hook(on_parameter),
        registered.register_module_buffer_registration_hook(on_buffer),
        registered.register_module_module_registration_hook(lambda *_: add("modules", 1)),
    ]
    try:
        with torch.device("meta"):
            yield
    finally:
        for handle in handles:
            handle.remove()
