"""`echelon doctor`: what this machine offers and what is promised on it."""

from __future__ import annotations

import json
import platform
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from echelon import LLM, ConfigError, ops
from echelon.adaptive.cost_files import all_costs
from echelon.cli.shared import JsonOption, SpeculativeOption, speculative_mapping
from echelon.cli.words import SPECULATIVE
from echelon.drafters.head_selftest import familiarity
from echelon.drafters.heads import AttachedHead
from echelon.inputs import cache_folder, dtype_name
from echelon.model.load.loading import LoadedModel
from echelon.model.patches.linear import framework_layers
from echelon.ops import compiled
from echelon.release import version


def doctor(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Also load this model and say how it is served.")] = None,
    speculative_config: SpeculativeOption = None,
    json_output: JsonOption = False,
) -> None:
    """Say what this machine offers, which implementation serves each operation and why, and what is promised (more: `echelon inspect`)."""
    if model is None and speculative_config is not None:
        raise ConfigError(f"{SPECULATIVE} needs a model to draft for; name it")
    report: dict[str, str] = {
        "echelon": version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "none: models run on the CPU",
        **ops.which(),
        "cost tables": f"{len(all_costs())} kept in {cache_folder() / 'costs'}",
    }
    if advice := compiled.remedy():
        report["compiled kernels"] = f"MISSING ({compiled.REASON}): models run many times slower than they could; {advice}"
    if model is not None:
        llm = LLM(model, speculative_mapping(speculative_config))
        report |= {
            "model": f"{type(llm.target.model).__name__}, {dtype_name(llm.target.model.dtype)}, context {llm.max_len}",
            "self-test": "passed: every attention layer batches exactly",
            "acceptance": llm.acceptance_name,
            "same text": _promise(llm.acceptance_name, framework_layers(llm.target.model)),
        }
        if llm.engine.controller is not None:
            report["costs"] = llm.engine.controller.table.described()
        if llm.storage.head is not None:
            report["head"] = _known(llm.storage.head, llm.target)
    if json_output:
        typer.echo(json.dumps(report))
        return
    table = Table.grid(padding=(0, 2))
    for key, value in report.items():
        table.add_row(f"[bold]{escape(key)}[/]", escape(value))
    Console().print(table)


def _known(attached: AttachedHead, target: LoadedModel) -> str:
    """What the self-test of heads found."""
    head = attached.head
    found = familiarity(target, head, attached.reader, attached.shapes)
    if found is None:
        return f"{head.method}: the context is too short to ask it"
    verdict = "NO BETTER THAN CHANCE" if found.is_chance else "knows this model"
    places = f"its first choice is right at {found.share:.1%} of the places of the model's own text, by chance at {found.by_chance:.1%}"
    return f"{head.method}, {verdict}: {places}"


def _promise(acceptance: str, left: list[str]) -> str:
    if acceptance != "exact":
        kept = "the distribution is that of the model" if acceptance == "rejection" else "neither is the distribution"
        return f"no, above temperature 0: acceptance {acceptance} gives another text; {kept}"
    if not left:
        return "bitwise: a row's logits do not depend on the batch, with or without speculation"
    return f"equal tokens in float32 up to rounding ties: {', '.join(left)} stay with the framework, which may round by batch"
