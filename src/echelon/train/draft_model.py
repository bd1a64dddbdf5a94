"""A small draft model for any target: distilled from it, half on text and half on the target's own continuations."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, StrictFloat, StrictInt
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from echelon.checkpoint.facts import context_of
from echelon.inputs import LARGEST, check_kind, name_of
from echelon.settings import Settings
from echelon.train.files import check_same_run, only_trainer, writing
from echelon.train.precision import mixed_precision, teaching
from echelon.train.sources import HELD_OUT
from echelon.train.text import SAMPLING_TEMPERATURE, Tokens, batch, digest_of_tokens, fingerprint, target_continuations
from echelon.train.trainer import Log, Trainer

HEAD_SIZE = 64
RATE = 3e-3  # peak learning rate
TOKENS_PER_BATCH = 8192


class DraftTraining(Settings):
    """How a draft model is trained: its batches, the peak learning rate, batches between checkpoints, and the seed of initial weights and
    of what the batches hold.
    """

    steps: StrictInt = Field(ge=1)
    rate: StrictFloat = Field(default=RATE, ge=0.0, allow_inf_nan=False)
    every: StrictInt = Field(default=100, ge=1)
    seed: StrictInt = Field(default=0, ge=0, lt=LARGEST)


@dataclass(frozen=True)
class PairRun:
    """Training of a draft model beside its target, on arrays of tokens by group; its log and checkpoints lie in `work`."""

    target: PreTrainedModel
    draft: PreTrainedModel
    tokens: Tokens
    work: Path
    every: int

    def phase(self, name: str, trainer: Trainer, learn: Callable[[int], dict[str, float]], tokens_per_batch: int) -> None:
        """Make a phase's steps; held-out losses stand in the log, and what is left to do on standard error."""
        start = time.monotonic()

        def evaluated(done: int) -> dict[str, Any]:
            losses = evaluate(self.target, self.draft, self.tokens[HELD_OUT])
            print(f"held-out: target {losses[0]:.3f}, draft {losses[1]:.3f} nats a token", file=sys.stderr, flush=True)
            return {"tokens": done * tokens_per_batch, "held_out": losses}

        def report(done: int, losses: dict[str, float]) -> None:
            if done % 10 == 0:
                values, seconds = ", ".join(f"{x:.3f}" for x in losses.values()), (time.monotonic() - start) / (done - trainer.first)
                left = f"{seconds:.2f} s a step, {(trainer.steps - done) * seconds / 60:.0f} min left"
                print(f"{name} {done}/{trainer.steps}: {values}; {left}", file=sys.stderr, flush=True)

        trainer.run(learn, evaluated, Log(self.work / "log.jsonl", trainer.first, phase=name), self.every, report)


def small_llama(hidden: int, layers: int, intermediate: int, context: int, **tokens: Any) -> LlamaConfig:
    """A Llama with attention heads of HEAD_SIZE entries, one head of keys and values, and one matrix for embeddings and output; `tokens`:
    its vocabulary and special tokens.
    """
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=intermediate,
        num_attention_heads=hidden // HEAD_SIZE,
        num_key_value_heads=1,
        head_dim=HEAD_SIZE,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        **tokens,
    )


