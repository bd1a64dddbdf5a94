"""Batches of text, and what a target itself says: each a function of numbers, so that a resumed run sees what an unbroken one saw."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from echelon.train.files import partial, writing

Tokens = dict[str, np.ndarray]
HELD_OUT = "held-out"
# Share of each group in a batch: the standard library is what the evaluation reads, the wheels are most of the text.
MIX = {"stdlib": 0.4, "stdlib-tests": 0.15, "wheels": 0.45}
SAMPLING_TEMPERATURE = 0.8  # of the target's own text
WHEELS = ["torch", "transformers", "sympy", "networkx", "matplotlib", "numpy", "hypothesis", "pydantic", "rich", "setuptools"]
PROMPT_LENGTH = 32


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
def target_continuations(target: nn.Module, tokens: Tokens, file: Path, count: int = 4096, length: int = 257) -> np.ndarray:
    """[count, length] in the dtype of `tokens`: what the target says after 32 tokens of text, sampled; made once and read again."""
    if not file.exists():
        parts = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            for i in range(0, count, 128):
                prompts = batch(tokens, 2_000_000 + i, 63, min(128, count - i))[:, :PROMPT_LENGTH]
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    options = {"do_sample": True, "temperature": SAMPLING_TEMPERATURE, "top_k": 0, "eos_token_id": None, "pad_token_id": 1}
                    mask, new = torch.ones_like(prompts), length - PROMPT_LENGTH
                    out = target.generate(prompts, attention_mask=mask, max_new_tokens=new, **options)  # type: ignore[operator]
                parts.append(out.numpy().astype(next(iter(tokens.values())).dtype))
                print(f"target's own text: {min(i + 128, count)}/{count}", file=sys.stderr, flush=True)
        with writing(file):
            np.save(partial(file), np.concatenate(parts))
            partial(file).replace(file)
    return np.asarray(np.load(file))
