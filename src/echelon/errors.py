"""Everything echelon raises on purpose. A message says what was asked, which limit it met, and what mends it."""


class EchelonError(Exception):
    """Base of all errors of this package."""


class ConfigError(EchelonError, ValueError):
    """A configuration value is unknown, out of range or contradicts another."""


class RequestError(EchelonError, ValueError):
    """One request (prompt or sampling parameters) cannot be served; others can."""


class RowError(EchelonError):
    """One request's work failed inside the engine: its logits are no numbers, or code that serves it alone raised."""


def row_error(error: Exception) -> EchelonError:
    """What a request's output says about an exception in its work."""
    if isinstance(error, EchelonError):
        return error
    wrapped = RowError(f"{type(error).__name__} in the work of one request: {error}")
    wrapped.__cause__ = error
    return wrapped


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