def draft_config(target: Any) -> LlamaConfig:
    """Two layers, a quarter of the target's width: the shape of the embedded pair's draft model."""
    text = target.get_text_config()
    hidden = max(HEAD_SIZE, text.hidden_size // 4 // HEAD_SIZE * HEAD_SIZE)
    tokens = {name: getattr(text, name) for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    return small_llama(hidden, 2, 4 * hidden, context_of(text), **tokens)


def train_draft_model(target: PreTrainedModel, tokenizer: Any, tokens: Tokens, out: Path, data: Path, config: DraftTraining) -> None:
    """Train in `out`, or go on there; the checkpoint is `out`/model.

    Raises
    ------
    ConfigError  `out` holds a run with other settings or one that goes on in another process
    OutputError  `out` cannot be a folder
    """
    check_kind("target", target, PreTrainedModel)
    check_kind("config", config, DraftTraining)
    out, data = Path(name_of(out, "out")), Path(name_of(data, "data"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        draft = LlamaForCausalLM._from_config(draft_config(target.config), attn_implementation="sdpa").to(target.device)
    with only_trainer(out):
        settings = {"method": "draft_model", **config.model_dump(), "target": fingerprint(target)}
        settings["data"] = digest_of_tokens(tokens.items())
        check_same_run(out / "training.json", settings, is_kept=False)  # before the target writes for a run that cannot go on
        said = target_continuations(target, tokens, data / "continuations.npy")
        check_same_run(out / "training.json", settings | {"said": digest_of_tokens([("said", said)])})
        distil(PairRun(target, draft, tokens, out, config.every), data / "continuations.npy", config)
        with writing(out / "model"):
            draft.to(torch.bfloat16).save_pretrained(out / "model")
            tokenizer.save_pretrained(out / "model")


def distil(run: PairRun, file: Path, config: DraftTraining) -> None:
    """Train a draft model for acceptance by a frozen target.

    Half of each batch is text, half are the target's own continuations, sampled at SAMPLING_TEMPERATURE and kept in `file`.
    """
    target, draft = teaching(run.target), run.draft
    continuations, num_rows = target_continuations(target, run.tokens, file), TOKENS_PER_BATCH // 512
    loss_of = compiled(draft_loss, target.device)

    def learn(step: int) -> dict[str, float]:
        text = batch(run.tokens, 1_000_000 * (1 + config.seed) + step, continuations.shape[1] - 1, num_rows)
        chosen = np.random.default_rng([2025 + config.seed, step]).integers(0, len(continuations), num_rows)
        ids = torch.cat([text, torch.from_numpy(continuations[chosen].astype(np.int64))])
        loss = loss_of(target, draft, ids.to(target.device))
        loss.backward()
        return {"loss": float(loss.detach())}

    trainer = Trainer({"draft": draft}, run.work / "draft.pt", config.steps, config.steps, config.rate)
    replace(run, target=target).phase("draft", trainer, learn, TOKENS_PER_BATCH)


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function compiled for the CPU; a CUDA device makes the steps of a small model sooner than it would compile them."""
    return torch.compile(function, dynamic=False) if device.type == "cpu" else function


@torch.no_grad()
def evaluate(
    target: PreTrainedModel, draft: PreTrainedModel, held_out: np.ndarray, num_windows: int = 48, length: int = 1024
) -> tuple[float, float]:
    """(target, draft) loss on evenly spaced held-out windows, nats a token, every position counted."""
    length = min(length, len(held_out) - 1, context_of(target.config), context_of(draft.config))
    starts = np.linspace(0, len(held_out) - length - 1, num_windows).astype(int)
    totals = [0.0, 0.0]
    for start in starts:
        ids = torch.from_numpy(held_out[start : start + length + 1].astype(np.int64))[None].to(target.device)
        for i, model in enumerate((target, draft)):
            with mixed_precision(model):
                logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            totals[i] += float(F.cross_entropy(logits[0].float(), ids[0, 1:]))
    return totals[0] / num_windows, totals[1] / num_windows


def divergence_of(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """KL(target ‖ draft) of logits [T, V], nats a token."""
    log_target, log_draft = target_logits.log_softmax(-1), draft_logits.log_softmax(-1)
    return (log_target.exp() * (log_target - log_draft)).sum(-1).mean()


def draft_loss(target: PreTrainedModel, draft: PreTrainedModel, ids: Tensor) -> Tensor:
    """KL(target ‖ draft) plus the total variation at SAMPLING_TEMPERATURE, which bounds acceptance (DistillSpec, Zhou et al. 2024)."""
    with mixed_precision(target):
        with torch.no_grad():
            target_logits = target(input_ids=ids[:, :-1], use_cache=False).logits.float().flatten(0, 1)
        draft_logits = draft(input_ids=ids[:, :-1], use_cache=False).logits.float().flatten(0, 1)
    divergence = divergence_of(target_logits, draft_logits)
    sharp_target, sharp_draft = (target_logits / SAMPLING_TEMPERATURE).softmax(-1), (draft_logits / SAMPLING_TEMPERATURE).softmax(-1)
    variation = 0.5 * (sharp_target - sharp_draft).abs().sum(-1).mean()
    loss: Tensor = 0.25 * divergence + variation
    return loss
