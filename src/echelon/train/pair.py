"""The embedded pair: a target of about 11 M parameters and a draft model of about 1 M, trained together from Python source.

`python -m echelon.train.pair OUT` builds corpus, tokenizer and both models. The target learns the text (cross-entropy); the draft
model learns the target (forward KL divergence to its distribution) in the same loop, on the same batches. Then the target stands still and
the draft model goes on, half of it on the target's own text. A rerun resumes; batch n is a function of (seed, n) alone.

Constant learning rate, then a linear decay to zero over the last part; sequences grow from 256 tokens to the full context.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from echelon.train import corpus
from echelon.train.files import only_trainer, writing
from echelon.train.loop import Loop
from echelon.train.text import HELD_OUT, MIX, SAMPLING_TEMPERATURE, WHEELS, Tokens, batch, target_continuations

VOCABULARY = 4096
CONTEXT = 2048
TOKENS_PER_BATCH = 8192
SPECIAL = ["<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def model_config(hidden: int, layers: int, intermediate: int, heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )


TARGET = model_config(hidden=512, layers=4, intermediate=1024, heads=8)
DRAFT = model_config(hidden=128, layers=2, intermediate=512, heads=2)


def train_tokenizer(docs: list[corpus.Document]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 4,096 entries, learned on the standard library and every eighth file of the wheels."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = [d.text for d in docs if d.group == "stdlib"]
    wheels = [d.text for d in docs if d.group == "wheels"][::8]
    tokenizer.train_from_iterator(library + wheels, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def prepare(work: Path) -> tuple[PreTrainedTokenizerFast, Tokens]:
    """Tokenizer and token arrays by group, made on the first call and read again afterwards."""
    folder, file = work / "tokenizer", work / "tokens.npz"
    if not file.exists():
        docs = corpus.documents(WHEELS)
        (work / "manifest.json").write_text(json.dumps(corpus.manifest(docs, WHEELS), indent=1) + "\n")
        tokenizer = train_tokenizer(docs)
        tokenizer.save_pretrained(folder)
        groups = {g: [d for d in docs if d.group == g] for g in (*MIX, HELD_OUT)}
        arrays: dict[str, Any] = {g: corpus.tokenize(tokenizer.backend_tokenizer, d, 0) for g, d in groups.items()}
        np.savez(file, **arrays)
    return PreTrainedTokenizerFast.from_pretrained(folder), dict(np.load(file))


def pair_losses(target: nn.Module, draft: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the target and KL(target ‖ draft) of the draft, both in nats a token."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        target_logits = target(input_ids=ids[:, :-1], use_cache=False).logits
        draft_logits = draft(input_ids=ids[:, :-1], use_cache=False).logits
    target_logits = target_logits.float().flatten(0, 1)
    cross_entropy = F.cross_entropy(target_logits, ids[:, 1:].flatten())
    log_target = target_logits.detach().log_softmax(-1)
    log_draft = draft_logits.float().flatten(0, 1).log_softmax(-1)
    divergence = (log_target.exp() * (log_target - log_draft)).sum(-1).mean()
    return cross_entropy, divergence


def sequence_length(step: int, steps: int, decay: int) -> int:
    """Short sequences while the model learns to spell, the full context at the end (attention is a third of the cost at 512)."""
    if step >= steps - 50:
        return CONTEXT
    if step >= steps - decay:
        return 1024
    return 512 if step >= steps // 4 else 256


@torch.no_grad()
def evaluate(target: nn.Module, draft: nn.Module, held_out: np.ndarray, num_windows: int = 48, length: int = 1024) -> tuple[float, float]:
    """(target, draft) loss on evenly spaced held-out windows, nats a token, every position counted."""
    length = min(length, len(held_out) - 1)
    starts = np.linspace(0, len(held_out) - length - 1, num_windows).astype(int)
    totals = [0.0, 0.0]
    for start in starts:
        ids = torch.from_numpy(held_out[start : start + length + 1].astype(np.int64))[None]
        for i, model in enumerate((target, draft)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            totals[i] += float(F.cross_entropy(logits[0].float(), ids[0, 1:]))
    return totals[0] / num_windows, totals[1] / num_windows


def export(out: Path, tokenizer: PreTrainedTokenizerFast, target: nn.Module, draft: nn.Module, work: Path) -> None:
    """bf16 checkpoints under `out`/target and `out`/draft, in files under 16 MiB, with tokenizer and manifest."""
    for name, model, config in (("target", target, TARGET), ("draft", draft, DRAFT)):
        copy = LlamaForCausalLM(config)
        copy.load_state_dict(model.state_dict())
        copy.to(torch.bfloat16).save_pretrained(out / name, max_shard_size="12MB")
        tokenizer.save_pretrained(out / name)
    (out / "manifest.json").write_text((work / "manifest.json").read_text())
    (out / "training.jsonl").write_text((work / "log.jsonl").read_text())


def train_together(
    target: nn.Module, draft: nn.Module, tokens: Tokens, work: Path, steps: int, decay: int, rate: float, every: int
) -> None:
    """First phase: the target learns the text and the draft model learns the target, on the same batches."""
    loop = Loop({"target": target, "draft": draft}, work / "checkpoint.pt", steps, decay, rate)
    losses = torch.compile(pair_losses, dynamic=False)
    start = time.monotonic()
    for step in range(loop.first, steps):
        length = sequence_length(step, steps, decay)
        ids = batch(tokens, step, length, TOKENS_PER_BATCH // length)
        cross_entropy, divergence = losses(target, draft, ids)
        loop.update(step, cross_entropy + divergence)
        seconds = (time.monotonic() - start) / (step + 1 - loop.first)
        report("pair", step + 1, steps, seconds, float(cross_entropy.detach()), float(divergence.detach()))
        if (step + 1) % every == 0 or step + 1 == steps:
            loop.save(step + 1)
            log_held_out(work, "pair", step + 1, target, draft, tokens)


def distil(target: nn.Module, draft: nn.Module, tokens: Tokens, work: Path, said_file: Path, steps: int, rate: float, every: int) -> None:
    """Second phase: the target stands still, and the draft model is trained for acceptance.

    Half of each batch is text, half is what the target itself says: continuations sampled at SAMPLING_TEMPERATURE.
    """
    said = target_continuations(target, tokens, said_file)
    loop = Loop({"draft": draft}, work / "draft.pt", steps, steps, rate)
    losses = torch.compile(draft_loss, dynamic=False)
    start = time.monotonic()
    for step in range(loop.first, steps):
        text = batch(tokens, 1_000_000 + step, said.shape[1] - 1, TOKENS_PER_BATCH // 512)
        rng = np.random.default_rng([2025, step])
        own = torch.from_numpy(said[rng.integers(0, len(said), TOKENS_PER_BATCH // 512)].astype(np.int64))
        loss = losses(target, draft, torch.cat([text, own]))
        loop.update(step, loss)
        report("draft", step + 1, steps, (time.monotonic() - start) / (step + 1 - loop.first), float(loss.detach()))
        if (step + 1) % every == 0 or step + 1 == steps:
            loop.save(step + 1)
            log_held_out(work, "draft", step + 1, target, draft, tokens)


def draft_loss(target: nn.Module, draft: nn.Module, ids: Tensor) -> Tensor:
    """KL(target ‖ draft) plus the total variation at SAMPLING_TEMPERATURE, which bounds acceptance (DistillSpec, Zhou et al. 2024)."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            target_logits = target(input_ids=ids[:, :-1], use_cache=False).logits.float().flatten(0, 1)
        draft_logits = draft(input_ids=ids[:, :-1], use_cache=False).logits.float().flatten(0, 1)
    log_target, log_draft = target_logits.log_softmax(-1), draft_logits.log_softmax(-1)
    divergence = (log_target.exp() * (log_target - log_draft)).sum(-1).mean()
    sharp_target, sharp_draft = (target_logits / SAMPLING_TEMPERATURE).softmax(-1), (draft_logits / SAMPLING_TEMPERATURE).softmax(-1)
    variation = 0.5 * (sharp_target - sharp_draft).abs().sum(-1).mean()
    loss: Tensor = 0.25 * divergence + variation
    return loss


