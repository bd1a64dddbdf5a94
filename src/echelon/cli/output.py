"""The output file of `echelon generate`: one line a finished row, so that a run that was cut off can be resumed.

The first line holds a hash of everything that may change a row. Rows are appended and flushed as they finish, in that order; what a
crash can leave behind is whole lines and at most one torn last line.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from echelon.errors import ConfigError, OutputError

HASH = "config_hash"


def config_hash(values: Mapping[str, Any]) -> str:
    """Of values that JSON can write, whatever the order of keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class OutputFile:
    """A locked JSONL file that grows by whole rows; `rows` are those that an earlier run has finished.

    Raises
    ------
    ConfigError  it cannot be opened, another process writes it, or (resuming) it belongs to another configuration
    OutputError  a row cannot be written, for lack of space for instance
    """

    def __init__(self, path: Path, hash: str, resume: bool) -> None:
        self.path, self.rows = path, list[dict[str, Any]]()
        try:
            self._file = path.open("ab+")
        except OSError as error:
            raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}; choose another --output") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"{str(path)!r} is being written by another run; wait for it or choose another --output") from None
        whole = self._read(hash) if resume else 0
        self._file.truncate(whole)
        if whole == 0:
            self._write({HASH: hash})

    def _read(self, hash: str) -> int:
        """Load finished rows; returns the length of all whole lines, in bytes."""
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        lines = content[:whole].splitlines()
        if not lines:
            return 0
        try:
            header, *self.rows = [json.loads(line) for line in lines]
        except ValueError as error:
            raise ConfigError(f"{str(self.path)!r} holds a line that is not JSON ({error}); it is no output to resume") from error
        found_hash = header.get(HASH) if isinstance(header, dict) else None
        if found_hash != hash:
            found = f"has the hash {found_hash}" if found_hash else "has no hash in its first line"
            raise ConfigError(
                f"cannot resume {str(self.path)!r}: it {found}, this configuration {hash}; "
                "repeat the options and input of the first run, or choose another --output"
            )
        return whole

    def append(self, row: dict[str, Any]) -> None:
        """Add a finished row."""
        self._write(row)
        self.rows.append(row)

    def _write(self, value: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(
                f"cannot write {str(self.path)!r}: {error.strerror}; {len(self.rows)} rows are saved: make room and go on with --resume"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(OSError):  # what a failed write left in the buffer; that failure has been raised
            self._file.close()
