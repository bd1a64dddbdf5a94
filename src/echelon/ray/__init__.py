"""Replicas on Ray: an application of Ray Serve, and Ray Data for files.

`build_app` gives the application, `generate` continues the prompts of a dataset, `connect` starts a cluster on loopback or joins one.
"""

from echelon.errors import MissingExtraError

try:
    from echelon.ray.application import build_app
    from echelon.ray.cluster import connect
except ImportError as error:
    raise MissingExtraError(f"{error.name} is not installed; run: pip install 'echelon[ray]'") from error

__all__ = ["build_app", "connect"]
