"""`echelon inspect`: a model as the engine sees it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from echelon import LLM, ops
from echelon.adaptive.cost_files import all_costs
from echelon.cli.shared import JsonOption, ModelArgument, drafter_in
from echelon.engine_costs import model_key
from echelon.errors import EchelonError
from echelon.inputs import dtype_name
from echelon.model.attention import record_layers
from echelon.model.load.loading import LoadedModel
from echelon.model.patches.linear import framework_layers, packed_weights, weight_bytes
from echelon.ops.contract import PackedWeight
from echelon.sizes import mebibytes


def inspect(
    model: ModelArgument,
    drafter: Annotated[list[str] | None, typer.Option(help="Folder or hub name of a draft model or a head; may be repeated.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Say what a model is made of, what serves each layer, what memory it takes, and which drafters fit (exit 1: one does not)."""
    llm = LLM(model)
    drafters = {"ngram": "yes: needs no weights"} | {name: _compatible(llm.target, name) for name in drafter or []}
    report = {
        "architecture": architecture(llm.target),
        "layers": layers(llm.target),
        "memory": memory(llm),
        "drafters": drafters,
        "costs": costs(llm.target),
    }
    if json_output:
        typer.echo(json.dumps(report))
    else:
        _print(report)
    if any(answer.startswith("no") for answer in drafters.values()):
        raise typer.Exit(1)


def architecture(loaded: LoadedModel) -> dict[str, Any]:
    """What the configuration says, and what the model was seen to store."""
    config = loaded.model.config.get_text_config()
    kinds = Counter(_kind(weight) for weight in packed_weights(loaded.model))
    shapes = Counter((s.num_kv_heads, s.key_size, s.value_size) for s in record_layers(loaded.model))
    return {
        "class": type(loaded.model).__name__,
        "dtype": dtype_name(loaded.model.dtype),
        "linear layers": ", ".join(f"{count} in {kind}" for kind, count in kinds.most_common()),
        "parameters": _num_parameters(loaded.model),
        "vocabulary": loaded.vocab_size,
        "context": loaded.max_len,
        "hidden size": config.hidden_size,
        "query heads": config.num_attention_heads,
        "key/value heads × key, value size": ", ".join(f"{h} × {k}, {v} in {n} layers" for (h, k, v), n in shapes.items()),
        "sliding window": getattr(config, "sliding_window", None) or "none",
        "end-of-text ids": sorted(loaded.eos_token_ids),
        "tokenizer": "none" if loaded.tokenizer is None else f"{len(loaded.tokenizer):,} pieces",
    }


def _kind(weight: PackedWeight) -> str:
    bits, group_size, has_zeros = weight.integers
    groups = f" in groups of {group_size}{', with zeros' if has_zeros else ''}" if group_size else ""
    return f"{bits} bits{groups}" if bits else dtype_name(weight.dtype)


def layers(loaded: LoadedModel) -> dict[str, str]:
    """Class of module → what computes it."""
    modules = {type(module).__name__: module for module in loaded.model.modules()}
    served = {name: f"{count} by echelon: {_computed_by(modules[name], loaded)}" for name, count in loaded.replaced.items()}
    left = dict.fromkeys(framework_layers(loaded.model), "by the framework, which may round by batch")
    return {"attention": f"by echelon: {ops.which(loaded.device)['ragged_attention']}", **served, **left}


def _computed_by(module: nn.Module, loaded: LoadedModel) -> str:
    if any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):
        return ops.which(loaded.device)["linear"]
    if any(True for _ in module.children()):
        return "the order of its parts, where seen to give the same bits"
    return ops.which(loaded.device)["norms, rotary, activations"]


def memory(llm: LLM) -> dict[str, str]:
    """Weights, KV a token, and the pool that `LLM` would take by default."""
    plan = llm.memory_plan
    return {
        "weights": mebibytes(weight_bytes(llm.target.model)),
        "KV per token": f"{plan.block_bytes // plan.block_size:,} bytes",
        "KV per full row": mebibytes(plan.block_bytes // plan.block_size * llm.max_len),
        "KV pool": str(plan).removeprefix("KV pool: "),
    }


def costs(loaded: LoadedModel) -> dict[str, str]:
    """Cost tables that are kept of models of these shapes, by what they were measured with; of those measured alike the newest."""
    kept = [record for record in all_costs() if record.key.get("model") == model_key(loaded)]
    return {_measured_with(record.key): record.table.described() for record in kept}


def _measured_with(key: dict[str, str]) -> str:
    """The drafter, how far the table reaches, and how the model ran."""
    ran = ", ".join(key[name] for name in ("isa", "strategy", "settings", "pool") if name in key)
    drafts = [key[name] for name in ("drafter", "drafts", "drafter_quantization", "drafter_shapes") if name in key]
    return f"{', '.join(drafts) or 'nothing drafts'}; up to {key.get('reach', '?')} tokens; {ran}"


def _compatible(target: LoadedModel, name: str) -> str:
    try:
        drafter = drafter_in(name, target)
    except EchelonError as error:
        return f"no: {error}"
    if not isinstance(drafter, LoadedModel):
        return f"yes: a head of method {drafter.method}, {_num_parameters(drafter):,} parameters"
    share = _num_parameters(drafter.model) / _num_parameters(target.model)
    skipped = "" if drafter.max_len >= target.max_len else f"; rows longer than its context of {drafter.max_len:,} go on without it"
    return f"yes: {share:.1%} of the target's parameters{skipped}"


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _print(report: dict[str, dict[str, Any]]) -> None:
    table = Table.grid(padding=(0, 2))
    for title, entries in report.items():
        table.add_row(f"[bold]{title}[/]")
        for key, value in entries.items():
            text = f"{value:,}" if isinstance(value, int) else str(value)
            table.add_row(f"  {escape(key)}", escape(text))
    Console().print(table)
