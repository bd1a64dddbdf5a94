"""`echelon bench peers`: other engines on the same prompts and the same model folder."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import torch
import typer

from echelon import ConfigError, SamplingParams
from echelon.bench.peers import MODES, Peer, PeerResult, as_markdown, job, measure_peers
from echelon.bench.report import described
from echelon.bench.throughput import CONFIDENT, default_methods, environment, measure, plain_outputs
from echelon.cli.measured import (
    BatchSizesOption,
    DraftLengthOption,
    DraftOption,
    InputOption,
    MaxTokensOption,
    NumPromptsOption,
    OutputOption,
    PromptTokensOption,
    TargetArgument,
    WorkloadOption,
    command,
    progress_bar,
    prompts_of,
    sizes_of,
    write_report,
)
from echelon.demo import DRAFT, TARGET
from echelon.model.load.loading import load_model


def peers(
    model: TargetArgument = str(TARGET),
    draft_model: DraftOption = str(DRAFT),
    vllm_python: Annotated[str | None, typer.Option(help="Python of an environment made from bench/workers/requirements-vllm.txt.")] = None,
    openvino_python: Annotated[
        str | None, typer.Option(help="Python of an environment made from bench/workers/requirements-openvino.txt.")
    ] = None,
    modes: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(MODES)}.")] = ",".join(MODES),
    batch_sizes: BatchSizesOption = "1,8,16",
    workload: WorkloadOption = "continue",
    input: InputOption = None,
    num_prompts: NumPromptsOption = 16,
    prompt_tokens: PromptTokensOption = 256,
    max_tokens: MaxTokensOption = 128,
    rounds: Annotated[int, typer.Option(help="Runs of each.", min=1)] = 3,
    num_speculative_tokens: DraftLengthOption = 4,
    timeout: Annotated[float, typer.Option(help="Seconds that one job of a worker may take.", min=1.0)] = 1800.0,
    output: OutputOption = None,
) -> None:
    """vLLM and OpenVINO GenAI beside our own engine: the same prompts, the same model folder, greedy; versions are recorded."""
    others = _peers(vllm_python, openvino_python)
    chosen, sizes = modes.split(","), sizes_of(batch_sizes)
    if unknown := [m for m in chosen if m not in MODES]:
        raise ConfigError(f"there is no mode {unknown[0]!r}; known: {', '.join(MODES)}")
    target, draft = load_model(model), load_model(draft_model)
    prompts = prompts_of(target, workload, input, num_prompts, prompt_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    methods = [m for m in default_methods(num_draft_tokens=num_speculative_tokens) if m.name in {MODES[c] for c in chosen}]
    methods += [CONFIDENT] if "draft_model" in chosen else []
    lookup, threads = default_methods()[1].config or {}, torch.get_num_threads()
    tasks = [
        job(model, draft_model, prompts, m, b, max_tokens, rounds, threads, lookup, num_speculative_tokens) for b in sizes for m in chosen
    ]
    with progress_bar() as progress:
        task = progress.add_task("plain decoding, row by row", total=len(sizes) * len(methods) * rounds + len(tasks) * len(others))

        def done(name: str) -> None:
            progress.update(task, advance=1, description=name)

        truth = plain_outputs(target, prompts, params)
        ours = [r for size in sizes for r in measure(target, draft, methods, prompts, params, size, rounds, truth, done)]
        theirs = measure_peers(others, tasks, truth, timeout, done)
    where, versions = environment(), _versions(theirs)
    markdown = as_markdown([*ours, *(t.result for t in theirs)], versions)
    typer.echo(f"{described(where)}\n\n{markdown}")
    value = {
        "command": command(),
        "environment": where,
        "versions": versions,
        "ours": [asdict(r) for r in ours],
        "peers": [asdict(t) for t in theirs],
    }
    write_report(output, "peers", value, f"# Peers\n\n`{command()}` on {described(where)}.\n\n{markdown}\n")


def _peers(vllm: str | None, openvino: str | None) -> list[Peer]:
    found = [Peer(name, python) for name, python in (("vllm", vllm), ("openvino", openvino)) if python]
    if not found:
        raise ConfigError(
            "there is nobody to compare with; give --vllm-python or --openvino-python: the Python of an environment that has it"
        )
    return found


def _versions(results: list[PeerResult]) -> dict[str, str]:
    return {package: version for r in results for package, version in r.versions.items()}
