"""The matrix of adaptive lengths: what is compared with what, and a cell in small."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.adaptive import WARM_UP, as_markdown, measure, most, over_single, ratios, settings_of, take_turns
from benchmarks.workloads import SMALL
from echelon import ConfigError, SamplingParams
from echelon.bench.throughput import Run, Stepping, in_turn


def test_the_best_other_is_chosen_in_the_other_rounds() -> None:
    speeds = {"plain": [10.0, 10.0], "auto": [12.0, 12.0], "1": [20.0, 6.0], "2": [11.0, 24.0], "dropped": [1.0]}
    over_plain, over_best, best = ratios(speeds)
    assert (over_plain, over_best, best) == (pytest.approx(1.2), pytest.approx((12 / 11 + 12 / 6) / 2), "2")
    assert ratios({name: v[:1] for name, v in speeds.items()})[1:] == (pytest.approx(12 / 20), "1")


def line_of(record: dict[str, Any]) -> str:
    """Of a table with one cell, which the second paragraph holds."""
    _, cells, *_ = as_markdown({"a_b1": record}).split("\n\n")
    return cells.splitlines()[2]


def test_the_best_other_is_best_beside_plain_decoding_in_the_same_round() -> None:
    """The machine was fast in a round that was good for the wrong one."""
    speeds = {"plain": [10.0, 100.0, 20.0], "auto": [12.0, 110.0, 24.0], "1": [5.0, 90.0, 30.0], "2": [15.0, 80.0, 21.0]}
    assert ratios(speeds)[2] == "2"
    line = line_of({"speeds": speeds, "whole": speeds})
    assert line.split(" | ")[3] == "2"


class _Setting:
    """A setting of a known speed: in its warm-up, and in rounds."""

    def __init__(self, warm_up: float, in_rounds: float) -> None:
        self._speeds, self.lengths, self.full_speed = (warm_up, in_rounds), list[int](), 0.0
        self.begun: list[int] = []

    def begin(self) -> None:
        self.begun.append(len(self.lengths))

    def stepping(self, prompts: list[list[int]], params: SamplingParams) -> Stepping[Run]:
        assert params.max_tokens is not None
        self.full_speed = self._speeds[bool(self.lengths)]
        self.lengths.append(params.max_tokens)
        yield
        return Run([[7] * params.max_tokens for _ in prompts], 1.0, (1, 1.0))


def test_a_setting_that_loses_takes_few_rounds() -> None:
    """One far below plain decoding warms up, one below it takes a round; a first token without a full step drops none."""
    runs = {"plain": _Setting(50.0, 90.0), "auto": _Setting(1.0, 1.0), "far": _Setting(5.0, 90.0), "below": _Setting(40.0, 50.0)}
    runs |= {"level": _Setting(20.0, 80.0), "unknown": _Setting(math.nan, 80.0)}
    speeds, found = take_turns(runs, [[[1]]] * 3, SamplingParams(max_tokens=64), 1)
    assert speeds == {"plain": [90.0] * 3, "auto": [1.0] * 3, "far": [5.0], "below": [50.0], "level": [80.0] * 3, "unknown": [80.0] * 3}
    assert {name: run.lengths for name, run in runs.items() if name in ("far", "below", "level")} == {
        "far": [WARM_UP],
        "below": [WARM_UP, 64],
        "level": [WARM_UP, 64, 64, 64],
    }
    assert [len(own) for own in found.values()] == [3, 3, 1, 1, 3, 3]
    assert all(run.begun == ([] if name == "far" else [1]) for name, run in runs.items() if name != "plain"), "warm-up is not counted"
    with pytest.raises(ConfigError, match="a: no step of a round had all rows"):
        take_turns({"plain": _Setting(50.0, 90.0), "a": _Setting(50.0, math.nan)}, [[[1]]], SamplingParams(max_tokens=64), 1)


def test_steps_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice each, one step at least; whoever is done leaves the others to theirs."""
    log, clock = list[str](), iter(range(100))

    def steps(name: str, count: int) -> Stepping[Run]:
        for _ in range(count):
            log.append(name)
            yield
        return Run([], count, (0, 0.0))

    monkeypatch.setattr("echelon.bench.throughput.SLICE", 0.0)
    found = in_turn({"a": steps("a", 3), "b": steps("b", 1), "c": steps("c", 2)})
    assert log == ["a", "b", "c", "a", "c", "a"]
    assert [(name, run.seconds) for name, run in found.items()] == [("a", 3), ("b", 1), ("c", 2)]
    log.clear()
    monkeypatch.setattr("echelon.bench.throughput.SLICE", 1.5)
    monkeypatch.setattr("echelon.bench.throughput.time.perf_counter", lambda: next(clock))
    in_turn({"a": steps("a", 5), "b": steps("b", 1)})
    assert log == ["a", "a", "b", "a", "a", "a"]


def test_a_single_setting_is_one_for_all_cells() -> None:
    records = [{"speeds": {"plain": [10.0], "auto": [20.0], "1": [20.0]}}, {"speeds": {"plain": [10.0], "auto": [10.0], "1": [5.0]}}]
    over, best = over_single(records)
    assert (over, best) == (pytest.approx(2**0.5), pytest.approx(2**0.5))
    assert "auto over the best single setting" in as_markdown({f"a_b{i}": r | {"whole": r["speeds"]} for i, r in enumerate(records)})


def test_means_over_cells_are_of_ratios_by_round() -> None:
    speeds = {"plain": [10.0, 100.0, 20.0], "auto": [20.0, 110.0, 22.0], "1": [15.0, 200.0, 21.0]}
    assert over_single([{"speeds": speeds}] * 2) == (pytest.approx(1.1 / 1.5), pytest.approx(1.0))
    last = as_markdown({f"a_b{i}": {"speeds": speeds, "whole": speeds} for i in (1, 4)}).splitlines()
    assert "| a | 2 | 0.73 | 1.00 |" in last


def test_a_repeated_cell_misses_by_its_interval() -> None:
    """Fifteen rounds, of which the middle one is just below the goal, and as many above as below."""
    around = {"plain": [100.0] * 15, "auto": [89.0 + i for i in range(15)]}
    assert 0.96 < most([a / 100.0 for a in around["auto"]]) <= 1.03
    below = {"plain": [100.0] * 15, "auto": [80.0 + i for i in range(15)]}
    record = {"speeds": {"plain": [10.0], "auto": [5.0]}, "whole": {"plain": [10.0], "auto": [5.0]}}
    lines = [line_of(record | {"repeated": {"speeds": s}}) for s in (around, below)]
    assert "| yes |" in lines[0] and "| **no** |" in lines[1]


def test_a_cell_in_small() -> None:
    record = measure("draft_model", 2, 0.0, 2, SMALL)
    assert set(record["speeds"]) == set(record["whole"]) == set(settings_of("draft_model", {}))
    assert len(record["speeds"]["auto"]) == 2
    assert record["adaptive"]["num_steps"] > 0
