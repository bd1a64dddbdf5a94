"""The compiled ranking of drafted tokens against its definition: the same tokens, whatever stands in the row and beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from echelon import SamplingParams
from echelon.ops import compiled, reference
from echelon.ops.sample import NUM_CANDIDATES, likeliest
from echelon.sampling import Sampler

pytestmark = pytest.mark.skipif(not compiled.is_built(), reason="the compiled kernels are not built")

ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}, {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.1}, {"temperature": 2.0, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
]  # fmt: skip


def samplers(count: int, kinds: list[dict[str, Any]]) -> list[Sampler]:
    return [Sampler(SamplingParams(**kinds[i % len(kinds)]), seed=2**63 + i, index=i % 3) for i in range(count)]


def rows_of(kind: str, count: int, size: int) -> Tensor:
    """Random rows, rows of few different values, rows that are mostly −∞ (a draft vocabulary), ascending ones, and those of equals."""
    rng = np.random.default_rng([size, count])
    values = rng.standard_normal((count, size), np.float32) * 3
    if kind == "ties":
        values = np.round(values)  # holds −0 and 0, which are equal
    if kind == "masked":
        values[:, rng.random(size) < 0.97] = -np.inf
        values[::3, 12:] = -np.inf
    if kind == "ascending":
        values.sort(1)
    if kind == "equal":
        values[:] = 1.5
    return torch.from_numpy(values)


def framework(
    logits: Tensor, given: list[Sampler], positions: list[int], width: int, only_ranks: bool, sharpness: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    is_drawn = any(not s.params.is_greedy for s in given)
    count = min(max(width, NUM_CANDIDATES) if is_drawn else width, logits.shape[1])
    return reference.likeliest_rows(logits, given, positions, min(width, logits.shape[1]), count, only_ranks, sharpness)


@pytest.mark.parametrize("kind", ["random", "ties", "masked", "ascending", "equal"])
@pytest.mark.parametrize("size", [1, 37, 1000, 4096, 4100, 32000])
@pytest.mark.parametrize("kinds", [ASKED[:1], ASKED[1:2], ASKED], ids=["greedy", "drawn", "mixed"])
def test_tokens_are_those_of_the_definition(kind: str, size: int, kinds: list[dict[str, Any]]) -> None:
    """Log-probabilities of a greedy place are equal as far as float32 carries; the reference adds those up in float32."""
    for count in (1, 13):
        logits, given, positions = rows_of(kind, count, size), samplers(count, kinds), list(range(5, 5 + count))
        for width in sorted({1, min(10, size), min(200, size), max(1, size - 1), size} if size < 32000 else {1, 10, 300}):
            for only_ranks, sharpness in ((False, 1.0), (False, 1.5), (True, 1.5)):
                tokens, scores = likeliest(logits, given, positions, width, only_ranks, sharpness)
                expected, expected_scores = framework(logits, given, positions, width, only_ranks, sharpness)
                possible = np.isfinite(expected_scores)
                assert np.array_equal(np.isfinite(scores), possible)
                assert np.array_equal(tokens[possible], expected[possible])
                np.testing.assert_allclose(scores[possible], expected_scores[possible], rtol=1e-6, atol=4e-6)
                greedy = [i for i, s in enumerate(given) if s.params.is_greedy]
                assert np.array_equal(tokens[greedy], expected[greedy])


@pytest.mark.parametrize("sharpness", [1.0, 1.5])
def test_greedy_scores_are_log_probabilities(sharpness: float) -> None:
    logits = rows_of("random", 7, 32000)
    tokens, scores = likeliest(logits, samplers(7, ASKED[:1]), [3] * 7, 10, sharpness=sharpness)
    exact = (logits.double() * sharpness).log_softmax(-1).numpy()
    np.testing.assert_allclose(scores, np.take_along_axis(exact, tokens, 1), rtol=0, atol=1e-6)


def test_sharpness_makes_no_other_tokens_and_surer_ones() -> None:
    """Of every kind of row: the same tokens in the same order, by the log-softmax of sharpened (and, drawn, perturbed) logits."""
    logits, given = rows_of("random", 40, 90), samplers(40, ASKED)
    tokens, plain = likeliest(logits, given, [3] * 40, 90)
    same, sharp = likeliest(logits, given, [3] * 40, 90, sharpness=1.5)
    possible = np.isfinite(plain)
    assert np.array_equal(tokens[possible], same[possible]) and np.array_equal(possible, np.isfinite(sharp))
    expected = torch.from_numpy(1.5 * plain).log_softmax(-1).numpy()
    np.testing.assert_allclose(sharp[possible], expected[possible], rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [999, 4096])
def test_a_row_does_not_depend_on_its_neighbours(size: int) -> None:
    logits, given, positions = rows_of("ties", 24, size), samplers(24, ASKED), list(range(24))
    tokens, scores = likeliest(logits, given, positions, 10)
    for i in range(24):
        alone, alone_scores = likeliest(logits[i : i + 1], given[i : i + 1], positions[i : i + 1], 10)
        assert np.array_equal(alone[0], tokens[i])
        assert np.array_equal(alone_scores[0], scores[i])


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_a_broken_row_has_no_children(bad: float) -> None:
    logits, given = rows_of("random", 12, 4096), samplers(12, ASKED)
    logits[3, 1234] = logits[6, 4095] = bad
    logits[0], broken = -torch.inf, [0, 3, 6]
    for _, scores in (likeliest(logits, given, [1] * 12, 10), framework(logits, given, [1] * 12, 10, False)):
        assert np.isneginf(scores[broken]).all()
        assert np.isfinite(scores[[1, 2, 4, 5, 7], 0]).all()


def test_other_dtypes_and_strides_are_read() -> None:
    logits = rows_of("random", 8, 600)
    given = samplers(8, ASKED)
    for other in (logits.bfloat16(), logits.t().contiguous().t(), logits[:, ::2]):
        plain = other.float().contiguous()
        for got, expected in zip(likeliest(other, given, [2] * 8, 6), likeliest(plain, given, [2] * 8, 6), strict=True):
            assert np.array_equal(got, expected)
