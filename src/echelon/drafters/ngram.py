"""LLMA (Yang et al. 2023, "Inference with Reference"), also known as prompt lookup: propose what followed these tokens before."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from echelon.draft import Draft
from echelon.drafters.base import Drafter
from echelon.sequence import PlannedRow
from echelon.speculative_config import SpeculativeConfig

LONGEST_MATCH = 10  # tokens found again, of which more are no surer sign


class NgramIndex:
    """n-gram → the position after its latest occurrence, for n in `lengths`; extended by new tokens, never rebuilt.

    An n-gram is entered once the token after it is known, so a lookup of a text's last n tokens finds an earlier place.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._places: dict[tuple[int, ...], int] = {}
        self._num_seen = 0  # n-grams that end before this position are entered

    def extend(self, tokens: SequenceOf[int], end: int) -> None:
        """Enter all n-grams whose continuation lies before `end`."""
        for place in range(max(self._num_seen, 1), end):
            for length in self._lengths:
                if place >= length:
                    self._places[tuple(tokens[place - length : place])] = place
        self._num_seen = max(self._num_seen, end)

    def find(self, tokens: SequenceOf[int]) -> tuple[int, int]:
        """Position that followed the latest occurrence of the last n tokens, longest n first, and n; n is 0 on a miss."""
        for length in self._lengths:  # a text of fewer tokens is looked up whole
            if (place := self._places.get(tuple(tokens[-length:]))) is not None:
                return place, length
        return 0, 0


class NgramDrafter(Drafter):
    """Looks up the last tokens of each row in the row's own prompt, or in prompt and output. What became of a draft it need not hear."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, rows: SequenceOf[PlannedRow]) -> Draft:
        found = [self._propose_row(row) if row.max_draft_tokens > 0 else ([], 0) for row in rows]
        matched = np.repeat([length for _, length in found], [len(tokens) for tokens, _ in found])
        return Draft.chains([tokens for tokens, _ in found], scores=np.log1p(-(0.5**matched)))  # a stand-in that rises with the match

    def _propose_row(self, row: PlannedRow) -> tuple[list[int], int]:
        """The copy, and how many tokens before it were found again."""
        sequence, config = row.sequence, self._config
        index = self._indexes.get(sequence.id)
        if index is None:
            index = self._indexes[sequence.id] = NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max)
        end = sequence.num_prompt_tokens if config.prompt_lookup_source == "prompt" else len(sequence)
        index.extend(sequence.tokens, end)
        place, length = index.find(sequence.tokens)
        length = matched(sequence.tokens, place, length)
        return (copied(sequence.tokens, place, min(row.max_draft_tokens, config.most_tokens), end) if length else []), length

    def forget(self, row: int) -> None:
        self._indexes.pop(row, None)


def matched(tokens: SequenceOf[int], place: int, length: int) -> int:
    """How many of the last tokens stand before `place` as well, as far as LONGEST_MATCH; `length` of them are known to."""
    most = min(place, LONGEST_MATCH)
    while 0 < length < most and tokens[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def copied(tokens: SequenceOf[int], place: int, count: int, end: int) -> list[int]:
    """`count` tokens from `place` on; a copy that runs past `end` goes on with what it has copied, as in Lempel–Ziv."""
    copy = list(tokens[place : min(place + count, end)])
    while len(copy) < count and end == len(tokens):
        copy.append(copy[len(copy) - (end - place)])
    return copy
