"""Engines that die under a hard limit, and what is said of them."""

from __future__ import annotations

from pathlib import Path

from benchmarks import memory
from benchmarks.hard_limits import limited
from benchmarks.memory_plots import draw_peaks, draw_ratios

MIB = 2**20


def test_a_process_that_a_limit_kills_leaves_a_record() -> None:
    record = limited("limit", "embedded", str(-200 * MIB))
    assert "died" in record and record["survived"] == 0 and record["planned"] - record["limit"] > 100 * MIB


def test_what_was_measured_is_told_and_drawn(tmp_path: Path) -> None:
    peaks = {f"peak_{m}_{s}": {"total_bytes": 1100 * MIB, "peak": 1000 * MIB} for m in ("llama", "opt") for s in ("chain", "int8_kv")}
    ratios = {
        "ratio_llama_2": {"ratio": "2", "bytes": 200 * MIB, "planned": 0, "held": 0, "died": "of it"},
        "ratio_llama_15": {"ratio": "15", "bytes": 30 * MIB, "planned": 15, "held": 15},
        "ratio_llama_plan": {"ratio": "plan", "bytes": 60 * MIB, "planned": 28, "held": 28},
    }
    limits = {"limit_llama": {"planned": 900 * MIB, "data": 800 * MIB, "survived": 200}}
    fell_short = {"limit_opt": {"planned": 900 * MIB, "survived": 120, "died": "of it"}}
    said = memory.as_markdown(peaks | ratios | limits | fell_short).splitlines()
    assert any("200 of 200" in line and "yes" in line for line in said) and any("120 of 200" in line and "**no**" in line for line in said)
    assert any("0 queries" in line and "died" in line for line in said) and any("28 held" in line for line in said)
    draw_peaks(peaks, 128.0, tmp_path / "peaks.png")
    draw_ratios(ratios, tmp_path / "ratios.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("peaks", "ratios"))
