"""The verbs of `echelon bench` that run models on prompts: throughput, latency, and other engines beside ours."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from echelon import ConfigError, EngineConfig
from echelon.bench.framework import framework_runs, in_fastest_dtype
from echelon.bench.latency import as_json as latencies_as_json
from echelon.bench.latency import as_markdown as latencies_as_markdown
from echelon.bench.latency import measure_latency
from echelon.bench.peers import MODES, Peer, job, measure_peers
from echelon.bench.peers import as_markdown as peers_as_markdown
from echelon.bench.plot import latency_charts, throughput_charts
from echelon.bench.report import (
    adaptive_as_markdown,
    notes_as_markdown,
    positions_as_markdown,
    speeds_as_markdown,
    steps_as_markdown,
    throughput_as_markdown,
)
from echelon.bench.throughput import (
    ADAPTIVE,
    CONFIDENT,
    Contender,
    default_methods,
    environment,
    measure,
    methods_of,
    plain_outputs,
)
from echelon.bench.throughput import as_json as speeds_as_json
from echelon.bench.verify import STRATEGY_SETTINGS, check_strategies
from echelon.cli.measured import (
    BenchOptions,
    IsaOption,
    ParametersOption,
    Report,
    RoundsOption,
    command,
    counted,
    integers_of,
    load_grown,
    load_target,
)
from echelon.cli.shared import Flags, RefillOption, verb
from echelon.cli.words import errors
from echelon.model.load.loading import LoadedModel, load_model, load_plain
from echelon.model.load.publishing import publish
from echelon.settings import Quantization


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(BenchOptions):
    """The flags of `echelon bench throughput`."""

    parameters: ParametersOption = 0
    strategies: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(STRATEGY_SETTINGS)}.")] = "unpadded,padded,realign"
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "1,4,8,16"
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0
    rounds: RoundsOption = 3
    isa: IsaOption = None
    engine: dict[str, Any]
    baselines: Annotated[
        bool, typer.Option("--transformers/--no-transformers", help="Also run `transformers` itself; a run in integers leaves it out.")
    ] = True

    def framework(self, target: LoadedModel) -> dict[int, list[Contender]]:
        """`transformers` itself by batch size, where it is asked for, greedy, and runs the same numbers."""
        if not self.baselines or self.temperature > 0.0:
            return {}
        if integers := integers_of(target.quantization, self.engine["kv_cache_dtype"]):
            errors.print(f"transformers is left out: it does not run {integers}", highlight=False)
            return {}
        folder, num_drafted, lookup = self.elsewhere
        model, notes = in_fastest_dtype(load_grown(self.model, self.parameters).to(target.device))
        assistant = None if folder is None else in_fastest_dtype(load_plain(folder)[0].to(target.device))[0]
        if assistant is not None and assistant.config.get_text_config().vocab_size != model.config.get_text_config().vocab_size:
            errors.print("transformers, assisted, is left out: it takes no pair of other vocabularies", highlight=False)
            assistant = None
        return {size: framework_runs(model, assistant, size, lookup, num_drafted, notes) for size in self.sizes}


@verb(ThroughputOptions, engine=Flags(EngineConfig, "quantization", "kv_cache_dtype", "refill"))
def throughput(options: ThroughputOptions) -> None:
    """Strategies and drafters on the same prompts: tokens/s, where a step's time goes, what is padded, and whether the text is the same.

    Our plain decoding runs beside them at every batch, and so does `transformers`, where there are no integers: plain, and assisted at
    batch 1.
    """
    sizes, rounds, strategies = options.sizes, options.rounds, options.strategies.split(",")
    check_strategies(strategies, kv_cache_dtype=options.engine["kv_cache_dtype"])
    methods = methods_of(options.configs, strategies)
    target = load_target(options.model, options.parameters, options.engine["quantization"])
    draft, others = options.draft(target.device.type), options.framework(target)
    prompts, params = options.prompts(target), options.params(options.temperature)
    total = 1 + rounds * (len(sizes) * len(methods) + sum(map(len, others.values())))
    results = []
    with counted(total, "plain decoding, row by row") as done:
        truth = plain_outputs(target, prompts, params, **options.engine)
        done("plain decoding, row by row")
        for size in sizes:
            beside = others.get(size, [])
            results += measure(target, draft, methods, prompts, params, size, rounds, truth, done, beside, **options.engine)
    parts = [write(results) for write in (speeds_as_markdown, notes_as_markdown, steps_as_markdown, positions_as_markdown)]
    parts += [adaptive_as_markdown(results)] if any(r.adaptive for r in results) else []
    tables = "\n\n".join(part for part in parts if part)
    value = speeds_as_json(results) | {"quantization": target.quantization, "kv_cache_dtype": options.engine["kv_cache_dtype"]}
    report = throughput_as_markdown(results, value["environment"], command())
    draw = partial(throughput_charts, results=results)
    options.publish(Report(name="throughput", value=value, tables=tables, text=report, charts=draw))
    if any(r.num_identical < r.num_rows for r in results if r.strategy == "unpadded"):
        errors.print("[red]some rows differ from plain decoding[/]")
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(BenchOptions):
    """The flags of `echelon bench latency`."""

    parameters: ParametersOption = 0
    strategies: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(STRATEGY_SETTINGS)}.")] = "unpadded,realign,same-length"
    loads: Annotated[str, typer.Option(help="Arrivals over what plain decoding can serve, comma-separated.")] = "0.5,0.9"
    num_prompts: Annotated[int, typer.Option(help="Number of prompts.", min=1)] = 48
    seed: Annotated[int, typer.Option(help="Of the arrivals.", min=0)] = 0
    refill: RefillOption = True


@verb(LatencyOptions)
def latency(options: LatencyOptions) -> None:
    """Latencies P50, P90 and P99 of requests that arrive at random, the same moments for every strategy; prompts of different lengths."""
    sizes, loads = options.sizes, _loads(options.loads)
    methods = methods_of(options.configs, options.strategies.split(","))
    target = load_target(options.model, options.parameters)
    draft = options.draft(target.device.type)
    prompts, params = options.prompts(target, is_ragged=True), options.params()
    results = []
    with counted(len(sizes) * len(loads) * len(methods), "warming up") as done:
        for size in sizes:
            results += measure_latency(target, draft, methods, prompts, params, size, loads, options.seed, done, refill=options.refill)
    draw = partial(latency_charts, results=results)
    options.publish(Report(name="latency", value=latencies_as_json(results), tables=latencies_as_markdown(results), charts=draw))


def _loads(text: str) -> list[float]:
    try:
        loads = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--loads {text!r} are no numbers; write 0.5,0.9") from None
    if min(loads) <= 0.0:
        raise ConfigError(f"--loads {text!r}: a load is above 0")
    return loads


@dataclass(frozen=True, kw_only=True)
class PeersOptions(BenchOptions):
    """The flags of `echelon bench peers`."""

    vllm_python: Annotated[str | None, typer.Option(help="Python with vLLM's CPU build (benchmarks/workers/requirements-vllm.txt).")] = None
    openvino_python: Annotated[
        str | None, typer.Option(help="Python with OpenVINO GenAI (benchmarks/workers/requirements-openvino.txt).")
    ] = None
    llama_cpp: Annotated[
        Path | None, typer.Option(help="Folder with llama.cpp's llama-server (benchmarks/workers/requirements-llama_cpp.txt).")
    ] = None
    modes: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(MODES)}.")] = ",".join(MODES)
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "1,8,16"
    prompt_tokens: Annotated[int, typer.Option(help="Most tokens of a prompt.", min=1)] = 256
    max_tokens: Annotated[int, typer.Option(help="New tokens a prompt.", min=1)] = 128
    rounds: RoundsOption = 3
    quantization: Annotated[
        Quantization | None, typer.Option(help="The target in 8 or 4 bits, in each engine by its own way of rounding.")
    ] = None
    timeout: Annotated[float, typer.Option(help="Seconds that one job of a worker may take.", min=1.0)] = 1800.0

    @property
    def others(self) -> list[Peer]:
        found = [Peer(name, python) for name, python in (("vllm", self.vllm_python), ("openvino", self.openvino_python)) if python]
        if self.llama_cpp is not None:
            for program in ("llama-server", *(["llama-quantize"] if self.quantization else [])):
                if not (self.llama_cpp / program).is_file():
                    raise ConfigError(f"--llama-cpp {str(self.llama_cpp)!r} has no {program}; give the folder that it was built into")
            found.append(Peer("llama_cpp", sys.executable, str(self.llama_cpp)))
        if not found:
            raise ConfigError(
                "there is nobody to compare with; give --vllm-python or --openvino-python, the Python of an environment that has it, "
                "or --llama-cpp, the folder of its programs"
            )
        return found

    @property
    def chosen_modes(self) -> list[str]:
        chosen = self.modes.split(",")
        if unknown := [m for m in chosen if m not in MODES]:
            raise ConfigError(f"there is no mode {unknown[0]!r}; known: {', '.join(MODES)}")
        able = [m for m in chosen if m != "draft_model" or self.elsewhere.draft_model is not None]
        if not able:
            raise ConfigError("mode 'draft_model' needs a draft model that other engines load; name one with --speculative-config")
        return able


@verb(PeersOptions)
def peers(options: PeersOptions) -> None:
    """vLLM, OpenVINO GenAI and llama.cpp beside our own engine: the same prompts, the same model folder, greedy; versions are recorded.

    With --max-tokens 1: the time that a prompt takes, which is that to the first token at batch 1. What fails in another engine is left out
    of the report, and said at the end.
    """
    others, modes, sizes, rounds = options.others, options.chosen_modes, options.sizes, options.rounds
    for peer in others:
        _ = peer.worker  # refused before anything is measured where it is not there
    target = load_model(options.model, device="cpu", quantization=options.quantization)
    draft, (draft_model, num_drafted, lookup) = options.draft("cpu"), options.elsewhere
    prompts, params = options.prompts(target), options.params()
    known = [m for m in (*default_methods(), CONFIDENT, *ADAPTIVE) if ("plain" if m.config is None else m.config["method"]) in modes]
    methods = methods_of(options.configs, ["unpadded"]) if options.speculative_config else known
    threads, folders = torch.get_num_threads(), (options.model, draft_model)
    with (
        TemporaryDirectory() as folder,
        counted(len(sizes) * (len(methods) * rounds + len(modes) * len(others)), "plain decoding, row by row") as done,
    ):
        published = folder if options.quantization and options.vllm_python else None
        if published and options.quantization:
            publish(options.model, Path(published), options.quantization)
        kind = (options.quantization, published)
        tasks = [
            job(*folders, prompts, mode, size, options.max_tokens, rounds, threads, lookup, num_drafted, *kind)
            for size in sizes
            for mode in modes
        ]
        truth = plain_outputs(target, prompts, params)
        ours = [r for size in sizes for r in measure(target, draft, methods, prompts, params, size, rounds, truth, done)]
        theirs, failures = measure_peers(others, tasks, truth, options.timeout, done)
    versions = {package: version for r in theirs for package, version in r.versions.items()}
    results = {"ours": [asdict(r) for r in ours], "peers": [asdict(r) for r in theirs]}
    value = {"command": command(), "environment": environment(), "versions": versions, **results}
    options.publish(Report(name="peers", value=value, tables=peers_as_markdown([*ours, *(r.result for r in theirs)], versions)))
    if failures:
        count = f"{len(failures)} of {len(tasks) * len(others)}"
        raise ConfigError(f"{count} runs of other engines failed, and the report is without them; the first was {failures[0]}")
