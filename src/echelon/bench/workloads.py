"""Prompts to measure on."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence as SequenceOf
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from echelon.errors import ConfigError


def code_prompts(tokenizer: PreTrainedTokenizerBase, files: SequenceOf[str], count: int, num_tokens: int) -> list[list[int]]:
    """`count` prompts of `num_tokens` tokens of Python source, to be continued: pieces of standard-library `files`, spread evenly.

    `files` are paths below the standard library's folder; those that are missing or short are passed over.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    pieces: list[list[int]] = []
    for name in files:
        if (root / name).is_file():
            tokens: list[int] = tokenizer.encode((root / name).read_text("utf-8"))
            pieces += [tokens[i : i + num_tokens] for i in range(0, len(tokens) - 2 * num_tokens, 2 * num_tokens)]
    if len(pieces) < count:
        raise ConfigError(f"the held-out files give {len(pieces)} prompts of {num_tokens} tokens, {count} were asked for; ask for fewer")
    return [pieces[i * len(pieces) // count] for i in range(count)]
