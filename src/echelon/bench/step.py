"""What one forward pass costs as it gets wider, beside what the machine needs for it at least: to read the weights, and to multiply.

Batched speculation earns the difference: if a pass over 40 tokens costs little more than a pass over one, every accepted token is nearly
free. Passes of all widths, reads of the weights and large products are interleaved; figures are medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from echelon.batch import RaggedBatch, Span
from echelon.bench.clock import clock_of, kernel_seconds, seconds_of
from echelon.bench.kernels import fastest_dtype
from echelon.bench.report import columns
from echelon.checkpoint.facts import num_heads_of
from echelon.kv.cache import cache_for_rows
from echelon.model.attention import record_layers
from echelon.model.load.loading import LoadedModel
from echelon.model.patches.linear import packed_weights
from echelon.model.patches.packing import Packing
from echelon.model.runner import ModelRunner
from echelon.ops import compiled, cpu, devices
from echelon.ops.contract import PackedWeight

PRODUCT_ROWS, PRODUCT_SIZE = 512, 2048
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
    arithmetic: float  # as many operations at the rate of the fastest large product

    @property
    def limit(self) -> float:
        """What a pass takes at least."""
        return max(self.reading, self.arithmetic)


class StepRounds:
    """Passes of several widths through one model, a round at a time, so that models can take turns. The first round warms up."""

    def __init__(self, loaded: LoadedModel, widths: SequenceOf[int], tokens_per_row: int, context: int) -> None:
        self._widths, self._tokens_per_row, self._context = widths, tokens_per_row, context
        num_rows = -(-max(widths) // tokens_per_row)
        length = context + tokens_per_row
        cache = cache_for_rows(record_layers(loaded.model), num_rows, length, loaded.model.dtype, loaded.device)
        self._runner = ModelRunner(loaded, cache)
        for row in range(num_rows):
            if context:
                self._runner.feed([Span(row, 0, [1 + row] * context, 0, context)])
        self._batches = [_batch(self._runner, width, tokens_per_row, context) for width in widths]
        packed = packed_weights(loaded.model)
        self._weights = [w.data for w in packed]
        self._products = _products(loaded, max((w.integers.bits for w in packed), key=partial(_numbers_of, packed)))
        self._taken: list[list[tuple[float, float, float]]] = [[] for _ in widths]
        self._reads: list[float] = []
        self._multiplied: list[list[float]] = [[] for _ in self._products]

    def take(self) -> None:
        """One round: a read of the weights, the large products, a pass of every width."""
        device = self._runner.cache.device
        self._reads.append(seconds_of(partial(_read, self._weights), device))
        for product, seconds in zip(self._products, self._multiplied, strict=True):
            seconds.append(seconds_of(product, device))
        for batch, results in zip(self._batches, self._taken, strict=True):
            results.append(_timed(self._runner, batch))

    def results(self) -> list[StepSpeed]:
        """One a width: medians of all rounds but the first."""
        reading = statistics.median(self._reads[1:]) * 1e3
        seconds = min(statistics.median(taken[1:]) for taken in self._multiplied)
        rate = 2 * PRODUCT_ROWS * PRODUCT_SIZE**2 / seconds / 1e3  # a millisecond
        operations = [_operations(self._runner, batch) for batch in self._batches]
        return [
            _result(width, self._tokens_per_row, self._context, results[1:], reading, count / rate)
            for width, results, count in zip(self._widths, self._taken, operations, strict=True)
        ]


def measure_steps(
    loaded: LoadedModel,
    widths: SequenceOf[int],
    tokens_per_row: int,
    context: int,
    rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> list[StepSpeed]:
    """One result a width."""
    steps = StepRounds(loaded, widths, tokens_per_row, context)
    for _ in range(rounds + 1):
        steps.take()
        on_round()
    return steps.results()


def _numbers_of(packed: SequenceOf[PackedWeight], bits: int) -> int:
    """Entries of the weights that have so many bits."""
    return sum(w.columns * w.depth for w in packed if w.integers.bits == bits)


def _products(loaded: LoadedModel, bits: int) -> list[Callable[[], object]]:
    """Large products: by our kernel over weights of so many bits (0: numbers), as most of the model's are, and on a CPU by the framework
    too, of integers where it multiplies them exactly, or in the faster of the model's dtype and float32.

    Without instructions of its own for a narrow dtype the framework takes hundreds of times as long in it.
    """
    device = loaded.device
    x, weight = (torch.ones(n, PRODUCT_SIZE, dtype=loaded.model.dtype, device=device) for n in (PRODUCT_ROWS, PRODUCT_SIZE))
    backend, packed = devices.backend_of(x), Packing(bits=bits).pack(weight)
    ours: Callable[[], object] = lambda: backend.packed_linear(x, packed)  # noqa: E731
    if device.type == "cpu" and compiled.isa() == "generic":
        return [ours]  # the framework's is held to no such family
    if bits:
        rows, columns = x.to(torch.int8), weight.to(torch.int8).t()
        return [ours, lambda: torch._int_mm(rows, columns)] if _is_exact(rows, columns) else [ours]
    theirs = [t.to(fastest_dtype(device)) for t in (x, weight)]
    return [ours, lambda: F.linear(*theirs)]


def _is_exact(rows: torch.Tensor, columns: torch.Tensor) -> bool:
    """Whether the framework's product of integers is right for the largest: on AVX2 it saturates where two products meet in 16 bits."""
    largest = 127
    product = torch._int_mm(torch.full_like(rows, largest), torch.full_like(columns, largest))
    return bool((product == largest**2 * rows.shape[1]).all())


def _operations(runner: ModelRunner, batch: RaggedBatch) -> int:
    """Multiplications and additions of linear layers and of attention in a pass whose tokens all want logits."""
    loaded, cache = runner.loaded, runner.cache
    weights = sum(w.columns * w.depth for w in packed_weights(loaded.model))
    heads, _ = num_heads_of(loaded.model.config)
    keys = int(batch.positions.sum()) + batch.num_tokens
    return 2 * batch.num_tokens * weights + sum(
        2 * keys * heads * (k.shape[3] + v.shape[3]) for k, v in zip(cache.keys, cache.values, strict=True)
    )


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


def _result(
    width: int, tokens_per_row: int, context: int, taken: list[tuple[float, float, float]], reading: float, arithmetic: float
) -> StepSpeed:
    total, in_linear, in_attention = (statistics.median(part) * 1e3 for part in zip(*taken, strict=True))
    other = total - in_linear - in_attention
    return StepSpeed(width, tokens_per_row, context, total, in_linear, in_attention, other, reading, arithmetic)


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
            "its arithmetic": lambda r: f"{r.arithmetic:.1f}",
            "pass / the larger": lambda r: f"{r.milliseconds / r.limit:.2f}",
        },
    )
