"""`echelon verify`: is the text of every strategy and drafter that of plain decoding alone?"""

from __future__ import annotations

import json
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from echelon import LLM, EngineConfig, SamplingParams
from echelon.bench.throughput import environment, methods_of
from echelon.bench.verify import STRATEGY_SETTINGS, EqualityResult, VerificationJob, verify_model
from echelon.bench.workloads import workload
from echelon.cli.measured import counted, integers_of, sizes_of
from echelon.cli.shared import ComparedOption, Flags, JsonOption, ModelArgument, speculative_mappings, verb
from echelon.cli.words import errors
from echelon.demo import held_out_files
from echelon.requests import read_requests

LOOKUP = {"method": "ngram", "num_speculative_tokens": 5}  # what drafts where nothing is said


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The flags of `echelon verify`."""

    model: ModelArgument
    speculative_config: ComparedOption = None
    strategies: Annotated[str, typer.Option(help="Comma-separated; keys and values in int8 belong to `unpadded` alone.")] = ",".join(
        STRATEGY_SETTINGS
    )
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "1,4,8"
    dtypes: Annotated[str, typer.Option(help="Comma-separated.")] = "float32,bfloat16"
    input: Annotated[Path | None, typer.Option(help="Prompts, .txt or .jsonl; held-out Python source by default.")] = None
    num_prompts: Annotated[int, typer.Option(help="Prompts to use.", min=1)] = 8
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the longest prompt of source; the others are shorter.", min=4)] = 96
    max_tokens: Annotated[int, typer.Option(help="New tokens a prompt.", min=1)] = 48
    engine: dict[str, Any]
    control: Annotated[
        bool,
        typer.Option("--control/--no-control", help="Also compare `transformers` with itself at batch 1; a run in integers leaves it out."),
    ] = True
    json_output: JsonOption = False


@verb(VerifyOptions, engine=Flags(EngineConfig, "quantization", "kv_cache_dtype", "refill", "device", "numerics"))
def verify(options: VerifyOptions) -> None:
    """Compare token ids with plain decoding at batch 1: exact and partial match of every strategy, drafter, batch size and dtype.

    A model in integers, rounded here or published so, is compared with plain decoding in the same integers.

    Exit 1 if any difference is not a tie of rounding: both tokens the float32 model's top two, no further apart than twice the error of
    the dtype (docs/correctness.md).
    """
    sizes, strategies, dtypes = sizes_of(options.batch_sizes), options.strategies.split(","), options.dtypes.split(",")
    prompts, quantization = _prompts(options)
    job = VerificationJob(
        options.model,
        prompts,
        {m.name: m.config for m in methods_of(speculative_mappings(options.speculative_config) or [LOOKUP], ["unpadded"])},
        options.max_tokens,
        **options.engine,
    )
    integers = integers_of(quantization, job.kv_cache_dtype)
    reference = f"plain decoding at batch 1, {integers or 'in the same dtype'}"
    has_control = options.control and not integers
    if options.control and integers:
        errors.print(f"transformers is left out: it does not run {integers}", highlight=False)
    total = len(dtypes) * (len(strategies) * len(job.drafters) * len(sizes) + has_control * sum(s > 1 for s in sizes))
    with counted(total, "plain decoding at batch 1") as done:
        results = verify_model(job, dtypes, strategies, sizes, has_control, lambda r: done(str(r.case)))
    num_faults = sum(r.num_faults for r in results)
    if options.json_output:
        head = {"environment": environment(), "reference": reference, "quantization": quantization, "kv_cache_dtype": job.kv_cache_dtype}
        typer.echo(json.dumps(head | {"num_faults": num_faults, "results": [as_json(r) for r in results]}))
    else:
        for dtype in dtypes:
            Console().print(as_table(dtype, [r for r in results if r.case.dtype == dtype], f"compared with {reference}"))
    _explain(results)
    if num_faults:
        errors.print(f"[red]{num_faults} rows differ from plain decoding by more than a tie[/]")
        raise typer.Exit(1)


def as_json(result: EqualityResult) -> dict[str, Any]:
    value: dict[str, Any] = asdict(result)
    case: dict[str, Any] = value.pop("case")
    # JSON knows no infinity: a text that ended where the other went on has no gap
    mismatches = [m | {"gap": None if m["token"] is None or m["expected"] is None else m["gap"]} for m in value["mismatches"]]
    return case | value | {"exact_match": result.exact_match, "num_faults": result.num_faults, "mismatches": mismatches}


def as_table(title: str, results: SequenceOf[EqualityResult], caption: str) -> Table:
    table = Table("strategy", "drafter", "batch", "exact", "partial", "ties", "faults", title=title, caption=caption)
    for r in results:
        case = r.case
        ties = str(sum(m.is_tie for m in r.mismatches)) if r.is_judged else "–"
        faults = f"[red]{r.num_faults}[/]" if r.num_faults else ("0" if r.is_judged else "–")
        exact, partial = f"{r.num_exact} of {r.num_rows}", f"{r.partial_match:.1%}"
        table.add_row(case.strategy, case.drafter, str(case.batch_size), exact, partial, ties, faults)
    return table


def _explain(results: SequenceOf[EqualityResult]) -> None:
    """Every fault; ties are in the JSON."""
    for r in results:
        for m in (m for m in r.mismatches if not m.is_tie):
            where = f"{r.case}, row {m.row}, token {m.position}"
            errors.print(
                f"{where}: {m.token} for {m.expected}, {m.gap:.4f} apart in float32, the dtype errs by {m.error:.4f}", highlight=False
            )


def _prompts(options: VerifyOptions) -> tuple[list[list[int]], str | None]:
    """Token ids, and the integers that the model has, rounded or published so.

    Prompts made from source have different lengths, or padding would have nothing to do.
    """
    llm, count = LLM(options.model, max_num_seqs=1, **options.engine), options.num_prompts
    if options.input is not None:
        prompts = [r.token_ids(llm) for r in read_requests(options.input, count)]
    else:
        prompts = workload("continue", llm, count, options.prompt_tokens, held_out_files(), is_ragged=True)
    for prompt in prompts:
        llm.inputs.check_prompt(prompt, SamplingParams(max_tokens=options.max_tokens))
    return prompts, llm.target.quantization
