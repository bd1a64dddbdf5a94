"""What every drafter can do."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol, runtime_checkable

from torch import Tensor

from echelon.draft import Draft, Verdict
from echelon.heads.base import HiddenStateName
from echelon.sequence import PlannedRow


class Drafter(Protocol):
    """Keeps state per row (by `sequence.id`); a row may be forgotten and come back longer at any time.

    hidden_state_names  those of the target that `observe` wants, [T, len(hidden_state_names) · d] for the rows' new tokens, drafted ones
                        included; with none it gets None
    """

    hidden_state_names: tuple[HiddenStateName, ...] = ()

    def propose(self, rows: SequenceOf[PlannedRow]) -> Draft:
        """At most `max_draft_tokens` tokens for every row, 0 for some or all."""

    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict, hidden_states: Tensor | None) -> None:  # noqa: ARG002
        """What became of the last proposal; called once a step, before the tokens are appended. Where `propose` failed, or was not called,
        nothing was drafted, and what it has left behind must go.
        """
        return

    def forget(self, row: int) -> None:  # noqa: ARG002
        """The row finished, was preempted or aborted; a row never seen is fine."""
        return


@runtime_checkable
class Rehearsing(Protocol):
    """A drafter whose work costs something worth counting."""

    def rehearse(self, num_rows: int) -> None:
        """Do the work of drafting one token for so many rows, to be measured before any request has come."""


class NoDrafter(Drafter):
    """Plain decoding: every row emits one token a step."""

    def propose(self, rows: SequenceOf[PlannedRow]) -> Draft:
        return Draft.chains([()] * len(rows))
