"""What the verbs of `echelon bench` share: options, models, prompts, files."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from transformers import PreTrainedModel

from echelon import LLM, ConfigError, SamplingParams
from echelon.bench.inflate import inflate, plan_growth
from echelon.bench.report import described, write_json
from echelon.bench.throughput import NUM_DRAFTED, default_methods
from echelon.bench.workloads import WORKLOADS, workload
from echelon.cli.shared import ComparedOption, JsonOption, progress, speculative_mappings
from echelon.cli.words import errors
from echelon.demo import DRAFT, TARGET, held_out_files
from echelon.errors import OutputError
from echelon.inputs import made_folder, write_text
from echelon.model.load.loading import LoadedModel, adopt_model, load_model, load_plain
from echelon.ops import compiled
from echelon.ops.devices import chosen_device
from echelon.speculative_config import OWN_COPY, SpeculativeConfig


def writable(path: Path | None) -> Path | None:
    """Refuse an `--output` where nothing can be written, before anything is measured."""
    if path is not None:
        made_folder(path.parent if path.suffix == ".json" else path, "--output")
        if path.suffix == ".json" and path.exists() and not path.is_file():
            raise OutputError(f"{str(path)!r} is no file; choose another --output")
    return path


def writable_file(flag: typer.CallbackParam, path: Path | None) -> Path | None:
    """The same for a file of any name."""
    if path is not None and path.is_dir():
        raise OutputError(f"{str(path)!r} is a folder, and a file is needed there; choose another {flag.opts[0]}")
    if path is not None:
        made_folder(path.parent, flag.opts[0])
    return path


def use_isa(name: str | None) -> str | None:
    """Hold the kernels to a family before anything is measured."""
    if name is not None:
        compiled.set_isa(name)
    return name


IsaOption = Annotated[
    str | None,
    typer.Option(
        "--isa",
        callback=use_isa,
        help="Instructions that kernels may use: generic, avx2, avx512, avx512_bf16 or amx; by default ECHELON_ISA, or all that there are.",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(callback=writable, help="Also write JSON here; a name without .json is a folder for JSON, Markdown and plots."),
]
ParametersOption = Annotated[int, typer.Option(help="Grow the target in memory to this many parameters first; 0: as it is.")]
RoundsOption = Annotated[int, typer.Option(help="Runs of each method, interleaved.", min=1)]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a verb has measured.

    name    of the verb, and of its files
    value   for JSON; its `environment` is that of this process, without one another's was measured
    tables  for the terminal
    text    Markdown; by default the tables under a heading
    charts  draws plots into a folder and returns their paths
    """

    name: str
    value: Mapping[str, Any]
    tables: str
    text: str = ""
    charts: Callable[[Path], SequenceOf[Path]] = lambda _: []

    def publish(self, output: Path | None, as_json: bool) -> None:
        """Print the tables, or JSON; write JSON to a file `….json`, or JSON, Markdown and plots into a folder."""
        on = described(self.value["environment"]) if "environment" in self.value else "another machine"
        typer.echo(json.dumps(self.value) if as_json else f"{on}\n\n{self.tables}")
        if output is None:
            return
        if output.suffix == ".json":
            said(write_json(output, self.value))
            return
        said(write_json(output / f"{self.name}.json", self.value))
        text = self.text or f"# {self.name.capitalize()}\n\n`{command()}` on {on}.\n\n{self.tables}\n"
        said(write_text(output / f"{self.name}.md", text, "--output"))
        for path in self.charts(output):
            said(path)


