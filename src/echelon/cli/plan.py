"""`echelon plan`: where the bytes go, before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from echelon import EngineConfig
from echelon.cli.plan_on_paper import PaperOptions, plan_on_paper
from echelon.cli.shared import (
    BATCHED,
    ENGINE,
    Flags,
    JsonOption,
    ModelArgument,
    SpeculativeOption,
    speculative_mapping,
    verb,
)
from echelon.cli.words import errors
from echelon.config import RANKS
from echelon.estimate.devices import read_devices
from echelon.memory.ladder import Fitting
from echelon.memory.lower_bound import LeastMemory, least_memory
from echelon.memory.plan import MemoryPlan
from echelon.memory.residents import PlannedModels
from echelon.sizes import gibibytes
from echelon.speculative_config import speculative

NOT_PLANNED = {"kv_cache_memory_bytes", "numerics", "enforce_eager", "device", *RANKS}  # the last ones mean something else on paper
SERVED = tuple(name for name in (*ENGINE, *BATCHED) if name not in NOT_PLANNED)


@verb(engine=Flags(EngineConfig, *SERVED))
def plan(
    model: ModelArgument,
    *,
    speculative_config: SpeculativeOption = None,
    turns: Annotated[int, typer.Option(help="Turns of a conversation; the plan says how many tokens each may have.", min=1)] = 1,
    speculation: Annotated[
        bool, typer.Option("--speculation", help="Also what memory each size of draft needs, and from how many tokens a step it is faster.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda: this machine. Or on paper: " + ", ".join(read_devices()) + ", or of --devices.")
    ] = "auto",
    tensor_parallel_size: Annotated[int, typer.Option("--tensor-parallel-size", "-tp", help="On paper: tensor-parallel ranks.", min=1)] = 1,
    pipeline_parallel_size: Annotated[int, typer.Option("--pipeline-parallel-size", "-pp", help="On paper: pipeline stages.", min=1)] = 1,
    devices: Annotated[Path | None, typer.Option(metavar="FILE", help="On paper: JSON file of further devices.")] = None,
    tokens_per_step: Annotated[
        float | None, typer.Option(help="On paper: tokens a step with drafts; as published for the method by default.", min=1.0)
    ] = None,
    engine: dict[str, Any],
    json_output: JsonOption = False,
) -> None:
    """Say where the memory goes that MODEL would take, and how many conversations fit (exit 1: they do not). No weight is read.

    Without a budget, keys and values are those of --max-num-seqs rows of --max-model-len tokens. With the name of a device it is a plan on
    paper, an estimate for devices that are not here: bytes of each, what a step sends between them, and expected tokens/s. MODEL may then
    be a published shape, such as llama-70b (docs/on_paper.md).
    """
    spec = speculative(speculative_mapping(speculative_config))
    options = PaperOptions(model, device, tensor_parallel_size, pipeline_parallel_size, devices, tokens_per_step)
    if options.is_on_paper:
        plan_on_paper(options, EngineConfig(**engine), spec, speculation, json_output)
        return
    config = EngineConfig(**(engine | {"device": device}))
    models = PlannedModels(config, spec, model)
    budget = config.budget(models.memory)
    fitting = None if budget is None else models.fitted(budget)
    planned = models.plan(config, spec) if fitting is None else fitting.plan
    used = config if fitting is None else fitting.config
    rows, length = used.max_num_seqs, used.max_model_len or models.context
    limit = budget if budget is not None else models.memory
    least = least_memory(models, used, spec) if speculation else []
    report = planned.as_dict() | {
        "fits": planned.total_bytes <= limit,
        "flags": [] if fitting is None else fitting.flags(),
        "max_num_seqs": rows,
        "max_model_len": length,
        "tokens_per_turn": length // turns,
        "rungs": [] if fitting is None else [vars(rung) for rung in fitting.rungs],
        "speculation": [vars(found) for found in least],
    }
    if json_output:
        typer.echo(json.dumps(report))
    else:
        _print(planned, fitting, least)
        typer.echo(f"{rows} conversations of {length:,} tokens" + (f", {length // turns:,} in each of {turns} turns" if turns > 1 else ""))
    if not report["fits"]:
        errors.print(f"[red]{gibibytes(planned.total_bytes)} are more than the {gibibytes(limit)} there are[/]; --memory chooses what fits")
        raise typer.Exit(1)


def _print(planned: MemoryPlan, fitting: Fitting | None, least: list[LeastMemory]) -> None:
    """The plan as tables."""
    table = Table("what", "memory", "share", title="at its peak")
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, count in (planned.terms | {"loading, beyond these": planned.loading}).items():
        if count:
            table.add_row(name, gibibytes(count), f"{count / planned.total_bytes:.1%}")
    table.add_section()
    table.add_row("in all", gibibytes(planned.total_bytes), "")
    console = Console()
    console.print(table)
    for line in fitting.lines() if fitting is not None else ():
        console.print(escape(line), soft_wrap=True)
    if least:
        bounds = Table("method", "drafts", "runs in", "pays from", title="least memory for one row")
        for found in least:
            bounds.add_row(found.method, found.shape, gibibytes(found.bytes), found.pays)
        console.print(bounds)
