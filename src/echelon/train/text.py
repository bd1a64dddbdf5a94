"""Tokens to train on, and what a target continues texts with.

A batch is a function of numbers, so that a resumed run sees what an unbroken one saw; the texts of a run lie in a folder that several runs
with one target may share.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from echelon.checkpoint.facts import context_of
from echelon.errors import ConfigError
from echelon.inputs import check_kind, name_of
from echelon.train.files import replacing, taking_turns
from echelon.train.precision import mixed_precision, teaching
from echelon.train.sources import (
    GIVEN,
    HELD_OUT,
    HELD_OUT_SHARE,
    WHEELS,
    Document,
    check_apart,
    check_source,
    digest_of,
    documents,
    documents_of,
    each_once,
)

FILES_AT_ONCE = 256  # an encoding takes some thirty times the memory of its text
Tokens = dict[str, np.ndarray]
# Share of each group in a batch, of those that are there: the standard library is what the evaluation reads, the wheels are most of the
# source, and where other text is given it is more than half.
MIX = {"stdlib": 0.4, "stdlib-tests": 0.15, "wheels": 0.45, GIVEN: 1.2}
SAMPLING_TEMPERATURE = 0.8  # of the target's own text
PROMPT_LENGTH = 32
TEXTS_AT_ONCE = 128  # that the target writes: the same prompts on every device, and memory enough for a model of some size
WINDOW = 257  # tokens of a training text
MOST_TOKENS = 100_000_000  # of a data set, which is streamed


def tokenize(tokenizer: Tokenizer, docs: Iterable[Document], end_of_text: int) -> np.ndarray:
    """One flat array, uint16 where the vocabulary fits: all of every document's tokens, whatever the tokenizer would cut or fill up, each
    document preceded by `end_of_text`.
    """
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    texts = [d.text for d in docs]
    parts = []
    with _as_texts_are(tokenizer):
        for start in range(0, len(texts), FILES_AT_ONCE):
            encoded = tokenizer.encode_batch_fast(texts[start : start + FILES_AT_ONCE], add_special_tokens=False)
            parts += [np.array([end_of_text, *e.ids], dtype=dtype) for e in encoded]
    return np.concatenate(parts)


@contextmanager
def _as_texts_are(tokenizer: Tokenizer) -> Iterator[None]:
    """While inside, the tokenizer cuts nothing and fills nothing up."""
    truncation, padding = tokenizer.truncation, tokenizer.padding
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        yield
    finally:
        if truncation is not None:
            tokenizer.enable_truncation(**truncation)
        if padding is not None:
            tokenizer.enable_padding(**padding)


def batch(tokens: Tokens, step: int, length: int, num_rows: int) -> Tensor:
    """int64 [num_rows, length + 1]: random crops, a function of `step` alone."""
    rng = np.random.default_rng([2024, step])
    mix = {g: share for g, share in MIX.items() if g in tokens} or {g: 1.0 for g in tokens if g != HELD_OUT}
    shares = np.array(list(mix.values())) / sum(mix.values())
    rows = []
    for _ in range(num_rows):
        source = tokens[str(rng.choice(list(mix), p=shares))]
        start = int(rng.integers(0, len(source) - length))
        rows.append(source[start : start + length + 1])
    return torch.from_numpy(np.stack(rows).astype(np.int64))


@torch.no_grad()
def target_continuations(target: PreTrainedModel, tokens: Tokens, file: Path, count: int = 4096, length: int = 257) -> np.ndarray:
    """[count, length] in the dtype of `tokens`: what the target samples after 32 tokens of text; made once and read again."""
    if not file.exists():
        target = teaching(target)
        parts, device = [], target.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(7)
            for i in range(0, count, TEXTS_AT_ONCE):
                prompts = batch(tokens, 2_000_000 + i, 63, min(TEXTS_AT_ONCE, count - i))[:, :PROMPT_LENGTH].to(device)
                with mixed_precision(target):
                    options: dict[str, Any] = {
                        "do_sample": True,
                        "temperature": SAMPLING_TEMPERATURE,
                        "top_k": 0,
                        "top_p": 1.0,
                        "repetition_penalty": 1.0,
                        "eos_token_id": None,
                        "pad_token_id": 1,
                    }
                    mask, new = torch.ones_like(prompts), length - PROMPT_LENGTH
                    out = target.generate(prompts, attention_mask=mask, max_new_tokens=new, **options)
                parts.append(out.cpu().numpy().astype(next(iter(tokens.values())).dtype))
                print(f"target's own text: {min(i + TEXTS_AT_ONCE, count)}/{count}", file=sys.stderr, flush=True)
        with replacing(file) as part:
            np.save(part, np.concatenate(parts))
    return np.asarray(np.load(file))


def digest_of_tokens(arrays: Iterable[tuple[str, np.ndarray]]) -> str:
    """A digest by which a run knows again what it learns from."""
    digest = hashlib.sha256()
    for name, array in arrays:
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Data:
    """Token arrays by group; [n, WINDOW] of the target's continuations of text, and of held-out text."""

    text: Tokens
    continuations: np.ndarray
    held_out_continuations: np.ndarray

    @property
    def digest(self) -> str:
        """By which a run knows it again."""
        return digest_of_tokens([*self.text.items(), ("said", self.continuations), ("held out", self.held_out_continuations)])

    def batch(self, seed: int, step: int, num_rows: int) -> Tensor:
        """int64 [num_rows, WINDOW], half text and half continuations of the target: a function of (seed, step)."""
        half = num_rows // 2
        return torch.cat([self.text_batch(seed, step, half), self.continuation_batch(seed, step, num_rows - half)])

    def text_batch(self, seed: int, step: int, num_rows: int) -> Tensor:
        """int64 [num_rows, WINDOW] of raw text, a function of (seed, step)."""
        return batch(self.text, seed * 10_000_000 + step, self.continuations.shape[1] - 1, num_rows)

    def continuation_batch(self, seed: int, step: int, num_rows: int) -> Tensor:
        """int64 [num_rows, WINDOW] of what the target says itself, a function of (seed, step)."""
        chosen = np.random.default_rng([2025, seed, step]).integers(0, len(self.continuations), num_rows)
        return torch.from_numpy(self.continuations[chosen].astype(np.int64))


