"""`echelon bench peers`: other engines on the same prompts and the same model folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer

from echelon import ConfigError
from echelon.bench.peers import MODES, Peer, as_markdown, job, measure_peers
from echelon.bench.throughput import CONFIDENT, default_methods, environment, measure, plain_outputs
from echelon.cli.measured import BenchOptions, RoundsOption, command, counted
from echelon.cli.shared import verb
from echelon.model.load.loading import load_model


@dataclass(frozen=True, kw_only=True)
class PeersOptions(BenchOptions):
    """The flags of `echelon bench peers`."""

    vllm_python: Annotated[str | None, typer.Option(help="Python with vLLM's CPU build (benchmarks/workers/requirements-vllm.txt).")] = None
    openvino_python: Annotated[
        str | None, typer.Option(help="Python with OpenVINO GenAI (benchmarks/workers/requirements-openvino.txt).")
    ] = None
    modes: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(MODES)}.")] = ",".join(MODES)
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "1,8,16"
    prompt_tokens: Annotated[int, typer.Option(help="Most tokens of a prompt.", min=1)] = 256
    max_tokens: Annotated[int, typer.Option(help="New tokens a prompt.", min=1)] = 128
    rounds: RoundsOption = 3
    timeout: Annotated[float, typer.Option(help="Seconds that one job of a worker may take.", min=1.0)] = 1800.0

    @property
    def others(self) -> list[Peer]:
        found = [Peer(name, python) for name, python in (("vllm", self.vllm_python), ("openvino", self.openvino_python)) if python]
        if not found:
            raise ConfigError(
                "there is nobody to compare with; give --vllm-python or --openvino-python: the Python of an environment that has it"
            )
        return found

    @property
    def chosen_modes(self) -> list[str]:
        chosen = self.modes.split(",")
        if unknown := [m for m in chosen if m not in MODES]:
            raise ConfigError(f"there is no mode {unknown[0]!r}; known: {', '.join(MODES)}")
        return chosen


@verb(PeersOptions)
def peers(options: PeersOptions) -> None:
    """vLLM and OpenVINO GenAI beside our own engine: the same prompts, the same model folder, greedy; versions are recorded."""
    others, modes, sizes, rounds = options.others, options.chosen_modes, options.sizes, options.rounds
    for peer in others:
        _ = peer.worker  # refused before anything is measured where it is not there
    target, draft = load_model(options.model, device="cpu"), load_model(options.draft_model, device="cpu")
    prompts, params, num_drafted = options.prompts(target), options.params(), options.num_speculative_tokens
    methods = [m for m in default_methods(num_draft_tokens=num_drafted) if m.name in {MODES[mode] for mode in modes}]
    methods += [CONFIDENT] if "draft_model" in modes else []
    lookup, threads, folders = default_methods()[1].config or {}, torch.get_num_threads(), (options.model, options.draft_model)
    tasks = [
        job(*folders, prompts, mode, size, options.max_tokens, rounds, threads, lookup, num_drafted) for size in sizes for mode in modes
    ]
    with counted(len(sizes) * len(methods) * rounds + len(tasks) * len(others), "plain decoding, row by row") as done:
        truth = plain_outputs(target, prompts, params)
        ours = [r for size in sizes for r in measure(target, draft, methods, prompts, params, size, rounds, truth, done)]
        theirs = measure_peers(others, tasks, truth, options.timeout, done)
    where, versions = environment(), {package: version for r in theirs for package, version in r.versions.items()}
    results = {"ours": [asdict(r) for r in ours], "peers": [asdict(r) for r in theirs]}
    value = {"command": command(), "environment": where, "versions": versions, **results}
    options.publish("peers", value, where, as_markdown([*ours, *(r.result for r in theirs)], versions))
