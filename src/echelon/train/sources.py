"""Documents to learn from: Python source that stands on this machine, or what a user gives, which may be UTF-8 files (of HTML the text),
folders of them, JSON lines, or a data set by its hub name where `datasets` is installed.

The source is in four groups. Held-out documents are whole files of the standard library, chosen by the hash of their path, so the split
does not depend on the order of a directory listing.
"""

from __future__ import annotations

import hashlib
import html.parser
import importlib
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from echelon.errors import ConfigError

MAX_FILE_BYTES = 300_000
MAX_MEAN_LINE = 120  # characters; longer lines mean tables or generated code
HELD_OUT = "held-out"
HELD_OUT_SHARE = 20  # one file in this many; of files that come without a split of their own, the last part of each
TEST_FOLDERS = {"test", "tests", "idlelib", "lib2to3"}
WHEELS = ["torch", "transformers", "sympy", "networkx", "matplotlib", "numpy", "hypothesis", "pydantic", "rich", "setuptools"]
GIVEN = "text"  # the group of what a user gives
JSON_LINES, HTML = ".jsonl", (".html", ".htm", ".xhtml")
UNREAD = {"script", "style", "head", "nav", "svg"}  # elements of HTML without text to learn from
BLOCKS = {"p", "div", "li", "tr", "pre", "br", "h1", "h2", "h3", "h4", "h5", "h6", "dt", "dd", "blockquote", "section", "td", "th"}
FIELDS = ("text", "content")  # of a JSON object or a data set's row: the first that is there is its text
BYTES_PER_TOKEN = 8  # more than any tokenizer's, for how much of a data set is read


@dataclass(frozen=True)
class Document:
    """One text: its group, its path below the group's root."""

    group: str
    path: str
    text: str

    @property
    def sha256(self) -> str:
        """Digest of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def _read(path: Path) -> str | None:
    """The text of a source file, or `None` for what no model should learn from (empty, huge, generated, not UTF-8)."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    is_odd = not text.strip() or len(text) > MAX_FILE_BYTES or len(text) > MAX_MEAN_LINE * (text.count("\n") + 1)
    return None if is_odd else text


def _standard_library() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if "site-packages" in relative.parts or (text := _read(path)) is None:
            continue
        digest = int(hashlib.sha256(str(relative).encode()).hexdigest(), 16)
        group = "held-out" if digest % HELD_OUT_SHARE == 0 else "stdlib"
        yield Document("stdlib-tests" if TEST_FOLDERS.intersection(relative.parts) else group, str(relative), text)


def _wheels(names: Iterable[str]) -> Iterator[Document]:
    for name in names:
        for file in sorted(metadata.distribution(name).files or [], key=str):
            if file.suffix == ".py" and (text := _read(Path(str(file.locate())))) is not None:
                yield Document("wheels", str(file), text)


def documents(wheels: Iterable[str]) -> list[Document]:
    """All documents, each text once (the first path that has it); `wheels` are names of installed distributions."""
    library = sorted(_standard_library(), key=lambda d: d.group != "held-out")
    return each_once([*library, *_wheels(wheels)])


def each_once(docs: Iterable[Document]) -> list[Document]:
    """Each text once, so that none of what is held out is learned from: the first document that has it."""
    seen: dict[str, Document] = {}
    for document in docs:
        seen.setdefault(document.sha256, document)
    return list(seen.values())


def manifest(docs: Sequence[Document], wheels: Iterable[str]) -> dict[str, object]:
    """Describe the corpus: versions, and per group the number of files, bytes and one SHA-256 over the sorted (path, SHA-256) pairs.

    Held-out files are listed one by one, because evaluations read them again.
    """
    groups: dict[str, object] = {}
    for group in sorted({d.group for d in docs}):
        members = sorted((d.path, d.sha256, len(d.text.encode())) for d in docs if d.group == group)
        digest = hashlib.sha256("".join(f"{p} {s}\n" for p, s, _ in members).encode()).hexdigest()
        groups[group] = {"files": len(members), "bytes": sum(n for *_, n in members), "sha256": digest}
    return {
        "python": sysconfig.get_config_var("py_version"),
        "wheels": {name: metadata.version(name) for name in sorted(wheels)},
        "groups": groups,
        "held_out": {d.path: d.sha256 for d in sorted(docs, key=lambda d: d.path) if d.group == "held-out"},
    }


def with_held_out(docs: Iterable[Document]) -> list[Document]:
    """Each text once; one document in HELD_OUT_SHARE, by the hash of its text, is held out."""
    once = each_once(d for d in docs if d.text.strip())
    return [replace(d, group=HELD_OUT) if int(d.sha256, 16) % HELD_OUT_SHARE == 0 else d for d in once]


