"""Measure: whole runs, or a step without its model."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.markup import escape
from rich.progress import Progress

from echelon import LLM, ConfigError
from echelon.adaptive.cost_files import write_costs
from echelon.bench.balance import as_markdown as balance_as_markdown
from echelon.bench.balance import charts as balance_charts
from echelon.bench.balance import measure_balance, numbers_of
from echelon.bench.kernels import (
    ATTENTION_SHAPES,
    LINEAR_SHAPES,
    AttentionSpeed,
    attention_as_markdown,
    check_kernels,
    measure_attention,
    measure_linear,
    measure_machine,
)
from echelon.bench.kernels import as_markdown as kernels_as_markdown
from echelon.bench.overhead import measure_all
from echelon.bench.report import table
from echelon.bench.serve import Goal, Traffic
from echelon.bench.serve import as_markdown as load_as_markdown
from echelon.bench.serve import measure as measure_server
from echelon.bench.shapes import SHAPES, random_model
from echelon.bench.step import as_markdown as steps_as_markdown
from echelon.bench.step import measure_steps
from echelon.bench.throughput import environment
from echelon.bench.workloads import code_texts
from echelon.cli.measured import IsaOption, OutputOption, Report, counted, said, sizes_of, writable_file
from echelon.cli.runs import latency, peers, throughput
from echelon.cli.shared import JsonOption, QuantizationOption, SpeculativeOption, speculative_mapping
from echelon.cli.words import SPECULATIVE, errors
from echelon.demo import held_out_files
from echelon.inputs import dtype_name
from echelon.model.load.loading import LoadedModel, load_model
from echelon.model.load.reading import DTYPES
from echelon.ops import compiled
from echelon.ops.devices import chosen_device
from echelon.requests import Request, read_requests
from echelon.settings import Quantization

AUTO = {"num_speculative_tokens": "auto"}
app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")
for command in (throughput, latency, peers):
    app.command()(command)


@app.command()
def step(
    model: Annotated[str, typer.Argument(help=f"Folder or hub name; or random weights in the shape {', '.join(SHAPES)}.")] = "llama-1.1b",
    tokens: Annotated[str, typer.Option(help="New tokens in the pass, comma-separated.")] = "1,8,16,32,40,64",
    tokens_per_row: Annotated[int, typer.Option(help="New tokens of each row, at most.", min=1)] = 8,
    context: Annotated[int, typer.Option(help="Tokens that each row has before them.", min=0)] = 256,
    rounds: Annotated[int, typer.Option(help="Passes of each width, interleaved.", min=1)] = 9,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], typer.Option(help="auto: as stored, bfloat16 of random weights.")
    ] = "auto",
    quantization: QuantizationOption = None,
    isa: IsaOption = None,  # noqa: ARG001
    cost_table: Annotated[
        Path | None,
        typer.Option(callback=writable_file, help="Write here what `cost_table` of --speculative-config reads, and nothing else."),
    ] = None,
    speculative_config: SpeculativeOption = None,
    max_num_seqs: Annotated[int, typer.Option(help="Rows that the cost table reaches to.", min=1)] = 64,
    json_output: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """One forward pass by its number of tokens, beside merely reading the weights; in milliseconds, linear layers and attention apart."""
    widths = sorted(sizes_of(tokens, "--tokens"))
    if cost_table is None and speculative_config is not None:
        raise ConfigError(f"{SPECULATIVE} says whose drafting a cost table has; give --cost-table too, or leave it out")
    if cost_table is not None and output is not None:
        raise ConfigError("--cost-table writes its file and nothing else; leave --output out")
    check_kernels(chosen_device("auto"))
    with errors.status(f"making {escape(model)}"):
        loaded = _made(model, dtype, quantization)
    if cost_table is not None:
        with errors.status("measuring costs"):
            llm = LLM(loaded, (speculative_mapping(speculative_config) or {"method": "ngram"}) | AUTO, max_num_seqs=max_num_seqs)
            record = llm.measure_costs()
        typer.echo(record.model_dump_json() if json_output else record.table.described())
        said(write_costs(cost_table, record))
        return
    with Progress(console=errors, transient=True) as progress:
        task = progress.add_task("passes", total=rounds + 1)
        results = measure_steps(loaded, widths, tokens_per_row, context, rounds, lambda: progress.advance(task))
    kind = {"model": model, "isa": compiled.isa(), "dtype": loaded.quantization or dtype_name(loaded.model.dtype)}
    value = {"environment": environment(), **kind, "results": [asdict(r) for r in results]}
    Report(name="step", value=value, tables=steps_as_markdown(results)).publish(output, json_output)


def _made(model: str, dtype: str = "auto", quantization: Quantization | None = None) -> LoadedModel:
    """A model from a folder, or with random weights, in a dtype or rounded."""
    if model in SHAPES:
        return random_model(model, DTYPES.get(dtype, torch.bfloat16), quantization=quantization)
    return load_model(model, dtype=dtype, quantization=quantization)


@app.command()
def balance(
    model: Annotated[str, typer.Argument(help=f"Folder or hub name; or random weights in the shape {', '.join(SHAPES)}.")] = "llama-1.1b",
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "1,2,4,8,16,32",
    context: Annotated[int, typer.Option(help="Tokens that each row has before those of the step.", min=0)] = 256,
    rounds: Annotated[int, typer.Option(help="Passes of each kind.", min=1)] = 3,
    isa: IsaOption = None,  # noqa: ARG001
    json_output: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Scylla's law: operations a byte by batch and tokens a row, the machine's balance, and the tokens of a row that it favours, k_opt."""
    sizes = sizes_of(batch_sizes)
    machine = measure_machine(chosen_device("auto"))
    with errors.status(f"making {escape(model)}"):
        loaded = _made(model)
    with counted(sum(len(numbers_of(size)) for size in sizes), "steps") as done:
        found = measure_balance(loaded, machine, sizes, context, rounds, done)
    value = {"environment": environment(), "model": model, "isa": compiled.isa(), **found.as_json()}
    charts = partial(balance_charts, found=found)
    Report(name="balance", value=value, tables=balance_as_markdown(found), charts=charts).publish(output, json_output)


