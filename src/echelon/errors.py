"""Everything echelon raises on purpose. A message says what was asked, which limit it met, and what mends it."""

from __future__ import annotations

import traceback
from pathlib import Path


class EchelonError(Exception):
    """Base of all errors of this package. `place`: where in the code it arose, once its frames have been let go."""

    place: str = ""


class ConfigError(EchelonError, ValueError):
    """A configuration value is unknown, out of range or contradicts another."""


class RequestError(EchelonError, ValueError):
    """One request (prompt or sampling parameters) cannot be served; others can."""


class RowError(EchelonError):
    """One request's work failed inside the engine: its logits are no numbers, or code that serves it alone raised."""


def row_error(error: Exception) -> EchelonError:
    """What a request's output says about an exception in its work. It outlives the step, whose tensors the exception's frames hold: so
    these are let go, and only their names stay.
    """
    wrapped = error if isinstance(error, EchelonError) else RowError(f"{type(error).__name__} in the work of one request: {error}")
    if wrapped is not error:
        wrapped.__cause__ = error
    wrapped.place = wrapped.place or _frames(error)
    _let_go(wrapped)
    return wrapped


def place_of(error: BaseException) -> str:
    """An exception for the log: its kind and where it arose. What it says may hold pieces of a request, so that stays out."""
    place = error.place if isinstance(error, EchelonError) else ""
    return f"{type(error).__name__} in {place or _frames(error)}"


def _frames(error: BaseException) -> str:
    """The last three frames that it came through, the innermost first."""
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)[-3:]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))


def _let_go(error: BaseException) -> None:
    """What it came through, and what was being handled when it arose; likewise of its cause."""
    error.__traceback__ = error.__context__ = None
    if error.__cause__ is not None:
        _let_go(error.__cause__)


class ModelLoadError(EchelonError):
    """A checkpoint cannot be read: files missing, unsafe or mis-shaped."""


class UnsupportedModelError(EchelonError):
    """A model whose rows cannot be batched or rolled back exactly, refused by name."""


class OutOfBlocksError(EchelonError):
    """The KV pool has too few free blocks for a reservation."""


class OutputError(EchelonError):
    """Results cannot be written: no space, no permission, no such place."""


class MissingExtraError(EchelonError):
    """An optional dependency is not installed; the message says which `pip install` mends it."""
