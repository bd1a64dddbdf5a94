"""What a command leaves: exit code, standard output, standard error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]
