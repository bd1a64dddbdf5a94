"""A drafting method in a file of its own: it repeats what followed the last token when that stood in the text before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echelon import SpeculativeConfig
from echelon.config import EngineConfig
from echelon.draft import Draft
from echelon.drafters.base import Drafter
from echelon.sequence import PlannedRow
from echelon.storage import Storage


class AfterTheSame(Drafter):
    """Proposes up to `limit` tokens."""

    hidden_state_names: tuple[str, ...] = ()

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def propose(self, rows: Sequence[PlannedRow]) -> Draft:
        return Draft.chains([self._continuation(row.sequence.tokens)[: row.max_draft_tokens] for row in rows])

    def _continuation(self, tokens: list[int]) -> list[int]:
        before = [i for i, token in enumerate(tokens[:-1]) if token == tokens[-1]]
        return tokens[before[-1] + 1 :][: self._limit] if before else []

    def observe(self, rows: Any, verdict: Any, hidden_states: Any) -> None: ...

    def forget(self, row: int) -> None: ...


def build(_config: EngineConfig, spec: SpeculativeConfig, _storage: Storage) -> AfterTheSame:
    return AfterTheSame(spec.num_speculative_tokens)
