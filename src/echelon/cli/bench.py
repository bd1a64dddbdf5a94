"""`echelon bench`: measurements that anyone can repeat."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import Progress

from echelon import ConfigError, SamplingParams
from echelon.bench.kernels import LINEAR_SHAPES, measure_linear, measure_machine
from echelon.bench.kernels import as_markdown as kernels_as_markdown
from echelon.bench.overhead import measure_all
from echelon.bench.pair import evaluate_pair
from echelon.bench.throughput import as_json, as_markdown, default_methods, environment, measure, plain_outputs
from echelon.bench.workloads import code_prompts
from echelon.cli.bench_serve import serve
from echelon.cli.shared import errors
from echelon.demo import DRAFT, TARGET, held_out_files
from echelon.target.loading import adopt_model, load_model, load_plain

app = typer.Typer(help="Measure: whole runs, or a step without its model.", no_args_is_help=True)
app.command()(serve)
OutputOption = Annotated[Path | None, typer.Option(help="Also write JSON here.")]


@app.command()
def throughput(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="Target; the embedded one by default.")] = str(TARGET),
    draft_model: Annotated[str, typer.Option(help="Draft model; the embedded one by default.")] = str(DRAFT),
    parameters: Annotated[int, typer.Option(help="Grow the target in memory to this many parameters first; 0: as it is.")] = 0,
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "1,4,8,16",
    num_prompts: Annotated[int, typer.Option(help="Prompts of held-out Python source.", min=1)] = 16,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 128,
    max_tokens: Annotated[int, typer.Option(help="New tokens a prompt.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    rounds: Annotated[int, typer.Option(help="Runs of each method, interleaved.", min=1)] = 3,
    num_speculative_tokens: Annotated[int, typer.Option(help="Draft length of the draft model.", min=1)] = 4,
    output: OutputOption = None,
) -> None:
    """Plain decoding, LLMA and a draft model on the same prompts: tokens/s, tokens_per_step, and whether the text is the same."""
    sizes = _sizes(batch_sizes)
    target = load_model(model)
    if parameters:
        from echelon.bench.inflate import inflate, plan_growth

        plain, tokenizer = load_plain(model)
        target = adopt_model(inflate(plain, plan_growth(plain, parameters)), tokenizer, f"{model}, grown")
    draft = load_model(draft_model)
    if target.tokenizer is None:
        raise ConfigError(f"{model!r} has no tokenizer to encode the prompts with; choose another model")
    prompts = code_prompts(target.tokenizer, held_out_files(), num_prompts, prompt_tokens)
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=max_tokens, ignore_eos=True)
    methods = default_methods(num_draft_tokens=num_speculative_tokens)
    results = []
    with Progress(console=errors, transient=True) as progress:
        task = progress.add_task("plain decoding, row by row", total=1 + len(sizes) * rounds * len(methods))
        truth = plain_outputs(target, prompts, params)
        progress.advance(task)
        for size in sizes:

            def done(name: str, size: int = size) -> None:
                progress.update(task, advance=1, description=f"batch {size}, {name}")

            results += measure(target, draft, methods, prompts, params, size, rounds, truth, done)
    where = environment()
    typer.echo(f"{where['cpu']}, {where['threads']} threads, torch {where['torch']}, transformers {where['transformers']}\n")
    typer.echo(as_markdown(results))
    _write(output, as_json(results))
    if any(r.num_identical < r.num_rows for r in results):
        errors.print("[red]some rows differ from plain decoding[/]")
        raise typer.Exit(1)


@app.command()
def overhead(output: OutputOption = None) -> None:
    """Milliseconds of a step outside the model: scheduling, packing, verifying, sampling; vocabulary 32,000."""
    rows = measure_all()
    typer.echo("| batch | drafted a row | temperature | median ms | largest ms |\n|---|---|---|---|---|")
    for r in rows:
        typer.echo(f"| {r.batch_size} | {r.num_draft_tokens} | {r.temperature} | {r.median_ms:.2f} | {r.largest_ms:.2f} |")
    _write(output, {"environment": environment(), "results": [asdict(r) for r in rows]})


@app.command()
def kernels(
    shapes: Annotated[str, typer.Option(help="Weights of linear layers, N x K, comma-separated.")] = LINEAR_SHAPES,
    rows: Annotated[str, typer.Option(help="Rows of a call, comma-separated.")] = "1,2,4,8,16,32,40,64,128,512",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
    output: OutputOption = None,
) -> None:
    """Each compiled kernel beside the memory's and the arithmetic's limit, oneDNN and plain PyTorch; weights come from memory."""
    counts = _sizes(rows, "--rows")
    machine = measure_machine()
    results = []
    with Progress(console=errors, transient=True) as progress:
        pairs = [_shape(s) for s in shapes.split(",")]
        task = progress.add_task("linear", total=len(pairs) * len(counts))
        for shape in pairs:
            for result in measure_linear(shape, counts, dtype):
                results.append(result)
                progress.advance(task)
    report = {"environment": environment(), "machine": asdict(machine), "linear": [asdict(r) for r in results]}
    typer.echo(json.dumps(report) if json_output else kernels_as_markdown(machine, results))
    _write(output, report)


@app.command()
def pair(
    num_prompts: Annotated[int, typer.Option(help="Continuations of held-out Python source.", min=1)] = 128,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each.", min=8)] = 128,
    output: OutputOption = None,
) -> None:
    """What the embedded pair is worth: held-out loss, and acceptance on continuations sampled at temperature 0.8."""
    with errors.status("measuring the embedded pair"):
        report = evaluate_pair(num_prompts, max_tokens)
    for key, value in report.items():
        typer.echo(f"{key}: {value:.3f}")
    _write(output, {"environment": environment(), "results": report})


def _sizes(text: str, option: str = "--batch-sizes") -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r} are no numbers; write 1,4,8") from None
    if min(sizes) < 1:
        raise ConfigError(f"{option} {text!r}: the smallest is 1")
    return sizes


def _shape(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2 or not all(p.strip().isdigit() and int(p) > 0 for p in parts):
        raise ConfigError(f"--shapes {text!r} is no shape; write 2048x8192 for a weight [N, K]")
    return int(parts[0]), int(parts[1])


def _write(output: Path | None, value: object) -> None:
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
        errors.print(f"wrote {escape(str(output))}", highlight=False)
