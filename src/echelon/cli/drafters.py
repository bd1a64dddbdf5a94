"""`echelon drafters`: which of the drafters at hand pay for a model, on one's own prompts."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from echelon import LLM, ConfigError, EngineConfig, SamplingParams
from echelon.bench.throughput import DecodingMethod, EngineRun, Run
from echelon.bench.workloads import workload
from echelon.cli.advice import PAYS
from echelon.cli.measured import counted
from echelon.cli.shared import Flags, JsonOption, ModelArgument, drafter_in, verb
from echelon.cli.words import SPECULATIVE, errors
from echelon.demo import held_out_files
from echelon.errors import EchelonError
from echelon.model.load.loading import LoadedModel, load_model
from echelon.requests import read_requests
from echelon.sizes import mebibytes

SAMPLE = 16  # prompts that drafters are tried on
WARM_UP = 8  # tokens


@dataclass
class Candidate:
    """A drafter with what came of it; `problem` says why it cannot draft for the model."""

    name: str
    config: dict[str, Any]
    problem: str = ""
    runs: list[Run] = field(default_factory=list)
    tokens_per_step: float = 0.0
    memory: int = 0  # bytes of its weights

    @property
    def speed(self) -> float:
        """Tokens a second of decoding, all runs together; of whole runs where nothing was decoded apart from prompts."""
        return _speed(self.runs)


def _speed(runs: list[Run]) -> float:
    tokens, seconds = (sum(run.decode[i] for run in runs) for i in (0, 1))
    if tokens and seconds:
        return tokens / seconds
    return sum(len(ids) for run in runs for ids in run.outputs) / max(sum(run.seconds for run in runs), 1e-9)


@verb(engine=Flags(EngineConfig, "kv_cache_dtype", "dtype", "quantization", "device", "numerics"))
def drafters(
    model: ModelArgument,
    *,
    drafter: Annotated[list[str] | None, typer.Option(help="Folder or hub name of a draft model or a head; may be repeated.")] = None,
    input: Annotated[Path | None, typer.Option(help="Your prompts (.txt or .jsonl); Python source without.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows that run at once.", min=1)] = 8,
    num_prompts: Annotated[
        int | None, typer.Option(help=f"Prompts that are taken of them; {SAMPLE} by default, or all where there are fewer.", min=1)
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Most tokens of a prompt.", min=1)] = 256,
    max_tokens: Annotated[int, typer.Option(help="New tokens a prompt.", min=2)] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    rounds: Annotated[int, typer.Option(help="Runs of each drafter, interleaved.", min=1)] = 2,
    engine: dict[str, Any],
    json_output: JsonOption = False,
) -> None:
    """Try n-grams and the given drafters on a sample of your prompts, beside plain decoding, and say which is the fastest and its flags."""
    target = load_model(model, **{name: value for name, value in engine.items() if name != "kv_cache_dtype"})
    tried = [Candidate("ngram", {"method": "ngram"}), *(c for name in dict.fromkeys(drafter or ()) for c in candidates(name, target))]
    for c in tried:
        if c.problem:
            errors.print(escape(f"{c.name} cannot draft for this model: {c.problem}"), highlight=False)
    reader, chosen = LLM(target, max_num_seqs=1, numerics=engine["numerics"]), "prompts" if input else "continue"
    count = num_prompts or (SAMPLE if input is None else max(1, min(SAMPLE, len(read_requests(input)))))
    prompts = workload(chosen, reader, count, prompt_tokens, held_out_files(), input)
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=max_tokens, ignore_eos=True)
    plain = measured(target, tried, prompts, params, batch_size, rounds, **engine)
    best = max((c for c in tried if not c.problem), key=lambda c: c.speed)
    pays = best.speed >= PAYS * plain.speed
    report = {
        "model": target.name,
        "batch_size": batch_size,
        "plain_tokens_per_second": plain.speed,
        "plain_rounds": [_speed([run]) for run in plain.runs],
        "drafters": [_as_json(c, plain) for c in tried],
        "best": _as_json(best, plain) if pays else None,
        "flags": flags_of(best) if pays else "",
    }
    if json_output:
        typer.echo(json.dumps(report))
    else:
        _print(tried, plain, best if pays else None, batch_size)


def candidates(name: str, target: LoadedModel) -> list[Candidate]:
    """The drafter in a folder as a chain, a head also as a tree; or why it cannot draft."""
    try:
        drafter = drafter_in(name, target)
    except EchelonError as error:
        return [Candidate(name, {}, str(error))]
    if isinstance(drafter, LoadedModel):
        return [Candidate(name, {"method": "draft_model", "model": name})]
    config = {"method": drafter.method, "model": name}
    return [Candidate(name, config), Candidate(f"{name} (tree)", config | {"tree": "dynamic"})]


def measured(
    target: LoadedModel,
    tried: list[Candidate],
    prompts: list[list[int]],
    params: SamplingParams,
    batch_size: int,
    rounds: int,
    **settings: Any,
) -> Candidate:
    """Run every candidate that fits, and plain decoding, which is returned, in turn; `settings` are the engine's.

    Raises
    ------
    ConfigError  a text differs from that of plain decoding, whose rounding does not depend on the batch
    """
    plain = Candidate("plain", {})
    running = [plain, *(c for c in tried if not c.problem)]
    engines = [EngineRun(DecodingMethod(c.name, c.config or None), target, None, batch_size, settings) for c in running]
    with counted((rounds + 1) * len(running), "warming up") as done:
        for engine, candidate in zip(engines, running, strict=True):
            engine.warm_up(prompts[:batch_size], params.model_copy(update={"max_tokens": min(WARM_UP, params.most_tokens)}))
            candidate.memory = engine.memory
            done(f"warming up {candidate.name}")
        for _, (engine, candidate) in product(range(rounds), zip(engines, running, strict=True)):
            candidate.runs.append(engine.run(prompts, params))
            done(candidate.name)
    for engine, candidate in zip(engines, running, strict=True):
        candidate.tokens_per_step = engine.result(batch_size, candidate.runs).tokens_per_step
        if not target.is_fast and candidate.runs[-1].outputs != plain.runs[-1].outputs:
            raise ConfigError(f"with {candidate.name} a text differs from that of plain decoding; please report this")
    return plain


def flags_of(candidate: Candidate) -> str:
    """What `generate`, `serve` and `chat` take to draft so."""
    return f"{SPECULATIVE} {shlex.quote(json.dumps(candidate.config))}"


def _as_json(candidate: Candidate, plain: Candidate) -> dict[str, Any]:
    if candidate.problem:
        return {"name": candidate.name, "problem": candidate.problem}
    return {
        "name": candidate.name,
        "speculative_config": candidate.config,
        "tokens_per_step": candidate.tokens_per_step,
        "tokens_per_second": candidate.speed,
        "rounds": [_speed([run]) for run in candidate.runs],
        "over_plain": candidate.speed / plain.speed,
        "weight_bytes": candidate.memory,
    }


def _print(tried: list[Candidate], plain: Candidate, best: Candidate | None, batch_size: int) -> None:
    console = Console(soft_wrap=True)
    table = Table("drafter", "tokens a step", "tokens/s", "× plain", "weights", title=f"batch {batch_size}", title_justify="left")
    table.add_row("none", f"{plain.tokens_per_step:.2f}", f"{plain.speed:.1f}", "1.00", "–")
    for c in sorted((c for c in tried if not c.problem), key=lambda c: -c.speed):
        style = "bold green" if c is best else ""
        numbers = f"{c.tokens_per_step:.2f}", f"{c.speed:.1f}", f"{c.speed / plain.speed:.2f}", mebibytes(c.memory)
        table.add_row(escape(c.name), *numbers, style=style)
    console.print(table)
    if best is None:
        console.print(f"None is {PAYS} times as fast as plain decoding at this batch: leave speculation out, or try a smaller batch.")
    else:
        console.print(f"The fastest: {flags_of(best)}", highlight=False, markup=False)
