"""`echelon bench step`: how much more a wide pass costs than a narrow one."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich.progress import Progress

from echelon import ConfigError
from echelon.bench.report import write_json
from echelon.bench.shapes import SHAPES, random_model
from echelon.bench.step import as_markdown, measure_steps
from echelon.bench.throughput import environment
from echelon.cli.measured import JsonOption, sizes_of
from echelon.cli.shared import errors
from echelon.model.load.loading import load_model
from echelon.ops import compiled, devices


def step(
    model: Annotated[str, typer.Argument(help=f"Folder or hub name; or random weights in the shape {', '.join(SHAPES)}.")] = "llama-1.1b",
    tokens: Annotated[str, typer.Option(help="New tokens in the pass, comma-separated.")] = "1,8,16,32,40,64",
    tokens_per_row: Annotated[int, typer.Option(help="New tokens of each row, at most.", min=1)] = 8,
    context: Annotated[int, typer.Option(help="Tokens that each row has before them.", min=0)] = 256,
    rounds: Annotated[int, typer.Option(help="Passes of each width, interleaved.", min=1)] = 9,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
    output: JsonOption = None,
) -> None:
    """One forward pass by its number of tokens, beside merely reading the weights; in milliseconds, linear layers and attention apart."""
    if not devices.has_kernels(torch.empty(0, device=devices.chosen_device("auto"))):
        raise ConfigError(f"there are no compiled kernels to measure ({compiled.REASON}); install with a C++ compiler at hand")
    widths = sorted(sizes_of(tokens, "--tokens"))
    with errors.status(f"making {model}"):
        loaded = random_model(model) if model in SHAPES else load_model(model, device="auto")
    with Progress(console=errors, transient=True) as progress:
        task = progress.add_task("passes", total=rounds + 1)
        results = measure_steps(loaded, widths, tokens_per_row, context, rounds, lambda: progress.advance(task))
    report = {"environment": environment(), "model": model, "results": [asdict(r) for r in results]}
    typer.echo(json.dumps(report) if json_output else as_markdown(results))
    if output is not None:
        write_json(output, report)