class Elsewhere(NamedTuple):
    """What drafts in other engines: a draft model's folder, if one drafts, and its tokens a step, and the settings of n-grams."""

    draft_model: str | None
    num_drafted: int
    lookup: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The flags of every verb that runs models on prompts; a verb adds its own, and may have other defaults."""

    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="Target; the embedded one by default.")] = str(TARGET)
    speculative_config: ComparedOption = None
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "1,4,8"
    workload: Annotated[str, typer.Option(help="; ".join(f"`{name}`: {what}" for name, what in WORKLOADS.items()) + ".")] = "continue"
    input: Annotated[Path | None, typer.Option(help="File that the workload reads its prompts from.")] = None
    num_prompts: Annotated[int, typer.Option(help="Number of prompts.", min=1)] = 16
    prompt_tokens: Annotated[int, typer.Option(help="Most tokens of a prompt.", min=1)] = 128
    max_tokens: Annotated[int, typer.Option(help="New tokens a prompt.", min=1)] = 64
    json_output: JsonOption = False
    output: OutputOption = None

    @property
    def sizes(self) -> list[int]:
        return sizes_of(self.batch_sizes)

    @property
    def configs(self) -> list[dict[str, Any]]:
        """What drafts, each with its method."""
        given = [config | {"method": SpeculativeConfig(**config).method} for config in speculative_mappings(self.speculative_config)]
        return given or [dict(m.config) for m in default_methods() if m.config is not None]

    @property
    def elsewhere(self) -> Elsewhere:
        """What drafts in other engines, which decide nothing by themselves: the first of each that is named."""
        ours = [c for c in self.configs if c.get("method") == "draft_model"]
        folders = [c["model"] for c in ours if not c.get("model", OWN_COPY).startswith(OWN_COPY)]
        lengths = [c["num_speculative_tokens"] for c in ours if isinstance(c.get("num_speculative_tokens"), int)]
        copied = next((c for c in self.configs if c.get("method") == "ngram"), {})
        named = {k: copied[k] for k in ("num_speculative_tokens", "prompt_lookup_max") if isinstance(copied.get(k), int)}
        lookup = dict(default_methods()[1].config or {}) | named
        folder = next(iter(folders), str(DRAFT) if self._drafts_embedded else None)
        return Elsewhere(folder, next(iter(lengths), NUM_DRAFTED), lookup)

    @property
    def _drafts_embedded(self) -> bool:
        """Whether a draft model drafts that is not named."""
        return any(c.get("method") == "draft_model" and "model" not in c for c in self.configs)

    def draft(self, device: str) -> LoadedModel | None:
        """The embedded draft model, where one drafts and none is named."""
        return load_model(str(DRAFT), device=device) if self._drafts_embedded else None

    def prompts(self, target: LoadedModel, is_ragged: bool = False) -> list[list[int]]:
        """Prompts of the workload; a file alone means the workload `prompts`."""
        chosen = "prompts" if self.input is not None and self.workload == "continue" else self.workload
        llm = LLM(target, max_num_seqs=1)
        return workload(chosen, llm, self.num_prompts, self.prompt_tokens, held_out_files(), self.input, is_ragged)

    def params(self, temperature: float = 0.0) -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=0, max_tokens=self.max_tokens, ignore_eos=True)

    def publish(self, report: Report) -> None:
        report.publish(self.output, self.json_output)


def sizes_of(text: str, option: str = "--batch-sizes") -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r} are no numbers; write 1,4,8") from None
    if min(sizes) < 1:
        raise ConfigError(f"{option} {text!r}: the smallest is 1; write 1,4,8")
    return sizes


def load_target(model: str, parameters: int, quantization: str | None = None) -> LoadedModel:
    """The target as asked, grown or not, in integers or not."""
    if not parameters:
        return load_model(model, device="auto", quantization=quantization)
    grown, tokenizer = load_grown(model, parameters), load_plain(model)[1]
    name = Path(model).name if Path(model).is_dir() else model  # reports that are kept do not say where a folder lay
    return adopt_model(grown.to(chosen_device("auto")), tokenizer, f"{name}, grown", quantization=quantization)


def load_grown(model: str, parameters: int) -> PreTrainedModel:
    """The same as `transformers` runs it."""
    plain = load_plain(model)[0]
    return inflate(plain, plan_growth(plain, parameters)) if parameters else plain


def integers_of(quantization: str | None, kv_cache_dtype: str) -> str:
    """What a run has in integers, in words; empty where it has none, and `transformers` can run the same."""
    parts = {"weights": quantization, "keys and values": None if kv_cache_dtype == "auto" else kv_cache_dtype}
    return ", ".join(f"{part} in {numbers}" for part, numbers in parts.items() if numbers)


@contextmanager
def counted(total: int, first: str) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; call it with the name of what is done."""
    with progress(total, first) as update:
        yield lambda name: update(advance=1, description=name)


def command() -> str:
    """What was typed, for the report."""
    return shlex.join(["echelon", *sys.argv[1:]])


def said(path: Path) -> None:
    errors.print(f"wrote {escape(str(path))}", highlight=False)
