"""Filters against their textbook forms, noise against its distribution, and parameters against nonsense."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from echelon import EchelonError, RequestError, SamplingParams
from echelon.acceptance import largest_rows
from echelon.ops import devices, sample
from echelon.ops.reference import largest_of
from echelon.ops.sample import SampleRow, choose, likeliest
from echelon.sampling import Sampler, gumbel_noise, kept_tokens, logprobs_of


def row(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)


@pytest.mark.parametrize("seed", range(20))
def test_top_k_keeps_the_k_largest(seed: int) -> None:
    logits = row(50, seed)
    for k in (1, 2, 7, 49, 50, 99):
        kept = kept_tokens(logits, SamplingParams(top_k=k))
        assert set(kept) == set(np.argsort(-logits)[:k])


@pytest.mark.parametrize("seed", range(20))
def test_top_p_keeps_the_smallest_sufficient_set(seed: int) -> None:
    logits = row(50, seed)
    probabilities = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
    for top_p in (0.01, 0.3, 0.9, 0.999):
        kept = kept_tokens(logits, SamplingParams(top_p=top_p))
        mass = probabilities[kept].sum()
        assert mass >= top_p
        assert mass - probabilities[kept].min() < top_p
        assert probabilities[kept].min() >= np.delete(probabilities, kept).max(initial=0)


@pytest.mark.parametrize("seed", range(20))
def test_min_p_is_relative_to_the_likeliest(seed: int) -> None:
    logits = row(50, seed)
    kept = kept_tokens(logits, SamplingParams(min_p=0.05))
    ratio = np.exp(logits - logits.max())
    assert set(kept) == set(np.flatnonzero(ratio >= 0.05))


def test_noise_is_a_function_of_its_key() -> None:
    ids = np.arange(1000)
    base = gumbel_noise(7, 0, 3, ids)
    assert np.array_equal(base, gumbel_noise(7, 0, 3, ids))
    assert np.array_equal(base[[5, 900]], gumbel_noise(7, 0, 3, np.array([5, 900])))
    for other in (gumbel_noise(8, 0, 3, ids), gumbel_noise(7, 1, 3, ids), gumbel_noise(7, 0, 4, ids)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.1
    assert np.isfinite(gumbel_noise(2**64 - 1, 5, 10**6, ids)).all()


def test_noise_is_gumbel() -> None:
    """Kolmogorov–Smirnov distance of 200,000 draws; 1e-6 of all samples would exceed the bound."""
    draws = np.sort(np.concatenate([gumbel_noise(1, 0, position, np.arange(1000)) for position in range(200)]))
    exact = np.exp(-np.exp(-draws))
    distance = np.abs(exact - (np.arange(len(draws)) + 0.5) / len(draws)).max()
    assert distance < 2.7 / np.sqrt(len(draws))


def test_tokens_follow_the_distribution() -> None:
    """Chi-squared of 40,000 draws from five tokens."""
    logits = np.array([0.0, 1.0, -1.0, 0.5, 2.0], np.float32)
    params = SamplingParams(temperature=0.7)
    draws = np.bincount([Sampler(params, 3).choose_processed(logits, position) for position in range(40_000)], minlength=5)
    expected = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum() * 40_000
    assert ((draws - expected) ** 2 / expected).sum() < 33.4  # 1e-6 quantile, 4 degrees of freedom


def test_greedy_is_the_first_largest() -> None:
    assert Sampler(SamplingParams(temperature=0), 0).choose(np.array([1.0, 3.0, 3.0], np.float32), []) == 1


@pytest.mark.parametrize("width", [1, 5, 127, 128, 129, 640, 1000])
def test_argmax_of_rows(width: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(width).integers(0, 50, (40, width)).astype(np.float32))
    assert largest_rows(logits)[0].tolist() == logits.numpy().argmax(-1).tolist()
    assert largest_rows(logits.bfloat16())[0].tolist() == logits.numpy().argmax(-1).tolist()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": -2}, "seed"),
        ({"stop": ["a", ""]}, "empty string"),
        ({"temprature": 1}, "known keys: temperature"),
    ],
)
def test_nonsense_is_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


RNG = np.random.default_rng(11)


def random_params(i: int) -> SamplingParams:
    pick = RNG.choice
    return SamplingParams(
        temperature=float(pick([0.3, 0.8, 1.0, 2.5])),
        top_k=int(pick([0, 0, 1, 2, 17, 400])),
        top_p=float(pick([1.0, 1.0, 0.01, 0.5, 0.95, 0.9999])),
        min_p=float(pick([0.0, 0.0, 0.02, 0.5, 1.0])),
        seed=i,
    )


def random_logits(size: int) -> np.ndarray:
    """Smooth, flat, peaked, with ties, with tokens that are ruled out, very large: what models and users bring."""
    values = RNG.normal(0, RNG.choice([0.01, 1.0, 4.0, 30.0]), size)
    shape = RNG.integers(0, 5)
    if shape == 0:
        values = np.round(values)  # ties
    if shape == 1 and size > 1:
        values[RNG.integers(0, size, size // 2)] = -np.inf
    if shape == 2:
        values[RNG.integers(0, size)] += 25.0
    if shape == 3:
        values += RNG.choice([-1e4, 1e4])
    if not np.isfinite(values.max()):
        values[0] = 0.0
    return values.astype(np.float32)


@pytest.mark.parametrize("size", [1, 2, 7, 255, 1000, 32000])
def test_the_kernel_draws_what_the_definition_draws(size: int) -> None:
    places = []
    for i in range(60 if size == 32000 else 1500):
        sampler = Sampler(random_params(i), seed=i * 7919, index=i % 3, num_prompt_tokens=2)
        places.append(SampleRow(sampler, random_logits(size), [1] * (2 + i % 5)))
    defined = [p.sampler.choose(p.logits, p.tokens) for p in places]
    assert choose(places) == defined
    assert size < 7 or len(set(defined)) > 3


def test_a_draw_depends_on_its_place_alone(threads: int) -> None:
    places = [SampleRow(Sampler(random_params(i), seed=i), random_logits(700), [1] * 9) for i in range(64)]
    assert threads == torch.get_num_threads()
    assert choose(places) == [choose([p])[0] for p in places] == choose(places[::-1])[::-1]


def test_changed_rows_choose_a_few_at_a_time_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of logits each, which are not all held at once; one without a token is entered by its place among all."""
    count = 2 * sample.CHANGED_AT_ONCE + 3
    bad = {5, sample.CHANGED_AT_ONCE, count - 1}
    places = []
    for i in range(count):
        sampler = Sampler(SamplingParams(temperature=float(i % 2), logit_bias={i % 40: 2.0}), seed=i)
        places.append(SampleRow(sampler, np.full(40, -np.inf, np.float32) if i in bad else row(40, i), [1, 2]))
    alone = [-1 if i in bad else choose([place])[0] for i, place in enumerate(places)]
    backend: Any = devices.backend_of(torch.empty(0))
    draw, sizes = backend.sample_rows, list[int]()

    def noted(logits: list[torch.Tensor], *others: Any) -> Any:
        sizes.append(len(logits))
        return draw(logits, *others)

    monkeypatch.setattr(backend, "sample_rows", noted)
    problems: dict[int, EchelonError] = {}
    assert choose(places, problems) == alone
    assert problems.keys() == bad
    assert sum(sizes) == count - len(bad) and max(sizes) <= sample.CHANGED_AT_ONCE
    with pytest.raises(EchelonError, match="largest logit at position 2"):
        choose(places)


