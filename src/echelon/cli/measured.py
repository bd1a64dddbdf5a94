"""What the verbs of `echelon bench` share: options, models, prompts, files."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel

from echelon import LLM, ConfigError
from echelon.bench.report import write_json
from echelon.bench.workloads import WORKLOADS, workload
from echelon.cli.shared import errors
from echelon.demo import held_out_files
from echelon.errors import OutputError
from echelon.inputs import made_folder, write_text
from echelon.model.load.loading import LoadedModel, adopt_model, load_model, load_plain
from echelon.ops.devices import chosen_device

TargetArgument = Annotated[str, typer.Argument(metavar="[MODEL]", help="Target; the embedded one by default.")]
DraftOption = Annotated[str, typer.Option(help="Draft model; the embedded one by default.")]
ParametersOption = Annotated[int, typer.Option(help="Grow the target in memory to this many parameters first; 0: as it is.")]
PromptTokensOption = Annotated[int, typer.Option(help="Most tokens of a prompt.", min=1)]
BatchSizesOption = Annotated[str, typer.Option(help="Comma-separated.")]
NumPromptsOption = Annotated[int, typer.Option(help="Number of prompts.", min=1)]
MaxTokensOption = Annotated[int, typer.Option(help="New tokens a prompt.", min=1)]
DraftLengthOption = Annotated[int, typer.Option(help="Draft length of the draft model (at most 7 for the confident one).", min=1)]
InputOption = Annotated[Path | None, typer.Option(help="File that the workload reads its prompts from.")]
WorkloadOption = Annotated[str, typer.Option(help="; ".join(f"`{name}`: {what}" for name, what in WORKLOADS.items()) + ".")]


def writable(path: Path | None) -> Path | None:
    """`--output` before anything is measured: refused where nothing can be written."""
    if path is not None:
        made_folder(path.parent if path.suffix == ".json" else path, "--output")
        if path.suffix == ".json" and path.exists() and not path.is_file():
            raise OutputError(f"{str(path)!r} is no file; choose another --output")
    return path


def writable_file(path: Path | None) -> Path | None:
    """The same for a file of any name."""
    if path is not None and path.is_dir():
        raise OutputError(f"{str(path)!r} is a folder, and a file is needed there; choose another --output")
    if path is not None:
        made_folder(path.parent, "--output")
    return path


OutputOption = Annotated[
    Path | None,
    typer.Option(callback=writable, help="Also write JSON here; a name without .json is a folder for JSON, Markdown and plots."),
]
JsonOption = Annotated[Path | None, typer.Option(callback=writable_file, help="Also write JSON here.")]


def sizes_of(text: str, option: str = "--batch-sizes") -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r} are no numbers; write 1,4,8") from None
    if min(sizes) < 1:
        raise ConfigError(f"{option} {text!r}: the smallest is 1")
    return sizes


def load_target(model: str, parameters: int) -> LoadedModel:
    """The target as asked, grown or not."""
    if not parameters:
        return load_model(model, device="auto")
    grown, tokenizer = load_grown(model, parameters), load_plain(model)[1]
    name = Path(model).name if Path(model).is_dir() else model  # reports that are kept do not say where a folder lay
    return adopt_model(grown.to(chosen_device("auto")), tokenizer, f"{name}, grown")


def load_grown(model: str, parameters: int) -> PreTrainedModel:
    """The same as `transformers` runs it."""
    from echelon.bench.inflate import inflate, plan_growth

    plain = load_plain(model)[0]
    return inflate(plain, plan_growth(plain, parameters)) if parameters else plain


def prompts_of(target: LoadedModel, name: str, path: Path | None, count: int, num_tokens: int, is_ragged: bool = False) -> list[list[int]]:
    """Prompts of a workload; a file alone means the workload `prompts`."""
    chosen = "prompts" if path is not None and name == "continue" else name
    return workload(chosen, LLM(target, max_num_seqs=1), count, num_tokens, held_out_files(), path, is_ragged)


def progress_bar() -> Progress:
    """On stderr, with the time that is left."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(*columns, console=errors, transient=True)


def command() -> str:
    """What was typed, for the report."""
    return shlex.join(["echelon", *sys.argv[1:]])


def write_report(output: Path | None, name: str, value: object, markdown: str = "") -> Path | None:
    """JSON to a file `….json`, or `name.json` and `name.md` into a folder, which is returned."""
    if output is None:
        return None
    if output.suffix == ".json":
        said(write_json(output, value))
        return None
    said(write_json(output / f"{name}.json", value))
    if markdown:
        said(write_text(output / f"{name}.md", markdown, "--output"))
    return output


def said(path: Path) -> None:
    errors.print(f"wrote {escape(str(path))}", highlight=False)
