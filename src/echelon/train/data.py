"""The texts of a training run, in a folder that several runs with one target may share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from echelon.errors import ConfigError
from echelon.inputs import check_kind, name_of
from echelon.train import corpus
from echelon.train.files import partial, taking_turns, write_text, writing
from echelon.train.text import HELD_OUT, MIX, WHEELS, Tokens, batch, target_continuations

HELD_OUT_SHARE = 20  # of files that come without a split of their own: the last twentieth
WINDOW = 257  # tokens of a training text


@dataclass(frozen=True)
class Data:
    """Token arrays by group; [n, WINDOW] of what the target says after text, and after held-out text."""

    text: Tokens
    said: np.ndarray
    said_held_out: np.ndarray

    def batch(self, seed: int, step: int, num_rows: int) -> Tensor:
        """int64 [num_rows, WINDOW], half text and half what the target says: a function of (seed, step)."""
        half, width = num_rows // 2, self.said.shape[1]
        text = batch(self.text, seed * 10_000_000 + step, width - 1, half)
        chosen = np.random.default_rng([2025, seed, step]).integers(0, len(self.said), num_rows - half)
        return torch.cat([text, torch.from_numpy(self.said[chosen].astype(np.int64))])


def prepare(target: nn.Module, tokenizer: Any, files: Sequence[Path] | None, folder: Path, count: int = 4096) -> Data:
    """Texts of `files`, or Python source that stands on this machine, and what the target says; made once and read again.

    Raises
    ------
    ConfigError  the texts are too short or not UTF-8, or `folder` holds those of another target or of other files
    OutputError  `folder` cannot be one
    """
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        raise ConfigError("training reads text, and the model has no fast tokenizer; put its tokenizer.json beside its weights")
    check_kind("target", target, PreTrainedModel)
    check_kind("count", count, int)
    if count < 1:
        raise ConfigError(f"count = {count} is no number of texts; give at least 1")
    files = None if files is None else [Path(name_of(f, "files")) for f in files]
    folder = Path(name_of(folder, "folder"))
    with taking_turns(folder):
        return _prepared(target, tokenizer, files, folder, count)


def _prepared(target: nn.Module, tokenizer: Any, files: Sequence[Path] | None, folder: Path, count: int) -> Data:
    """Read the texts in a folder, or make those that are missing; no other process does so meanwhile."""
    _check_same(folder / "data.json", {"target": fingerprint(target), "files": _hashes(files), "continuations": count})
    text = _tokens(tokenizer, files, folder / "tokens.npz")
    window = min(WINDOW, int(target.config.max_position_embeddings))  # type: ignore[union-attr,arg-type]
    for group, array in text.items():
        if len(array) < 2 * window:
            raise ConfigError(
                f"the texts have {len(array):,} tokens ({group}); training needs at least {2 * window:,}: give more with --text"
            )
    held_out = {HELD_OUT + " prompts": text[HELD_OUT]}
    said = target_continuations(target, text, folder / "said.npy", count, window)
    return Data(text, said, target_continuations(target, held_out, folder / "said_held_out.npy", max(16, count // 32), window))


def fingerprint(target: nn.Module) -> str:
    """What tells a target from another: its configuration and some of its weights."""
    digest = hashlib.sha256(target.config.to_json_string().encode())  # type: ignore[union-attr,operator]
    digest.update(target.get_input_embeddings().weight[:64].detach().float().cpu().numpy().tobytes())  # type: ignore[operator]
    return digest.hexdigest()[:16]


def _hashes(files: Sequence[Path] | None) -> list[str]:
    if files is None:
        return []
    for file in files:
        if not file.is_file():
            raise ConfigError(f"--text {str(file)!r} is no file; give UTF-8 text")
        try:
            file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {str(file)!r} cannot be read as UTF-8 ({error}); convert it") from error
    return [hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files]


def _check_same(file: Path, settings: dict[str, Any]) -> None:
    try:
        before = json.loads(file.read_text("utf-8")) if file.exists() else settings
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read ({error}); remove that folder, or choose another") from error
    if before != settings:
        raise ConfigError(f"{file.parent} holds the texts of another target or of other files; choose another folder")
    write_text(file, json.dumps(settings) + "\n")


def _tokens(tokenizer: Any, files: Sequence[Path] | None, file: Path) -> Tokens:
    if not file.exists():
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0
        arrays: dict[str, Any] = {g: corpus.tokenize(tokenizer.backend_tokenizer, d, end) for g, d in _groups(files).items()}
        with writing(file):
            np.savez(partial(file), **arrays)
            partial(file).replace(file)
    tokens = dict(np.load(file))
    if HELD_OUT not in tokens:
        tokens = {g: a[: -len(a) // HELD_OUT_SHARE] for g, a in tokens.items()} | {HELD_OUT: _tail(tokens)}
    return tokens


def _tail(tokens: Tokens) -> np.ndarray:
    return np.concatenate([a[-len(a) // HELD_OUT_SHARE :] for a in tokens.values()])


def _groups(files: Sequence[Path] | None) -> dict[str, list[corpus.Document]]:
    if files is not None:
        return {"text": [corpus.Document("text", str(f), f.read_text("utf-8")) for f in files]}
    installed = {d.metadata["Name"].lower() for d in metadata.distributions()}
    docs = corpus.documents([w for w in WHEELS if w in installed])
    return {g: [d for d in docs if d.group == g] for g in (*MIX, HELD_OUT)}
