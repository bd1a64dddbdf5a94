"""What the command line knows before a verb is loaded: where errors go, and how an argument is read."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json
from rich.console import Console

SPECULATIVE = "--speculative-config"
errors = Console(stderr=True, soft_wrap=True)


def from_argument(text: str) -> Any:
    """JSON of an argument; `ValueError` for what is none. Bytes that are no UTF-8, which Python hands on as lone surrogates, are none."""
    return from_json(text.encode("utf-8", "backslashreplace"))
