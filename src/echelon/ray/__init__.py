"""Replicas on Ray: an application of Ray Serve, and Ray Data for files.

`build_app` gives the application and `run_until_signal` runs it, `generate` continues the prompts of a dataset, `connect` starts a cluster
on loopback or joins one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from echelon.errors import MissingExtraError

if TYPE_CHECKING:
    from echelon.ray.application import build_app, run_until_signal
    from echelon.ray.cluster import connect
    from echelon.ray.dataset import generate

__all__ = ["build_app", "connect", "generate", "run_until_signal"]
HOMES = {"build_app": "application", "run_until_signal": "application", "connect": "cluster", "generate": "dataset"}


def __getattr__(name: str) -> Any:
    """Load what needs Ray when it is asked for: the rest of this room does without."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{error.name} is not installed; run: pip install 'echelon[ray]'") from error
