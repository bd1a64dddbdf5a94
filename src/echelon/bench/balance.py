"""How many tokens of every row a step may verify before it is bound by arithmetic: Scylla's law (arXiv 2505.07858, Theorem 1.3).

A step of b rows with k tokens each does FLOPs(b, k) and moves Bytes(b, k): weights, keys and values, activations. While their ratio, the
arithmetic intensity, lies below the machine's balance (operations it does while it moves a byte), reading takes longer and further tokens
are almost free. k_opt(b) is where the two meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from echelon.bench.kernels import Machine
from echelon.bench.plot import Curve, line_chart
from echelon.bench.report import columns, table
from echelon.bench.step import measure_steps
from echelon.checkpoint.facts import num_heads_of
from echelon.estimate.roofline import ModelShape
from echelon.model.attention import record_layers
from echelon.model.load.loading import LoadedModel
from echelon.model.patches.linear import packed_weights

MOST_TOKENS = 256  # of a step that is measured
PUBLISHED_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


QWEN_72B = ModelShape(
    weights=80 * (8192 * (64 + 2 * 8) * 128 + 8192 * 8192 + 3 * 8192 * 29568) + 8192 * 152064,
    activations=80 * (8192 + 80 * 128 + 2 * 8192 + 3 * 8192 + 3 * 29568) + 8192 + 152064,
    query_size=80 * 64 * 256,
    cache_size=80 * 8 * 256,
    bytes_each=2,
)
H800_BALANCE = 989.5e12 / 3.35e12  # dense bfloat16 over bandwidth; four of each are in the same ratio


def published_k_opt(batch_size: int) -> float:
    """Scylla's own curve for Qwen2.5-72B on four H800 after 10,000 tokens (as reported of Theorem 1.3)."""
    return 27904.0 * math.sqrt(1.0 + 0.034 / batch_size) - 27897.0


def shape_of(loaded: LoadedModel) -> ModelShape:
    """The shape of a loaded model."""
    shapes = record_layers(loaded.model)
    linear = [m for m in loaded.model.modules() if hasattr(m, "in_features")]
    sizes = [(w.columns, w.depth) for w in packed_weights(loaded.model)] or [(m.out_features, m.in_features) for m in linear]
    heads, _ = num_heads_of(loaded.model.config)
    return ModelShape(
        sum(columns * depth for columns, depth in sizes),
        sum(columns + depth for columns, depth in sizes),
        sum(heads * (s.key_size + s.value_size) for s in shapes),
        sum(s.num_kv_heads * (s.key_size + s.value_size) for s in shapes),
        loaded.model.dtype.itemsize,
    )


@dataclass(frozen=True)
class BalancePoint:
    """A step of `batch_size` rows with `k` tokens each: milliseconds, and operations a byte."""

    batch_size: int
    k: int
    milliseconds: float
    intensity: float


@dataclass(frozen=True)
class Balance:
    """What was measured of a model, and where the law puts k_opt."""

    machine: Machine
    shape: ModelShape
    context: int
    points: list[BalancePoint]

    @property
    def balance(self) -> float:
        """Operations that the machine does while it moves a byte."""
        return self.machine.matmul_gflop / self.machine.read_gb

    @property
    def batch_sizes(self) -> list[int]:
        """In rising order."""
        return sorted({p.batch_size for p in self.points})

    def predicted(self, batch_size: int) -> float:
        """k_opt by the roofline."""
        return self.shape.k_opt(batch_size, self.context, self.balance)

    def measured(self, batch_size: int) -> float:
        """k_opt as the steps show it: where what a step of one token takes meets the line of those that arithmetic bounds."""
        own = sorted((p.k, p.milliseconds) for p in self.points if p.batch_size == batch_size)
        if len(own) < 3:
            return math.nan
        (k1, t1), (k2, t2) = own[-2:]
        slope = (t2 - t1) / (k2 - k1)
        if slope <= 0.0:
            return math.inf
        return max(1.0, k2 - (t2 - own[0][1]) / slope)

    def as_json(self) -> dict[str, Any]:
        """Everything, with both k_opt by batch."""
        both = [{"batch_size": b, "roofline": _known(self.predicted(b)), "measured": _known(self.measured(b))} for b in self.batch_sizes]
        return asdict(self) | {"balance": self.balance, "k_opt": both}


