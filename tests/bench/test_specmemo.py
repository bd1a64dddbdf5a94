"""SpecMemo's experiments, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import toys

from benchmarks import specmemo
from benchmarks.cells import Records
from benchmarks.conversations import Conversation, of_mt_bench, of_story
from benchmarks.memory_document import write_memory
from benchmarks.workloads import SMALL, Models
from echelon import ConfigError, load_model
from echelon.bench.throughput import environment
from echelon.demo import TARGET
from echelon.trees import StaticTree

TINY = specmemo.Lengths(conversations=1, prompt=24, new=10, answer=6, story=180, rounds=1, grid_rounds=1)


@pytest.mark.parametrize(("heads", "nodes"), specmemo.shapes_of_the_grid("medusa"))
def test_trees_keep_their_first_level_and_are_connected(heads: int, nodes: int) -> None:
    paths = specmemo.paths_of(heads, nodes)
    assert len(paths) == len(set(paths)) == nodes - 1 and max(map(len, paths)) <= heads
    assert sum(len(path) == 1 for path in paths) == specmemo.WIDTH
    StaticTree(paths)


def questions_in(folder: Path) -> Path:
    asked = [{"category": "coding", "turns": ["Write a loop.", "Shorter."]}, {"category": "qa", "turns": ["Who?"]}]
    (folder / "question.jsonl").write_text("\n".join(map(json.dumps, asked)))
    return folder / "question.jsonl"


@pytest.mark.parametrize("method", list(specmemo.STOCK) if toys.PROVE else ["eagle"])
def test_a_shape_is_chosen_from_the_grid_and_measured_beside_stock(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specmemo, "shapes_of_the_grid", lambda _: [(2, 16), (4, 64)])
    models, records, name = Models(SMALL, [method]), Records(tmp_path), f"{method}_mt_bench"
    study = specmemo.Study(models, method, "mt_bench", TINY, questions_in(tmp_path))
    for chooses in (specmemo.planned, specmemo.budgets):
        with pytest.raises(ConfigError, match="grid"):
            chooses(study, records, environment())
    measured, where = specmemo.grid(study), environment()
    for other in ({"cpu": "another"}, {"commit": "another"}):
        records.write(study.name("grid"), {"environment": where | other} | measured)
        with pytest.raises(ConfigError, match="measure the cell"):
            specmemo.planned(study, records, where)
    records.write(study.name("grid"), {"environment": where} | measured)
    found = {f"planned_{name}": specmemo.planned(study, records, where), f"budgets_{name}": specmemo.budgets(study, records, where)}
    planned, budgets = found.values()
    assert planned["shape"] == (2, 16) and planned["tree"][1] <= specmemo.MOST_TREE * planned["tree"][0]
    assert planned["process"][1] < planned["process"][0]
    assert [b["ran"] == b["held"] == b["asked"] for b in budgets["budgets"]] == [True] * len(specmemo.KV_BUDGETS)
    assert [b["stock_runs"] for b in budgets["budgets"]] == [False, False, False, True], "the context's keys and values are the largest"
    said = specmemo.as_markdown(records.read() | found)
    (tmp_path / "memory.md").write_text("# Memory\n\nAs it is.\n\n## Measured\n\nOf old.\n")
    here = {"environment": {"cpu": "one", "isa": "none", "threads": "1", "torch": "2", "commit": "0"}}
    write_memory(tmp_path / "memory.md", {}, {name: record | here for name, record in (records.read() | found).items()})
    written = (tmp_path / "memory.md").read_text()
    assert "As it is." in written and "Of old." not in written and "MT-Bench, two turns | 2 heads, 16 nodes" in written
    for plot in (f"memory-shapes-{method}-mt-bench", f"memory-budgets-{method}"):
        assert (tmp_path / "plots" / f"{plot}.png").stat().st_size > 5000
    write_memory(tmp_path / "memory.md", {}, {study.name("grid"): records.read()[study.name("grid")] | here})
    assert "2 of them, in the grid alone: 2 heads and 16 nodes decode at" in (tmp_path / "memory.md").read_text()
    assert "runs in 1 of 4 (MT-Bench, two turns)" in written
    assert "throughput kept" in said and "| 4 | 64 |" in said and "2 of 2" in said


def test_turns_that_no_longer_fit_are_left_out(tmp_path: Path) -> None:
    target = load_model(str(TARGET), device="cpu")
    (story,) = of_story(target, 400, 16)
    assert 350 < story.length <= 400 and len(story.turns) > 8
    assert story.shortened(story.length) == story
    assert story.shortened(story.length - 1) == Conversation(story.turns[:-1], 16) and story.shortened(3).turns == []
    turns = [(40, 1.0, 0.5), (80, 1.0, 0.5), (120, 1.0, 2.0)]
    assert [t.length for t in specmemo.fitting([list(turns)], 100)] == [40, 80]
    (asked,) = of_mt_bench(target, questions_in(tmp_path), 4, 8)
    assert len(asked.turns) == 2 and asked.length == sum(map(len, asked.turns)) + 16
    (tmp_path / "question.jsonl").write_text(json.dumps({"category": "qa", "turns": ["Who?"]}))
    with pytest.raises(ConfigError, match="two turns"):
        of_mt_bench(target, tmp_path / "question.jsonl", 4, 8)