def report(phase: str, done: int, steps: int, seconds: float, *losses: float) -> None:
    if done % 10 == 0:
        shown = ", ".join(f"{x:.3f}" for x in losses)
        print(
            f"{phase} {done}/{steps}: {shown}; {seconds:.2f} s a step, {(steps - done) * seconds / 60:.0f} min left",
            file=sys.stderr,
            flush=True,
        )


def log_held_out(work: Path, phase: str, done: int, target: nn.Module, draft: nn.Module, tokens: Tokens) -> None:
    losses = evaluate(target, draft, tokens[HELD_OUT])
    with writing(work / "log.jsonl"), (work / "log.jsonl").open("a") as log:
        log.write(json.dumps({"phase": phase, "step": done, "tokens": done * TOKENS_PER_BATCH, "held_out": losses}) + "\n")
    print(f"held-out: target {losses[0]:.3f}, draft {losses[1]:.3f} nats a token", file=sys.stderr, flush=True)


def main(
    out: Annotated[Path, typer.Argument(help="Folder for the two checkpoints.")],
    work: Annotated[Path, typer.Option(help="Folder for tokens and resumable checkpoints.")] = Path("build/pair"),
    steps: Annotated[int, typer.Option(help="Batches of 8,192 tokens for both models.")] = 1800,
    decay: Annotated[int, typer.Option(help="Last of these, with falling rate and longer sequences.")] = 400,
    draft_steps: Annotated[int, typer.Option(help="Batches for the draft model alone.")] = 1000,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
) -> None:
    """Train the embedded pair again, or go on where an interrupted run stopped."""
    with only_trainer(work):
        _train_pair(out, work, steps, decay, draft_steps, rate, every)


def _train_pair(out: Path, work: Path, steps: int, decay: int, draft_steps: int, rate: float, every: int) -> None:
    """Train both models in a folder that no other process trains in, and write them out."""
    tokenizer, tokens = prepare(work)
    print({group: len(array) for group, array in tokens.items()}, flush=True)
    torch.manual_seed(0)
    target = LlamaForCausalLM._from_config(TARGET, attn_implementation="sdpa")
    draft = LlamaForCausalLM._from_config(DRAFT, attn_implementation="sdpa")
    train_together(target, draft, tokens, work, steps, decay, rate, every)
    distil(target.eval().requires_grad_(False), draft, tokens, work, work / "said.npy", draft_steps, rate, every)
    export(out, tokenizer, target, draft, work)


if __name__ == "__main__":
    typer.run(main)
