"""What the verbs share."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

SPECULATIVE = "--speculative-config"
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub name of a causal language model (safetensors).")]
errors = Console(stderr=True, soft_wrap=True)