@app.command()
def serve(
    base_url: Annotated[str, typer.Option(help="Of any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="The first that the server names by default.")] = None,
    input: Annotated[Path | None, typer.Option(help="Prompts, .txt or .jsonl; held-out Python source by default.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests.", min=1)] = 64,
    prompt_characters: Annotated[int, typer.Option(help="Of each prompt of source.", min=1)] = 400,
    max_tokens: Annotated[int, typer.Option(help="New tokens a request.", min=1)] = 64,
    max_concurrency: Annotated[int, typer.Option(help="Requests at once; 0: no bound.", min=0)] = 0,
    request_rate: Annotated[float, typer.Option(help="Requests a second, Poisson; 0: all at once.", min=0.0)] = 0.0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of arrivals and sampling.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Ask for full length (echelon, vLLM).")] = False,
    ttft_goal: Annotated[float | None, typer.Option(help="Milliseconds to the first token, for goodput.")] = None,
    tpot_goal: Annotated[float | None, typer.Option(help="Milliseconds a further token, for goodput.")] = None,
    json_output: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """TTFT, TPOT, ITL, goodput and acceptance of a server under load. The key is that in OPENAI_API_KEY. Exit 3 if some fail."""
    if input is not None:
        prompts = [_text_of(request) for request in read_requests(input, num_prompts)]
    else:
        prompts = code_texts(held_out_files(), num_prompts, prompt_characters)
    params: dict[str, Any] = {"temperature": temperature, "seed": seed} | ({"ignore_eos": True} if ignore_eos else {})
    traffic = Traffic(prompts, max_tokens, max_concurrency, request_rate, params, seed)
    with errors.status(f"{len(prompts)} requests to {base_url}"):
        value = asyncio.run(measure_server(base_url, os.environ.get("OPENAI_API_KEY"), model, traffic, Goal(ttft_goal, tpot_goal)))
    Report(name="serve", value=value, tables=load_as_markdown(value)).publish(output, json_output)
    for problem in value["problems"]:
        errors.print(f"[red]failed:[/] {escape(problem)}", highlight=False)
    if value["num_failed"]:
        raise typer.Exit(3)


def _text_of(request: Request) -> str:
    """The prompt of a line; `ConfigError` where it has none or is no text."""
    if request.problem is not None or not request.prompt:
        raise ConfigError(request.problem or f"row {request.index} of the input has no text; give it `prompt` or `turns`")
    return request.prompt


@app.command()
def overhead(
    trees: Annotated[bool, typer.Option("--trees", help="With EAGLE-2's trees from a head that takes no time, instead of chains.")] = False,
    json_output: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Milliseconds of a step outside the model: scheduling, packing, verifying, sampling; vocabulary 32,000."""
    rows = measure_all(trees)
    head = ["batch", "drafted a row", "temperature", "median ms", "largest ms"]
    tables = table(head, [(r.batch_size, r.num_draft_tokens, r.temperature, f"{r.median_ms:.2f}", f"{r.largest_ms:.2f}") for r in rows])
    value = {"environment": environment(), "results": [asdict(r) for r in rows]}
    Report(name="overhead", value=value, tables=tables).publish(output, json_output)


@app.command()
def kernels(
    shapes: Annotated[str, typer.Option(help="Weights of linear layers, N x K, comma-separated.")] = LINEAR_SHAPES,
    rows: Annotated[str, typer.Option(help="Rows of a call, comma-separated.")] = "1,2,4,8,16,32,40,64,128,512",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    isa: IsaOption = None,  # noqa: ARG001
    json_output: JsonOption = False,
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
    value = {
        "environment": environment(),
        "machine": asdict(machine),
        "linear": [asdict(r) for r in results],
        "attention": [asdict(r) for r in attention],
    }
    tables = f"{kernels_as_markdown(machine, results)}\n\n{attention_as_markdown(attention)}"
    Report(name="kernels", value=value, tables=tables).publish(output, json_output)


def _shape(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2 or not all(p.strip().isdigit() and int(p) > 0 for p in parts):
        raise ConfigError(f"--shapes {text!r} is no shape; write 2048x8192 for a weight [N, K]")
    return int(parts[0]), int(parts[1])
