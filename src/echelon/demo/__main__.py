"""`make demo`: the main job in under three minutes, on the embedded models and on the same target grown to serving size."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

from echelon import LLM, SamplingParams
from echelon.bench.inflate import describe, inflate_with_heads
from echelon.bench.kernels import fastest_dtype
from echelon.bench.plot import grouped_bars
from echelon.bench.throughput import DecodingMethod, Stepping, ended, environment, in_turn
from echelon.bench.verify import generate_padded
from echelon.bench.workloads import code_prompts
from echelon.demo import DRAFT, EAGLE, TARGET, held_out_files
from echelon.demo.rows import DemoRow, engine_row, run_framework
from echelon.errors import MissingExtraError
from echelon.model.load.loading import LoadedModel, adopt_model, load_model, load_plain

BATCH_SIZES = (1, 8)
NUM_ALONE = 3  # prompts at batch 1; of the others plain decoding says what is right
PROMPT_TOKENS = 112
GROWN_PARAMETERS = 500_000_000
console = Console()


@dataclass(frozen=True)
class Models:
    """A target with what drafts for it, where there is something: a draft model, the folder of an EAGLE head."""

    title: str
    target: LoadedModel
    draft: LoadedModel | None = None
    head: str = ""

    def methods(self) -> list[DecodingMethod]:
        """Plain decoding, LLMA, and what the models are there for."""
        found = [DecodingMethod("plain", None), DecodingMethod("LLMA", {"method": "ngram", "prompt_lookup_max": 2})]
        found += [DecodingMethod("draft model", {"method": "draft_model"})] if self.draft else []
        found += [DecodingMethod("EAGLE", {"method": "eagle", "model": self.head})] if self.head else []
        return found


@contextmanager
def progress(title: str, total: int) -> Iterator[Progress]:
    """A bar over the new tokens of all rows of a table."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        bar.add_task(title, total=total)
        yield bar


@dataclass(frozen=True)
class Measured:
    """Rows of a table, and the texts of plain decoding, each prompt alone, as far as there was time for them."""

    rows: list[DemoRow]
    truth: list[list[int]]

    def at(self, method: str, batch_size: int) -> DemoRow:
        return next(row for row in self.rows if (row.method, row.batch_size) == (method, batch_size))

    @property
    def is_identical(self) -> bool:
        """Every text of the engine is that of plain decoding."""
        return all(row.num_identical(self.truth) == len(row.outputs) for row in self.rows if row.method != "transformers")


def run_all(models: Models, plain: PreTrainedModel | None, prompts: list[list[int]], params: SamplingParams, limit: float) -> Measured:
    """At every batch size all methods, step by step in turn, so that they see the same machine; then `transformers` where `plain` is its
    model, and plain decoding of the prompts that no method has been given alone.
    """
    asked = {size: prompts[:NUM_ALONE] if size == 1 else prompts for size in BATCH_SIZES}
    methods, rows, tokens = models.methods(), list[DemoRow](), params.most_tokens
    runs = (len(methods) + (plain is not None)) * sum(map(len, asked.values())) + len(prompts) - NUM_ALONE
    with progress(models.title, runs * tokens) as bar:

        def steps(method: DecodingMethod, size: int, own: list[list[int]], seconds: float) -> Stepping[DemoRow]:
            llm = LLM(models.target, method.config, models.draft, max_num_seqs=size, enable_prefix_caching=False)
            ended(engine_row(llm, method.name, prompts[:1], 1, params.model_copy(update={"max_tokens": 6}), seconds))
            return engine_row(llm, method.name, own, size, params, seconds, lambda n: bar.advance(bar.task_ids[0], n))

        for size, own in asked.items():
            bar.update(bar.task_ids[0], description=f"{models.title}, batch {size}")
            rows += in_turn({m.name: steps(m, size, own, limit) for m in methods}).values()
            if plain is not None:
                bar.update(bar.task_ids[0], description=f"{models.title}, batch {size}, transformers")
                rows.append(run_framework(plain, own, size, params, limit))
            bar.update(bar.task_ids[0], completed=sum(len(row.outputs) for row in rows) * tokens)
        bar.update(bar.task_ids[0], description=f"{models.title}, the other prompts alone")
        rest = ended(steps(methods[0], 1, prompts[NUM_ALONE:], 2 * limit))
    return Measured(rows, next(row for row in rows if row.method == "plain").outputs + rest.outputs)


