"""Engines that die under a hard limit, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import memory
from benchmarks.hard_limits import limited
from benchmarks.memory_document import write_memory

MIB = 2**20
HERE = {"cpu": "one", "isa": "none", "threads": "1", "torch": "2", "commit": "0"}


def test_a_process_that_a_limit_kills_leaves_a_record() -> None:
    record = limited("limit", "embedded", str(-200 * MIB))
    assert "died" in record and record["survived"] == 0 and record["planned"] - record["limit"] > 100 * MIB


def bound_of(speeds: tuple[float, ...], below: dict[str, object]) -> dict[str, object]:
    """Rounds of drafting at these speeds, beside plain decoding that is slower in each."""
    drafted = [{"least": 900 * MIB, "limit": 850 * MIB, "data": 800 * MIB, "speed": speed} for speed in speeds]
    rounds = [{"none": {"speed": 10.0 - i}, "draft_model": own} for i, own in enumerate(drafted)]
    return {"rounds": rounds, "below": {"limit": 768 * MIB} | below, "environment": HERE}


GAINS, LOSES = (15.0, 9.9, 8.0), (9.0, 8.1, 8.0)


@pytest.mark.parametrize(
    ("speeds", "below", "line", "sentence"),
    [
        (GAINS, {"died": "of it"}, "1.10 × plain; less: died | yes |", "1.1 times as fast as without drafts"),
        (GAINS, {"speed": 12.0}, "1.10 × plain; less: 12.0 tokens/s | **no** |", "under 768 MiB it decodes 1.50 times as fast"),
        (LOSES, {"died": "of it"}, "0.90 × plain; less: died | **no** |", "0.9 times as fast as without drafts"),
    ],
)
def test_the_lower_bound_is_told_by_the_middle_of_its_rounds(
    speeds: tuple[float, ...], below: dict[str, object], line: str, sentence: str, tmp_path: Path
) -> None:
    """It is met where drafting gains there, and dies of less."""
    records = {"bound": bound_of(speeds, below)}
    assert f"| bound | 900 MiB | 800 MiB of data | {line}" in memory.as_markdown(records)
    (tmp_path / "memory.md").write_text("# Memory\n")
    assert sentence in write_memory(tmp_path / "memory.md", records, {}).read_text()


def test_what_was_measured_is_told_and_drawn(tmp_path: Path) -> None:
    peaks = {f"peak_{m}_{s}": {"total_bytes": 1100 * MIB, "peak": 1000 * MIB} for m in ("llama", "opt") for s in ("chain", "int8_kv")}
    ratios = {
        "ratio_llama_2": {"ratio": "2", "bytes": 200 * MIB, "planned": 0, "held": 0, "died": "of it"},
        "ratio_llama_15": {"ratio": "15", "bytes": 30 * MIB, "planned": 15, "held": 15, "holds_one_more": False},
        "ratio_llama_plan": {"ratio": "plan", "bytes": 60 * MIB, "planned": 28, "held": 28, "holds_one_more": False},
    }
    limits = {"limit_llama": {"planned": 900 * MIB, "data": 800 * MIB, "survived": 200}}
    nodes = {f"nodes_{n}": {"total_bytes": 10**9 + 2 * n * 10**6, "peak": 9 * 10**8 + n * 10**6, "tree_bytes": n * 10**6} for n in (16, 64)}
    fell_short = {"limit_opt": {"planned": 900 * MIB, "survived": 120, "died": "of it"}}
    said = memory.as_markdown(peaks | ratios | limits | fell_short).splitlines()
    assert any("200 of 200" in line and "yes" in line for line in said) and any("120 of 200" in line and "**no**" in line for line in said)
    assert any("0 queries" in line and "died" in line for line in said) and any("28 held" in line for line in said)
    records = {name: record | {"environment": HERE} for name, record in (peaks | ratios | limits | fell_short | nodes).items()}
    (tmp_path / "memory.md").write_text("# Memory\n")
    written = write_memory(tmp_path / "memory.md", records, {}).read_text()
    assert "4 of 4 are met" in written and "| llama | +100 of 1,000 | – |" in written and "llama 200, opt 120" in written
    assert "grows by 48 MB from trees of 16 nodes to 64, its plan by 96 MB, of which 48 are" in written
    assert "| 1:2 | 200 MiB | does not fit | died |" in written and "| the plan's choice | 60 MiB | 28 | 28 |" in written
    assert all((tmp_path / "plots" / f"memory-{name}.png").stat().st_size > 5000 for name in ("peaks", "ratios"))
