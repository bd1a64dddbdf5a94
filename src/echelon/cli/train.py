"""`echelon train`: what drafts for a model."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from echelon import LLM, ConfigError
from echelon.cli.advice import advice
from echelon.cli.shared import ModelArgument, progress
from echelon.cli.words import SPECULATIVE, errors
from echelon.heads.checkpoints import build_head
from echelon.inputs import made_folder, shown
from echelon.methods import METHODS, Can, head_class, method_names
from echelon.model.load.loading import load_plain
from echelon.ops.devices import chosen_device
from echelon.pyplot import pyplot_or_refusal
from echelon.train.draft_model import RATE, DraftTraining, train_draft_model
from echelon.train.heads import TrainingConfig, train_head
from echelon.train.sources import check_apart
from echelon.train.text import prepare

BLOCKS = ("augmenting", "regressive", "attention-decoder")  # of Clover


def train(
    model: ModelArgument,
    method: Annotated[str, typer.Option(help=f"What to train: {', '.join(method_names(Can.TRAIN))}.")],
    output: Annotated[Path, typer.Option(help="Folder of the run; an interrupted one goes on.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(help="UTF-8 files, folders, JSON lines, or (with `datasets`) a data set; Python source of this machine without."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder for tokens and the target's own text, to share between runs; OUTPUT/data.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Batches; of a method that pretrains, those of raw text.", min=0)] = 1000,
    fine_tuning_steps: Annotated[
        int | None, typer.Option(help="Batches of the model's own text after pretraining; a quarter of --steps without.", min=0)
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Texts (of 257 tokens) in a batch; 8 without. Heads only.", min=2)] = None,
    rate: Annotated[float | None, typer.Option(help="Peak learning rate; the method's own without.", min=0.0)] = None,
    every: Annotated[int, typer.Option(help="Steps between checkpoints and evaluations.", min=1)] = 100,
    seed: Annotated[int, typer.Option(help="Of initial weights, batches and noise.", min=0)] = 0,
    targets: Annotated[
        Literal["hard", "soft"] | None, typer.Option(help="Learn the text (hard) or the model's distribution (soft); as published without.")
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option(help="Decoder layers of Scylla or Clover-2 (2), blocks of Medusa (1).", min=1, max=16)
    ] = None,
    num_heads: Annotated[int | None, typer.Option(help="Heads of Medusa (5) or Clover (3).", min=1, max=16)] = None,
    ablate: Annotated[str | None, typer.Option(help="Blocks of Clover to leave out, with commas: " + ", ".join(BLOCKS))] = None,
    draft_vocab_size: Annotated[int | None, typer.Option(help="Tokens that EAGLE-3 can draft: the most frequent.", min=8)] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: CUDA where there is a device.")] = "auto",
    num_continuations: Annotated[int, typer.Option(help="Texts that the model writes for its drafter.", min=1)] = 4096,
) -> None:
    """Train heads, or a draft model, on the frozen MODEL: from text, and from what it says itself.

    How long it takes, how much text it needs and what it brings: docs/training.md.
    """
    if method not in (known := method_names(Can.TRAIN)):
        raise ConfigError(f"--method {shown(method)} is none that can be trained; known: {', '.join(known)}")
    options, is_model = _options(method, num_heads, num_layers, ablate, draft_vocab_size), METHODS[method].needs == "model"
    if is_model and targets is not None:
        raise ConfigError(f"method {method} learns the model's distribution and what it would accept; leave --targets out")
    if is_model and fine_tuning_steps is not None:
        raise ConfigError(f"method {method} does not pretrain; leave --fine-tuning-steps out")
    if is_model and batch_size is not None:
        raise ConfigError(f"method {method} learns batches of a size of its own; leave --batch-size out")
    is_soft = None if targets is None else targets == "soft"
    texts_a_step = batch_size or TrainingConfig.batch_size
    config: TrainingConfig | DraftTraining = (
        DraftTraining(steps=steps, rate=RATE if rate is None else rate, every=every, seed=seed)
        if is_model
        else TrainingConfig(method, steps, rate, every, seed, is_soft, options, None, fine_tuning_steps, texts_a_step)
    )
    if not is_model:
        pyplot_or_refusal()  # training a head ends by drawing its curves
    where = chosen_device(device)
    check_apart(text or [], output)
    made_folder(output, "--output")
    what, num_steps = ("draft model", steps) if isinstance(config, DraftTraining) else (f"{method} head", config.num_steps)
    errors.print(
        f"training a {what}: the model first writes {num_continuations:,} texts, then {num_steps:,} steps "
        "follow; how long that takes, and what it brings: docs/training.md",
        highlight=False,
    )
    target, tokenizer = load_plain(model)
    target = target.to(where)
    if not is_model:
        build_head(method, target, **dict(options))  # refused before the model writes its texts
    texts = prepare(target, tokenizer, text, data or output / "data", num_continuations)
    if isinstance(config, DraftTraining):
        train_draft_model(target, tokenizer, texts.text, output, data or output / "data", config)
        _print_use(model, method, output / "model", f"{output} holds log.jsonl, {output / 'model'} the {what}")
        return
    with progress(num_steps, f"training {method}") as update:
        train_head(target, texts, output, config, lambda done, _, loss: update(completed=done, note=f"loss {loss:.3f}"))
    _print_use(model, method, output, f"{output} holds the {what}, log.jsonl and curves.png")
    for line in _advice(model, output, config):
        errors.print(escape(line), highlight=False)


def _print_use(model: str, method: str, drafter: Path, made: str) -> None:
    """What was made, and the commands that try it and use it."""
    errors.print(escape(made), highlight=False)
    for words in (
        ["drafters", model, "--drafter", str(drafter), "--input", "PROMPTS"],
        ["serve", model, f"{SPECULATIVE}.method", method, f"{SPECULATIVE}.model", str(drafter)],
    ):
        errors.print(escape(f"  {shlex.join(['echelon', *words])}"), highlight=False)


def _advice(model: str, out: Path, config: TrainingConfig) -> Iterable[str]:
    """What the head is worth on this machine."""
    log = [json.loads(line) for line in (out / "log.jsonl").read_text("utf-8").splitlines()]
    with LLM(model, {"method": config.method, "model": str(out)}) as llm:
        assert llm.engine.controller is not None
        table = llm.engine.controller.table
    num_layers = json.loads((out / "config.json").read_text("utf-8")).get("options", {}).get("num_layers")
    return advice(table, log, config.num_steps - config.falling, num_layers if config.recipe.pretrains else None)


def _options(
    method: str, num_heads: int | None, num_layers: int | None, ablate: str | None, draft_vocab_size: int | None
) -> tuple[tuple[str, Any], ...]:
    """The head's own options; those of another method are refused."""
    left_out = [name for name in (ablate or "").split(",") if name]
    if unknown := [name for name in left_out if name not in BLOCKS]:
        raise ConfigError(f"--ablate {unknown[0]!r} is no block of Clover; known: {', '.join(BLOCKS)}")
    given = {"num_heads": num_heads, "num_layers": num_layers, "draft_vocab_size": draft_vocab_size} | {
        n.replace("-", "_"): False for n in left_out
    }
    options = {name: value for name, value in given.items() if value is not None}
    allowed = head_class(method).options_class.__dataclass_fields__ if METHODS[method].head else {}
    if surplus := options.keys() - allowed:
        raise ConfigError(f"method {method} has no option for {', '.join(sorted(surplus))}; leave it out")
    return tuple(options.items())
