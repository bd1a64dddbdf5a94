"""Counters of a run, in the field's terms: accepted never counts the extra token, emitted is accepted + 1."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

from echelon.draft import Verdict
from echelon.sequence import PlannedRow


class DrafterFault(StrEnum):
    """What a drafter does wrong, and that it is left out for it; see `drafters.guard`."""

    RAISED = "raised"
    GARBAGE = "garbage"
    TOO_SLOW = "too slow"
    CUT_OFF = "cut off"


PARTS = ("schedule", "draft", "layout", "forward", "verify", "settle")  # of a step, in order


class StepTimer:
    """Measures the parts of steps by `clock`, one part at a time: `with timer("draft"): ...`.

    A clock may wait for the device. Parts that overlap with a device at work (`is_overlapped`) are measured by the host's own.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock, self._reading, self._part, self._start = clock, clock, PARTS[0], 0.0
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def __call__(self, part: str, is_overlapped: bool = False) -> Self:
        self._part, self._reading = part, time.perf_counter if is_overlapped else self.clock
        return self

    def __enter__(self) -> None:
        self._start = self._reading()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._part] += self._reading() - self._start

    def take(self) -> dict[str, float]:
        """Return seconds by part since the last call."""
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return seconds


@dataclass(frozen=True)
class StepRecord:
    """One step, once it is settled.

    rows, verdict     what was planned, and what survived, row by row
    num_emitted       tokens that every row emitted: accepted + 1, fewer only where the row stopped
    seconds           by part of the step; of steps in flight, what was spent since the last record
    """

    rows: list[PlannedRow]
    verdict: Verdict
    num_emitted: list[int]
    num_preempted: int
    seconds: dict[str, float]

    @property
    def num_input_tokens(self) -> int:
        """Tokens fed to the target."""
        return sum(row.num_new + kept.num_draft_tokens for row, kept in zip(self.rows, self.verdict, strict=True))


StepObserver = Callable[[StepRecord], None]


@dataclass(frozen=True)
class Occupancy:
    """What one forward pass holds and loads, in rows of input and slots of KV; a slot is one token's keys and values in every layer."""

    num_inputs: int
    num_reserved: int
    num_touched: int
    num_live: int
    index_bytes: int


