"""`echelon bench throughput`: methods side by side on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Annotated, Any

import typer

from echelon import SamplingParams
from echelon.bench.framework import framework_runs
from echelon.bench.plot import throughput_charts
from echelon.bench.report import described, positions_as_markdown, speeds_as_markdown, steps_as_markdown, throughput_as_markdown
from echelon.bench.throughput import ThroughputResult, as_json, default_methods, environment, measure, methods_of, plain_outputs
from echelon.bench.verify import STRATEGIES
from echelon.cli.measured import (
    BatchSizesOption,
    DraftLengthOption,
    DraftOption,
    InputOption,
    MaxTokensOption,
    NumPromptsOption,
    OutputOption,
    ParametersOption,
    PromptTokensOption,
    TargetArgument,
    WorkloadOption,
    command,
    load_grown,
    load_target,
    progress_bar,
    prompts_of,
    said,
    sizes_of,
    write_report,
)
from echelon.cli.shared import RefillOption, errors
from echelon.demo import DRAFT, TARGET
from echelon.model.load.loading import load_model, load_plain


def throughput(
    model: TargetArgument = str(TARGET),
    draft_model: DraftOption = str(DRAFT),
    parameters: ParametersOption = 0,
    strategies: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(STRATEGIES)}.")] = "unpadded,padded,realign",
    drafters: Annotated[
        str,
        typer.Option(
            help="Comma-separated, of ngram, draft_model, confident (a draft model that stops where it is not sure), replay, none."
        ),
    ] = "ngram,draft_model",
    batch_sizes: BatchSizesOption = "1,4,8,16",
    workload: WorkloadOption = "continue",
    input: InputOption = None,
    num_prompts: NumPromptsOption = 16,
    prompt_tokens: PromptTokensOption = 128,
    max_tokens: MaxTokensOption = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    rounds: Annotated[int, typer.Option(help="Runs of each method, interleaved.", min=1)] = 3,
    num_speculative_tokens: DraftLengthOption = 4,
    replay_tokens_per_step: Annotated[float, typer.Option(help="What the drafter `replay` pretends to.", min=1.0)] = 3.0,
    refill: RefillOption = True,
    baselines: Annotated[bool, typer.Option("--transformers/--no-transformers", help="Also run `transformers` itself.")] = True,
    output: OutputOption = None,
) -> None:
    """Strategies and drafters on the same prompts: tokens/s, where a step's time goes, what is padded, and whether the text is the same.

    Our plain decoding runs beside them at every batch, and so does `transformers`: plain, and assisted at batch 1.
    """
    sizes = sizes_of(batch_sizes)
    replay: dict[str, Any] = {"replay_tokens_per_step": replay_tokens_per_step}
    methods = methods_of(strategies.split(","), drafters.split(","), num_draft_tokens=num_speculative_tokens, **replay)
    target = load_target(model, parameters)
    draft = load_model(draft_model, device=target.device.type)
    framework = load_grown(model, parameters).to(target.device) if baselines and temperature == 0.0 else None
    prompts = prompts_of(target, workload, input, num_prompts, prompt_tokens)
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=max_tokens, ignore_eos=True)
    lookup = default_methods()[1].config or {}
    others = {
        s: framework_runs(framework, load_plain(draft_model)[0].to(target.device), s, lookup, num_speculative_tokens) if framework else []
        for s in sizes
    }
    with progress_bar() as progress:
        total = 1 + rounds * sum(len(methods) + len(others[s]) for s in sizes)
        task = progress.add_task("plain decoding, row by row", total=total)

        def done(name: str) -> None:
            progress.update(task, advance=1, description=name)

        truth = plain_outputs(target, prompts, params)
        done("plain decoding, row by row")
        results: list[ThroughputResult] = []
        for size in sizes:
            results += measure(target, draft, methods, prompts, params, size, rounds, truth, done, others[size], refill=refill)
    report(results, output)
    if any(r.num_identical < r.num_rows for r in results if r.strategy == "unpadded"):
        errors.print("[red]some rows differ from plain decoding[/]")
        raise typer.Exit(1)


def report(results: SequenceOf[ThroughputResult], output: Path | None) -> None:
    """Tables on stdout; files where asked."""
    where = environment()
    tables = [described(where), speeds_as_markdown(results), steps_as_markdown(results), positions_as_markdown(results)]
    typer.echo("\n\n".join(t for t in tables if t))
    folder = write_report(output, "throughput", as_json(results), throughput_as_markdown(results, where, command()))
    if folder is not None:
        for path in throughput_charts(folder, results):
            said(path)
