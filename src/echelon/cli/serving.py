"""`echelon bench serving`: what HTTP costs."""

from __future__ import annotations

from typing import Annotated

import typer

from echelon import LLM
from echelon.bench.throughput import environment
from echelon.cli.measured import (
    DraftLengthOption,
    DraftOption,
    MaxTokensOption,
    OutputOption,
    ParametersOption,
    TargetArgument,
    load_target,
    write_report,
)
from echelon.cli.shared import errors
from echelon.demo import DRAFT, TARGET
from echelon.errors import MissingExtraError
from echelon.model.load.loading import load_model


def serving(
    model: TargetArgument = str(TARGET),
    draft_model: DraftOption = str(DRAFT),
    parameters: ParametersOption = 500_000_000,
    max_tokens: MaxTokensOption = 32,
    num_speculative_tokens: DraftLengthOption = 4,
    rounds: Annotated[int, typer.Option(help="Of each measurement, interleaved.", min=1)] = 5,
    output: OutputOption = None,
) -> None:
    """Throughput through HTTP at concurrency 32 over that of `generate`; and a short request's wait beside a prompt of 1,500 tokens."""
    try:
        from echelon.bench import serving as bench
    except ImportError as error:
        raise MissingExtraError(f"{error.name} is not installed; run: pip install 'echelon[server]'") from error
    target = load_target(model, parameters)
    draft = load_model(draft_model, device=target.device.type)
    config = {"method": "draft_model", "num_speculative_tokens": num_speculative_tokens}
    direct, behind = (LLM(target, config, draft, max_num_seqs=bench.CONCURRENCY, max_num_batched_tokens=512) for _ in range(2))
    with errors.status(f"serving {target.name}"), bench.served(behind) as url:
        report = bench.as_json(bench.measure_throughput(direct, url, max_tokens, rounds), bench.measure_short_waits(behind, url, rounds))
    typer.echo(bench.as_markdown(report))
    write_report(output, "serving", {"environment": environment(), "model": target.name, "parameters": parameters, "results": report})