def identical(row: DemoRow, truth: list[list[int]]) -> str:
    """How many rows are what plain decoding gives."""
    count, total = row.num_identical(truth), len(row.outputs)
    return ("yes" if count == total else f"{count}/{total}") + (" cut" if row.was_cut else "")


def table_of(title: str, measured: Measured) -> Table:
    sizes = sorted({row.batch_size for row in measured.rows})
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAVY)
    speeds = [text for size in sizes for text in (f"batch {size}\ntokens/s", "over\nplain")]
    for name in ("\nmethod", *speeds, "tokens\na step", "\nidentical"):
        table.add_column(name, justify="left" if name == "\nmethod" else "right", no_wrap=True)
    for method in dict.fromkeys(row.method for row in measured.rows):
        own = [measured.at(method, size) for size in sizes]
        cells = []
        for row in own:
            over = row.speed / measured.at("plain", row.batch_size).speed
            cells += [f"{row.speed:,.0f}", f"{over:.2f}"]
        same = [identical(row, measured.truth) for row in own]
        table.add_row(method, *cells, f"{own[0].tokens_per_step:.2f}", same[0] if len(set(same)) == 1 else ", ".join(same))
    return table


def verdict(measured: Measured, batch_size: int) -> str:
    """The gain of the best drafter at this batch size, or what a drafted step costs and brings where there is none."""
    plain = measured.at("plain", batch_size)
    drafted = [r for r in measured.rows if r.batch_size == batch_size and r.method not in ("plain", "transformers")]
    best = max(drafted, key=lambda r: r.speed)
    if best.speed > plain.speed:
        return f"Batch {batch_size}: {best.method} decodes {best.speed / plain.speed:.2f} times as fast as plain decoding."
    return (
        f"Batch {batch_size}: no gain; {best.method} reaches {best.speed / plain.speed:.2f} of plain decoding. What a drafted token costs "
        "here is more than it brings, so few are drafted."
    )


def spread_of(plain: DemoRow) -> str:
    """How far the machine itself is from steady, as steps say that do the same work each time."""
    if not plain.step_ms:
        return ""
    low, high = plain.spread
    return (
        f"Plain steps of {plain.batch_size} took {low:.1f} to {high:.1f} ms (the middle half of them): differences below "
        f"{high / low - 1.0:.0%} are this machine's own."
    )


def transformers_refusal(model: PreTrainedModel, draft: PreTrainedModel, prompts: list[list[int]]) -> str:
    """What `transformers` says to a batch with a draft model."""
    try:
        generate_padded(model, prompts, 4, assistant_model=draft)
    except ValueError as error:
        return str(error).splitlines()[0]
    return "accepted (this version of transformers batches assisted generation)"


def coloured_sample(llm: LLM, prompt: list[int], params: SamplingParams) -> Text:
    """One continuation: the prompt dim, drafted and accepted tokens green, the target's own tokens yellow."""
    tokenizer = llm.target.tokenizer
    assert tokenizer is not None
    completion = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    text = Text(tokenizer.decode(prompt[-24:]), style="dim")
    for token, accepted in zip(completion.token_ids, completion.is_accepted, strict=True):
        text.append(tokenizer.decode([token]), style="green" if accepted else "bold yellow")
    return text


