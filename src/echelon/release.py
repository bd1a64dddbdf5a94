"""Which version of this package runs."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """The version that is installed; "unknown" where the sources run without an installation."""
    try:
        return metadata.version("echelon")
    except metadata.PackageNotFoundError:
        return "unknown"
