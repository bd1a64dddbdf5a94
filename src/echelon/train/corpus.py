"""Text that stands on every machine that runs echelon: Python source of the standard library and of the installed wheels.

The corpus is a list of `Document`s in four groups. Held-out documents are whole files of the standard library, chosen by the hash of
their path, so the split does not depend on the order of a directory listing.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

MAX_FILE_BYTES = 300_000
MAX_MEAN_LINE = 120  # characters; longer lines mean tables or generated code
HELD_OUT_SHARE = 20  # one file in this many
FILES_AT_ONCE = 256  # an encoding takes some thirty times the memory of its text
TEST_FOLDERS = {"test", "tests", "idlelib", "lib2to3"}


@dataclass(frozen=True)
class Document:
    """One source file: its group, its path below the group's root, its text."""

    group: str
    path: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def _read(path: Path) -> str | None:
    """The text of a source file, or `None` for what no model should learn from (empty, huge, generated, not UTF-8)."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if not text.strip() or len(text) > MAX_FILE_BYTES or len(text) > MAX_MEAN_LINE * (text.count("\n") + 1):
        return None
    return text


def _standard_library() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if "site-packages" in relative.parts or (text := _read(path)) is None:
            continue
        if TEST_FOLDERS.intersection(relative.parts):
            group = "stdlib-tests"
        else:
            digest = int(hashlib.sha256(str(relative).encode()).hexdigest(), 16)
            group = "held-out" if digest % HELD_OUT_SHARE == 0 else "stdlib"
        yield Document(group, str(relative), text)


def _wheels(names: Iterable[str]) -> Iterator[Document]:
    for name in names:
        for file in sorted(metadata.distribution(name).files or [], key=str):
            if file.suffix == ".py" and (text := _read(Path(str(file.locate())))) is not None:
                yield Document("wheels", str(file), text)


def documents(wheels: Iterable[str]) -> list[Document]:
    """All documents, each text once (the first path that has it); `wheels` are names of installed distributions."""
    seen: dict[str, Document] = {}
    library = sorted(_standard_library(), key=lambda d: d.group != "held-out")
    for document in [*library, *_wheels(wheels)]:
        seen.setdefault(document.sha256, document)
    return list(seen.values())


def manifest(docs: Sequence[Document], wheels: Iterable[str]) -> dict[str, object]:
    """What was read: versions, and per group the number of files, bytes and one SHA-256 over the sorted (path, SHA-256) pairs.

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


def tokenize(tokenizer: Tokenizer, docs: Iterable[Document], end_of_text: int) -> np.ndarray:
    """One flat array, uint16 where the vocabulary fits: every document's tokens, each document preceded by `end_of_text`."""
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    texts = [d.text for d in docs]
    parts = []
    for start in range(0, len(texts), FILES_AT_ONCE):
        encoded = tokenizer.encode_batch_fast(texts[start : start + FILES_AT_ONCE], add_special_tokens=False)
        parts += [np.array([end_of_text, *e.ids], dtype=dtype) for e in encoded]
    return np.concatenate(parts)
