"""`echelon inflate`: a trained checkpoint at serving size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from echelon import ConfigError
from echelon.bench.inflate import Inflation, describe, plan_growth
from echelon.bench.inflate import inflate as grow
from echelon.cli.words import errors
from echelon.inputs import made_apart
from echelon.model.load.loading import load_plain


def inflate(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A trained Llama- or OPT-type checkpoint.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder for the grown checkpoint.")],
    width: Annotated[int | None, typer.Option(help="Repeat the width this often (a power of two).", min=1)] = None,
    num_layers: Annotated[int | None, typer.Option(help="Number of layers afterwards.", min=1)] = None,
    parameters: Annotated[str, typer.Option(help="Or: grow to at least this many parameters, e.g. 500M or 1.1B.")] = "500M",
) -> None:
    """Grow a trained checkpoint to serving size without changing its function.

    Acceptance stays that of the trained model, while a step costs what a large model costs.
    """
    count = _count(parameters)
    model, tokenizer = load_plain(source)
    made_apart(destination, Path(source), "DST")
    growth = plan_growth(model, count)
    if width is not None or num_layers is not None:
        growth = Inflation(width or 1, num_layers or model.config.num_hidden_layers)
    grown = grow(model, growth)
    grown.save_pretrained(destination, max_shard_size="2GB")
    if tokenizer is not None:
        tokenizer.save_pretrained(destination)
    errors.print(f"{escape(source)}: {describe(model)}", highlight=False)
    errors.print(f"{escape(str(destination))}: {describe(grown)}", highlight=False)


def _count(text: str) -> int:
    factor = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:].upper(), 1)
    try:
        count = int(float(text[:-1] if factor > 1 else text) * factor)
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise ConfigError(f"--parameters {text!r} is no count; write 500M or 1.1B")
    return count
