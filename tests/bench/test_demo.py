"""The demo's rows: the same texts, decoding apart from prompts, and what is said where nothing is gained."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import toys

from echelon import LLM, SamplingParams
from echelon.bench.throughput import ended, in_turn
from echelon.demo.__main__ import Measured, Models, run_all, spread_of, table_of, verdict
from echelon.demo.rows import DemoRow, engine_row, run_framework

PROMPTS = [[5, 6, 7], [8] * 9, [9, 3], [4, 4, 2, 1]]
PARAMS = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def truth() -> list[list[int]]:
    return [o.outputs[0].token_ids for o in LLM(toys.adopted(toys.llama()), max_num_seqs=1).generate(PROMPTS, PARAMS)]


def test_a_row_gives_plain_text_at_any_batch_size() -> None:
    for size, config in ((1, None), (2, None), (4, NGRAM)):
        seen: list[int] = []
        row = ended(engine_row(LLM(toys.adopted(toys.llama()), config, max_num_seqs=size), "x", PROMPTS, size, PARAMS, 60.0, seen.append))
        assert row.outputs == truth()
        assert row.num_identical(truth()) == len(PROMPTS)
        assert sum(seen) == sum(map(len, row.outputs))
        assert row.tokens <= sum(seen) - len(PROMPTS)  # first tokens belong to the prompts
        assert row.speed > 0.0
        assert not row.was_cut
        if config is None:
            assert row.tokens_per_step == 1.0
            assert row.steps == (PARAMS.max_tokens - 1) * len(PROMPTS) // size == len(row.step_ms)
            assert 1e-3 * sum(row.step_ms) == pytest.approx(row.seconds)


def test_a_row_ends_at_its_limit_and_is_compared_as_far_as_it_came() -> None:
    llm = LLM(toys.adopted(toys.llama()), max_num_seqs=4)
    row = ended(engine_row(llm, "x", PROMPTS, 4, PARAMS, 0.0))
    assert row.was_cut
    assert row.tokens == 0 == row.speed
    assert [len(o) for o in row.outputs] == [1] * 4
    assert row.num_identical(truth()) == 4
    toys.assert_all_blocks_free(llm)
    other = DemoRow("x", 4, [[1 + o[0]] for o in row.outputs], 1, 4, 1.0, 1.0)
    assert other.num_identical(truth()) == 0
    whole = DemoRow("x", 4, truth(), 1, 4, 1.0, 1.0)
    cut = [tokens[:count] for tokens, count in zip(truth(), (10, 3, 1, 0), strict=True)]
    assert whole.num_identical(cut) == 4, "plain decoding was cut"
    assert other.num_identical(cut) == 1, "a first token differs wherever there is one"


def test_transformers_is_a_row_like_the_others() -> None:
    row = run_framework(toys.llama(), PROMPTS, 2, PARAMS, 60.0)
    assert row.num_identical(truth()) == len(PROMPTS)
    assert row.tokens == (PARAMS.max_tokens - 1) * len(PROMPTS)


def test_what_others_do_between_steps_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows take turns on a clock that only reading it moves: each has the time of its own steps."""
    clock = itertools.count()
    monkeypatch.setattr("echelon.demo.rows.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr("echelon.bench.throughput.SLICE", 0.0)
    found = in_turn({n: engine_row(LLM(toys.adopted(toys.llama()), max_num_seqs=1), n, PROMPTS[:1], 1, PARAMS, 60.0) for n in "ab"})
    assert [(row.method, row.steps, row.seconds) for row in found.values()] == [("a", 9, 9.0), ("b", 9, 9.0)]


def test_all_methods_and_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the prompts that no method was given alone, plain decoding says what is right too."""
    monkeypatch.setattr("echelon.demo.__main__.NUM_ALONE", 1)
    monkeypatch.setattr("echelon.demo.__main__.BATCH_SIZES", (1, 3))
    measured = run_all(Models("toys", toys.adopted(toys.llama()), toys.adopted(toys.llama())), toys.llama(), PROMPTS, PARAMS, 60.0)
    assert measured.truth == truth()
    assert [(row.method, row.batch_size, len(row.outputs)) for row in measured.rows] == [
        (name, size, count) for size, count in ((1, 1), (3, 4)) for name in ("plain", "LLMA", "draft model", "transformers")
    ]
    assert measured.is_identical
    measured.at("LLMA", 3).outputs[3][-1] += 1
    assert not measured.is_identical


def rows(speed: float) -> Measured:
    plain = DemoRow("plain", 1, [[1, 2]], 10, 10, 1.0, 1.0)
    return Measured([plain, DemoRow("LLMA", 1, [[1, 3]], 5, 10, 10 / speed, 2.0, was_cut=True)], [[1, 2]])


def test_what_is_said_of_a_gain_and_of_none() -> None:
    assert "LLMA decodes 2.00 times as fast" in verdict(rows(20.0), 1)
    assert "no gain; LLMA reaches 0.50 of plain decoding" in verdict(rows(5.0), 1)
    cells = [list(column.cells) for column in table_of("", rows(20.0)).columns]
    assert cells[-1] == ["yes", "0/1 cut"]


def test_the_spread_of_plain_steps_is_said() -> None:
    plain = DemoRow("plain", 8, [], 5, 40, 1.0, 1.0, step_ms=[50.0, 10.0, 20.0, 30.0, 40.0])
    assert spread_of(plain) == (
        "Plain steps of 8 took 20.0 to 40.0 ms (the middle half of them): differences below 100% are this machine's own."
    )
    assert spread_of(DemoRow("plain", 8, [], 0, 0, 0.0, 1.0)) == "", "no step was made in time"
