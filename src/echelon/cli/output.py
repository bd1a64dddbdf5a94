"""The output file of `echelon generate`: one line a finished row, so that a run that was cut off can be resumed.

The first line holds everything that may change a row. Rows are appended and flushed as they finish, in that order; what a
crash can leave behind is whole lines and at most one torn last line.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from pydantic_core import from_json

from echelon.errors import ConfigError, OutputError
from echelon.inputs import shown

SETTINGS = "settings"  # the key of the first line
MOST_NAMED = 5  # differences in a message


class Mode(StrEnum):
    """What is done with rows that the file holds already: refuse them, keep those that did not fail, or drop them."""

    new = "new"
    resume = "resume"
    overwrite = "overwrite"


class OutputFile:
    """A locked JSONL file that grows by whole rows. `begin` comes before the first row; `rows` are those that are finished.

    Raises
    ------
    ConfigError  it cannot be opened, another process writes it, it holds results that are not to be overwritten, or (resuming) it belongs
                 to another configuration
    OutputError  a row cannot be written, for lack of space for instance
    """

    def __init__(self, path: Path, mode: Mode = Mode.new) -> None:
        self.path, self.rows = path, list[dict[str, Any]]()
        self._mode = mode
        self._file = _locked(path)
        try:
            if mode is Mode.new:
                self._refuse_results()
        except ConfigError:
            self._file.close()
            raise

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Load the rows of an earlier run with the same settings, but for those that failed; or begin the file anew."""
        header = json.loads(json.dumps({SETTINGS: settings}))
        lines = self._whole_lines() if self._mode is Mode.resume else []
        if not lines:
            if self._mode is Mode.resume:
                self._refuse_foreign()
            self._file.truncate(0)
            self._write(header)
            return
        found, *rows = self._parsed(lines)
        self._check_same(found.get(SETTINGS), header[SETTINGS])
        self.rows = [row for row in rows if "error" not in row]
        if len(self.rows) < len(rows):
            self._rewrite([lines[0], *(line for line, row in zip(lines[1:], rows, strict=True) if "error" not in row)])
        else:
            self._file.truncate(sum(len(line) + 1 for line in lines))

    def append(self, row: dict[str, Any]) -> None:
        """Add a finished row."""
        self._write(row)
        self.rows.append(row)

    def _whole_lines(self) -> list[bytes]:
        """Lines with their end; a torn last one is left out."""
        self._file.seek(0)
        return self._file.read().split(b"\n")[:-1]

    def _refuse_results(self) -> None:
        """A file that says no more than how it was begun holds none."""
        lines = self._whole_lines()
        is_only_begun = len(lines) == 1 and lines[0].startswith(f'{{"{SETTINGS}"'.encode())
        if self._file.tell() and not is_only_begun:
            raise ConfigError(
                f"{str(self.path)!r} holds something already ({self._file.tell():,} bytes); go on with --resume, replace it with "
                "--overwrite, or choose another --output"
            )

    def _refuse_foreign(self) -> None:
        """A line without its end is the beginning of a run that was cut off, or somebody else's."""
        self._file.seek(0)
        begun, torn = f'{{"{SETTINGS}"'.encode(), self._file.read()
        if not torn.startswith(begun[: len(torn)]):
            raise ConfigError(f"cannot resume {str(self.path)!r}: its first line has no settings; choose another --output")

    def _parsed(self, lines: list[bytes]) -> list[dict[str, Any]]:
        try:
            values = [from_json(line) for line in lines]
        except ValueError as error:
            raise ConfigError(f"{str(self.path)!r} holds a line that is not JSON ({error}); it is no output to resume") from error
        if not all(isinstance(v, dict) for v in values) or not all(isinstance(v.get("index"), int) for v in values[1:]):
            raise ConfigError(f"{str(self.path)!r} holds lines that are no rows; it is no output to resume: choose another --output")
        return values

    def _check_same(self, found: Any, wanted: dict[str, Any]) -> None:
        """Name what differs."""
        if not isinstance(found, dict):
            raise ConfigError(f"cannot resume {str(self.path)!r}: its first line has no settings; choose another --output")
        names = [n for n in sorted(found.keys() | wanted.keys()) if found.get(n) != wanted.get(n)]  # a setting may be newer than the file
        if names:
            listed = "; ".join(_difference(n, found, wanted) for n in names[:MOST_NAMED])
            more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            raise ConfigError(
                f"cannot resume {str(self.path)!r}, for its rows come from another configuration: {listed}{more}; repeat that of the first "
                "run, or choose another --output"
            )

    def _rewrite(self, lines: list[bytes]) -> None:
        """The file with these lines alone, replaced in one move; the lock goes on to the new one."""
        target = self.path.resolve()
        partial = target.with_name(target.name + ".partial")
        try:
            file = partial.open("wb")
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(b"".join(line + b"\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
            partial.replace(target)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise OutputError(f"cannot write {str(partial)!r}: {error.strerror}; make room and go on with --resume") from error
        self._file.close()
        self._file = file

    def _write(self, value: dict[str, Any]) -> None:
        line = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")  # a lone surrogate becomes JSON's own escape
        try:
            self._file.write(line + b"\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(
                f"cannot write {str(self.path)!r}: {error.strerror}; {len(self.rows)} rows are saved: make room and go on with --resume"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(OSError):
            if os.fstat(self._file.fileno()).st_size == 0:  # nothing has begun: leave nothing behind
                self.path.unlink()
        with suppress(OSError):  # what a failed write left in the buffer; that failure has been raised
            self._file.close()


def _locked(path: Path) -> BinaryIO:
    """The file, opened to append, for this process alone; made anew if another run replaces it meanwhile."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"cannot write {str(path)!r}: it is no regular file; choose another --output")
    while True:
        try:
            file = path.open("ab+")
        except OSError as error:
            raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}; choose another --output") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ConfigError(f"{str(path)!r} is being written by another run; wait for it or choose another --output") from None
        with suppress(OSError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def _difference(name: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Short values as they are; of files and long ones only that they differ."""
    there, here = (shown(v[name]) if name in v else "none" for v in (found, wanted))
    is_hash = name.startswith(("model.", "draft.")) or name == "input"
    return f"{name} differs" if is_hash and "none" not in (there, here) else f"{name} = {there} there, {here} here"
