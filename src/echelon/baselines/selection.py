"""Which of the running rows take part in a step, for strategies whose batches are rectangles. Sees no tensors.

In a rectangle every row is as wide as the widest, so a prompt beside a decoding row would pad it to the prompt's length: prompts are read
in steps of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from echelon.sequence import Sequence

NumCached = Callable[[Sequence], int]


@dataclass(frozen=True)
class Selection:
    """The rows of a step; `is_group`: were they found by equal length? `None` where nothing was looked for."""

    rows: list[Sequence]
    is_group: bool | None = None


class Selector(Protocol):
    def choose(self, running: SequenceOf[Sequence], num_cached: NumCached) -> Selection: ...


def _reading_or_all(rows: SequenceOf[Sequence], num_cached: NumCached) -> list[Sequence]:
    """The rows that still read their prompt; all of them where none does."""
    return [s for s in rows if len(s) - num_cached(s) > 1] or list(rows)


class PromptsApart:
    """Every running row; while prompts are being read, those alone."""

    def choose(self, running: SequenceOf[Sequence], num_cached: NumCached) -> Selection:
        return Selection(_reading_or_all(running, num_cached))


class SameLength:
    """`size` rows of equal length and equal KV state from all that are running, the first that are found in order of arrival (EXSPEC).

    Where there are none, the first `size` rows run, of whatever lengths. Near the end, when fewer are left, all of them are a group if
    they are equal.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def choose(self, running: SequenceOf[Sequence], num_cached: NumCached) -> Selection:
        size = min(self._size, len(running))
        groups: dict[tuple[int, int], list[Sequence]] = {}
        for sequence in running:
            group = groups.setdefault((len(sequence), num_cached(sequence)), [])
            group.append(sequence)
            if len(group) == size:
                return Selection(group, is_group=True)
        return Selection(_reading_or_all(running[:size], num_cached), is_group=False)
