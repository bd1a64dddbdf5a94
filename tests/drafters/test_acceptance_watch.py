"""A drafter of which nothing is accepted is named once; one that is right now and then is not."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import toys

from echelon import LLM, SamplingParams
from echelon.draft import RowVerdict
from echelon.drafters import acceptance_watch
from echelon.drafters.acceptance_watch import LEAST_ACCEPTED, NUM_DRAFTS, AcceptanceWatch
from echelon.stats import Stats, StepRecord


def step(accepted: int, drafted: int = 4) -> StepRecord:
    """Two rows, of which the second drafts nothing."""
    rows: Any = [SimpleNamespace(num_new=1)] * 2
    verdict = [RowVerdict(drafted, list(range(accepted)), [7] * accepted, 3), RowVerdict(0, [], [], 3)]
    return StepRecord(rows, verdict, [accepted + 1, 1], 0, {})


def settle(watch: AcceptanceWatch, record: StepRecord) -> None:
    """As an engine does: counted, then observed."""
    watch.stats.count(record)
    watch.observe(record)


@pytest.mark.parametrize(
    ("num_right", "warns"), [(0, True), (int(LEAST_ACCEPTED * NUM_DRAFTS) - 1, True), (int(LEAST_ACCEPTED * NUM_DRAFTS), False)]
)
def test_a_warning_once(num_right: int, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    watch = AcceptanceWatch("eagle", Stats())
    with caplog.at_level(logging.WARNING, "echelon"):
        for i in range(NUM_DRAFTS - 1):
            settle(watch, step(int(i < num_right)))
        assert not caplog.records
        for i in range(2 * NUM_DRAFTS):
            settle(watch, step(int(i % NUM_DRAFTS < num_right)))
    assert [("'eagle'" in r.getMessage(), f"only {num_right} tokens" in r.getMessage()) for r in caplog.records] == [(True, True)] * warns


def test_steps_without_drafts_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    watch = AcceptanceWatch("ngram", Stats())
    for _ in range(2 * NUM_DRAFTS):
        settle(watch, step(0, drafted=0))
    assert not caplog.records and watch.judged == (0, 0)


def test_an_engine_says_so_while_it_runs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model with weights of its own is hardly ever right."""
    monkeypatch.setattr(acceptance_watch, "NUM_DRAFTS", 24)
    config = {"method": "draft_model", "num_speculative_tokens": 1}
    llm = LLM(toys.adopted(toys.llama()), config, toys.adopted(toys.llama(seed=3)), max_num_seqs=4)
    with caplog.at_level(logging.WARNING, "echelon"):
        llm.generate(toys.prompts(), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    assert llm.stats.acceptance_rate < LEAST_ACCEPTED
    assert sum("`echelon drafters MODEL --input PROMPTS`" in r.getMessage() for r in caplog.records) == 1
