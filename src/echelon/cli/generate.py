"""`echelon generate`: prompts in, JSONL out."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

import typer
from rich.markup import escape

from echelon import LLM, ConfigError, EchelonError, EngineConfig, RequestOutput, SamplingParams
from echelon.cli.fingerprint import file_hash, hash_of, settings_of
from echelon.cli.output import Mode, OutputFile
from echelon.cli.shared import (
    BATCHED,
    ENGINE,
    SAMPLING,
    Flags,
    ModelArgument,
    SpeculativeOption,
    print_fitting,
    progress,
    speculative_mapping,
    verb,
)
from echelon.cli.words import errors
from echelon.requests import Request, output_line, read_requests, request_from_text

SHOWN_OF_A_PROMPT = 72  # characters


@verb(
    sampling=Flags(SamplingParams, *SAMPLING, "ignore_eos", max_tokens=128, temperature=0.0),
    engine=Flags(EngineConfig, *ENGINE, *BATCHED, "strategy", "pad", "grouping", "refill", max_num_batched_tokens=2048),
)
def generate(
    model: ModelArgument,
    *,
    prompt: Annotated[list[str] | None, typer.Argument(help="Prompts, instead of --input.")] = None,
    input: Annotated[
        Path | None,
        typer.Option(help="Prompts: .txt (one a line) or .jsonl with `prompt`, `prompt_token_ids`, `messages` or `turns` (Spec-Bench)."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSONL file for the outputs, each appended when it is done; without it they are printed.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the rows that --output holds already; run the others, and those that failed.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results that --output holds already.")] = False,
    speculative_config: SpeculativeOption = None,
    sampling: dict[str, Any],
    num_prompts: Annotated[int | None, typer.Option(help="Only the first prompts of the input.", min=1)] = None,
    engine: dict[str, Any],
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON summary on stdout, with the rows unless --output has them.")
    ] = False,
) -> None:
    """Continue prompts, many at once. Lines that cannot be served are reported; the others still run (exit 3)."""
    SamplingParams(**sampling)
    mode = _mode(output, resume, overwrite)
    requests = _requests(prompt or [], input, num_prompts)
    drafts = speculative_mapping(speculative_config)
    with OutputFile(output, mode) if output else nullcontext() as file:
        llm = LLM(model, drafts, **engine)
        print_fitting(llm, (*ENGINE, *BATCHED))
        errors.print(escape(str(llm.memory_plan)), highlight=False)
        if file is not None:
            source = file_hash(input) if input else hash_of(prompt)
            file.begin(settings_of(llm, model, {"input": source, "num_prompts": num_prompts, "params": sampling}))
        rows = _run(llm, requests, sampling, file)
    _report(rows, output, print_texts=output is None and not json_output)
    if json_output:
        typer.echo(json.dumps(_summary(llm, rows) | ({} if output else {"rows": rows})))
    if any("error" in row for row in rows):
        raise typer.Exit(3)


def _mode(output: Path | None, resume: bool, overwrite: bool) -> Mode:
    """What becomes of rows that the output file holds already."""
    if (resume or overwrite) and output is None:
        raise ConfigError("--resume and --overwrite say what becomes of an output file; name it with --output")
    if resume and overwrite:
        raise ConfigError("--resume keeps the rows of --output and --overwrite drops them; leave one of the two out")
    return Mode.resume if resume else Mode.overwrite if overwrite else Mode.new


def _requests(prompts: list[str], path: Path | None, limit: int | None) -> list[Request]:
    """Requests from arguments or from a file."""
    if (path is None) == (not prompts):
        raise ConfigError("give prompts either as arguments or with --input FILE")
    return read_requests(path, limit) if path else [request_from_text(i, prompt) for i, prompt in enumerate(prompts[:limit])]


def _run(llm: LLM, requests: list[Request], defaults: dict[str, Any], file: OutputFile | None) -> list[dict[str, Any]]:
    """Output rows in the order of the input, each appended to the file when it is done; those in the file already are not run again."""
    rows = {row["index"]: row for row in (file.rows if file else ())}
    if rows:
        errors.print(f"{len(rows)} of {len(requests)} rows are done already", highlight=False)

    def done(row: dict[str, Any]) -> None:
        rows[row["index"]] = row
        if file is not None:
            file.append(row)

    accepted = []
    for request in [r for r in requests if r.index not in rows]:
        try:
            accepted.append((request, *request.sampled(llm, defaults)))
        except EchelonError as error:
            done({"index": request.index, "id": request.id, "error": str(error)})
    start = time.monotonic()
    with progress(len(accepted), "generating") as update:

        def finished(i: int, out: RequestOutput) -> None:
            done(output_line(accepted[i][0], out))
            update(advance=1)

        def stepped() -> None:
            rate = llm.stats.num_emitted_tokens / (time.monotonic() - start)
            update(note=f"{rate:,.0f} tokens/s, {llm.stats.tokens_per_step:.2f} tokens a step")

        llm.generate([tokens for _, tokens, _ in accepted], [params for *_, params in accepted], finished, stepped, use_tqdm=False)
    return [rows[request.index] for request in requests]


def _report(rows: list[dict[str, Any]], output: Path | None, print_texts: bool) -> None:
    """Where the rows are, or their texts, several below a line with the prompt; and what is wrong with those that failed."""
    if output is not None:
        errors.print(f"{escape(str(output))} holds {len(rows)} rows", highlight=False)
    for row in rows:
        if print_texts and "error" not in row:
            if len(rows) > 1:
                typer.echo(f"--- {row['id']}: {shorten(row.get('prompt', ''), SHOWN_OF_A_PROMPT)}")
            typer.echo(row["text"])
    for row in rows:
        if "error" in row:
            errors.print(f"[red]row {row['index']}:[/] {escape(row['error'])}", highlight=False)


def _summary(llm: LLM, lines: list[dict[str, Any]]) -> dict[str, Any]:
    counted = {name: getattr(llm.stats, name) for name in ("num_steps", "num_emitted_tokens", "tokens_per_step", "acceptance_rate")}
    failed = sum("error" in line for line in lines)
    return {"num_requests": len(lines), "num_failed": failed, **counted, "acceptance": llm.acceptance_name, "seconds": llm.stats.seconds}
