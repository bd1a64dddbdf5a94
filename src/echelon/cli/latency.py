"""`echelon bench latency`: requests that arrive one by one."""

from __future__ import annotations

from typing import Annotated

import typer

from echelon import ConfigError, SamplingParams
from echelon.bench.latency import Latency, as_json, as_markdown, measure_latency
from echelon.bench.plot import latency_charts
from echelon.bench.report import described
from echelon.bench.throughput import environment, methods_of
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
    load_target,
    progress_bar,
    prompts_of,
    said,
    sizes_of,
    write_report,
)
from echelon.cli.shared import RefillOption
from echelon.demo import DRAFT, TARGET
from echelon.model.load.loading import load_model


def latency(
    model: TargetArgument = str(TARGET),
    draft_model: DraftOption = str(DRAFT),
    parameters: ParametersOption = 0,
    strategies: Annotated[
        str, typer.Option(help=f"Comma-separated, of {', '.join(STRATEGIES)}; the first one's speed sets the rates.")
    ] = "unpadded,realign,same-length",
    drafter: Annotated[str, typer.Option(help="ngram, draft_model, confident or none.")] = "draft_model",
    batch_sizes: BatchSizesOption = "1,4,8",
    loads: Annotated[str, typer.Option(help="Arrivals over what the first strategy can serve, comma-separated.")] = "0.5,0.9",
    workload: WorkloadOption = "continue",
    input: InputOption = None,
    num_prompts: NumPromptsOption = 48,
    prompt_tokens: PromptTokensOption = 128,
    max_tokens: MaxTokensOption = 64,
    num_speculative_tokens: DraftLengthOption = 4,
    seed: Annotated[int, typer.Option(help="Of the arrivals.", min=0)] = 0,
    refill: RefillOption = True,
    output: OutputOption = None,
) -> None:
    """Latencies P50, P90 and P99 of requests that arrive at random, the same moments for every strategy; prompts of different lengths."""
    sizes, rates = sizes_of(batch_sizes), _loads(loads)
    methods = [
        m for m in methods_of(strategies.split(","), [drafter], num_draft_tokens=num_speculative_tokens) if drafter == "none" or m.config
    ]
    target = load_target(model, parameters)
    draft = load_model(draft_model, device=target.device.type)
    prompts = prompts_of(target, workload, input, num_prompts, prompt_tokens, is_ragged=True)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    results: list[Latency] = []
    with progress_bar() as progress:
        task = progress.add_task("warming up", total=len(sizes) * len(rates) * len(methods))
        for size in sizes:
            results += measure_latency(
                target,
                draft,
                methods,
                prompts,
                params,
                size,
                rates,
                seed,
                lambda name: progress.update(task, advance=1, description=name),
                refill=refill,
            )
    where = environment()
    typer.echo(f"{described(where)}\n\n{as_markdown(results)}")
    heading = f"# Latency\n\n`{command()}` on {described(where)}.\n\n"
    folder = write_report(output, "latency", as_json(results), heading + as_markdown(results) + "\n")
    for path in latency_charts(folder, results) if folder is not None else []:
        said(path)


def _loads(text: str) -> list[float]:
    try:
        loads = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--loads {text!r} are no numbers; write 0.5,0.9") from None
    if min(loads) <= 0.0:
        raise ConfigError(f"--loads {text!r}: a load is above 0")
    return loads
