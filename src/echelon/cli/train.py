"""`echelon train`: what drafts for a model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from echelon import ConfigError
from echelon.cli.shared import ModelArgument, errors
from echelon.inputs import made_folder
from echelon.model.load.loading import load_plain
from echelon.train.draft_model import RATE, train_draft_model
from echelon.train.heads import TrainingConfig, train_head
from echelon.train.text import prepare


class Method(StrEnum):
    medusa = "medusa"
    clover = "clover"
    clover2 = "clover2"
    eagle = "eagle"
    eagle3 = "eagle3"
    draft_model = "draft_model"


class Targets(StrEnum):
    hard = "hard"
    soft = "soft"


class Block(StrEnum):
    augmenting = "augmenting"
    regressive = "regressive"
    attention_decoder = "attention-decoder"


def train(
    model: ModelArgument,
    method: Annotated[Method, typer.Option(help="What to train.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; an interrupted one goes on.")],
    text: Annotated[list[Path] | None, typer.Option(help="UTF-8 text files; Python source of this machine without.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder for tokens and the target's own text, to share between runs; OUT/data.")] = None,
    steps: Annotated[int, typer.Option(help="Batches of about 2,000 tokens.", min=1)] = 1000,
    rate: Annotated[float | None, typer.Option(help="Peak learning rate; the method's own without.", min=0.0)] = None,
    every: Annotated[int, typer.Option(help="Steps between checkpoints and evaluations.", min=1)] = 100,
    seed: Annotated[int, typer.Option(help="Of initial weights, batches and noise of heads.", min=0)] = 0,
    targets: Annotated[Targets | None, typer.Option(help="Learn the text, or the model's distribution; as published without.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Heads of Medusa (5) or Clover (3).", min=1, max=16)] = None,
    ablate: Annotated[str | None, typer.Option(help="Blocks of Clover to leave out, with commas: " + ", ".join(Block))] = None,
    draft_vocab_size: Annotated[int | None, typer.Option(help="Tokens that EAGLE-3 can draft: the most frequent.", min=8)] = None,
    num_continuations: Annotated[int, typer.Option(help="Texts that the model writes for its drafter.", min=1)] = 4096,
) -> None:
    """Train heads, or a draft model, on the frozen MODEL: from text, and from what it says itself."""
    options = _options(method, num_heads, ablate, draft_vocab_size)
    if method is Method.draft_model and targets is not None:
        raise ConfigError("method draft_model learns the model's distribution and what it would accept; leave --targets out")
    made_folder(out, "--out")
    target, tokenizer = load_plain(model)
    texts = prepare(target, tokenizer, text, data or out / "data", num_continuations)
    if method is Method.draft_model:
        train_draft_model(target, tokenizer, texts.text, out, data or out / "data", steps, RATE if rate is None else rate, every)
        return
    is_soft = None if targets is None else targets is Targets.soft
    config = TrainingConfig(method.value, steps, rate, every, seed, is_soft, options)
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=errors, transient=True) as progress:
        task = progress.add_task(f"training {method.value}", total=steps, loss="")
        train_head(target, texts, out, config, lambda done, _, loss: progress.update(task, completed=done, loss=f"loss {loss:.3f}"))
    errors.print(f"{escape(str(out))} holds the {method.value} head, log.jsonl and curves.png", highlight=False)


def _options(method: Method, num_heads: int | None, ablate: str | None, draft_vocab_size: int | None) -> tuple[tuple[str, Any], ...]:
    """The head's own options; those of another method are refused."""
    options: dict[str, Any] = {}
    if num_heads is not None:
        options["num_heads"] = num_heads
    if draft_vocab_size is not None:
        options["draft_vocab_size"] = draft_vocab_size
    for name in (ablate or "").split(","):
        if name and name not in list(Block):
            raise ConfigError(f"--ablate {name!r} is no block of Clover; known: {', '.join(Block)}")
        if name:
            options[name.replace("-", "_")] = False
    allowed = {Method.medusa: {"num_heads"}, Method.eagle3: {"draft_vocab_size"}}
    allowed[Method.clover] = {"num_heads", *(b.replace("-", "_") for b in Block)}
    if surplus := options.keys() - allowed.get(method, set()):
        raise ConfigError(f"method {method.value} has no option for {', '.join(sorted(surplus))}; leave it out")
    return tuple(options.items())
