"""`echelon bench latency`: requests that arrive one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from echelon import ConfigError
from echelon.bench.latency import as_json, as_markdown, measure_latency
from echelon.bench.plot import latency_charts
from echelon.bench.throughput import environment, methods_of
from echelon.bench.verify import STRATEGIES
from echelon.cli.measured import BenchOptions, ParametersOption, counted, load_target
from echelon.cli.shared import RefillOption, verb
from echelon.model.load.loading import load_model


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(BenchOptions):
    """The flags of `echelon bench latency`."""

    parameters: ParametersOption = 0
    strategies: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(STRATEGIES)}; the first one's speed sets the rates.")] = (
        "unpadded,realign,same-length"
    )
    drafter: Annotated[str, typer.Option(help="ngram, draft_model, confident or none.")] = "draft_model"
    loads: Annotated[str, typer.Option(help="Arrivals over what the first strategy can serve, comma-separated.")] = "0.5,0.9"
    num_prompts: Annotated[int, typer.Option(help="Number of prompts.", min=1)] = 48
    seed: Annotated[int, typer.Option(help="Of the arrivals.", min=0)] = 0
    refill: RefillOption = True


@verb(LatencyOptions)
def latency(options: LatencyOptions) -> None:
    """Latencies P50, P90 and P99 of requests that arrive at random, the same moments for every strategy; prompts of different lengths."""
    sizes, loads = options.sizes, _loads(options.loads)
    methods = methods_of(options.strategies.split(","), [options.drafter], num_draft_tokens=options.num_speculative_tokens)
    methods = [m for m in methods if options.drafter == "none" or m.config]
    target = load_target(options.model, options.parameters)
    draft = load_model(options.draft_model, device=target.device.type)
    prompts, params = options.prompts(target, is_ragged=True), options.params()
    results = []
    with counted(len(sizes) * len(loads) * len(methods), "warming up") as done:
        for size in sizes:
            results += measure_latency(target, draft, methods, prompts, params, size, loads, options.seed, done, refill=options.refill)
    options.publish("latency", as_json(results), environment(), as_markdown(results), charts=lambda folder: latency_charts(folder, results))


def _loads(text: str) -> list[float]:
    try:
        loads = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--loads {text!r} are no numbers; write 0.5,0.9") from None
    if min(loads) <= 0.0:
        raise ConfigError(f"--loads {text!r}: a load is above 0")
    return loads