def main(
    out: Annotated[Path, typer.Option(help="Folder for the bar chart.")] = Path("build/demo"),
    max_tokens: Annotated[int, typer.Option(help="New tokens a prompt.", min=2)] = 56,
    limit: Annotated[float, typer.Option(help="Seconds of decoding for each row of a table, at most.", min=0.1)] = 15.0,
) -> None:
    """Speculate in a batch, check that nothing changed, and show what it brings. Exit 1 where a text is not that of plain decoding."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    small, draft = Models("embedded target", load_model(str(TARGET), device="cpu")), load_model(str(DRAFT), device="cpu")
    assert small.target.tokenizer is not None
    prompts = code_prompts(small.target.tokenizer, held_out_files(), max(BATCH_SIZES), PROMPT_TOKENS)
    lengths = [PROMPT_TOKENS - 10 * i for i in range(len(prompts))]
    prompts = [p[-n:] for p, n in zip(prompts, lengths, strict=True)]
    where, dtype = environment(), fastest_dtype(torch.device("cpu"))
    console.print(
        f"[bold]echelon[/] on {escape(where['cpu'])}, kernels for {where['isa']}, torch {where['torch']}, "
        f"transformers {where['transformers']}"
    )
    console.print(
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens of Python source that no model here has seen, {max_tokens} new "
        f"tokens each, greedy, bfloat16; transformers in {str(dtype).removeprefix('torch.')}, in which it is fastest here.\n"
        f"tokens/s: of decoding, prompts left out; at batch 1 of {NUM_ALONE} prompts in turn. tokens a step: of a row, at batch 1. "
        "identical: the same token ids as plain decoding, each row alone.\n"
    )
    tables = {small.title: run_all(small, None, prompts, params, limit)}
    _show(1, f"The embedded target: {describe(small.target.model)}", tables[small.title])
    console.print("What drafts from a model of its own is shown below, on a target whose steps cost enough for it.\n")

    plain_model, tokenizer = load_plain(str(TARGET))
    plain_draft, _ = load_plain(str(DRAFT))
    with tempfile.TemporaryDirectory() as folder:
        with console.status("growing the target"):
            grown, heads = inflate_with_heads(plain_model, GROWN_PARAMETERS, {"eagle": str(EAGLE)}, Path(folder))
            target = adopt_model(copy.deepcopy(grown), tokenizer, "embedded target, grown")
        large = Models("grown target", target, draft, heads["eagle"])
        tables[large.title] = run_all(large, grown.to(dtype), prompts, params, limit)
    _show(2, f"The same target grown in memory to {describe(grown)}; draft {describe(draft.model)}", tables[large.title])
    refusal = transformers_refusal(grown, plain_draft.to(dtype), prompts)
    console.print(f"transformers with a draft model and {len(prompts)} prompts: [red]{escape(refusal)}[/]\n")
    _finish(small.target, draft, prompts[0], params, out, tables)
    if not all(measured.is_identical for measured in tables.values()):
        console.print("[bold red]A text differs from plain decoding.[/]")
        raise typer.Exit(1)


def _show(number: int, title: str, measured: Measured) -> None:
    console.print(table_of(f"{number}. {title}", measured))
    for size in BATCH_SIZES:
        console.print(verdict(measured, size), spread_of(measured.at("plain", size)))
    console.print()


def _finish(
    target: LoadedModel, draft: LoadedModel, prompt: list[int], params: SamplingParams, out: Path, tables: dict[str, Measured]
) -> None:
    """One continuation in colours, the bar chart, and where to go on."""
    llm = LLM(target, {"method": "draft_model"}, draft)
    sample = coloured_sample(llm, prompt, params.model_copy(update={"max_tokens": 80}))
    console.print("3. One continuation: [green]drafted and accepted[/], [bold yellow]the target's own[/]")
    console.print(sample)
    console.print()
    speeds = {
        f"{title}, batch {size}": {row.method: row.speed for row in measured.rows if row.batch_size == size}
        for title, measured in tables.items()
        for size in BATCH_SIZES
    }
    try:
        grouped_bars(out / "demo.png", speeds, "new tokens per second, prompts left out")
        console.print(f"Bar chart: {out / 'demo.png'}")
    except MissingExtraError as error:
        console.print(f"No bar chart: {error}")
    console.print(f"Next: echelon generate {TARGET} 'def main(' --speculative-config.method ngram   ·   echelon doctor   ·   README.md")


if __name__ == "__main__":
    typer.run(main)
