"""Choice of the rows that take part in a step, for strategies whose batches are rectangles. Sees no tensors.

In a rectangle every row is as wide as the widest, so a prompt beside a decoding row would pad it to the prompt's length: prompts are read
in steps of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from echelon.sequence import Sequence
from echelon.stats import Usage

NumCached = Callable[[Sequence], int]


def prompts_apart(running: SequenceOf[Sequence], num_cached: NumCached) -> list[Sequence]:
    """Every running row; while prompts are being read, those alone."""
    return [s for s in running if len(s) - num_cached(s) > 1] or list(running)


class SameLength:
    """`size` rows of equal length and equal KV state from all that are running, the first such group in order of arrival (EXSPEC).

    Where there are none, the first `size` rows run, of whatever lengths. Near the end, when fewer are left, all of them are a group if
    they are equal. `usage` counts both.
    """

    def __init__(self, size: int, usage: Usage) -> None:
        self._size, self._usage = size, usage

    def __call__(self, running: SequenceOf[Sequence], num_cached: NumCached) -> list[Sequence]:
        size = min(self._size, len(running))
        self._usage.num_group_choices += 1
        groups: dict[tuple[int, int], list[Sequence]] = {}
        for sequence in running:
            group = groups.setdefault((len(sequence), num_cached(sequence)), [])
            group.append(sequence)
            if len(group) == size:
                self._usage.num_group_hits += 1
                return group
        return prompts_apart(running[:size], num_cached)
