"""A folder of results in parts, which outlives any end of those that write it: a part is there whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from echelon.errors import ConfigError, OutputError
from echelon.inputs import made_folder, shown

SETTINGS, RUN, LOCK = "settings.json", "run", ".lock"
PATTERN = "part-*.jsonl"
OPTION = "output"


class PartsFolder:
    """Where one run writes. Runs are numbered: a process of an earlier one that still lives writes nothing any more.

    Parameters
    ----------
    path  a folder that all nodes see
    run   the number of the run that writes, as `begin` gives it
    """

    def __init__(self, path: str | os.PathLike[str], run: int = 0) -> None:
        self.path, self.run = Path(path), run

    @classmethod
    def begin(cls, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> PartsFolder:
        """The folder for a new run, which goes on where earlier ones with the same settings ended.

        Raises
        ------
        ConfigError  what is there was written with other settings
        OutputError  the folder cannot be made or written
        """
        folder = cls(made_folder(Path(path), OPTION))
        given = json.loads(json.dumps(settings, default=str))
        with folder._writing():
            before = folder._read(SETTINGS)
            if before is not None and (changed := _changed(json.loads(before), given)):
                raise ConfigError(
                    f"{str(path)!r} holds results with other settings ({', '.join(changed)}); give the same, or another {OPTION}"
                )
            folder.run = int(folder._read(RUN) or 0) + 1
            folder._replace(SETTINGS, json.dumps(given, indent=1))
            folder._replace(RUN, str(folder.run))
        return folder

    def ids(self) -> set[str]:
        """Ids of all rows that are written."""
        return {json.loads(line)["id"] for part in self.path.glob(PATTERN) for line in part.read_text("utf-8").splitlines()}

    def has(self, ids: Iterable[str]) -> bool:
        """Whether there is a part of just these rows."""
        return (self.path / _name(ids)).exists()

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Add a part.

        Raises
        ------
        OutputError  a later run has begun, or there is no space or permission
        """
        with self._writing():
            if int(self._read(RUN) or 0) != self.run:
                raise OutputError(f"another run writes to {str(self.path)!r} by now; let one run at a time")
            self._replace(_name(row["id"] for row in rows), "".join(json.dumps(row) + "\n" for row in rows))

    def _writing(self) -> FileLock:
        return FileLock(self.path / LOCK)

    def _read(self, name: str) -> str | None:
        path = self.path / name
        return path.read_text("utf-8") if path.exists() else None

    def _replace(self, name: str, text: str) -> None:
        new = self.path / f".{name}.new"
        try:
            with new.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path / name)
        except OSError as error:
            raise OutputError(f"cannot write to {str(self.path)!r}: {error.strerror}; make room, or choose another {OPTION}") from error


def _name(ids: Iterable[str]) -> str:
    """A part's name says which rows it has: rows that are run again after a crash replace themselves."""
    return f"part-{hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:24]}.jsonl"


def _changed(before: Any, now: Any) -> list[str]:
    return [shown(key) for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
