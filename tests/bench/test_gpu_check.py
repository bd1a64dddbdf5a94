"""The script for machines with a GPU: the same code on the CPU, on tiny models, and what it says where there is no device."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_document import gpu_part, gpu_table, table_lines
from echelon.bench.throughput import ThroughputResult, environment


def test_without_a_device_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = tmp_path / "found.json"
    assert gpu.main(["--output", str(output)]) == 2
    assert capsys.readouterr().out.startswith("nothing was measured: device = 'cuda', and PyTorch sees no CUDA device")
    assert not output.exists()
    (part,) = gpu_part(output)[1:]
    assert part.startswith("**Not measured yet.**")


def test_every_cell_runs_and_is_not_measured_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = environment() | {"commit": "0123abc"}
    monkeypatch.setattr(gpu, "environment", lambda: where)
    output = tmp_path / "found.json"
    asked = ["attention", "equality-float16", "table-tiny-02", "plain-fast", "fast-bfloat16", "transformers", "two-devices"]
    arguments = ["--device", "cpu", "--small", "--minutes", "60", "--output", str(output), *asked]
    gpu.main(arguments)
    printed = capsys.readouterr().out
    assert "0 of 7 cells are measured already" in printed and "failed" not in printed
    for words in (
        "| text of plain decoding alone, float16, invariant, batch 1, 2 | 16 of 16 rows | all | holds |",
        "unpadded / padded",
        "≥ 1.09",
        "vanilla",
        "share of copying",
        "are ties",
        "tokens/s; ours",
        "| 2 ranks, 5 × 64 to 128: bits of one device | equal | equal | holds |",
    ):
        assert words in printed, words
    records = json.loads(output.read_text())
    assert len(records) == 7 and all(r["device"] == "cpu" and r["lines"] for r in records.values())
    assert records["table-tiny-02"]["results"][-1]["method"] == "replay draft model"

    records["attention"]["settings"] = {}
    records["plain-fast-02"] = records["plain-fast-02"] | {"failed": "for want of a reason"}
    output.write_text(json.dumps(records))
    assert gpu.main([*arguments, "--minutes", "0"]) == 1
    printed = capsys.readouterr().out
    assert "5 of 7 cells are measured already" in printed and "out of time: 2 cells are left" in printed
    assert "| attention | not measured |  | **misses** |" in printed


def test_without_a_known_commit_nothing_counts_as_measured() -> None:
    known, unknown = ({"settings": {}, "device": "cpu", "environment": {"commit": c}} for c in ("0123abc", "unknown"))
    assert gpu.is_alike(known, known)
    assert not gpu.is_alike(unknown, unknown) and not gpu.is_alike(known, unknown)


def test_what_holds_is_said() -> None:
    line = ["what", "1.0", "0.8", True]
    table, holds = gpu_table(["a"], {"a": {"lines": [line, ["other", "2", "", None]], "seconds": 60.0}})
    assert holds and "1 hold, 0 do not" in table and "1.0 min" in table
    assert not gpu_table(["a"], {"a": {"lines": [[*line[:3], False]], "seconds": 1.0}})[1]
    names = [cell.name for cell in gpu.DeviceCells(gpu.DeviceSize(), torch.device("cpu"), "invariant").all]
    assert names[-1] == "two-devices"
    assert len(names) == 2 + 3 + 2 * 6 + 6 + 3 + 2 + 2 + 1 and names[:3] == ["tests", "attention", "equality-float32"]


def test_each_device_has_a_table_of_its_own(tmp_path: Path) -> None:
    where = environment()
    records = {
        name: {"device": device, "environment": where | {"gpu": device}, "lines": [[name, "1", "", True]], "seconds": 6.0}
        for name, device in (("attention", "one card"), ("equality-float32", "another"))
    }
    output = tmp_path / "found.json"
    output.write_text(json.dumps(records))
    _, first, one, second, other, missing = gpu_part(output)
    assert "one card" in first and "another" in second and "another" not in first
    assert "| attention |" in one and "equality" not in one and "| equality-float32 |" in other and "attention" not in other
    assert missing.startswith("Not measured yet: ")


def table_2() -> list[ThroughputResult]:
    """Speeds of all strategies at batch 8."""

    def result_of(method: str, strategy: str, speed: float) -> ThroughputResult:
        return ThroughputResult(method, 8, [speed], 4.2, 0.5, 0, 0, strategy=strategy, decode_tokens_per_second=[speed])

    speeds = [result_of("plain", "unpadded", 100.0), result_of("replay LLMA, no graphs", "unpadded", 210.0)]
    for method in ("replay LLMA", "replay draft model"):
        speeds += [
            result_of(method, s, v) for s, v in (("padded", 140.0), ("padded-inputs", 150.0), ("padded-kv", 200.0), ("unpadded", 218.0))
        ]
    return speeds


def test_table_2_is_held_against_the_published_figures() -> None:
    lines = table_lines("OPT-6.7B", 8, table_2())
    assert lines[0][1] == "vanilla 1.40, unpad KV only 1.50, unpad inputs only 2.00, EMS 2.18"
    assert [line[1:] for line in lines[1:3]] == [["2.18", "≥ 2.17", True], ["1.50", "≥ 1.59", False]]
    assert len(lines) == 4
    unlaunched = table_lines("OPT-6.7B", 8, [r for r in table_2() if not r.method.endswith("no graphs")])
    assert unlaunched == [*lines[:2], lines[3]], "nothing to compare padded with"


def test_table_2_is_judged_by_its_speeds_whatever_its_record_says() -> None:
    """A record without speeds as it says."""
    record = {"lines": [["", "9.99", "above 1.59", True]], "seconds": 60.0}
    name, results = "table-OPT-6.7B-08", json.loads(json.dumps([asdict(r) for r in table_2()]))
    said, holds = gpu_table([name], {name: record | {"results": results}})
    assert not holds and "9.99" not in said
    assert "| OPT-6.7B, batch 8, LLMA at 4.20 tokens a step: unpadded / plain | 2.18 | ≥ 2.17 | holds |" in said
    assert "| 1.50 | ≥ 1.59 | **misses** |" in said
    said, holds = gpu_table([name], {name: record})
    assert holds and f"| {name} | 9.99 | above 1.59 | holds |" in said
