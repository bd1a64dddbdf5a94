"""Counters of a run, in the field's terms: accepted never counts the extra token, emitted is accepted + 1."""

from __future__ import annotations

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
    num_drafts_by_position: list[int] = field(default_factory=list)
    num_accepted_by_position: list[int] = field(default_factory=list)
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
        missing = num_draft_tokens - len(self.num_drafts_by_position)
        if missing > 0:
            self.num_drafts_by_position += [0] * missing
            self.num_accepted_by_position += [0] * missing
        for position in range(num_draft_tokens):
            self.num_drafts_by_position[position] += 1
            self.num_accepted_by_position[position] += position < num_accepted
