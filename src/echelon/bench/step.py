"""What one forward pass costs as it gets wider, beside what reading the weights costs.

Batched speculation earns the difference: if a pass over 40 tokens costs little more than a pass over one, every accepted token is nearly
free. Passes of all widths and reads of the weights are interleaved; figures are medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial

import torch

from echelon.batch import RaggedBatch, Span
from echelon.bench.clock import clock_of, kernel_seconds, seconds_of
from echelon.bench.report import columns
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache
from echelon.model.attention import record_layers
from echelon.model.load.loading import LoadedModel
from echelon.model.patches.weights import PackedParameter
from echelon.model.runner import ModelRunner
from echelon.ops import compiled, cpu, devices

BLOCK = 16
KERNELS = {"linear": ("_linear", "gemm", "nvjet", "cutlass"), "attention": ("_attend", "_merge_splits")}  # on CUDA, in their names


@dataclass(frozen=True)
class StepSpeed:
    """A pass over `tokens` new tokens in rows of at most `tokens_per_row`, each with `context` tokens before them. Milliseconds."""

    tokens: int
    tokens_per_row: int
    context: int
    milliseconds: float
    linear: float
    attention: float
    other: float  # everything else: norms, rotary embeddings, activations, the framework's own work
    reading: float  # merely reading the packed weights, between the passes


def packed_weights(loaded: LoadedModel) -> list[torch.Tensor]:
    """What a pass has to read: every packed weight once."""
    packed = {w.data.data_ptr(): w.data for p in loaded.model.parameters() if isinstance(p, PackedParameter) for w in p.all_packed}
    return list(packed.values())


def measure_steps(
    loaded: LoadedModel,
    widths: SequenceOf[int],
    tokens_per_row: int,
    context: int,
    rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> list[StepSpeed]:
    """One result a width."""
    num_rows = -(-max(widths) // tokens_per_row)
    blocks_per_row = -(-(context + tokens_per_row) // BLOCK)
    tables = BlockTables(num_rows * blocks_per_row, BLOCK, blocks_per_row)
    runner = ModelRunner(loaded, KVCache(record_layers(loaded.model), tables, loaded.model.dtype, loaded.device))
    for row in range(num_rows):
        tables.reserve(row, context + tokens_per_row)
        if context:
            runner.feed([Span(row, 0, [1 + row] * context, 0, context)])
    batches = [_batch(runner, width, tokens_per_row, context) for width in widths]
    weights = packed_weights(loaded)
    taken: list[list[tuple[float, float, float]]] = [[] for _ in widths]
    reads = []
    for _ in range(rounds + 1):
        reads.append(seconds_of(partial(_read, weights), loaded.device))
        for batch, results in zip(batches, taken, strict=True):
            results.append(_timed(runner, batch))
        on_round()
    reading = statistics.median(reads[1:]) * 1e3
    return [_result(width, tokens_per_row, context, results[1:], reading) for width, results in zip(widths, taken, strict=True)]


def _read(weights: SequenceOf[torch.Tensor]) -> None:
    for weight in weights:
        devices.backend_of(weight).read_memory(weight)


def _timed(runner: ModelRunner, batch: RaggedBatch) -> tuple[float, float, float]:
    """Seconds of a pass, and of linear layers and attention in it; on a CUDA device the parts are those of a second pass, by kernel."""
    device, now = runner.cache.device, clock_of(runner.cache.device)
    batch.plans.clear()
    before, start = _seconds_in_kernels(), now()
    runner.run(batch)
    total = now() - start
    if device.type == "cuda":
        batch.plans.clear()
        by_kernel = kernel_seconds(partial(runner.run, batch), device)
        linear, attention = (sum(s for name, s in by_kernel.items() if any(word in name for word in words)) for words in KERNELS.values())
    else:
        linear, attention = (after - earlier for after, earlier in zip(_seconds_in_kernels(), before, strict=True))
    return total, linear, attention


def _seconds_in_kernels() -> tuple[float, float]:
    return cpu.seconds_in_kernels() if compiled.is_built() else (0.0, 0.0)


def _batch(runner: ModelRunner, width: int, tokens_per_row: int, context: int) -> RaggedBatch:
    counts = [min(tokens_per_row, width - start) for start in range(0, width, tokens_per_row)]
    return runner.pack([Span(row, context, [7] * n, n, context + 1, n - 1) for row, n in enumerate(counts)])


def _result(width: int, tokens_per_row: int, context: int, taken: list[tuple[float, float, float]], reading: float) -> StepSpeed:
    total, in_linear, in_attention = (statistics.median(part) * 1e3 for part in zip(*taken, strict=True))
    return StepSpeed(width, tokens_per_row, context, total, in_linear, in_attention, total - in_linear - in_attention, reading)


def as_markdown(results: SequenceOf[StepSpeed]) -> str:
    one = results[0]
    return columns(
        results,
        {
            "tokens": lambda r: r.tokens,
            "ms": lambda r: f"{r.milliseconds:.1f}",
            f"× the pass over {one.tokens}": lambda r: f"{r.milliseconds / one.milliseconds:.2f}",
            "linear": lambda r: f"{r.linear:.1f}",
            "attention": lambda r: f"{r.attention:.1f}",
            "other": lambda r: f"{r.other:.1f}",
            "reading the weights": lambda r: f"{r.reading:.1f}",
            "pass / reading": lambda r: f"{r.milliseconds / r.reading:.2f}",
        },
    )
