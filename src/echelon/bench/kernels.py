"""How near the compiled kernels come to what the machine can do: reading memory, and multiplying.

Every figure is a median over calls that are interleaved with those of its rivals, because a shared machine's memory changes its speed
from second to second. Weights are cold: calls cycle over more copies than fit into a cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.errors import ConfigError
from echelon.ops import compiled, linear

LINEAR_SHAPES = "2048x2048,8192x2048,2048x8192,5632x2048,50272x2048"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
COLD_BYTES = 256 * 2**20
SECONDS = 0.5  # spent on each implementation of a case
FEWEST, MOST = 7, 60  # calls of each

Call = Callable[[int], object]


@dataclass(frozen=True)
class Machine:
    """What this machine does at best: GB/s read and copied (bytes read and written), GFLOP/s of a large bfloat16 matmul."""

    read_gb: float
    copy_gb: float
    matmul_gflop: float


@dataclass(frozen=True)
class LinearSpeed:
    """One shape, one number of rows. The rivals' figures are their time over ours; None where one does not serve the dtype."""

    columns: int
    depth: int
    rows: int
    dtype: str
    milliseconds: float
    gb: float  # GB/s of weight
    gflop: float  # GFLOP/s
    read: float  # time of merely reading the weight over ours, measured between our calls
    onednn: float | None  # oneDNN on a weight that it packed for this number of rows
    plain: float


def measure_machine() -> Machine:
    if not compiled.is_built():
        raise ConfigError(f"there are no compiled kernels to measure ({compiled.REASON}); install with a C++ compiler at hand")
    source, square = torch.ones(COLD_BYTES // 8, dtype=torch.int64), torch.ones(2048, 2048, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    read, copy, matmul = interleaved([lambda _: linear.read_memory(source), lambda _: target.copy_(source), lambda _: square @ square])
    return Machine(COLD_BYTES / read / 1e9, 2 * COLD_BYTES / copy / 1e9, 2 * 2048**3 / matmul / 1e9)


def interleaved(calls: SequenceOf[Call]) -> list[float]:
    """Median seconds of each call; `call(i)` is given a counter to choose its copy of the weight by."""
    seconds: list[list[float]] = [[] for _ in calls]
    start = time.perf_counter()
    for i in range(MOST + 1):
        for call, taken in zip(calls, seconds, strict=True):
            before = time.perf_counter()
            call(i)
            taken.append(time.perf_counter() - before)
        if i >= FEWEST and time.perf_counter() - start > SECONDS * len(calls):
            break
    return [statistics.median(taken[1:]) for taken in seconds]


def measure_linear(shape: tuple[int, int], counts: SequenceOf[int], dtype: str) -> Iterator[LinearSpeed]:
    """One result for each number of rows; `shape` is [N, K]."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is not served; choose from {', '.join(DTYPES)}")
    columns, depth = shape
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(columns, depth, generator=generator) / depth**0.5).to(DTYPES[dtype])
    num_copies = max(2, COLD_BYTES // weight.nbytes)
    plain = [weight.clone() for _ in range(num_copies)]
    packed = [linear.PackedWeight.pack(w) for w in plain]
    for rows in counts:
        x = torch.randn(rows, depth, generator=generator).to(weight.dtype)
        calls = _calls(x, plain, packed)
        ours, read, framework, *onednn = interleaved(calls)
        yield LinearSpeed(
            columns=columns,
            depth=depth,
            rows=rows,
            dtype=dtype,
            milliseconds=ours * 1e3,
            gb=weight.nbytes / ours / 1e9,
            gflop=2 * rows * columns * depth / ours / 1e9,
            read=read / ours,
            onednn=onednn[0] / ours if onednn else None,
            plain=framework / ours,
        )


def _calls(x: Tensor, plain: list[Tensor], packed: list[linear.PackedWeight]) -> list[Call]:
    """Ours, reading the weight, the framework, and oneDNN on packed weights where it serves the dtype."""
    count = len(plain)
    calls: list[Call] = [
        lambda i: linear.packed_linear(x, packed[i % count]),
        lambda i: linear.read_memory(packed[(i + count // 2) % count].data),
        lambda i: F.linear(x, plain[i % count]),
    ]
    onednn = torch.ops.mkldnn
    try:
        reordered = [onednn._reorder_linear_weight(w, len(x)) for w in plain]
    except RuntimeError:
        return calls
    return [*calls, lambda i: onednn._linear_pointwise(x, reordered[i % count], None, "none", [], "")]


def as_markdown(machine: Machine, results: SequenceOf[LinearSpeed]) -> str:
    lines = [
        f"read {machine.read_gb:.1f} GB/s, copy {machine.copy_gb:.1f} GB/s, bfloat16 matmul {machine.matmul_gflop:.0f} GFLOP/s",
        "",
        "| [N, K] | rows | ms | GB/s | of reading | GFLOP/s | of the matmul | oneDNN packed / ours | F.linear / ours |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        onednn = "–" if r.onednn is None else f"{r.onednn:.2f}"
        lines.append(
            f"| {r.columns} × {r.depth} | {r.rows} | {r.milliseconds:.3f} | {r.gb:.1f} | {r.read:.2f} "
            f"| {r.gflop:.0f} | {r.gflop / machine.matmul_gflop:.2f} | {onednn} | {r.plain:.2f} |"
        )
    return "\n".join(lines)
