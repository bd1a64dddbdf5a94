"""The study of scaling laws: what a lineage shares, a few cells in small, and the page that they make."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import corruptions
import numpy as np
import pytest
import torch
import toys

from benchmarks.laws import COMPARED, SHARES, LawStudy, Lineage, cells, lineages
from benchmarks.laws import main as laws
from benchmarks.laws_document import speed_part, write_laws
from echelon import ConfigError
from echelon.heads.checkpoints import build_head, save_head
from echelon.model.load.loading import load_plain
from echelon.train.files import load_checkpoint

ENVIRONMENT = {"cpu": "one", "threads": "1", "torch": "2", "transformers": "5", "commit": "c"}


@pytest.fixture(autouse=True)
def _few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.laws.NUM_PROMPTS", 6)


def study_of(folder: Path, work: Path) -> LawStudy:
    return LawStudy(str(folder), work, 100, 2, [folder / "text.txt"], folder / "questions.jsonl", continuations=16)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's folder with a text to learn from, and questions."""
    folder = tmp_path_factory.mktemp("study")
    toys.llama().save_pretrained(folder)
    corruptions.pieces().save_pretrained(folder)
    words = np.random.default_rng(0).integers(0, 90, 8_000)
    (folder / "text.txt").write_text(" ".join(f"w{w}" for w in words))
    lines = [{"category": c, "turns": [f"w{i} w{i + 1}", "w3"]} for i, c in enumerate(("qa", "math", "qa"))]
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_head_goes_on_from_the_constant_part_of_the_one_before(toy: Path, tmp_path: Path) -> None:
    """To the weights that it would have by itself."""
    study = study_of(toy, tmp_path / "work")
    shared = study.head("d1_s0", 2)
    assert study_of(toy, tmp_path / "work").head("d1_s0", 2) == shared, "a head that is there is taken as it is"
    constant = load_checkpoint(Path(shared) / "constant.pt")
    assert constant is not None and constant["step"] == 2
    alone = study_of(toy, tmp_path / "alone")
    shutil.copytree(tmp_path / "work" / "data", tmp_path / "alone" / "data")
    alone._lineages["d1_s0"] = Lineage("d1_s0", options=(("num_layers", 1),), shares=(2,))
    both = [torch.load(Path(f) / "checkpoint.pt", weights_only=True)["head"] for f in (shared, alone.head("d1_s0", 2))]
    assert both[0].keys() == both[1].keys()
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])


def test_a_head_that_was_trained_with_other_settings_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "d1_s0" / "000"
    folder.mkdir(parents=True)
    plan = next(line for line in lineages() if line.name == "d1_s0").training(0, 100, 2, 8)
    (folder / "training.json").write_text(json.dumps(asdict(plan) | asdict(plan.recipe) | {"target": "t", "data": "d"}))
    (folder / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"head trained with other settings \(.*fine_tuning.*\); choose another --work"):
        LawStudy("nowhere", tmp_path, 100, 3).head("d1_s0", 0)
    with pytest.raises(ConfigError, match=r"head trained with other settings \(.*batch_size.*\); choose another --work"):
        LawStudy("nowhere", tmp_path, 100, 2, batch_size=4).head("d1_s0", 0)
    assert LawStudy("nowhere", tmp_path, 100, 2).head("d1_s0", 0) == str(folder)


def test_cells_in_small_and_their_page(toy: Path, tmp_path: Path) -> None:
    output = tmp_path / "docs" / "evidence" / "laws"
    words = ["--target", str(toy), "--work", str(tmp_path / "work"), "--output", str(output), "--text", str(toy / "text.txt")]
    words += [
        "--questions",
        str(toy / "questions.jsonl"),
        "--steps",
        "100",
        "--fine-tuning-steps",
        "2",
        "--parameters",
        "0",
        "--rounds",
        "1",
        "--continuations",
        "16",
    ]
    wanted = ["oracle", "d1_s0_t000", "d1_s0_t001", "d2_s0_t000", "no_norm", "no_pretraining"]
    assert laws([*words, *wanted]) == 0
    page = (tmp_path / "docs" / "laws.md").read_text("utf-8")
    assert "## By pretraining tokens" in page
    record = json.loads((output / "d1_s0_t001.json").read_text("utf-8"))
    assert record["pretrained"] == 8 * 127
    assert all(emitted >= 1.0 for _, _, emitted in record["emitted"])
    before = (output / "oracle.json").stat().st_mtime_ns
    assert laws([*words, "oracle"]) == 0
    assert (output / "oracle.json").stat().st_mtime_ns == before, "a record of these settings is kept"


def test_the_oracle_is_nowhere_below_a_drafter(toy: Path, tmp_path: Path) -> None:
    study = study_of(toy, tmp_path)
    oracle = {(t, n): e for t, n, e in study.oracle()["emitted"]}
    assert all(oracle[(t, n)] >= e for t, n, e in study.of_head("d1_s0", 0)["emitted"])
    assert oracle[(0.0, 4)] == pytest.approx(5.0, abs=0.5), "greedy, every drafted token of a chain is right"


