"""Which passes may share a captured graph: those that fit its bucket, a count of everything that a launch or a shape depends on.

A pass costs what its bucket holds, so tokens and rows of logits are filled up by little. Entries left over in a plan cost next to nothing
(a program that ends at once), and so may grow by powers of two, which keeps the number of buckets down while texts grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from echelon.batch import RaggedBatch
from echelon.ops.triton.plan import SPLIT, Tables

DIGITS = 4
LEAST = 8  # entries of a table that has any


@dataclass(frozen=True)
class PlanSize:
    """Room in the tables of a plan, named as there; `depth` of paths."""

    items: int
    late: int
    depth: int
    states: int


@dataclass(frozen=True)
class Bucket:
    """num_splits: of the longest row's keys, which the width of the block table follows from; plans: one a plan key, in order."""

    num_tokens: int
    num_logits: int
    num_splits: int
    plans: tuple[PlanSize, ...]


def filled_up(count: int) -> int:
    """The smallest number ≥ count whose binary digits after the first DIGITS are zeros: less than a ninth of it is padding, and there are
    eight such numbers an octave.
    """
    step = 1 << max(0, (count - 1).bit_length() - DIGITS)
    return -(-count // step) * step


def power_up(count: int) -> int:
    """0, or the smallest power of two that is at least LEAST and holds `count`."""
    return 1 << max(count - 1, LEAST - 1).bit_length() if count else 0


def bucket_of(batch: RaggedBatch, tables: Iterable[Tables[Any]]) -> Bucket:
    """The bucket of a pass over `batch`, whose plans are `tables`."""
    num_splits = -(-int(batch.kv_lens.max()) // SPLIT)
    sizes = (PlanSize(power_up(len(t.items)), power_up(len(t.late)), power_up(t.paths.shape[1]), power_up(t.num_states)) for t in tables)
    return Bucket(filled_up(batch.num_tokens), filled_up(len(batch.logit_rows)), 1 << (num_splits - 1).bit_length(), tuple(sizes))


def common(buckets: Iterable[Bucket]) -> Bucket:
    """The smallest that holds all of these."""
    given = list(buckets)
    plans = zip(*(b.plans for b in given), strict=True)
    return Bucket(
        max(b.num_tokens for b in given),
        max(b.num_logits for b in given),
        max(b.num_splits for b in given),
        tuple(PlanSize(*(max(getattr(s, name) for s in sizes) for name in ("items", "late", "depth", "states"))) for sizes in plans),
    )
