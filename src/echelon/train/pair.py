"""Pairs of a target and a draft model, trained together: the embedded one, of Python source, and that of the study, of prose besides.

`python -m echelon.train.pair OUT [--study --text FOLDER …]` builds corpus, tokenizer and both models. The target learns the text
(cross-entropy); the draft model learns the target (forward KL divergence to its distribution) in the same loop, on the same batches. Then
the target stands still and the draft model goes on, half of it on the target's own text. A rerun resumes; batch n is a function of
(seed, n) alone.

Constant learning rate, then a linear decay to zero over the last part; sequences grow from 256 tokens to the full context.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from echelon.errors import ConfigError
from echelon.ops.devices import chosen_device
from echelon.train.draft_model import (
    TOKENS_PER_BATCH,
    DraftTraining,
    PairRun,
    compiled,
    distil,
    divergence_of,
    small_llama,
)
from echelon.train.files import check_same_run, only_trainer, replacing
from echelon.train.precision import mixed_precision
from echelon.train.sources import (
    GIVEN,
    HELD_OUT,
    WHEELS,
    Document,
    check_source,
    documents,
    documents_of,
    each_once,
    manifest,
    with_held_out,
)
from echelon.train.text import MIX, MOST_TOKENS, Tokens, batch, tokenize
from echelon.train.trainer import Trainer

SPECIAL = ["<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True)
class Size:
    """Widths and depth of a Llama with attention heads of 64 entries and one head of keys and values."""

    hidden: int
    layers: int
    intermediate: int


@dataclass(frozen=True)
class Pair:
    """Vocabulary and context, in tokens, that a target and a draft model share."""

    vocabulary: int
    context: int
    target: Size
    draft: Size

    def config(self, size: Size) -> LlamaConfig:
        """A Llama of this size."""
        tokens = {"vocab_size": self.vocabulary, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
        return small_llama(size.hidden, size.layers, size.intermediate, self.context, **tokens)


EMBEDDED = Pair(4096, 2048, Size(hidden=512, layers=4, intermediate=1024), Size(hidden=128, layers=2, intermediate=512))
STUDY = Pair(8192, 8192, Size(hidden=320, layers=12, intermediate=896), Size(hidden=128, layers=2, intermediate=512))


def train_tokenizer(docs: list[Document], pair: Pair) -> PreTrainedTokenizerFast:
    """A byte-level BPE, learned on the standard library and every eighth file of the wheels and of other text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=pair.vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = [d.text for d in docs if d.group == "stdlib"]
    others = [d.text for group in ("wheels", GIVEN) for d in [d for d in docs if d.group == group][::8]]
    tokenizer.train_from_iterator(library + others, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=pair.context,
        clean_up_tokenization_spaces=False,
    )


def prepare_pair(work: Path, pair: Pair, sources: Sequence[Path]) -> tuple[PreTrainedTokenizerFast, Tokens]:
    """Tokenizer and token arrays by group, made on the first call and read again afterwards."""
    folder, file = work / "tokenizer", work / "tokens.npz"
    if not file.exists():
        given = with_held_out(d for source in sources for d in documents_of(source, MOST_TOKENS))
        docs = each_once([*documents(WHEELS), *given])  # a given text that the library has is the library's
        (work / "manifest.json").write_text(json.dumps(manifest(docs, WHEELS), indent=1) + "\n")
        tokenizer = train_tokenizer(docs, pair)
        tokenizer.save_pretrained(folder)
        groups = {g: own for g in (*MIX, HELD_OUT) if (own := [d for d in docs if d.group == g])}
        arrays: dict[str, Any] = {g: tokenize(tokenizer.backend_tokenizer, d, 0) for g, d in groups.items()}
        with replacing(file) as part, part.open("wb") as out:
            np.savez(out, **arrays)
    return PreTrainedTokenizerFast.from_pretrained(folder), dict(np.load(file))


