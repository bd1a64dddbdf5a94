"""What something took in memory at the peak. `python peak_memory.py FOLDER [QUANTIZATION]` loads a checkpoint and prints bytes at the peak
and of the weights.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from echelon import load_model
from echelon.model.patches.linear import weight_bytes

CLEAR_REFS = Path("/proc/self/clear_refs")
Result = TypeVar("Result")


def peak() -> int:
    """The most bytes that this process has held."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def growth_during(call: Callable[[], Result]) -> tuple[Result, int]:
    """What `call` returns, and how many bytes more than before it this process held at the most."""
    before = psutil.Process().memory_info().rss
    CLEAR_REFS.write_text("5")  # from here on the peak is counted anew
    result = call()
    return result, peak() - before


def main(folder: str, quantization: str | None = None) -> None:
    torch.set_num_threads(1)
    load_model(folder + "-tiny", quantization=quantization)  # what loading needs once
    before = psutil.Process().memory_info().rss
    loaded = load_model(folder, quantization=quantization)
    print(json.dumps({"peak": peak() - before, "weights": weight_bytes(loaded.model)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
