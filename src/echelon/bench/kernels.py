"""How near our kernels come to what the machine, or its CUDA device, can do: reading memory, and multiplying.

Every figure is a median over calls that are interleaved with those of its rivals, because a shared machine's memory changes its speed
from second to second. Weights are cold: calls cycle over more copies than fit into a cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.batch import RaggedBatch, Span
from echelon.bench.clock import seconds_of
from echelon.bench.report import columns
from echelon.errors import ConfigError
from echelon.kv.blocks import BlockTables
from echelon.model import pack as unpadded
from echelon.model.load.reading import DTYPES
from echelon.ops import compiled, devices
from echelon.ops.contract import PackedWeight

LINEAR_SHAPES = "2048x2048,8192x2048,2048x8192,5632x2048,50272x2048"
ATTENTION_SHAPES = ((32, 32, 64), (32, 8, 128), (32, 4, 64))  # heads, key/value heads, head size: OPT-1.3B, Llama-3 8B, Llama 1.1B
ATTENTION_ROWS, ATTENTION_CONTEXT = 8, 1024
COLD_BYTES = 256 * 2**20
SECONDS = 0.5  # spent on each implementation of a case
FEWEST, MOST = 7, 60  # calls of each

Call = Callable[[int], object]


@dataclass(frozen=True)
class Machine:
    """What this machine does at best: GB/s read and copied (bytes read and written), GFLOP/s of a large matmul in bfloat16
    or, where that is faster, float32.
    """

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


@dataclass(frozen=True)
class AttentionSpeed:
    """One shape, `new_tokens` a row; `read` is the time of merely reading as many bytes over ours."""

    heads: int
    kv_heads: int
    size: int
    new_tokens: int
    dtype: str
    milliseconds: float
    gb: float  # GB/s of keys and values
    gflop: float
    read: float


def check_kernels(device: torch.device) -> None:
    """Raise ConfigError where there are no kernels of ours, so that nothing can be measured."""
    if not devices.has_kernels(torch.empty(0, device=device)):
        raise ConfigError(f"there are no compiled kernels to measure ({compiled.REASON}); install with a C++ compiler at hand")


def measure_machine(device: torch.device) -> Machine:
    """The device's own memory, where it has some; `ConfigError` as of `check_kernels`."""
    check_kernels(device)
    size = 2048 if device.type == "cpu" else 8192
    source = torch.ones(COLD_BYTES // 8, dtype=torch.int64, device=device)
    square = torch.ones(size, size, dtype=fastest_dtype(device), device=device)
    target = torch.empty_like(source)
    calls: list[Call] = [
        lambda _: devices.backend_of(source).read_memory(source),
        lambda _: target.copy_(source),
        lambda _: square @ square,
    ]
    read, copy, matmul = interleaved(calls, device)
    return Machine(COLD_BYTES / read / 1e9, 2 * COLD_BYTES / copy / 1e9, 2 * size**3 / matmul / 1e9)


def fastest_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which the framework multiplies matrices fastest: on processors without instructions for bfloat16 that is float32, by
    hundreds of times.
    """
    if device.type != "cpu":
        return torch.bfloat16
    narrow, wide = (torch.ones(256, 256, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    by_narrow, by_wide = interleaved([lambda _: narrow @ narrow, lambda _: wide @ wide], device)
    return torch.bfloat16 if by_narrow < by_wide else torch.float32


def interleaved(calls: SequenceOf[Call], device: torch.device) -> list[float]:
    """Median seconds of each call; `call(i)` is given a counter to choose its copy of the weight by."""
    seconds: list[list[float]] = [[] for _ in calls]
    start = time.perf_counter()
    for i in range(MOST + 1):
        for call, taken in zip(calls, seconds, strict=True):
            taken.append(seconds_of(partial(call, i), device))
        if i >= FEWEST and time.perf_counter() - start > SECONDS * len(calls):
            break
    return [statistics.median(taken[1:]) for taken in seconds]


def measure_linear(shape: tuple[int, int], counts: SequenceOf[int], dtype: str, device: torch.device) -> Iterator[LinearSpeed]:
    """One result for each number of rows; `shape` is [N, K]."""
    columns, depth = shape
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(columns, depth, generator=generator) / depth**0.5).to(device, DTYPES[dtype])
    num_copies = max(2, COLD_BYTES // weight.nbytes)
    plain = [weight.clone() for _ in range(num_copies)]
    packed = [devices.backend_of(w).pack(w) for w in plain]
    for rows in counts:
        x = torch.randn(rows, depth, generator=generator).to(device, weight.dtype)
        ours, read, framework, *onednn = interleaved(_calls(x, plain, packed), device)
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


def _calls(x: Tensor, plain: list[Tensor], packed: list[PackedWeight]) -> list[Call]:
    """Ours, reading the weight, the framework, and oneDNN on packed weights where it serves the dtype."""
    count, backend = len(plain), devices.backend_of(x)
    calls: list[Call] = [
        lambda i: backend.packed_linear(x, packed[i % count]),
        lambda i: backend.read_memory(packed[(i + count // 2) % count].data),
        lambda i: F.linear(x, plain[i % count]),
    ]
    onednn = torch.ops.mkldnn
    if x.is_cuda:
        return calls
    try:
        reordered = [onednn._reorder_linear_weight(w, len(x)) for w in plain]
    except RuntimeError:
        return calls
    return [*calls, lambda i: onednn._linear_pointwise(x, reordered[i % count], None, "none", [], "")]


def measure_attention(
    heads: int, kv_heads: int, size: int, counts: SequenceOf[int], dtype: str, device: torch.device, context: int = ATTENTION_CONTEXT
) -> Iterator[AttentionSpeed]:
    """ATTENTION_ROWS rows of `context` tokens, `counts` new tokens each; one result for each count."""
    tables = BlockTables(ATTENTION_ROWS * (context // 16 + 4), 16, context // 16 + 4)
    generator = torch.Generator().manual_seed(0)
    shape = (tables.pool.num_blocks, kv_heads, 16, size)
    kv_bytes = 2 * ATTENTION_ROWS * context * kv_heads * size * DTYPES[dtype].itemsize
    num_copies = max(2, COLD_BYTES // kv_bytes)
    caches = [torch.randn(shape, generator=generator).to(device, DTYPES[dtype]) for _ in range(2)]
    copies = [(caches[0].clone(), caches[1].clone()) for _ in range(num_copies)]
    read = torch.empty(kv_bytes // 8, dtype=torch.int64, device=device)
    reads = [read.fill_(i).clone() for i in range(num_copies)]
    for row in range(ATTENTION_ROWS):
        tables.reserve(row, context + max(counts))
    for count in counts:
        start = context - count
        batch = unpadded.pack([Span(row, start, [0] * count, count, start + 1, count - 1) for row in range(ATTENTION_ROWS)], tables)
        query = torch.randn(batch.num_tokens, heads, size, generator=generator).to(device, DTYPES[dtype])
        calls: list[Call] = [partial(_attend, query, copies, batch), lambda i: devices.backend_of(read).read_memory(reads[i % num_copies])]
        ours, reading = interleaved(calls, device)
        flop = 4 * batch.num_tokens * heads * size * context
        yield AttentionSpeed(heads, kv_heads, size, count, dtype, ours * 1e3, kv_bytes / ours / 1e9, flop / ours / 1e9, reading / ours)


def _attend(query: Tensor, copies: list[tuple[Tensor, Tensor]], batch: RaggedBatch, i: int) -> object:
    return devices.backend_of(query).ragged_attention(query, *copies[i % len(copies)], batch, query.shape[2] ** -0.5)


def attention_as_markdown(results: SequenceOf[AttentionSpeed]) -> str:
    by_shape = columns(
        results,
        {
            "heads / key-value heads × size": lambda r: f"{r.heads} / {r.kv_heads} × {r.size}",
            "new tokens a row": lambda r: r.new_tokens,
            "ms": lambda r: f"{r.milliseconds:.3f}",
            "GB/s of keys and values": lambda r: f"{r.gb:.1f}",
            "of reading": lambda r: f"{r.read:.2f}",
            "GFLOP/s": lambda r: f"{r.gflop:.0f}",
        },
    )
    return f"attention of {ATTENTION_ROWS} rows × {ATTENTION_CONTEXT:,} tokens of context\n\n{by_shape}"


def as_markdown(machine: Machine, results: SequenceOf[LinearSpeed]) -> str:
    by_shape = columns(
        results,
        {
            "[N, K]": lambda r: f"{r.columns} × {r.depth}",
            "rows": lambda r: r.rows,
            "ms": lambda r: f"{r.milliseconds:.3f}",
            "GB/s": lambda r: f"{r.gb:.1f}",
            "of reading": lambda r: f"{r.read:.2f}",
            "GFLOP/s": lambda r: f"{r.gflop:.0f}",
            "of the matmul": lambda r: f"{r.gflop / machine.matmul_gflop:.2f}",
            "oneDNN packed / ours": lambda r: "–" if r.onednn is None else f"{r.onednn:.2f}",
            "F.linear / ours": lambda r: f"{r.plain:.2f}",
        },
    )
    limits = f"read {machine.read_gb:.1f} GB/s, copy {machine.copy_gb:.1f} GB/s, matmul {machine.matmul_gflop:.0f} GFLOP/s"
    return f"{limits}\n\n{by_shape}"
