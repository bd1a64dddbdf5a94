"""Copies: how much of the text before them stands there too."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echelon.drafters.ngram import LONGEST_MATCH, NgramIndex, matched


@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=60), shortest=st.integers(1, 3), more=st.integers(0, 2))
def test_what_is_found_again_is_counted_to_its_end(tokens: list[int], shortest: int, more: int) -> None:
    index = NgramIndex(shortest, shortest + more)
    index.extend(tokens, len(tokens))
    place, length = index.find(tokens)
    found = matched(tokens, place, length)
    if length == 0:
        assert found == 0, "nothing is copied"
        return
    same = 0
    while same < place and tokens[place - 1 - same] == tokens[-1 - same]:
        same += 1
    assert found == max(length, min(same, LONGEST_MATCH))


def test_a_text_without_an_end_is_no_longer_looked_through() -> None:
    assert matched([7] * 10_000, 9_999, 2) == LONGEST_MATCH
