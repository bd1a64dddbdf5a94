"""Counters of a run, in the field's terms: accepted never counts the extra token, emitted is accepted + 1."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Stats:
    """Sums over rows and steps; seconds by part of a step."""

    num_steps: int = 0
    num_row_steps: int = 0  # rows that emitted something, summed over steps
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_input_tokens: int = 0
    num_preemptions: int = 0
    acceptance: Counter[tuple[int, int]] = field(default_factory=Counter)  # (num_draft_tokens, num_accepted) → rows' steps
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("schedule", "draft", "forward", "verify", "settle"), 0.0))

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per row and step (the papers' τ)."""
        return self.num_emitted_tokens / self.num_row_steps if self.num_row_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def count_row(self, num_draft_tokens: int, num_accepted: int, num_emitted: int) -> None:
        """One row's step: drafted, accepted, and emitted (less than accepted + 1 only where the row stopped)."""
        self.num_row_steps += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        self.num_emitted_tokens += num_emitted
        self.acceptance[num_draft_tokens, num_accepted] += 1

    @property
    def num_drafts_by_position(self) -> list[int]:
        """Rows' steps that drafted a token at each position of the draft."""
        return self._by_position(0)

    @property
    def num_accepted_by_position(self) -> list[int]:
        """Rows' steps that accepted the token at each position of the draft."""
        return self._by_position(1)

    def _by_position(self, which: int) -> list[int]:
        longest = max((drafted for drafted, _ in self.acceptance), default=0)
        return [sum(n for pair, n in self.acceptance.items() if pair[which] > place) for place in range(longest)]

    def histogram(self) -> list[list[int]]:
        """[num_draft_tokens, num_accepted, count], in order: what the `replay` drafter reads."""
        return [[*pair, count] for pair, count in sorted(self.acceptance.items())]
