"""`echelon bench serve`: load on a running server."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from echelon.bench.report import write_json
from echelon.bench.serve import Goal, Traffic, as_markdown, measure
from echelon.bench.workloads import code_texts
from echelon.cli.measured import JsonOption
from echelon.cli.shared import errors
from echelon.demo import held_out_files
from echelon.requests import read_requests


def serve(
    url: Annotated[str, typer.Option(help="Of any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="The first that the server names by default.")] = None,
    input: Annotated[Path | None, typer.Option(help="Prompts, .txt or .jsonl; held-out Python source by default.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests.", min=1)] = 64,
    prompt_characters: Annotated[int, typer.Option(help="Of each prompt of source.", min=1)] = 400,
    max_tokens: Annotated[int, typer.Option(help="New tokens a request.", min=1)] = 64,
    concurrency: Annotated[int, typer.Option(help="Requests at once; 0: no bound.", min=0)] = 0,
    request_rate: Annotated[float, typer.Option(help="Requests a second, Poisson; 0: all at once.", min=0.0)] = 0.0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of arrivals and sampling.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Ask for full length (echelon, vLLM).")] = False,
    ttft_goal: Annotated[float | None, typer.Option(help="Milliseconds to the first token, for goodput.")] = None,
    tpot_goal: Annotated[float | None, typer.Option(help="Milliseconds a further token, for goodput.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
    output: JsonOption = None,
) -> None:
    """TTFT, TPOT, ITL, goodput and acceptance of a server under load. The key is that in OPENAI_API_KEY. Exit 3 if some fail."""
    if input is not None:
        prompts = [r.prompt or "" for r in read_requests(input, num_prompts)]
    else:
        prompts = code_texts(held_out_files(), num_prompts, prompt_characters)
    params: dict[str, Any] = {"temperature": temperature, "seed": seed} | ({"ignore_eos": True} if ignore_eos else {})
    traffic = Traffic(prompts, max_tokens, concurrency, request_rate, params, seed)
    with errors.status(f"{len(prompts)} requests to {url}"):
        value = asyncio.run(measure(url, os.environ.get("OPENAI_API_KEY"), model, traffic, Goal(ttft_goal, tpot_goal)))
    typer.echo(json.dumps(value) if json_output else as_markdown(value))
    for problem in value["problems"]:
        errors.print(f"[red]failed:[/] {escape(problem)}", highlight=False)
    if output is not None:
        write_json(output, value)
    if value["num_failed"]:
        raise typer.Exit(3)
