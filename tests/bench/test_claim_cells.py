"""The cells that the page of claims waits for, at a size of seconds: they measure what their names say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import alike, clover
from benchmarks.alike import Alike
from benchmarks.categories import Harness, as_markdown, summed
from benchmarks.clover import CloverStudy
from benchmarks.equivalence import DRAFT_MODEL, Equivalence
from benchmarks.long_outputs import LongOutputs, Quarter, Step, by_quarter
from benchmarks.questions import read_questions, spread
from benchmarks.workloads import SMALL, greedy
from echelon import ConfigError
from echelon.bench.throughput import ended
from echelon.demo import TARGET
from tools import soak

QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["def main(argv):\n    return", "class Stack:"]},
    {"question_id": 2, "category": "coding", "turns": ["import os\nimport"]},
    {"question_id": 3, "category": "qa", "turns": ["for i in range(10):\n    print("]},
    {"question_id": 4, "category": "qa", "turns": ["def read(path):\n    with open("]},
]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS), "utf-8")
    return path


def test_questions_by_task(questions: Path, tmp_path: Path) -> None:
    found = read_questions(questions)
    assert [q.task for q in found] == ["mt_bench", "mt_bench", "qa", "qa"]
    assert [q.task for q in spread(found, 2)] == ["mt_bench", "qa"]
    with pytest.raises(ConfigError, match=r"name its question\.jsonl"):
        read_questions(None)
    (tmp_path / "empty").write_text("", "utf-8")
    with pytest.raises(ConfigError, match="holds no questions"):
        read_questions(tmp_path / "empty")


def results(record: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(r["method"], r["strategy"]): r for r in record["results"]}


@pytest.fixture
def study() -> Alike:
    return Alike(SMALL, rows=3, rounds=1, tokens=12)


def test_strategies_with_one_attention(study: Alike) -> None:
    found = results(study.opt(2))
    padded, unpadded = found["replay LLMA", "padded"], found["replay LLMA", "unpadded"]
    assert len(padded["decode_tokens_per_second"]) == 1
    assert padded["padded_input_share"] > 0.0 < padded["padded_kv_share"]
    assert unpadded["padded_input_share"] == unpadded["padded_kv_share"] == 0.0
    assert padded["acceptance"] == unpadded["acceptance"], "the same is replayed for both"
    assert found["replay LLMA", "padded-kv"]["padded_input_share"] == 0.0
    assert found["replay LLMA", "padded-inputs"]["padded_kv_share"] == 0.0


def test_realigned_rows_with_one_attention(study: Alike) -> None:
    found = results(study.realign(3))
    assert set(found) == {("plain", "unpadded"), *(("draft model", s) for s in alike.REALIGNMENTS)}
    assert len({r["tokens_per_step"] for (method, _), r in found.items() if method == "draft model"}) == 1, "the same text"


def test_trees_padded_and_not(study: Alike, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alike, "TREES", {"tree": alike.TREES["tree"]})
    record = study.trees("eagle", 2)
    assert record["rows"] == 4
    found = results(record)
    assert found["tree", "padded"]["padded_kv_share"] > 0.0 == found["tree", "unpadded"]["padded_kv_share"]


def test_windows(study: Alike, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alike, "WINDOWS", (2, 4))
    assert [w for w, _, _ in study.windows(2)["windows"]] == [2, 4]


def test_texts_that_are_and_are_not_those_of_plain_decoding(questions: Path) -> None:
    study = Equivalence(str(TARGET), questions, count=4, tokens=16)
    assert study.compared(DRAFT_MODEL, 3)["num_exact"] == 4
    faulty = study.fault("bonus token from the draft")["results"]
    assert all(r["num_exact"] < 4 and r["partial_match"] < 1.0 for r in faulty)
    assert study.compared({"method": "ngram"}, 2, seed=1)["num_exact"] == 4, "a fault is gone after its cell"


def test_spec_bench_by_task(questions: Path) -> None:
    record = Harness(0, questions, count=2, tokens=8).measured("draft_model", 1, 0)
    assert set(record["tasks"]) == {"mt_bench", "qa"}
    assert record["num_questions"] == 4
    assert len(record["tasks"]["mt_bench"]["ours"]) == 2
    assert record["overall"]["tokens_per_step"] > 1.0
    decided = record["auto"]["tasks"]["qa"]
    assert len(decided["ours"]) == 2, "drafts as long as the engine decides are measured on the same questions"
    assert decided["plain"] == record["tasks"]["qa"]["plain"]
    together = Harness(0, questions, count=2, tokens=8).measured("ngram", 2, 1)
    assert len(together["tasks"]["qa"]["ours"]) == 1
    with pytest.raises(ConfigError, match="a batch of 8 takes 8 questions of each task, and here are 2; raise --count"):
        Harness(0, questions, count=8, tokens=8).measured("ngram", 8, 0)


def test_speeds_by_task_name_their_drafts() -> None:
    tasks = {"qa": {"plain": [10.0], "ours": [20.0], "steps": 5, "tokens": 10}}
    old = {**summed(tasks), "num_questions": 1}
    decided = {"qa": tasks["qa"] | {"ours": [30.0]}}
    page = as_markdown({"eagle_b1_t0": old | {"auto": summed(decided)}, "medusa_b1_t0": old})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()[2:]]
    assert rows == [
        ["eagle_b1_t0", "published", "1", "2.00 (2.00)", "2.00 (2.00)"],
        ["eagle_b1_t0", "auto", "1", "3.00 (2.00)", "3.00 (2.00)"],
        ["medusa_b1_t0", "published", "1", "2.00 (2.00)", "2.00 (2.00)"],
    ]


def test_clover_beside_medusa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clover, "SIZES", {"small": 0})
    monkeypatch.setattr(clover, "TREES", {"4": clover.TREES["4"]})
    found = results(CloverStudy(rows=2, rounds=1, tokens=4).measured("small", 1))
    assert {m for m, _ in found} == {"plain", "clover, 4", "medusa, 4"}


def test_long_texts() -> None:
    record = LongOutputs(0, 128).measured(2)
    assert record["num_exact"] == record["num_rows"] == 2
    assert len(record["speed"]) == len(record["plain"]) == len(record["tokens_per_step"]) == 4
    assert 64 < record["tokens_a_row"] <= 128
    assert record["kv_bytes"][1] >= record["kv_bytes"][0] > 0


def test_speed_by_quarter_is_that_of_the_steps_which_begin_in_it() -> None:
    steps = [Step(0, 2, 1.0), Step(2, 4, 1.0), Step(6, 2, 2.0), Step(8, 6, 2.0), Step(14, 2, 4.0), Step(16, 9, 0.1)]
    assert by_quarter(steps, 16) == [Quarter(3.0, 3.0), Quarter(1.0, 2.0), Quarter(3.0, 6.0), Quarter(0.5, 2.0)]


def test_no_step_of_fewer_rows_counts_in_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that reads a prompt: of three rows, one of which ends before the others, eleven steps with three tokens each."""
    study, limits = LongOutputs(0, 48), iter([12, 48, 48])
    monkeypatch.setattr("benchmarks.long_outputs.greedy", lambda _: greedy(next(limits)))
    run = ended(study._run(None, study.prompts(3)))
    assert [step.tokens for step in run.steps] == [3] * 11
    assert [step.before for step in run.steps] == list(range(3, 36, 3))
    assert [len(text) for text in run.texts] == [12, 48, 48]


def test_texts_that_are_too_short_have_no_quarters() -> None:
    with pytest.raises(ConfigError, match="take longer texts"):
        by_quarter([Step(0, 8, 1.0), Step(8, 8, 1.0)], 16)


def test_parts_of_a_soak(tmp_path: Path) -> None:
    memory = [(0.0, 100.0, 50.0), (30.0, 100.5, 50.25), (60.0, 101.0, 50.5)]
    counts = soak.Counter({"good": 5, "bad": 1})
    for _ in range(2):
        soak.keep(tmp_path / "soak.json", soak.part(60.0, counts, memory, 0))
    parts = json.loads((tmp_path / "soak.json").read_text("utf-8"))
    assert list(parts) == ["part-01", "part-02"]
    assert parts["part-02"]["mib_an_hour"] == pytest.approx(1.0)
    assert parts["part-02"]["allocated_mib_an_hour"] == pytest.approx(0.5)
    assert parts["part-02"]["requests"] == 6
