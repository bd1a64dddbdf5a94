"""What the verbs share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer
from pydantic_core import from_json
from rich.console import Console

SPECULATIVE = "--speculative-config"
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub name of a causal language model (safetensors).")]


def from_argument(text: str) -> Any:
    """JSON of an argument; `ValueError` for what is none. Bytes that are no UTF-8, which Python hands on as lone surrogates, are none."""
    return from_json(text.encode("utf-8", "backslashreplace"))


class Strategy(StrEnum):
    unpadded = "unpadded"
    padded = "padded"
    realign = "realign"


class Pad(StrEnum):
    both = "both"
    kv = "kv"
    inputs = "inputs"


class Grouping(StrEnum):
    none = "none"
    same_length = "same_length"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Numerics(StrEnum):
    invariant = "invariant"
    fast = "fast"


DeviceOption = Annotated[Device, typer.Option(help="auto: CUDA where there is a device.")]
NumericsOption = Annotated[
    Numerics,
    typer.Option(help="Linear layers on CUDA: the same bits in any batch, or the vendor library's. On the CPU they are invariant."),
]
EagerOption = Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs, and no step launched ahead.")]
StrategyOption = Annotated[Strategy, typer.Option(help="How rows become a batch; all but `unpadded` are there to be compared with.")]
PadOption = Annotated[Pad, typer.Option(help="What `padded` pads.")]
GroupingOption = Annotated[Grouping, typer.Option(help="What `realign` runs together: the first rows, or rows of equal length.")]
RefillOption = Annotated[bool, typer.Option("--refill/--no-refill", help="Rows enter as others finish, or in static batches.")]
errors = Console(stderr=True, soft_wrap=True)
