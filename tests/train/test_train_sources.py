"""What a user gives to learn from: files, folders, JSON lines, data sets by name."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from echelon import ConfigError
from echelon.demo import TARGET
from echelon.train import pair, sources
from echelon.train.sources import GIVEN, HELD_OUT, Document, check_source, digest_of, documents_of, with_held_out
from echelon.train.text import tokenize


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


def test_of_html_the_text_is_read(tmp_path: Path) -> None:
    page = """<html><head><title>no</title></head><body><script>if (a < b) no()</script><h1>One &amp; two</h1>
    <p>A  sentence
    of <b>three</b> lines.</p><nav>no</nav><ul><li>x</li><li>y</li></ul><pre>def f():
    return 1</pre></body></html>"""
    (tmp_path / "page.html").write_text(page)
    assert texts(tmp_path) == ["One & two\n\nA sentence of three lines.\n\nx\n\ny\n\ndef f():\n    return 1\n"]


def test_given_texts_are_held_out_by_what_they_say() -> None:
    docs = [Document(GIVEN, str(i), f"text {i % 400}") for i in range(500)]
    found = with_held_out(docs)
    assert len(found) == 400, "each once"
    held_out = {d.text for d in found if d.group == HELD_OUT}
    assert 8 <= len(held_out) <= 35
    assert held_out == {d.text for d in with_held_out(reversed(docs)) if d.group == HELD_OUT}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2 of --text '.*' is no JSON"),
        ("[1]", "line 2 of --text '.*' has no text; it needs a field"),
        ('{"text": 3}', "has no text"),
        ('{"text": "cut \\ud83d"}', "line 2 of --text '.*' is no JSON"),
    ],
)
def test_json_lines_without_text(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n' + line)
    with pytest.raises(ConfigError, match=message):
        texts(tmp_path / "x.jsonl")


def test_json_lines_end_where_json_lets_them(tmp_path: Path) -> None:
    """Other separators may stand inside a string, and a byte-order mark before the first line."""
    rows = [{"text": "one\u2028two\u0085three\u000bfour"}, {"text": "five"}]
    (tmp_path / "x.jsonl").write_text("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8-sig")
    assert texts(tmp_path / "x.jsonl") == [row["text"] for row in rows]


def test_a_row_of_a_data_set_is_unicode_text(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("datasets")
    module.load_dataset = lambda *_, **__: [{"text": "cut \ud83d"}]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(ConfigError, match="a row of --text 'some/set' is no Unicode text"):
        list(documents_of(Path("some/set"), 10))


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


def test_no_text_is_cut_or_filled_up_by_what_a_tokenizer_was_saved_with() -> None:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    docs = [Document(GIVEN, "a", "import os\n" * 20), Document(GIVEN, "b", "x")]
    whole = tokenize(tokenizer, docs, 0)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    assert np.array_equal(tokenize(tokenizer, docs, 0), whole) and len(whole) > 40


def test_a_pairs_corpus_is_source_and_what_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(300)]
    source = [
        Document(group, f"{group}{i}", " ".join(rng.choices(words, k=200))) for group in ("stdlib", "wheels", HELD_OUT) for i in range(8)
    ]
    monkeypatch.setattr(pair, "documents", lambda _: source)
    (tmp_path / "given").mkdir()
    for i in range(60):
        (tmp_path / "given" / f"{i}.txt").write_text(" ".join(rng.choices(words, k=50)))
    (tmp_path / "work").mkdir()
    small = replace(pair.STUDY, vocabulary=400)
    tokenizer, tokens = pair.prepare_pair(tmp_path / "work", small, [tmp_path / "given"])
    assert set(tokens) == {"stdlib", "wheels", GIVEN, HELD_OUT}
    assert len(tokenizer) == 400 and all(int(t.max()) < 400 for t in tokens.values())
    assert 0 < (tokens[GIVEN] == 0).sum() < 60, "a document begins with the end of another, and some are held out"
    again, same = pair.prepare_pair(tmp_path / "work", small, [])
    assert again.get_vocab() == tokenizer.get_vocab() and all(np.array_equal(same[g], tokens[g]) for g in tokens)
    assert small.config(small.target).num_attention_heads == 5


def test_a_pair_whose_texts_are_shorter_than_its_context_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(*_: object) -> None:
        raise AssertionError("training has begun")

    tokens = {"stdlib": np.zeros(5000, np.uint16), GIVEN: np.zeros(2048, np.uint16), HELD_OUT: np.zeros(9, np.uint16)}

    def prepared(work: Path, *_: object) -> tuple[None, dict[str, np.ndarray]]:
        np.savez(work / "tokens.npz", **tokens)  # type: ignore[arg-type]
        return None, tokens

    monkeypatch.setattr(pair, "prepare_pair", prepared)
    monkeypatch.setattr(pair, "train_together", begun)
    with pytest.raises(ConfigError, match=r"shorter than the context of 2,048 tokens \(\{'text': 2048\}\); give more with --text"):
        pair.main(tmp_path / "out", tmp_path / "work", device="cpu")
    assert not [file.name for file in (tmp_path / "work").iterdir() if file.suffix in (".npz", ".json")], "what is too short binds nobody"
