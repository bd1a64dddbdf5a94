"""The `echelon` command. Progress and messages go to stderr, results to stdout or to the file asked for.

Exit codes: 0 done, 1 a check failed, 2 usage, 3 some rows failed, 130 interrupted.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import echelon
from echelon import LLM, ConfigError, EchelonError, RequestOutput, SamplingParams, ops
from echelon.requests import Request, read_requests, request_from_text

app = typer.Typer(
    help="Batched speculative decoding: several tokens a step from every sequence, no padding, the same text.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
errors = Console(stderr=True)

SPECULATIVE = "--speculative-config"
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub name of a causal language model (safetensors).")]


class DType(StrEnum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


@app.command()
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

        def stepped(_: int) -> None:
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


def join_dotted(arguments: list[str]) -> list[str]:
    """`--speculative-config.key value` (or `=value`) pairs become one `--speculative-config JSON`."""
    config: dict[str, Any] = {}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if not word.startswith(SPECULATIVE + "."):
            rest.append(word)
            continue
        key, equals, value = word.removeprefix(SPECULATIVE + ".").partition("=")
        value = value if equals else next(words, "")
        try:
            config[key] = json.loads(value)
        except ValueError:
            config[key] = value
    return [*rest, SPECULATIVE, json.dumps(config)] if config else rest


@app.command()
def inflate(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A trained Llama- or OPT-type checkpoint.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder for the grown checkpoint.")],
    width: Annotated[int | None, typer.Option(help="Repeat the width this often (a power of two).")] = None,
    num_layers: Annotated[int | None, typer.Option(help="Number of layers afterwards.")] = None,
    parameters: Annotated[str, typer.Option(help="Or: grow to at least this many parameters, e.g. 500M or 1.1B.")] = "500M",
) -> None:
    """Grow a trained checkpoint to serving size without changing its function.

    Acceptance stays that of the trained model, while a step costs what a large model costs.
    """
    from echelon.bench.inflate import Growth, describe, plan_growth
    from echelon.bench.inflate import inflate as grow
    from echelon.target.loading import load_plain

    model, tokenizer = load_plain(source)
    growth = plan_growth(model, _count(parameters))
    if width is not None or num_layers is not None:
        growth = Growth(width or 1, num_layers or model.config.num_hidden_layers)
    grown = grow(model, growth)
    grown.save_pretrained(destination, max_shard_size="2GB")
    if tokenizer is not None:
        tokenizer.save_pretrained(destination)
    errors.print(f"{escape(source)}: {describe(model)}", highlight=False)
    errors.print(f"{escape(str(destination))}: {describe(grown)}", highlight=False)


def _count(text: str) -> int:
    factor = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:].upper(), 1)
    try:
        return int(float(text[:-1] if factor > 1 else text) * factor)
    except ValueError:
        raise ConfigError(f"--parameters {text!r} is no count; write 500M or 1.1B") from None


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Also load this model and say how it is served.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Say what this machine offers, which implementation serves each operation and why, and what is promised."""
    report: dict[str, str] = {
        "echelon": echelon_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "none (this version runs on the CPU)",
        **ops.which(),
    }
    if model is not None:
        llm = LLM(model)
        config = llm.target.model.config
        replaced = ", ".join(f"{n} {name}" for name, n in llm.target.replaced.items())
        report |= {
            "model": f"{type(llm.target.model).__name__}, {llm.target.model.dtype}, context {llm.max_len}".replace("torch.", ""),
            "self-test": "passed: every attention layer batches exactly",
            "layers": f"{config.num_hidden_layers} layers; {replaced} run echelon's operations",
            "same text": "bitwise: a row's logits do not depend on the batch, with or without speculation",
            "memory": str(llm.memory_plan),
        }
    if json_output:
        typer.echo(json.dumps(report))
        return
    table = Table.grid(padding=(0, 2))
    for key, value in report.items():
        table.add_row(f"[bold]{escape(key)}[/]", escape(value))
    Console().print(table)


def echelon_version() -> str:
    from importlib.metadata import version

    return version(echelon.__name__)


def main() -> None:
    """Entry point: errors of ours become one line and exit code 2."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        app(join_dotted(sys.argv[1:]), prog_name="echelon", standalone_mode=True)
    except EchelonError as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(130)
