"""The folder of a checkpoint: its files are confined to it, of bounded size, and must not change while they are read."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from pydantic import BaseModel, TypeAdapter, ValidationError

from echelon.errors import EchelonError, ModelLoadError
from echelon.inputs import first_line, shown

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SETTINGS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")  # what a checkpoint holds besides its weights
MAX_NAME = 255  # characters of a file's name, as file systems have it
MAX_PATH = 4096
MAX_JSON = 64 * 2**20  # bytes; the index of the largest published models has about 10 MiB
ANY_OBJECT = TypeAdapter(dict[str, Any])
Stamp = tuple[int, int, int, int]  # device, inode, size, time of the last change in nanoseconds
Schema = TypeVar("Schema", bound=BaseModel)


class Folder:
    """A checkpoint's folder on this machine; `name` is what the user called it.

    Every file is reached through `file`, which notes its state; `check_unchanged` compares once everything is read.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        real = path.resolve()
        # the hub's cache keeps files under blobs/ and links to them from snapshots/REVISION/
        blobs = [real.parent.parent / "blobs"] if real.parent.name == "snapshots" else []
        self._roots = [real, *(root.resolve() for root in blobs)]
        self._stamps: dict[Path, Stamp] = {}

    @classmethod
    def locate(cls, name: str, what: str, needs_owner: bool = False) -> Folder:
        """The folder `name`, or the settings of the hub's repository of that name, fetched. `what` names the kind of checkpoint in errors.

        Raises
        ------
        ModelLoadError  there is neither
        """
        if not name or len(name) > MAX_PATH or "\0" in name:
            raise ModelLoadError(f"{shown(name)} is no name of a {what}: give 1 to {MAX_PATH:,} characters, a folder or a hub name")
        path = Path(name)
        try:
            is_folder = path.is_dir()
        except OSError as error:
            raise ModelLoadError(f"{what} folder {shown(name)} cannot be opened: {first_line(error)}; check the path") from error
        if is_folder:
            return cls(name, path)
        slashes = {1} if needs_owner else {0, 1}
        if path.is_absolute() or name.startswith((".", "~")) or name.count("/") not in slashes or len(name) > MAX_NAME:
            example, problem = "head" if what == "head" else "model", "is a file" if path.is_file() else "does not exist"
            raise ModelLoadError(
                f"{what} folder {shown(name)} {problem}; give a folder with config.json, or a hub name such as 'org/{example}'"
            )
        return cls(name, _fetch(name, what, SETTINGS))

    @property
    def is_of_the_hub(self) -> bool:
        """Whether it is a snapshot of a hub's repository, of which files may not be here yet."""
        return self.name != str(self.path) and not Path(self.name).is_dir()

    def fetch_weights(self, names: list[str]) -> None:
        """Have the named weight files fetched where the folder is a snapshot of a hub's repository."""
        if self.is_of_the_hub and any(not (self.path / n).exists() for n in names):
            _fetch(self.name, "weights of", tuple(names))

    def has(self, name: str) -> bool:
        """Whether there is an entry of this name, wherever it leads."""
        return (self.path / name).is_symlink() or (self.path / name).exists()

    def file(self, name: str) -> Path:
        """The path of a file of the folder, its state noted.

        Raises
        ------
        ModelLoadError  it does not exist, is no plain file, or lies outside the folder
        """
        if not name or len(name) > MAX_PATH or "\0" in name:
            raise ModelLoadError(f"{self.shown} names a file {shown(name)}, which can be none; copy the checkpoint again")
        path = self.path / name
        try:
            real = path.resolve(strict=True)
            state = _stamp(path)
            is_plain = stat.S_ISREG(path.stat().st_mode)
        except (OSError, RuntimeError) as error:
            raise ModelLoadError(f"{self.label(name)} cannot be read ({_reason(error)}); copy the checkpoint again") from error
        if not any(real.is_relative_to(root) for root in self._roots):
            raise ModelLoadError(
                f"{self.label(name)} leads out of the folder, to {shown(str(real))}; a checkpoint's files lie in its folder: copy it there"
            )
        if not is_plain:
            raise ModelLoadError(f"{self.label(name)} is no plain file; copy the checkpoint again")
        if self._stamps.setdefault(path, state) != state:
            raise self._changed(path)
        return path

    def read_json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file.

        Raises
        ------
        ModelLoadError  as `file`; it is too large, not JSON, or no object
        """
        with self._refusing_json(name):
            return ANY_OBJECT.validate_json(self._bytes(name))

    def read_as(self, name: str, schema: type[Schema]) -> Schema:
        """A JSON file as `schema` describes it; errors as in `read_json`."""
        with self._refusing_json(name):
            return schema.model_validate_json(self._bytes(name))

    def check_unchanged(self) -> None:
        """Raise ModelLoadError if a file that was reached through `file` has been changed or replaced since."""
        for path, before in self._stamps.items():
            with suppress(OSError):  # it is gone
                if _stamp(path) == before:
                    continue
            raise self._changed(path)

    def label(self, name: str) -> str:
        """A file of the folder, fit for a message."""
        return shown(f"{self.name}/{name}", quote=False)

    @property
    def shown(self) -> str:
        """The user's name for it, fit for a message."""
        return shown(self.name)

    def _bytes(self, name: str) -> bytes:
        path = self.file(name)
        if (size := self._stamps[path][2]) > MAX_JSON:
            raise ModelLoadError(f"{self.label(name)} has {size:,} bytes; at most {MAX_JSON:,} are read: copy the checkpoint again")
        try:
            with path.open("rb") as file:
                return file.read(size + 1)  # which is reserved at once; one more shows that it has grown
        except OSError as error:
            raise ModelLoadError(f"{self.label(name)} cannot be read ({_reason(error)}); check its permissions") from error

    @contextmanager
    def _refusing_json(self, name: str) -> Iterator[None]:
        try:
            yield
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            key = shown(".".join(str(part) for part in first["loc"]), quote=False)
            what = "is not JSON" if first["type"] == "json_invalid" else f"has a wrong {key}" if key else "holds no settings"
            raise ModelLoadError(f"{self.label(name)} {what} ({shown(first['msg'], quote=False)}); copy the checkpoint again") from error

    def _changed(self, path: Path) -> ModelLoadError:
        return ModelLoadError(
            f"{path} was changed while it was being read, and may be of two versions now; load again once nothing writes to {self.shown}"
        )


@contextmanager
def refusing(what: str, remedy: str = "copy the checkpoint again") -> Iterator[None]:
    """Whatever a library raises about odd values, panics of compiled code included, becomes a `ModelLoadError` that begins with `what`."""
    try:
        yield
    except (EchelonError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ModelLoadError(f"{what}: {first_line(error)}; {remedy}") from error


def _stamp(path: Path) -> Stamp:
    state = path.stat()
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _reason(error: BaseException) -> str:
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else first_line(error)


def _fetch(name: str, what: str, patterns: tuple[str, ...]) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        raise ModelLoadError(
            f"the {what} {shown(name)} is gated at the hub; ask for access on its page there, then set HF_TOKEN or run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"there is no folder {shown(name)}, and at the hub no {what} of that name, or a private one; check the name, or set HF_TOKEN"
        ) from error
    except Exception as error:  # the hub's own errors share no base
        raise ModelLoadError(
            f"there is no folder {shown(name)}, and the {what} cannot be fetched from the hub: {first_line(error)}; give a folder, or a "
            "hub name that this machine can reach"
        ) from error
