"""Pages that commands write from the evidence are what they would write now."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from benchmarks import ablation
from benchmarks.cells import Records
from benchmarks.document import write_document
from benchmarks.laws_document import write_laws
from benchmarks.memory_document import write_memory
from benchmarks.tables import Tables
from benchmarks.workloads import Size

DOCS = Path(__file__).parents[2] / "docs"
EVIDENCE = DOCS / "evidence"


def test_the_page_of_benchmarks(tmp_path: Path) -> None:
    (tmp_path / "evidence").symlink_to(EVIDENCE)
    tables = Tables(Size(), EVIDENCE / "benchmarks")
    written = write_document(tmp_path, [cell.name for cell in tables.cells], json.loads(json.dumps(asdict(tables.size))))
    assert written.read_text("utf-8") == (DOCS / "benchmarks.md").read_text("utf-8"), "run: python -m benchmarks.tables none"


def test_the_page_of_laws(tmp_path: Path) -> None:
    written = write_laws(tmp_path, Records(EVIDENCE / "laws").read())
    assert written.read_text("utf-8") == (DOCS / "laws.md").read_text("utf-8"), "run: python -m benchmarks.laws --target TARGET none"


def test_the_page_of_the_ablation(tmp_path: Path) -> None:
    shutil.copy(EVIDENCE / "ablation.json", tmp_path)
    ablation.write_document(Records(tmp_path / "cells"), tmp_path, {})
    for name in ("ablation.json", "ablation.md"):
        assert (tmp_path / name).read_text("utf-8") == (EVIDENCE / name).read_text("utf-8"), "benchmarks.ablation.write_document"


def test_the_page_of_memory(tmp_path: Path) -> None:
    page = Path(shutil.copy(DOCS / "memory.md", tmp_path))
    write_memory(page, Records(EVIDENCE / "memory").read(), Records(EVIDENCE / "specmemo").read())
    assert page.read_text("utf-8") == (DOCS / "memory.md").read_text("utf-8"), "run: python -m benchmarks.memory none"