@dataclass
class Usage:
    """Sums over the forward passes of one model. Sliding windows are not taken off what attention loads.

    num_tokens          real tokens fed
    num_inputs          rows fed to the layers, padding included
    num_replays         passes that a captured graph carried out (`model.graphs.programs`)
    num_captures        graphs that were captured
    num_touched         slots that attention loads
    num_live            those of them that hold a token of their row
    kv_bytes_reserved   bytes that no other row could use, and the largest of any pass
    kv_bytes_touched    bytes that attention loads
    index_bytes         tables, slots and masks that say what lies where
    layout_seconds      shifting and copying keys and values so that they form a rectangle; part of the time of the pass or just before
    num_group_choices   passes whose rows were looked for in a window of equal lengths
    num_group_hits      those of them for which enough were found
    """

    num_passes: int = 0
    num_tokens: int = 0
    num_inputs: int = 0
    num_replays: int = 0
    num_captures: int = 0
    num_touched: int = 0
    num_live: int = 0
    kv_bytes_reserved: int = 0
    largest_kv_bytes_reserved: int = 0
    kv_bytes_touched: int = 0
    index_bytes: int = 0
    layout_seconds: float = 0.0
    num_group_choices: int = 0
    num_group_hits: int = 0

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Passes inside `with` are not served work, and do not count."""
        before = replace(self)
        try:
            yield
        finally:
            vars(self).update(vars(before))

    @property
    def padded_input_share(self) -> float:
        """Share of the rows fed that were padding."""
        return 1.0 - self.num_tokens / self.num_inputs if self.num_inputs else 0.0

    @property
    def padded_kv_share(self) -> float:
        """Share of the slots loaded that held no token of their row."""
        return 1.0 - self.num_live / self.num_touched if self.num_touched else 0.0

    def count(self, num_tokens: int, occupancy: Occupancy, bytes_per_slot: int) -> None:
        """Add one pass."""
        self.num_passes += 1
        self.num_tokens += num_tokens
        self.num_inputs += occupancy.num_inputs
        self.num_touched += occupancy.num_touched
        self.num_live += occupancy.num_live
        reserved = occupancy.num_reserved * bytes_per_slot
        self.kv_bytes_reserved += reserved
        self.largest_kv_bytes_reserved = max(self.largest_kv_bytes_reserved, reserved)
        self.kv_bytes_touched += occupancy.num_touched * bytes_per_slot
        self.index_bytes += occupancy.index_bytes


@dataclass
class Stats:
    """Sums over rows and steps; seconds by part of a step, `draft` with what a drafter does after the verdict. `target` and `draft` count
    the passes of the two models, or of the target and its head, and what they cost in memory.
    """

    num_steps: int = 0
    num_row_steps: int = 0  # rows that emitted something, summed over steps
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_input_tokens: int = 0
    num_preemptions: int = 0
    acceptance: Counter[tuple[int, int]] = field(default_factory=Counter)  # (num_draft_tokens, num_accepted) → rows' steps
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    target: Usage = field(default_factory=Usage)
    draft: Usage = field(default_factory=Usage)
    drafter_faults: Counter[DrafterFault] = field(default_factory=Counter)

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per row and step (the papers' τ)."""
        return self.num_emitted_tokens / self.num_row_steps if self.num_row_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted of drafted tokens."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def num_group_choices(self) -> int:
        """Steps whose rows were looked for in a window of equal lengths."""
        return self.target.num_group_choices

    @property
    def num_group_hits(self) -> int:
        """Those of them in which enough were found."""
        return self.target.num_group_hits

    @property
    def group_rate(self) -> float:
        """Share of steps in which enough rows of equal length were found (EXSPEC)."""
        return self.num_group_hits / self.num_group_choices if self.num_group_choices else 0.0

    def count(self, step: StepRecord) -> None:
        """Add one step, and of its rows those that emitted something."""
        self.num_steps += 1
        self.num_input_tokens += step.num_input_tokens
        self.num_preemptions += step.num_preempted
        for part, seconds in step.seconds.items():
            self.seconds[part] += seconds
        for kept, emitted in zip(step.verdict, step.num_emitted, strict=True):
            if emitted:
                self.num_row_steps += 1
                self.num_draft_tokens += kept.num_draft_tokens
                self.num_accepted_tokens += len(kept.path)
                self.num_emitted_tokens += emitted
                self.acceptance[kept.num_draft_tokens, len(kept.path)] += 1

    @property
    def num_drafts_by_position(self) -> list[int]:
        """Rows' steps that drafted a token at each position of the draft."""
        return self._by_position(0)

    @property
    def num_accepted_by_position(self) -> list[int]:
        """Rows' steps that accepted the token at each position of the draft."""
        return self._by_position(1)

    def _by_position(self, which: int) -> list[int]:
        steps = dict(self.acceptance)  # a copy in one step, which no other thread can interrupt
        longest = max((drafted for drafted, _ in steps), default=0)
        return [sum(n for pair, n in steps.items() if pair[which] > position) for position in range(longest)]

    @property
    def num_steps_by_length(self) -> dict[int, int]:
        """Rows' steps by how many drafted tokens of the row were verified."""
        found: Counter[int] = Counter()
        for (drafted, _), count in dict(self.acceptance).items():
            found[drafted] += count
        return dict(sorted(found.items()))

    def histogram(self) -> list[list[int]]:
        """[num_draft_tokens, num_accepted, count], in order: of all rows' steps."""
        return [[*pair, count] for pair, count in sorted(self.acceptance.items())]