def pair_losses(target: PreTrainedModel, draft: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the target and KL(target ‖ draft) of the draft, both in nats a token."""
    with mixed_precision(target):
        target_logits = target(input_ids=ids[:, :-1], use_cache=False).logits
        draft_logits = draft(input_ids=ids[:, :-1], use_cache=False).logits
    target_logits = target_logits.float().flatten(0, 1)
    cross_entropy = F.cross_entropy(target_logits, ids[:, 1:].flatten())
    return cross_entropy, divergence_of(target_logits.detach(), draft_logits.float().flatten(0, 1))


def sequence_length(step: int, steps: int, decay: int, context: int) -> int:
    """Short sequences while the model learns to spell, the full context at the end (attention is a third of the cost at 512)."""
    if step >= steps - 50:
        return context
    if step >= steps - decay:
        return 1024
    return 512 if step >= steps // 4 else 256


def export(folder: Path, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel) -> None:
    """A bf16 checkpoint in files under 16 MiB, with its tokenizer."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(folder, max_shard_size="12MB")
    tokenizer.save_pretrained(folder)


def export_history(out: Path, work: Path) -> None:
    """What the pair was made from, and its losses on held-out text."""
    (out / "manifest.json").write_text((work / "manifest.json").read_text())
    lines = [line for line in (work / "log.jsonl").read_text().splitlines(keepends=True) if "held_out" in line]
    (out / "training.jsonl").write_text("".join(lines))


def train_together(run: PairRun, context: int, steps: int, decay: int, rate: float, batch_tokens: int) -> None:
    """First phase: the target learns the text and the draft model learns the target, on the same batches."""
    target, draft = run.target, run.draft
    losses = compiled(pair_losses, target.device)

    def learn(step: int) -> dict[str, float]:
        length = sequence_length(step, steps, decay, context)
        ids = batch(run.tokens, step, length, max(1, batch_tokens // length)).to(target.device)
        cross_entropy, divergence = losses(target, draft, ids)
        (cross_entropy + divergence).backward()
        return {"cross_entropy": float(cross_entropy.detach()), "divergence": float(divergence.detach())}

    trainer = Trainer({"target": target, "draft": draft}, run.work / "checkpoint.pt", steps, decay, rate)
    run.phase("pair", trainer, learn, batch_tokens)


def main(
    out: Annotated[Path, typer.Argument(help="Folder for the two checkpoints.")],
    work: Annotated[Path, typer.Option(help="Folder for tokens and resumable checkpoints.")] = Path("build/pair"),
    study: Annotated[bool, typer.Option("--study", help="The pair of the study: 12 layers, a context of 8,192.")] = False,
    text: Annotated[list[Path] | None, typer.Option(help="Files and folders to learn from besides Python source.")] = None,
    steps: Annotated[int, typer.Option(help="Batches for both models.")] = 1800,
    decay: Annotated[int, typer.Option(help="Last of these, with falling rate and longer sequences.")] = 400,
    draft_steps: Annotated[int, typer.Option(help="Batches for the draft model alone.")] = 1000,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a batch for both models.")] = TOKENS_PER_BATCH,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: CUDA where there is a device.")] = "auto",
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
) -> None:
    """Train a pair, or go on where an interrupted run stopped."""
    pair = STUDY if study else EMBEDDED
    for source in text or []:
        check_source(source)
    where = chosen_device(device)
    distillation = DraftTraining(steps=draft_steps, rate=rate, every=every)
    sizes = {"steps": steps, "decay": decay, "draft_steps": draft_steps, "batch_tokens": batch_tokens, "rate": rate}
    with only_trainer(work):
        settings = {"pair": asdict(pair), "text": [str(t.resolve()) for t in text or []], **sizes}
        check_same_run(work / "training.json", settings, is_kept=False)
        tokenizer, tokens = prepare_pair(work, pair, text or [])
        if short := {g: len(a) for g, a in tokens.items() if g != HELD_OUT and len(a) <= pair.context}:
            (work / "tokens.npz").unlink()  # what is too short binds nobody
            raise ConfigError(f"texts are shorter than the context of {pair.context:,} tokens ({short}); give more with --text")
        check_same_run(work / "training.json", settings)
        print({group: len(array) for group, array in tokens.items()}, flush=True)
        torch.manual_seed(0)
        configs = (pair.config(size) for size in (pair.target, pair.draft))
        target, draft = (LlamaForCausalLM._from_config(config, attn_implementation="sdpa").to(where) for config in configs)
        run = PairRun(target, draft, tokens, work, every)
        train_together(run, pair.context, steps, decay, rate, batch_tokens)
        export(out / "target", tokenizer, target)
        target.eval().requires_grad_(False)
        distil(run, work / "continuations.npy", distillation)
        export(out / "draft", tokenizer, draft)
        export_history(out, work)


if __name__ == "__main__":
    typer.run(main)
