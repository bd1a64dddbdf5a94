"""Exceptions that echelon raises on purpose. A message says what was asked, which limit it met, and what mends it."""

from __future__ import annotations

import traceback
from enum import StrEnum
from pathlib import Path


class EchelonError(Exception):
    """Base of all errors of this package. `location`: where in the code it arose, once its frames have been let go."""

    location: str = ""


class ConfigError(EchelonError, ValueError):
    """A configuration value is unknown, out of range or contradicts another."""


class ClosedError(EchelonError, RuntimeError):
    """An `LLM` is used after it was closed."""


class RequestError(EchelonError, ValueError):
    """One request (prompt or sampling parameters) cannot be served; others can."""


class RowError(EchelonError):
    """One request's work failed inside the engine: its logits are no numbers, or code that serves it alone raised."""


def row_error(error: Exception) -> EchelonError:
    """The error that a request's output carries for an exception in its work.

    It outlives the step, whose tensors the exception's frames hold: so these are dropped, and only their names stay.
    """
    wrapped = error if isinstance(error, EchelonError) else RowError(f"{type(error).__name__} in the work of one request: {error}")
    if wrapped is not error:
        wrapped.__cause__ = error
    wrapped.location = wrapped.location or _frames(error)
    _drop_frames(wrapped)
    return wrapped


def location_of(error: BaseException) -> str:
    """Describe an exception for the log: its kind and where it arose. Its message may hold pieces of a request, so that stays out."""
    location = error.location if isinstance(error, EchelonError) else ""
    return f"{type(error).__name__} in {location or _frames(error)}"


def _frames(error: BaseException) -> str:
    """The last three frames of its traceback, the innermost first."""
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)[-3:]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))


def _drop_frames(error: BaseException) -> None:
    """Free its traceback and context, and those of its cause."""
    error.__traceback__ = error.__context__ = None
    if error.__cause__ is not None:
        _drop_frames(error.__cause__)


class OverloadedError(EchelonError):
    """All places for requests are taken; later there may be one."""


class UnavailableError(EchelonError):
    """The engine has stopped, hangs or shuts down."""


class RankError(UnavailableError):
    """A process that holds a share of a model has ended, hangs, or answers what it was not asked."""


class RequestTimeoutError(EchelonError, TimeoutError):
    """A request waited or ran longer than it may, and was given up."""


class SlowReaderError(EchelonError):
    """A request ended because what it said was not read."""


class ModelLoadError(EchelonError):
    """A checkpoint cannot be read: files missing, unsafe or mis-shaped."""


class UnknownHeadError(ModelLoadError):
    """A checkpoint is in none of the layouts of heads that are known; it may be a model."""


class Refusal(StrEnum):
    """Why models of a class are refused; the value is what they do."""

    STATE = "keeps more of a text than the keys and values of its attention (a recurrent or compressed state, an index, a buffer)"
    ATTENTION = "does not call the attention function of `transformers` once in each layer, with the keywords of the pass"
    MASK = "attends by a mask, a bias or chunks of its own, beyond causal order, a sliding window, a soft cap and sinks"
    POSITIONS = "counts positions itself and takes none, so that rows of different lengths cannot share a pass"
    BATCH = "computes a row's results from the other rows of a call"
    CACHE = "gives other logits step by step, with its cache, than in one pass, so that `generate` has no one text to equal"
    ROUNDING = "has products or sums that no kernel of ours computes, so that a row's last bits depend on its neighbours"
    OPERATIONS = "computes something else once our operations have taken the places of its own"
    NOT_CAUSAL = "lets tokens attend to later ones"
    INPUTS = "needs other inputs than token ids, or cannot be run by `transformers` as it is configured"
    PACKAGE = "needs a package that is not installed"

    @property
    def remedy(self) -> str:
        """What a user can do."""
        return REMEDIES.get(self, "run it with the `generate` of `transformers`, or take a model of docs/models.md")


REMEDIES = {
    Refusal.NOT_CAUSAL: "set is_decoder to true in its config.json if it was trained to continue text",
    Refusal.INPUTS: "run it as its page at `transformers` says, or mend its config.json",
    Refusal.PACKAGE: "install that package",
}


class UnsupportedModelError(EchelonError):
    """A model whose rows cannot be batched or rolled back exactly, refused by name. `refusal`: why, where it is the class's doing."""

    def __init__(self, message: str, refusal: Refusal | None = None) -> None:
        super().__init__(message)
        self.refusal = refusal

    @classmethod
    def because(cls, name: str, refusal: Refusal, detail: str = "") -> UnsupportedModelError:
        """Of the class `name`, with what was seen and what a user can do."""
        return cls(f"{name} {refusal}{f' ({detail})' if detail else ''}; {refusal.remedy}", refusal)


class OutOfBlocksError(EchelonError):
    """The KV pool has too few free blocks for a reservation."""


class OutputError(EchelonError):
    """Results cannot be written: no space, no permission, no such folder."""


class MissingExtraError(EchelonError):
    """An optional dependency is not installed; the message says which `pip install` mends it."""
