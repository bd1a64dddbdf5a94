"""`echelon bench`: measurements that anyone can repeat."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.progress import Progress

from echelon import ConfigError
from echelon.bench.kernels import (
    ATTENTION_SHAPES,
    LINEAR_SHAPES,
    AttentionSpeed,
    attention_as_markdown,
    measure_attention,
    measure_linear,
    measure_machine,
)
from echelon.bench.kernels import as_markdown as kernels_as_markdown
from echelon.bench.overhead import measure_all
from echelon.bench.throughput import environment
from echelon.cli.bench_serve import serve
from echelon.cli.latency import LatencyOptions, latency
from echelon.cli.measured import OutputOption, sizes_of, verb, write_report
from echelon.cli.peers import PeersOptions, peers
from echelon.cli.shared import errors
from echelon.cli.step import step
from echelon.cli.throughput import ThroughputOptions, throughput
from echelon.model.load.loading import DTYPES
from echelon.ops.devices import chosen_device

app = typer.Typer(help="Measure: whole runs, or a step without its model.", no_args_is_help=True)
app.command()(verb(ThroughputOptions, throughput))
app.command()(verb(LatencyOptions, latency))
app.command()(verb(PeersOptions, peers))
app.command()(step)
app.command()(serve)


@app.command()
def overhead(
    trees: Annotated[bool, typer.Option("--trees", help="With EAGLE-2's trees from a head that takes no time, instead of chains.")] = False,
    output: OutputOption = None,
) -> None:
    """Milliseconds of a step outside the model: scheduling, packing, verifying, sampling; vocabulary 32,000."""
    rows = measure_all(trees)
    typer.echo("| batch | drafted a row | temperature | median ms | largest ms |\n|---|---|---|---|---|")
    for r in rows:
        typer.echo(f"| {r.batch_size} | {r.num_draft_tokens} | {r.temperature} | {r.median_ms:.2f} | {r.largest_ms:.2f} |")
    write_report(output, "overhead", {"environment": environment(), "results": [asdict(r) for r in rows]})


@app.command()
def kernels(
    shapes: Annotated[str, typer.Option(help="Weights of linear layers, N x K, comma-separated.")] = LINEAR_SHAPES,
    rows: Annotated[str, typer.Option(help="Rows of a call, comma-separated.")] = "1,2,4,8,16,32,40,64,128,512",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
    output: OutputOption = None,
) -> None:
    """Each kernel of ours beside the memory's and the arithmetic's limit, oneDNN and plain PyTorch; weights come from memory."""
    counts = sizes_of(rows, "--rows")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is none that is served; known: {', '.join(DTYPES)}")
    device = chosen_device("auto")
    machine = measure_machine(device)
    results = []
    with Progress(console=errors, transient=True) as progress:
        pairs = [_shape(s) for s in shapes.split(",")]
        task = progress.add_task("linear", total=len(pairs) * len(counts))
        for shape in pairs:
            for result in measure_linear(shape, counts, dtype, device):
                results.append(result)
                progress.advance(task)
        task = progress.add_task("attention", total=len(ATTENTION_SHAPES))
        attention: list[AttentionSpeed] = []
        for heads in ATTENTION_SHAPES:
            attention += measure_attention(*heads, [1, 2, 4, 8], dtype, device)
            progress.advance(task)
    report = {
        "environment": environment(),
        "machine": asdict(machine),
        "linear": [asdict(r) for r in results],
        "attention": [asdict(r) for r in attention],
    }
    tables = f"{kernels_as_markdown(machine, results)}\n\n{attention_as_markdown(attention)}"
    typer.echo(json.dumps(report) if json_output else tables)
    write_report(output, "kernels", report)


def _shape(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2 or not all(p.strip().isdigit() and int(p) > 0 for p in parts):
        raise ConfigError(f"--shapes {text!r} is no shape; write 2048x8192 for a weight [N, K]")
    return int(parts[0]), int(parts[1])