def test_tables_by_task_and_by_batch(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_of(toy, tmp_path)
    monkeypatch.setattr(LawStudy, "head", lambda _, name, **__: untrained(toy, tmp_path, name))
    assert {(c, t) for c, t, _ in study.tasks("scylla")["tasks"]} == {(c, t) for c in ("qa", "math") for t in (0.0, 1.0)}
    record = study.speed(2, 1)
    assert record["speeds"].keys() == {"plain", "eagle, 60 nodes", "eagle, auto", "eagle3, auto", "scylla, auto"}
    assert record["tokens_per_step"]["plain"] == 1.0


def untrained(toy: Path, folder: Path, name: str) -> str:
    plain, _ = load_plain(str(toy))
    method = next(line.method for line in lineages() if line.name == name)
    save_head(build_head(method, plain).to(plain.dtype), folder / "heads" / name, plain)
    return str(folder / "heads" / name)


def test_every_part_of_the_page(tmp_path: Path) -> None:
    """Made-up records that follow laws: the page says which, and what misses its goal."""

    def head(name: str, share: int, value: float) -> tuple[str, dict[str, object]]:
        emitted = [[t, n, value * (0.5 + n / 120) - t] for t in (0.0, 1.0) for n in (4, 60)]
        return f"{name}_t{share:03d}", {"pretrained": share * 1_000_000, "emitted": emitted}

    records = dict(
        head(line.name, share, 4.0 + 0.1 * line.seed + np.log10(1 + share) * dict(line.options).get("num_layers", 0.5))
        for line in lineages()
        for share in line.shares
    )
    records["oracle"] = head("oracle", 0, 9.0)[1]
    names = ("plain", "eagle, 60 nodes", "eagle, auto", "eagle3, auto", "scylla, auto")
    for batch, slow in ((1, 1.0), (8, 1.0), (16, 1.0), (32, 3.0)):
        speeds = {n: [100.0 * (i + 1) / (slow if n != "plain" else 1.0)] for i, n in enumerate(names)}
        records[f"speed_b{batch:02d}"] = {"speeds": speeds, "tokens_per_step": dict.fromkeys(names, 2.0)}
    drawn = {"eagle": (3.0, 3.0), "eagle3": (3.1, 3.1), "d2_s0": (3.2, 3.5), "d5_s0": (3.5, 4.0), "oracle": (5.0, 7.0)}
    records["sharpness"] = {"drawn": [[name, s, 60, e] for name, found in drawn.items() for s, e in zip((1.0, 1.5), found, strict=True)]}
    records["tasks_eagle"] = {"tasks": [["qa", 0.0, 3.0]]}
    page = write_laws(tmp_path, {name: {"environment": ENVIRONMENT, **record} for name, record in records.items()}).read_text("utf-8")
    for title in ("By pretraining tokens", "By depth", "Beside other heads", "Without its parts", "Table 5", "By task"):
        assert f"## {title}" in page
    assert "| 60 | 3.00 → 3.00 | 3.10 → 3.10 | 3.20 → 3.50 | 3.50 → 4.00 | 5.00 → 7.00 | 25%, 50% | 12%, 25% |" in page
    assert "below plain decoding at batch: 32 (published" in page
    assert "logarithmic in tokens" in page
    assert {p.name for p in (tmp_path / "plots").iterdir()} == {"laws-tokens.png", "laws-depth.png", "laws-batch.png"}


def test_ratios_of_speeds_are_those_of_rounds(tmp_path: Path) -> None:
    """Of a machine that is of another speed in every round; what was dropped after the first is beside plain decoding there."""
    speeds = {
        "plain": [100.0, 200.0, 300.0],
        "eagle, 60 nodes": [90.0, 210.0, 280.0],
        "eagle, auto": [50.0],
        "scylla, auto": [100.0, 180.0, 330.0],
    }
    record = {"speeds": speeds, "tokens_per_step": dict.fromkeys(speeds, 2.0)}
    page = "\n".join(speed_part({"speed_b08": record, "speed_b16": record}, tmp_path))
    assert "| 8 | 200 (1.00; 2.00) | 210 (0.93; 2.00) | 50 (0.50; 2.00) | 180 (1.00; 2.00) | 1.11 |" in page
    assert "EAGLE-2 with 60 nodes is below plain decoding at batch: 8, 16 (published" in page
    assert "Scylla with adaptive trees is below 0.97 × plain decoding at batch: none." in page


def test_cells_and_settings(toy: Path, tmp_path: Path) -> None:
    found = [cell.name for cell in cells(study_of(toy, tmp_path), 1)]
    assert len(found) == len(set(found)) == 2 + 5 * len(SHARES) + 5 + len(COMPARED) + 9
    with pytest.raises(ConfigError, match="a multiple of 100"):
        LawStudy(str(toy), tmp_path, 150, 2)
    with pytest.raises(ConfigError, match="--questions"):
        LawStudy(str(toy), tmp_path, 100, 2).tasks("eagle")


def test_heads_may_be_trained_and_nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[str, int]] = []
    monkeypatch.setattr(LawStudy, "head", lambda _, name, share: trained.append((name, share)))
    output = tmp_path / "evidence" / "laws"
    assert laws(["--target", "nowhere", "--train", "--output", str(output), "d2_s0_t00", "eagle"]) == 0
    assert trained == [("d2_s0", share) for share in SHARES if share < 10] + [("eagle", 100), ("eagle3", 100)]
    assert not list(output.iterdir())
