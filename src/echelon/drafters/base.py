"""What every drafter can do."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from echelon.draft import Draft, Float64, Int64, Verdict
from echelon.heads.base import HiddenStateName
from echelon.sequence import PlannedRow, Sequence
from echelon.stats import Usage


class Drafter(Protocol):
    """Keeps state per row (by `sequence.id`); a row may be forgotten and come back longer at any time.

    hidden_state_names  those of the target that `observe` wants, [T, len(hidden_state_names) · d] for the rows' new tokens, drafted ones
                        included; with none it gets None
    usage               counts its forward passes; None: it makes none
    """

    hidden_state_names: tuple[HiddenStateName, ...] = ()
    usage: Usage | None = None

    @property
    def unguarded(self) -> Drafter:
        """What drafts, without the guard that it may stand behind."""
        return self

    def propose(self, rows: SequenceOf[PlannedRow]) -> Draft:
        """At most `max_draft_tokens` tokens for every row, 0 for some or all."""

    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict, hidden_states: Tensor | None) -> None:  # noqa: ARG002
        """What became of the last proposal; called once a step, before the tokens are appended. Where `propose` failed, or was not called,
        nothing was drafted: state that it wrote for this step must be rolled back.
        """
        return

    def conclude(self, rows: SequenceOf[Sequence]) -> None:  # noqa: ARG002
        """Rows have ended and are about to leave; keys and values that are made of them now serve other texts that begin alike."""
        return

    def forget(self, row: int) -> None:  # noqa: ARG002
        """The row finished, was preempted or aborted; a row never seen is fine."""
        return


Pace = Callable[[Int64, Float64], NDArray[np.bool_]]


def every(rows: Int64, scores: Float64) -> NDArray[np.bool_]:  # noqa: ARG001
    """Go on with every draft."""
    return np.ones(len(rows), np.bool_)


@runtime_checkable
class LevelDrafter(Protocol):
    """A drafter that works level by level, a pass each, and may stop after any.

    pace  asked after each level which drafts grow by another: of paths, with the places of their rows int64[M] among those proposed for and
          the logarithms of their tokens' probabilities float64[M, d], bool[M]
    """

    pace: Pace

    @property
    def breadth(self) -> int:
        """Most tokens of a row in a level."""

    def rehearse(self, num_rows: int) -> None:
        """Do the work of drafting a level for so many rows, to be measured before any request has come."""


class NoDrafter(Drafter):
    """Plain decoding: every row emits one token a step."""

    def propose(self, rows: SequenceOf[PlannedRow]) -> Draft:
        return Draft.none(len(rows))
