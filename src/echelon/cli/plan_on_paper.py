"""`echelon plan` for several devices, and for devices and models that are not here: everything is computed, nothing is measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from echelon import EngineConfig
from echelon.cli.words import errors
from echelon.errors import ConfigError
from echelon.estimate.devices import device_named, read_devices
from echelon.estimate.layout import Pass
from echelon.estimate.paper_plan import PaperPlan
from echelon.estimate.shapes import published_shapes, without_weights
from echelon.estimate.speed import Speed
from echelon.inputs import shown
from echelon.sizes import gibibytes
from echelon.speculative_config import SpeculativeConfig, most_drafted

HERE = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class PaperOptions:
    """What is planned: a model by name or folder, so many tensor ranks and stages on devices by name or from a file's table."""

    model: str
    device: str
    ranks: int
    stages: int
    table: Path | None
    tokens_per_step: float | None

    @property
    def is_on_paper(self) -> bool:
        """Whether this asks for anything that is not on this machine.

        Raises
        ------
        ConfigError  it does, and says of no device that it has a name
        """
        wanted = self.ranks > 1 or self.stages > 1 or self.table is not None or self.tokens_per_step is not None
        wanted |= self.model in published_shapes() and not Path(self.model).exists()
        if wanted and self.device in HERE:
            known = ", ".join(read_devices(self.table))
            asked = "names of shapes, -tp, -pp, --devices and --tokens-per-step are for devices that are not here"
            raise ConfigError(f"{asked}, and --device is {self.device}; for a plan on paper name a device: {known}")
        return self.device not in HERE


def plan_on_paper(
    options: PaperOptions, config: EngineConfig, spec: SpeculativeConfig | None, with_bounds: bool, json_output: bool
) -> None:
    """Print the plan; exit 1 where it does not fit, with the least number of devices that would."""
    device = device_named(options.device, read_devices(options.table))
    if with_bounds and spec is None:
        raise ConfigError("--speculation says from how many tokens a step drafts pay; give --speculative-config too")
    model = without_weights(options.model, config.dtype)
    plan = PaperPlan(model, device, options.ranks, options.stages, config, spec, options.tokens_per_step)
    bounds = plan.pays_from(config.max_num_seqs) if with_bounds else []
    if json_output:
        typer.echo(json.dumps(plan.as_dict() | {"pays_from": [{"drafted": n, "tokens_per_step": t} for n, t in bounds]}))
    else:
        _print(options, plan, bounds)
    if not plan.fits:
        most = max(d.total for d in plan.device_bytes)
        least = plan.least_devices()
        remedy = (
            f"{least[0] * least[1]} devices would do: --tensor-parallel-size {least[0]} --pipeline-parallel-size {least[1]}"
            if least is not None
            else "no number of them would: lower --max-num-seqs or --max-model-len"
        )
        errors.print(
            f"[red]{gibibytes(most)} are more than the {gibibytes(device.memory_bytes)} of {shown(options.device, False)}[/]; {remedy}"
        )
        raise typer.Exit(1)


def _print(options: PaperOptions, plan: PaperPlan, bounds: list[tuple[int, float]]) -> None:
    """The plan as tables."""
    console, count = Console(), plan.cluster.num_devices
    console.print(_bytes_table(options, plan))
    run = Pass(plan.config.max_num_seqs, 1 + most_drafted(plan.spec), plan.context)
    if count > 1:
        traffic = plan.traffic(run)
        parts = [f"{gibibytes(traffic.gathered)} in gathers ({gibibytes(traffic.logits)} of logits)"] if options.ranks > 1 else []
        parts += [f"{gibibytes(traffic.hidden_states)} of hidden states between stages"] if options.stages > 1 else []
        console.print(f"a step of {round(run.num_tokens):,} tokens sends {', and '.join(parts)}", soft_wrap=True)
    console.print(_speed_table(plan))
    if bounds:
        table = _table("drafted", "pays from", title=f"tokens a step, {plan.config.max_num_seqs} rows")
        for size, tokens in bounds:
            table.add_row(str(size), f"{tokens:.2f}")
        console.print(table)
    console.print(
        f"On paper, by roofline: {plan.context:,} tokens before each row's own; {options.device}: {plan.device.source}.", soft_wrap=True
    )


def _bytes_table(options: PaperOptions, plan: PaperPlan) -> Table:
    """A line a device; ranks and stages that have as much share one."""
    title = f"{options.model} on {plan.cluster.num_devices} × {options.device}, on paper: GiB of each"
    table = _table("stage", "rank", "layers", "weights", "drafter", "KV", "passes", "in all", "share", title=title)
    groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for d in plan.device_bytes:
        key = (d.layers, d.weights, d.draft_weights, d.keys_and_values, d.activations, d.total)
        groups.setdefault(key, []).append((d.stage, d.rank))
    for (layers, *counts), places in groups.items():
        share = f"{counts[-1] / plan.device.memory_bytes:.0%}"
        gibibyte_cells = [f"{count / 2**30:.2f}" for count in counts]
        table.add_row(_range([s for s, _ in places]), _range([r for _, r in places]), str(layers), *gibibyte_cells, share)
    return table


def _table(*head: str, title: str) -> Table:
    table = Table(*head, title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    return table


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}–{high}"


def _speed_table(plan: PaperPlan) -> Table:
    """Expected speeds by number of rows; `lanes`: rows that take turns, where there are stages; ×: times the speed of plain decoding."""
    own = ["ms", "tok/s"] if len(plan.cluster.stages) == 1 else ["lanes", "ms", "tok/s"]
    head, name = ["rows", *own], f" and with {plan.spec.method}" if plan.spec else ""
    if plan.spec is not None:
        head += ["drafted", "a step", *own, "×"]
    table = _table(*head, title=f"decoding, plain{name}: ms and tokens a step, tokens/s")
    for line in plan.speeds():
        cells = [str(line.plain.rows), *_speed_cells(line.plain, len(own))]
        if line.speculative is not None:
            drafted = [str(line.drafted), f"{line.tokens_per_step:.2f}"]
            cells += [*drafted, *_speed_cells(line.speculative, len(own)), f"{line.gain:.2f}"]
        table.add_row(*cells)
    return table


def _speed_cells(speed: Speed, count: int) -> list[str]:
    return [str(speed.lanes), f"{speed.seconds * 1e3:,.2f}", f"{speed.tokens_per_second:,.1f}"][-count:]
