"""What two devices would need to run a model as two ranks: a layer's columns on each, gathered by NCCL; a cell of `benchmarks.gpu`.

The engine itself splits models on CPUs alone (docs/parallel.md). Measured are the two things that it would stand on: that a device with
half of a layer's columns computes the bits of one that has all, and how long a gather takes. On the CPU the same code runs by gloo.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cells import Record
from echelon.bench.clock import clock_of
from echelon.ops.devices import backend_of

RANKS, ROUNDS = 2, 50


@dataclass
class TwoDevices:
    """A layer [columns, depth] in bfloat16 and its inputs, `rows` of them at a time."""

    kind: str
    depth: int
    columns: int
    rows: tuple[int, ...]
    store: Any = field(default_factory=dist.HashStore)  # type: ignore[attr-defined]

    def measured(self) -> Record:
        """Each rank is a thread, with a device of its own."""
        with ThreadPoolExecutor(RANKS) as pool:
            first, _ = pool.map(self._rank, range(RANKS))
        lines: list[list[Any]] = []
        for rows, (is_equal, seconds, alone) in first.items():
            what = f"{RANKS} ranks, {rows} × {self.depth} to {self.columns}"
            lines.append([f"{what}: bits of one device", "equal" if is_equal else "not equal", "equal", is_equal])
            gb = rows * self.columns * 2 / RANKS / seconds / 1e9
            lines.append([f"{what}: a gather", f"{1e6 * seconds:.0f} µs, {gb:.2f} GB/s; the layer alone {1e6 * alone:.0f} µs", "", None])
        return {"lines": lines}

    def _rank(self, rank: int) -> dict[int, tuple[bool, float, float]]:
        device, group = self._joined(rank)
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(self.columns, self.depth, generator=generator).to(device, torch.bfloat16)
        own = weight.chunk(RANKS)[rank].clone()
        backend, clock = backend_of(weight), clock_of(device)
        whole, part = backend.pack(weight), backend.pack(own)
        found = {}
        for rows in self.rows:
            x = torch.randn(rows, self.depth, generator=torch.Generator().manual_seed(rows)).to(device, torch.bfloat16)
            mine = backend.packed_linear(x, part)
            gathered = torch.empty(RANKS * mine.numel(), dtype=mine.dtype, device=device)

            def gather(given: Tensor = mine, into: Tensor = gathered) -> None:
                group._allgather_base(into, given.view(-1)).wait()

            seconds = timed(gather, clock)
            alone = timed(lambda x=x: backend.packed_linear(x, whole), clock)  # type: ignore[misc]
            together = gathered.view(RANKS, rows, -1).transpose(0, 1).reshape(rows, -1)
            found[rows] = torch.equal(together, backend.packed_linear(x, whole)), seconds, alone
        return found

    def _joined(self, rank: int) -> tuple[torch.device, Any]:
        library: Any = dist
        if self.kind != "cuda":
            return torch.device("cpu"), library.ProcessGroupGloo(self.store, rank, RANKS)
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank), library.ProcessGroupNCCL(self.store, rank, RANKS)


def timed(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Median seconds of a call, after a few that are not counted."""
    times = []
    for _ in range(ROUNDS):
        start = clock()
        call()
        times.append(clock() - start)
    return statistics.median(times[ROUNDS // 5 :])


def number_of_devices(kind: str) -> int:
    """Devices that this machine shows; the CPU counts as two, for the sake of trying the code."""
    return torch.cuda.device_count() if kind == "cuda" else RANKS