def check_source(source: Path) -> None:
    """Raise `ConfigError` for a source that is no text."""
    if source.is_dir():
        if next(_files(source), None) is None:
            raise ConfigError(f"--text {str(source)!r} is a folder without a UTF-8 file; give text")
    elif source.exists():
        _whole(source)
    elif find_spec("datasets") is None:
        raise ConfigError(f"--text {str(source)!r} is no file or folder; give UTF-8 text, or install `datasets` to read it by its hub name")


def check_apart(sources: Iterable[Path], folder: Path) -> None:
    """Raise `ConfigError` where a run would find its own files among its texts; hidden folders are not read."""
    for source in sources:
        is_below = source.is_dir() and folder.resolve().is_relative_to(source.resolve())
        if is_below and not any(part.startswith(".") for part in folder.resolve().relative_to(source.resolve()).parts):
            raise ConfigError(f"--text {str(source)!r} holds {str(folder)!r}, where the run writes its own files; choose another for these")


def digest_of(source: Path) -> str:
    """A digest by which a run knows its texts again; that of a data set is its name's."""
    digest = hashlib.sha256()
    if not source.exists():
        digest.update(str(source).encode())
    for path in _files(source) if source.is_dir() else [source] if source.exists() else []:
        digest.update(str(path.relative_to(source)).encode() if source.is_dir() else b"")
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def documents_of(source: Path, num_tokens: int) -> Iterator[Document]:
    """The texts of a source; of a data set, which may have no end, as many as some `num_tokens` tokens need."""
    if source.is_dir():
        for path in _files(source):
            yield from _of_file(path, str(path.relative_to(source)))
    elif source.exists():
        yield from _of_file(source, str(source))
    else:
        yield from _of_dataset(str(source), num_tokens * BYTES_PER_TOKEN)


def _files(folder: Path) -> Iterator[Path]:
    """Files of UTF-8 text below a folder, hidden ones left out, in an order of names."""
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not is_hidden and _is_text(path):
            yield path


def _is_text(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return "\0" not in file.read(4096)
    except (OSError, UnicodeDecodeError):
        return False


def _whole(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {str(path)!r} cannot be read as UTF-8 ({error}); convert it") from error


def _of_file(path: Path, name: str) -> Iterator[Document]:
    if path.suffix != JSON_LINES:
        yield Document(GIVEN, name, text_of_html(_whole(path)) if path.suffix in HTML else _whole(path))
        return
    for number, line in enumerate(_whole(path).split("\n"), 1):  # and not at other separators, which JSON allows inside a string
        if line.strip():
            yield Document(GIVEN, f"{name}:{number}", _text_of(line, f"line {number} of --text {name!r}"))


class _PageText(html.parser.HTMLParser):
    """Collects what a reader sees, a line for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._unread: list[str] = []
        self._is_preformatted = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:  # noqa: ARG002
        if tag in UNREAD:
            self._unread.append(tag)
        self._is_preformatted |= tag == "pre"
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._unread:
            del self._unread[self._unread.index(tag) :]
        if tag == "pre":
            self._is_preformatted = False
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._unread:
            self.parts.append(data if self._is_preformatted else re.sub(r"\s+", " ", data))


def text_of_html(page: str) -> str:
    """What a reader sees of a page of HTML."""
    parser = _PageText()
    parser.feed(page)
    parser.close()
    lines = (line.rstrip() for line in "".join(parser.parts).splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line if line.startswith("  ") else line.lstrip() for line in lines)).strip() + "\n"


def _text_of(line: str, where: str) -> str:
    try:
        row = from_json(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON ({error}); give an object a line") from error
    return _field(row, where)


def _field(row: object, where: str) -> str:
    found = next((row[name] for name in FIELDS if name in row), None) if isinstance(row, dict) else None
    if not isinstance(found, str):
        raise ConfigError(f"{where} has no text; it needs a field {' or '.join(map(repr, FIELDS))}")
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} is no Unicode text ({error.reason}); correct it") from error
    return found


def _of_dataset(name: str, num_bytes: int) -> Iterator[Document]:
    """Rows of the split "train", streamed."""
    datasets = importlib.import_module("datasets")
    try:
        rows = datasets.load_dataset(name, split="train", streaming=True)
    except Exception as error:
        raise ConfigError(
            f"--text {name!r} is no file or folder, and no data set that can be read ({str(error).splitlines()[0]})"
        ) from error
    texts = (_field(row, f"a row of --text {name!r}") for row in rows)
    taken = 0

    def is_wanted(text: str) -> bool:
        nonlocal taken
        is_first, taken = taken < num_bytes, taken + len(text.encode())
        return is_first

    for number, text in enumerate(takewhile(is_wanted, texts)):
        yield Document(GIVEN, f"{name}:{number}", text)