def _known(length: float) -> float | None:
    """For JSON, which has no infinity: a length without a bound is None."""
    return length if math.isfinite(length) else None


def measure_balance(
    loaded: LoadedModel,
    machine: Machine,
    batch_sizes: SequenceOf[int],
    context: int,
    rounds: int,
    on_step: Callable[[str], None] = lambda _: None,
) -> Balance:
    """Measure steps of every batch with 1, 2, 4 … tokens a row, up to MOST_TOKENS in all and at least three numbers of them."""
    shape, points = shape_of(loaded), []
    for size in batch_sizes:
        for k in numbers_of(size):
            (speed,) = measure_steps(loaded, [size * k], k, context, rounds)
            points.append(BalancePoint(size, k, speed.milliseconds, shape.intensity(size, k, context)))
            on_step(f"batch {size}, {k} tokens a row")
    return Balance(machine, shape, context, points)


def numbers_of(batch_size: int) -> list[int]:
    """Tokens a row that are measured."""
    return [k for k in (2**i for i in range(12)) if k <= 4 or k * batch_size <= MOST_TOKENS]


def as_markdown(found: Balance) -> str:
    """Tables: the law beside what was measured, every step, and the published curve."""
    laws = table(
        ["batch", "intensity of a plain step", "k_opt, roofline", "k_opt, measured"],
        [
            (b, f"{found.shape.intensity(b, 1, found.context):.1f}", _number(found.predicted(b)), _number(found.measured(b)))
            for b in found.batch_sizes
        ],
    )
    steps = columns(
        found.points,
        {
            "batch": lambda p: p.batch_size,
            "tokens a row": lambda p: p.k,
            "ms": lambda p: f"{p.milliseconds:.2f}",
            "ms a token": lambda p: f"{p.milliseconds / p.k / p.batch_size:.3f}",
            "operations a byte": lambda p: f"{p.intensity:.1f}",
        },
    )
    published = table(
        ["batch", "k_opt, as published", "k_opt, roofline"],
        [(b, f"{published_k_opt(b):.0f}", _number(QWEN_72B.k_opt(b, 10_000, H800_BALANCE))) for b in PUBLISHED_BATCHES],
    )
    rate, read = found.machine.matmul_gflop, found.machine.read_gb
    said = f"Balance of this machine: {found.balance:.1f} operations a byte ({rate:,.0f} GFLOP/s, {read:.1f} GB/s)."
    theirs = "Qwen2.5-72B on four H800 after 10,000 tokens, Scylla's formula beside the same roofline:"
    return "\n\n".join((said, laws, steps, theirs, published))


def _number(k: float) -> str:
    return "none" if math.isinf(k) else "–" if math.isnan(k) else f"{k:.1f}"


def charts(folder: Path, found: Balance) -> list[Path]:
    """Draw k_opt by batch, and the intensity of steps."""
    sizes = found.batch_sizes
    laws = [
        Curve("roofline", [(b, found.predicted(b)) for b in sizes if math.isfinite(found.predicted(b))], "#4575b4", "--"),
        Curve("measured", [(b, found.measured(b)) for b in sizes if math.isfinite(found.measured(b))], "#1a9850"),
    ]
    path = folder / "balance.png"
    line_chart(path, {"tokens of a row until arithmetic bounds the step": laws}, "k_opt")
    intensities = [
        Curve(f"batch {b}", [(p.k, p.intensity) for p in found.points if p.batch_size == b], colour)
        for b, colour in zip(sizes, ("#4575b4", "#1a9850", "#d98c5f", "#762a83", "#d73027", "#777777"), strict=False)
    ]
    other = folder / "intensity.png"
    line_chart(other, {"arithmetic intensity of a step": intensities}, "operations a byte", found.balance, "tokens a row")
    return [path, other]
