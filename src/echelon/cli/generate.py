"""`echelon generate`: prompts in, JSONL out."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from echelon import LLM, ConfigError, EchelonError, RequestOutput, SamplingParams
from echelon.cli.shared import SPECULATIVE, ModelArgument, errors
from echelon.requests import Request, read_requests, request_from_text


class DType(StrEnum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def generate(
    model: ModelArgument,
    prompt: Annotated[list[str] | None, typer.Argument(help="Prompts, instead of --input.")] = None,
    input: Annotated[
        Path | None,
        typer.Option(help="Prompts: .txt (one a line) or .jsonl with `prompt`, `prompt_token_ids`, `messages` or `turns` (Spec-Bench)."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSONL file for the outputs; without it they are printed.")] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            SPECULATIVE,
            metavar="JSON",
            help='What drafts, e.g. `{"method":"ngram","num_speculative_tokens":7,"prompt_lookup_max":2}`; also dotted: '
            "`--speculative-config.method ngram`.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens a prompt.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens at least this likely, relative to the likeliest.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the noise; without it one is drawn and reported.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End a text before this string; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")] = False,
    num_prompts: Annotated[int | None, typer.Option(help="Only the first prompts of the input.", min=1)] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Rows that run at once.", min=1)] = 64,
    max_model_len: Annotated[int | None, typer.Option(help="Context limit in tokens; the model's own by default.")] = None,
    kv_cache_memory_bytes: Annotated[str, typer.Option(help="Bytes of the KV pool, or auto.")] = "auto",
    dtype: Annotated[DType, typer.Option(help="auto: as stored.")] = DType.auto,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON summary on stdout.")] = False,
) -> None:
    """Continue prompts, many at once. Lines that cannot be served are reported; the others still run (exit 3)."""
    defaults: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop": tuple(stop or ()),
        "ignore_eos": ignore_eos,
    }
    SamplingParams(**defaults)
    if (input is None) == (not prompt):
        raise ConfigError("give prompts either as arguments or with --input FILE")
    requests = read_requests(input, num_prompts) if input else [request_from_text(i, p) for i, p in enumerate(prompt or [])]
    pool = kv_cache_memory_bytes if kv_cache_memory_bytes == "auto" else _integer(kv_cache_memory_bytes)
    llm = LLM(
        model,
        _speculative(speculative_config),
        dtype=dtype.value,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(2048, max_num_seqs),
        max_model_len=max_model_len,
        kv_cache_memory_bytes=pool,
    )
    errors.print(escape(str(llm.memory_plan)), highlight=False)
    lines = _run(llm, requests, defaults)
    failed = sum("error" in line for line in lines)
    _deliver(lines, output, json_output)
    if json_output:
        typer.echo(json.dumps(_summary(llm, lines)))
    for line in lines:
        if "error" in line:
            errors.print(f"[red]row {line['index']}:[/] {escape(line['error'])}", highlight=False)
    if failed:
        raise typer.Exit(3)


def _run(llm: LLM, requests: list[Request], defaults: dict[str, Any]) -> list[dict[str, Any]]:
    """Output lines in the order of the input; a request that cannot be served becomes an error line."""
    lines: list[dict[str, Any]] = [{} for _ in requests]
    rows, prompts, params = [], [], []
    for i, request in enumerate(requests):
        try:
            tokens = request.token_ids(llm)
            chosen = SamplingParams(**{**defaults, **request.params})
            llm.check_prompt(tokens, chosen)
        except EchelonError as error:
            lines[i] = {"index": request.index, "id": request.id, "error": str(error)}
            continue
        rows.append(i)
        prompts.append(tokens)
        params.append(chosen)
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[rate]}"), console=errors, transient=True) as progress:
        task = progress.add_task("generating", total=len(rows), rate="")

        def finished(i: int, out: RequestOutput) -> None:
            lines[rows[i]] = output_line(requests[rows[i]], out)
            progress.advance(task)

        def stepped() -> None:
            elapsed = progress.tasks[0].elapsed or 0.0
            stats = llm.stats
            if elapsed > 0:
                rate = f"{stats.num_emitted_tokens / elapsed:,.0f} tokens/s, {stats.tokens_per_step:.2f} tokens a step"
                progress.update(task, rate=rate)

        llm.generate(prompts, params, finished, stepped)
    return lines


def output_line(request: Request, out: RequestOutput) -> dict[str, Any]:
    completion = out.outputs[0]
    return {
        "index": request.index,
        "id": request.id,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "usage": {"prompt_tokens": len(out.prompt_token_ids), "completion_tokens": len(completion.token_ids)},
        "metrics": asdict(out.metrics),
    }


def _deliver(lines: list[dict[str, Any]], output: Path | None, json_output: bool) -> None:
    if output is not None:
        try:
            output.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {str(output)!r}: {error.strerror}; choose another --output") from error
        errors.print(f"wrote {len(lines)} lines to {escape(str(output))}", highlight=False)
    elif not json_output:
        for line in lines:
            if "error" not in line:
                typer.echo(line["text"])


def _summary(llm: LLM, lines: list[dict[str, Any]]) -> dict[str, Any]:
    stats = llm.stats
    return {
        "num_requests": len(lines),
        "num_failed": sum("error" in line for line in lines),
        "num_steps": stats.num_steps,
        "num_emitted_tokens": stats.num_emitted_tokens,
        "tokens_per_step": stats.tokens_per_step,
        "acceptance_rate": stats.acceptance_rate,
        "seconds": stats.seconds,
    }


def _integer(text: str) -> int:
    try:
        return int(float(text)) if "e" in text.lower() else int(text)
    except ValueError:
        raise ConfigError(f"--kv-cache-memory-bytes {text!r} is no number; give bytes such as 2000000000 or 2e9, or auto") from None


def _speculative(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{SPECULATIVE} is not JSON ({error}); quote it for the shell, or write {SPECULATIVE}.method ngram") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{SPECULATIVE} must be a JSON object such as " + '{"method":"ngram"}')
    return value
