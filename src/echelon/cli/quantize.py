"""`echelon quantize`: a checkpoint in integers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from echelon.cli.words import errors
from echelon.model.load.publishing import publish
from echelon.settings import Quantization
from echelon.sizes import mebibytes


def quantize(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint in bfloat16, float16 or float32: folder or hub name.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder for the checkpoint in integers.")],
    quantization: Annotated[Quantization, typer.Option(help="Weights in 8 bits, or in 4 in groups.")] = "int8",
) -> None:
    """Write a compressed-tensors checkpoint, which `transformers` and vLLM load too.

    int8 is W8A8: weights by column, activations by token. int4 has weights in groups (`pack-quantized`); here activations are rounded to 8
    bits as well, elsewhere they stay numbers. Output layer and embedding stay as they are.
    """
    made = publish(source, destination, quantization)
    ratio = f"{made.num_bytes / made.before_bytes:.2f} of {mebibytes(made.before_bytes)}"
    errors.print(f"{escape(str(destination))}: {made.num_layers} linear layers in {quantization}, {ratio}", highlight=False)
    errors.print(f"as they were: {escape(', '.join(made.ignored) or 'none')}", highlight=False)