def test_greedy_places_beside_drawn_ones() -> None:
    greedy = Sampler(SamplingParams(temperature=0, logit_bias={3: 50.0}), seed=0)
    places = [SampleRow(greedy, random_logits(9), [1]), SampleRow(Sampler(SamplingParams(top_k=1), seed=1), random_logits(9), [1])]
    assert choose(places) == [3, int(places[1].logits.argmax())]
    assert choose([]) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_refused(bad: float, temperature: float) -> None:
    logits = np.full(40, -np.inf, np.float32)
    logits[7] = bad
    sampler = Sampler(SamplingParams(temperature=temperature, logit_bias={1: 1.0}), seed=1)
    with pytest.raises(EchelonError, match="largest logit at position 4"):
        choose([SampleRow(sampler, logits, [1, 2, 3, 4])])


def test_noise_is_bounded_so_that_pruning_is_exact() -> None:
    assert gumbel_noise(0, 0, 0, np.arange(200_000)).max() < 36.75
    extremes = (np.array([0, 2**52 - 1], np.float64) + 0.5) * 2.0**-52
    assert extremes.min() > 0.0
    assert extremes.max() < 1.0
    assert -np.log(-np.log(extremes.max())) < 36.75


@pytest.mark.parametrize("count", [0, 1, 3, 40, 60])
def test_the_likeliest_tokens_come_in_order(count: int) -> None:
    logits = np.round(random_logits(50) * 2) / 2
    logits = np.nan_to_num(logits, neginf=-50.0)
    entry = logprobs_of(logits, 5, count)
    order = np.argsort(-logits, kind="stable")[:count]
    assert list(entry.top) == order.tolist()
    assert entry.rank == 1 + int((logits > logits[5]).sum())


def test_the_likeliest_draft_is_what_the_target_would_draw() -> None:
    """With equal logits the first candidate is the sampler's own token, whatever the filters; greedy ones rank by probability."""
    rng = np.random.default_rng(2)
    asked = [
        {"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}, {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 0.9, "min_p": 0.1}, {"temperature": 2.0, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    ]  # fmt: skip
    logits = rng.standard_normal((200, 100), np.float32) * 3
    samplers = [Sampler(SamplingParams(**asked[i % len(asked)]), seed=i, index=i % 3) for i in range(200)]
    positions = rng.integers(0, 50, 200).tolist()
    tokens, scores = likeliest(torch.from_numpy(logits), samplers, positions, 6)
    assert tokens.shape == scores.shape == (200, 6)
    for i, sampler in enumerate(samplers):
        assert tokens[i, 0] == sampler.choose_processed(logits[i], positions[i])
        assert (np.diff(scores[i][np.isfinite(scores[i])]) <= 0).all()
        assert np.exp(scores[i]).sum() <= 1 + 1e-6
        if sampler.params.is_greedy:
            assert tokens[i].tolist() == np.argsort(-logits[i], kind="stable")[:6].tolist()
        if sampler.params.top_k == 5:
            assert np.isneginf(scores[i, 5:]).all()
    wide, _ = likeliest(torch.from_numpy(logits[:, :4]), samplers, positions, 6)
    assert wide.shape == (200, 4)


def test_where_nothing_can_be_drawn_nothing_is_ranked() -> None:
    samplers = [Sampler(SamplingParams(temperature=t), seed=1) for t in (0.0, 1.0)]
    _, scores = likeliest(torch.full((2, 9), -torch.inf), samplers, [3, 3], 4)
    assert not np.isfinite(scores).any()


@pytest.mark.parametrize("width", [1, 30, 96, 160, 1000, 4099])
def test_the_largest_are_found_wherever_they_stand(width: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(width).standard_normal((40, width), np.float32))
    for count in {1, min(4, width), min(60, width)}:
        values, places = largest_of(logits, count)
        expected = logits.topk(count)
        assert torch.equal(values, expected.values)
        assert torch.equal(places, expected.indices)
