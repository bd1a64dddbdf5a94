"""Files of a training run that outlive crashes, flipped bits, full disks and a second trainer in the same folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from echelon.errors import ConfigError, ModelLoadError, OutputError
from echelon.inputs import made_folder

logger = logging.getLogger("echelon")
MARK = b"echelon sha256 "  # a checkpoint ends with this and the digest of all before it
LOCK = ".lock"


@contextmanager
def only_trainer(folder: Path) -> Iterator[None]:
    """Hold a run's folder; the lock goes with the process.

    Raises
    ------
    ConfigError  another process trains there
    """
    made_folder(folder, "--output")
    lock = FileLock(folder / LOCK, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(f"another process trains in {str(folder)!r}; wait for it, or choose another folder") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def taking_turns(folder: Path) -> Iterator[None]:
    """Hold a folder that runs share; wait for another that makes its files."""
    made_folder(folder, "--data")
    with FileLock(folder / LOCK):
        yield


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write into `OutputError`, which names the file and what its disk has left; remove the unfinished file."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        partial(path).unlink(missing_ok=True)
        reason = getattr(_cause(error), "strerror", None) or str(error).splitlines()[0]
        raise OutputError(
            f"cannot write {str(path)!r}: {reason} ({_free(path)} free on its disk); make room or choose another folder, and run again: "
            "a run goes on at its last checkpoint"
        ) from error


def partial(path: Path) -> Path:
    """Where a file is written before it takes its name; with the same ending, which some writers insist on."""
    return path.with_name(f".{path.stem}.tmp{path.suffix}")


def previous(path: Path) -> Path:
    """Where a checkpoint's predecessor is kept."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file whole or not at all: what is written to the path that is yielded takes its name at the end."""
    with writing(path):
        yield partial(path)
        partial(path).replace(path)


def save_checkpoint(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint with its digest, whole or not at all; the one before stays as its predecessor."""
    with replacing(path) as part:
        with part.open("wb") as file:
            hashing = _Hashing(file)
            torch.save(state, hashing)  # type: ignore[arg-type]
            file.write(MARK + hashing.digest.hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            path.replace(previous(path))


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The newest checkpoint that is as it was written, None where there is none; damaged ones are named in the log.

    Raises
    ------
    ModelLoadError  all are damaged
    """
    written = [p for p in (path, previous(path)) if p.exists()]
    whole = next((p for p in written if _is_whole(p)), None)
    if whole is None:
        if written:
            raise ModelLoadError(f"damaged: {', '.join(map(str, written))}; remove the file to begin anew, or put a whole copy there")
        return None
    if whole != written[0]:
        logger.warning("%s is damaged; training goes on from the checkpoint before, %s", written[0], whole)
    return dict(torch.load(whole, map_location="cpu", weights_only=True))


class _Hashing:
    """A file that takes what is written to it and digests it on the way."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _is_whole(path: Path) -> bool:
    """Whether a file ends with the digest of what stands before."""
    length = len(MARK) + 64
    try:
        with path.open("rb") as file:
            left = file.seek(0, os.SEEK_END) - length
            if left < 0:
                return False
            file.seek(0)
            digest = hashlib.sha256()
            while left and (piece := file.read(min(left, 1 << 20))):
                digest.update(piece)
                left -= len(piece)
            return file.read() == MARK + digest.hexdigest().encode()
    except OSError as error:
        raise ModelLoadError(f"cannot read {str(path)!r}: {error.strerror}; make it readable, or choose another folder") from error


def _cause(error: BaseException) -> BaseException:
    """The operating system's own error, if one stands behind."""
    while not isinstance(error, OSError) and (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return error


def _free(path: Path) -> str:
    """What is left on the disk that holds a path, or would."""
    folder = next((p for p in path.absolute().parents if p.exists()), Path("/"))
    return f"{shutil.disk_usage(folder).free / 1e9:,.1f} GB"


def check_same_run(file: Path, settings: dict[str, Any], is_kept: bool = True) -> None:
    """Write down the settings of a run, unless they are not to be kept yet, or raise `ConfigError` where it was begun with others."""
    settings = json.loads(json.dumps(settings))
    before = json.loads(file.read_text("utf-8")) if file.exists() else settings
    before = {name: settings.get(name) for name in ("data", "said")} | {"seed": 0} | before  # of which older runs say nothing
    if other := [f"{k} = {before.get(k)!r} there, {v!r} here" for k, v in settings.items() if before.get(k) != v]:
        raise ConfigError(f"{file.parent} holds a run with other settings ({'; '.join(other)}); choose another folder, or repeat those")
    if not is_kept:
        return
    with replacing(file) as part:
        part.write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
