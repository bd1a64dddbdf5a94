"""Results in parts: whole parts, each row once, one run at a time, whatever ended the runs before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.errors import ConfigError, OutputError
from echelon.ray.parts import PATTERN, PartsFolder

SETTINGS = {"model": "m", "engine": {"max_num_seqs": 4}}


def rows(*names: str, text: str = "t") -> list[dict[str, Any]]:
    return [{"id": name, "text": text} for name in names]


def test_a_later_run_finds_what_is_written(tmp_path: Path) -> None:
    first = PartsFolder.begin(tmp_path / "new" / "folder", SETTINGS)
    first.write(rows("a", "b"))
    first.write(rows("c"))
    (first.path / ".part-torn.jsonl.new").write_text('{"id": "d"', "utf-8")
    again = PartsFolder.begin(first.path, SETTINGS)
    assert again.ids() == {"a", "b", "c"}
    assert again.has(["a", "b"]) and not again.has(["a"])


def test_rows_that_are_run_again_replace_themselves(tmp_path: Path) -> None:
    folder = PartsFolder.begin(tmp_path, SETTINGS)
    for text in ("one", "two"):
        folder.write(rows("a", "b", text=text))
    (part,) = tmp_path.glob(PATTERN)
    assert part.read_text("utf-8").count("two") == 2


def test_a_process_of_an_earlier_run_writes_nothing_any_more(tmp_path: Path) -> None:
    first = PartsFolder.begin(tmp_path, SETTINGS)
    second = PartsFolder.begin(tmp_path, SETTINGS)
    with pytest.raises(OutputError, match="one run at a time"):
        first.write(rows("a"))
    second.write(rows("a"))
    assert second.ids() == {"a"}


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    PartsFolder.begin(tmp_path, SETTINGS)
    with pytest.raises(ConfigError, match="'engine', 'sampling_params'"):
        PartsFolder.begin(tmp_path, {"model": "m", "engine": {}, "sampling_params": {"temperature": 0}})


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError):
        PartsFolder.begin(tmp_path / "file", SETTINGS)
