"""What a user gives to learn from: files, folders, JSON lines, data sets by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from echelon import ConfigError
from echelon.train import sources
from echelon.train.sources import check_source, digest_of, documents_of


def texts(source: Path, num_tokens: int = 10**6) -> list[str]:
    check_source(source)
    return [d.text for d in documents_of(source, num_tokens)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b" / ".hidden").mkdir(parents=True)
    (tmp_path / "a.md").write_text("# one")
    (tmp_path / "b" / "c.py").write_text("two = 2")
    (tmp_path / "b" / "d.jsonl").write_text("\n".join(json.dumps(row) for row in ({"text": "three"}, {"content": "four", "n": 1})) + "\n\n")
    (tmp_path / "b" / ".hidden" / "e.txt").write_text("no")
    (tmp_path / "b" / "picture.png").write_bytes(b"\x89PNG\r\n\x00\xff")
    (tmp_path / "zeros").write_bytes(b"\0" * 10)
    return tmp_path


def test_a_folder_is_all_text_below_it(folder: Path) -> None:
    assert texts(folder) == ["# one", "two = 2", "three", "four"]
    assert texts(folder / "a.md") == ["# one"]


def test_a_source_is_known_by_what_it_holds_and_where(folder: Path) -> None:
    before = digest_of(folder)
    (folder / "b" / "picture.png").write_bytes(b"\xff")
    assert digest_of(folder) == before, "what is not read does not count"
    (folder / "a.md").rename(folder / "z.md")
    assert digest_of(folder) != before
    assert digest_of(folder / "z.md") == digest_of(folder / "z.md") != digest_of(folder / "b" / "c.py")
    assert digest_of(Path("some/set")) != digest_of(Path("other/set"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2 of --text '.*' is no JSON"),
        ("[1]", "line 2 of --text '.*' has no text; it needs a field"),
        ('{"text": 3}', "has no text"),
    ],
)
def test_json_lines_without_text(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n' + line)
    with pytest.raises(ConfigError, match=message):
        texts(tmp_path / "x.jsonl")


class Rows:
    """A data set without an end."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield {"id": 1, "text": "x" * 100}


def test_of_a_data_set_as_much_is_read_as_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(name: str, **settings: Any) -> Rows:
        asked.append((name, settings))
        if name != "some/set":
            raise ValueError("no such set\nmore")
        return Rows()

    module: Any = ModuleType("datasets")
    module.load_dataset = load
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(sources, "find_spec", lambda name: name)
    assert texts(Path("some/set"), 100) == ["x" * 100] * 8
    assert asked == [("some/set", {"split": "train", "streaming": True})]
    with pytest.raises(ConfigError, match=r"'none/such' is no file or folder, and no data set that can be read \(no such set\)"):
        texts(Path("none/such"))
