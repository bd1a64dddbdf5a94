"""`echelon bench throughput`: methods side by side on the same prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from echelon.bench.framework import framework_runs
from echelon.bench.plot import throughput_charts
from echelon.bench.report import positions_as_markdown, speeds_as_markdown, steps_as_markdown, throughput_as_markdown
from echelon.bench.throughput import Contender, as_json, default_methods, environment, measure, methods_of, plain_outputs
from echelon.bench.verify import STRATEGIES
from echelon.cli.measured import BenchOptions, ParametersOption, RoundsOption, command, counted, load_grown, load_target
from echelon.cli.shared import RefillOption, errors, verb
from echelon.model.load.loading import LoadedModel, load_model, load_plain


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(BenchOptions):
    """The flags of `echelon bench throughput`."""

    parameters: ParametersOption = 0
    strategies: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(STRATEGIES)}.")] = "unpadded,padded,realign"
    drafters: Annotated[
        str,
        typer.Option(help="Comma-separated, of ngram, draft_model, confident (a draft model that stops where it is not sure), none."),
    ] = "ngram,draft_model"
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "1,4,8,16"
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0
    rounds: RoundsOption = 3
    refill: RefillOption = True
    baselines: Annotated[bool, typer.Option("--transformers/--no-transformers", help="Also run `transformers` itself.")] = True

    def framework(self, target: LoadedModel) -> dict[int, list[Contender]]:
        """`transformers` itself by batch size, where it is asked for and greedy."""
        if not self.baselines or self.temperature > 0.0:
            return {}
        model, draft = (m.to(target.device) for m in (load_grown(self.model, self.parameters), load_plain(self.draft_model)[0]))
        lookup = default_methods()[1].config or {}
        return {size: framework_runs(model, draft, size, lookup, self.num_speculative_tokens) for size in self.sizes}


@verb(ThroughputOptions)
def throughput(options: ThroughputOptions) -> None:
    """Strategies and drafters on the same prompts: tokens/s, where a step's time goes, what is padded, and whether the text is the same.

    Our plain decoding runs beside them at every batch, and so does `transformers`: plain, and assisted at batch 1.
    """
    sizes, rounds = options.sizes, options.rounds
    methods = methods_of(
        options.strategies.split(","),
        options.drafters.split(","),
        num_draft_tokens=options.num_speculative_tokens,
    )
    target = load_target(options.model, options.parameters)
    draft, others = load_model(options.draft_model, device=target.device.type), options.framework(target)
    prompts, params = options.prompts(target), options.params(options.temperature)
    total = 1 + rounds * (len(sizes) * len(methods) + sum(map(len, others.values())))
    results = []
    with counted(total, "plain decoding, row by row") as done:
        truth = plain_outputs(target, prompts, params)
        done("plain decoding, row by row")
        for size in sizes:
            beside = others.get(size, [])
            results += measure(target, draft, methods, prompts, params, size, rounds, truth, done, beside, refill=options.refill)
    where = environment()
    tables = "\n\n".join(t for t in (speeds_as_markdown(results), steps_as_markdown(results), positions_as_markdown(results)) if t)
    report = throughput_as_markdown(results, where, command())
    options.publish("throughput", as_json(results), where, tables, report, lambda folder: throughput_charts(folder, results))
    if any(r.num_identical < r.num_rows for r in results if r.strategy == "unpadded"):
        errors.print("[red]some rows differ from plain decoding[/]")
        raise typer.Exit(1)