def prepare(
    target: PreTrainedModel, tokenizer: Any, sources: Sequence[Path] | None, folder: Path, count: int = 4096, num_tokens: int = MOST_TOKENS
) -> Data:
    """Texts of `sources` (files, folders, data sets), or Python source that stands on this machine, and the target's continuations; made
    once and read again. Of a data set some `num_tokens` tokens are read.

    Raises
    ------
    ConfigError  the texts are too short or not UTF-8, or `folder` is among them, or holds those of another target or of other sources
    OutputError  `folder` cannot be one
    """
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        raise ConfigError("training reads text, and the model has no fast tokenizer; put its tokenizer.json beside its weights")
    check_kind("target", target, PreTrainedModel)
    check_kind("count", count, int)
    check_kind("num_tokens", num_tokens, int)
    if count < 1:
        raise ConfigError(f"count = {count} is no number of texts; give at least 1")
    sources = None if sources is None else [Path(name_of(s, "sources")) for s in sources]
    for source in sources or []:
        check_source(source)
    folder = Path(name_of(folder, "folder"))
    check_apart(sources or [], folder)
    with taking_turns(folder):
        return _prepared(target, tokenizer, sources, folder, count, num_tokens)


def _prepared(target: PreTrainedModel, tokenizer: Any, sources: Sequence[Path] | None, folder: Path, count: int, num_tokens: int) -> Data:
    """Read the texts in a folder, or make those that are missing; no other process does so meanwhile."""
    settings = {"target": fingerprint(target), "files": [digest_of(s) for s in sources or []], "continuations": count}
    described, file = folder / "data.json", folder / "tokens.npz"
    is_made = file.exists()
    if is_made or (folder / "continuations.npy").exists():  # a folder without texts is nobody's yet
        _check_same(described, settings)
    arrays = dict(np.load(file)) if is_made else _tokenized(tokenizer, sources, num_tokens)
    text, window = _with_held_out(arrays), min(WINDOW, context_of(target.config))
    for group, array in text.items():
        if len(array) < 2 * window:
            cut = f", a {HELD_OUT_SHARE}th of all text" if group == HELD_OUT and HELD_OUT not in arrays else ""
            raise ConfigError(
                f"the texts have {len(array):,} tokens ({group}{cut}); training needs at least {2 * window:,} there: give more with --text"
            )
    if not is_made:
        with replacing(described) as part:
            part.write_text(json.dumps(settings) + "\n", "utf-8")
        with replacing(file) as part:
            np.savez(part, **arrays)
    held_out = {HELD_OUT + " prompts": text[HELD_OUT]}
    continuations = target_continuations(target, text, folder / "continuations.npy", count, window)
    count = max(16, count // 32)
    return Data(text, continuations, target_continuations(target, held_out, folder / "held_out_continuations.npy", count, window))


def fingerprint(target: PreTrainedModel) -> str:
    """A digest that tells a target from another, the same under any version of `transformers`: of its configuration and some weights."""
    config = {k: v for k, v in target.config.to_diff_dict().items() if k != "transformers_version"}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(target.get_input_embeddings().weight[:64].detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _check_same(file: Path, settings: dict[str, Any]) -> None:
    try:
        before = json.loads(file.read_text("utf-8")) if file.exists() else settings
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read ({error}); remove that folder, or choose another") from error
    if before != settings:
        what = "another target, of other files or with another number of continuations"
        raise ConfigError(f"{file.parent} holds the texts of {what}; choose another folder")


def _tokenized(tokenizer: Any, sources: Sequence[Path] | None, num_tokens: int) -> Tokens:
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0
    return {group: tokenize(tokenizer.backend_tokenizer, docs, end) for group, docs in _groups(sources, num_tokens).items()}


def _with_held_out(tokens: Tokens) -> Tokens:
    """Where no group is held out, the last part of each is."""
    if HELD_OUT in tokens:
        return tokens
    held_out = np.concatenate([a[-len(a) // HELD_OUT_SHARE :] for a in tokens.values()])
    return {g: a[: -len(a) // HELD_OUT_SHARE] for g, a in tokens.items()} | {HELD_OUT: held_out}


def _groups(sources: Sequence[Path] | None, num_tokens: int) -> dict[str, list[Document]]:
    """Texts by group; an installation may lack some of its own."""
    if sources is not None:
        groups = {GIVEN: each_once(d for s in sources for d in documents_of(s, num_tokens))}
    else:
        installed = {d.metadata["Name"].lower() for d in metadata.distributions()}
        docs = documents([w for w in WHEELS if w in installed])
        groups = {g: [d for d in docs if d.group == g] for g in (*MIX, HELD_OUT) if g != GIVEN}
    found = {group: docs for group, docs in groups.items() if docs}
    if not found.keys() - {HELD_OUT}:
        raise ConfigError("the texts are empty; give others with --text")
    return found
