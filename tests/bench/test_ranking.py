"""Two commands rank drafters: what counts as another order, and both on a pair in small, with flags that run as printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import ranking
from benchmarks.ranking import as_markdown, drafters_of, main, measured, swapped
from echelon.demo import DRAFT, EAGLE, TARGET


def test_only_what_all_rounds_say_is_another_order() -> None:
    ours = {"plain": [10.0, 11.0], "ngram": [20.0, 22.0], "eagle": [21.0, 23.0]}
    assert swapped(ours, ours) == []
    assert swapped(ours, ours | {"ngram": [8.0, 9.0]}) == [("plain", "ngram")]
    assert swapped(ours, ours | {"ngram": [8.0, 10.5]}) == [], "the rounds do not tell them apart"
    assert swapped(ours, ours | {"eagle": [18.0, 19.0]}) == [], "nor do those of the other command"


def test_the_drafters_of_a_pair_are_its_other_folders() -> None:
    assert drafters_of(TARGET.parent) == [DRAFT, EAGLE]


def test_both_commands_rank_the_embedded_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "SIZES", {"--num-prompts": 2, "--prompt-tokens": 16, "--max-tokens": 8, "--rounds": 2})
    record = measured(TARGET.parent, 2)
    names = {"plain", "ngram", "draft", "eagle", "eagle (tree)"}
    assert set(record["drafters"]) == set(record["throughput"]) == names and record["problems"] == {}
    assert all(len(rounds) == 2 for kind in ("drafters", "throughput") for rounds in record[kind].values())
    for ours, theirs in record["tokens_per_step"].values():
        assert ours >= 1.0 and theirs >= 1.0
    assert record["flags_run"] == bool(record["flags"])
    assert "| plain" in as_markdown({"embedded_b2": record}) or ", plain" in as_markdown({"embedded_b2": record})


def test_the_study_is_ranked_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[Path, int]] = []

    def record(pair: Path, batch_size: int) -> dict[str, Any]:
        asked.append((pair, batch_size))
        speeds = {"plain": [1.0], "ngram": [2.0]}
        backwards = {"plain": [2.0], "ngram": [1.0]} if pair.name == "wrong" else speeds
        names = [list(both) for both in swapped(speeds, backwards)]
        return {"drafters": speeds, "throughput": backwards, "swapped": names, "flags": "", "flags_run": False}

    monkeypatch.setattr(ranking, "measured", record)
    words = ["--output", str(tmp_path / "records")]
    assert main([*words, "--study", str(tmp_path / "nowhere")]) == 0
    assert {pair for pair, _ in asked} == {TARGET.parent}
    (tmp_path / "wrong" / "target").mkdir(parents=True)
    assert main(["study", *words, "--study", str(tmp_path / "wrong")]) == 1, "an order that differs is a failure"
    assert asked[-1] == (tmp_path / "wrong", 8)
    assert "study_b8" in capsys.readouterr().out
