"""Replayed acceptance: the work of a run whose acceptance is stated, on weights that accept nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import toys

from benchmarks.replayed import AcceptanceHistogram, replay
from echelon import LLM, ConfigError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
MIXED = [[0, 0, 3], [2, 0, 1], [2, 2, 2], [5, 1, 1], [5, 5, 3]]  # misses, short drafts, full acceptance


def replaying(law: AcceptanceHistogram, max_num_seqs: int = 16) -> LLM:
    llm = LLM(toys.adopted(toys.llama()), {"method": "ngram", "num_speculative_tokens": 5}, max_num_seqs=max_num_seqs)
    replay(llm, law)
    return llm


@pytest.mark.parametrize("tokens_per_step", [1.0, 1.5, 2.75, 4.9, 5.0])
def test_a_stated_mean_is_the_mean_of_the_law(tokens_per_step: float) -> None:
    histogram = AcceptanceHistogram.from_tokens_per_step(tokens_per_step, 4)
    shares = np.diff(histogram.mass, prepend=0.0)
    assert float((shares * (histogram.pairs[:, 1] + 1)).sum()) == pytest.approx(tokens_per_step, abs=1e-9)
    assert set(histogram.pairs[:, 0].tolist()) == {4}


def test_draws_follow_the_histogram() -> None:
    histogram = AcceptanceHistogram.from_counts(MIXED, "here")
    drawn = [histogram.draw(u) for u in (np.arange(1000) + 0.5) / 1000]
    assert {pair: drawn.count(pair) for pair in set(drawn)} == {(d, a): n * 100 for d, a, n in MIXED}


def test_a_run_does_the_stated_work_whatever_the_batch() -> None:
    prompts = toys.prompts((3, 9, 17, 30, 5, 2, 40, 8))
    outputs = []
    for rows in (1, 8):
        llm = toys.watch(replaying(AcceptanceHistogram.from_counts(MIXED, "here"), rows))
        outputs.append([o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)])
        assert {pair[:2] for pair in map(tuple, llm.stats.histogram())} >= {(d, a) for d, a, _ in MIXED}
        toys.assert_all_blocks_free(llm)
    assert outputs[0] == outputs[1]


def test_what_is_not_replayed_is_the_models_own_token() -> None:
    """Keys and values of accepted tokens are kept: each extra token is the argmax after the whole text before it."""
    llm = replaying(AcceptanceHistogram.from_tokens_per_step(3.0, 5))
    prompt = toys.prompts((7,))[0]
    done = llm.generate([prompt], GREEDY)[0].outputs[0]
    with torch.inference_mode():
        text = torch.tensor([prompt + done.token_ids])
        own = toys.llama()(text).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    extra = [i for i, accepted in enumerate(done.is_accepted) if not accepted]
    assert 0 < len(extra) < len(done.token_ids)
    assert [done.token_ids[i] for i in extra] == [own[i] for i in extra]
    assert llm.stats.tokens_per_step == pytest.approx(3.0, abs=1.0)


def test_a_mean_beyond_the_draft_is_refused() -> None:
    with pytest.raises(ConfigError, match="between 1 and"):
        AcceptanceHistogram.from_tokens_per_step(7.0, 5)


@pytest.mark.parametrize("content", ["[]", "[[1, 2, 1]]", "[[1, 1]]", "[[2, 1, 0]]", "[[2.5, 1, 1]]"])
def test_histograms_that_mean_nothing_are_refused(content: str) -> None:
    with pytest.raises(ConfigError, match=r"h\.json"):
        AcceptanceHistogram.from_counts(json.loads(content), "h.json")
