"""Load a checkpoint and say what it took: `python peak_memory.py FOLDER [QUANTIZATION]` prints bytes at the peak and of the weights."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import psutil
import torch

from echelon import load_model
from echelon.model.patches.linear import weight_bytes


def main(folder: str, quantization: str | None = None) -> None:
    torch.set_num_threads(1)
    load_model(folder + "-tiny", quantization=quantization)  # what loading needs once
    before = psutil.Process().memory_info().rss
    loaded = load_model(folder, quantization=quantization)
    peak = 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])  # type: ignore[index]
    print(json.dumps({"peak": peak - before, "weights": weight_bytes(loaded.model)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
