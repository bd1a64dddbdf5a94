"""A small draft model for any target, taught by `pair`'s second phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import Field, StrictFloat, StrictInt
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from echelon.inputs import check_kind, name_of
from echelon.settings import Settings
from echelon.train.files import only_trainer, writing
from echelon.train.pair import distil
from echelon.train.text import Tokens

HEAD_SIZE = 64
RATE = 3e-3  # peak learning rate


class _Plan(Settings):
    steps: StrictInt = Field(ge=1)
    rate: StrictFloat = Field(ge=0.0, allow_inf_nan=False)
    every: StrictInt = Field(ge=1)


def draft_config(target: Any) -> LlamaConfig:
    """Two layers, a quarter of the target's width: the shape of the embedded pair's draft model."""
    text = target.get_text_config()
    hidden = max(HEAD_SIZE, text.hidden_size // 4 // HEAD_SIZE * HEAD_SIZE)
    return LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=hidden,
        num_hidden_layers=2,
        intermediate_size=4 * hidden,
        num_attention_heads=hidden // HEAD_SIZE,
        num_key_value_heads=1,
        head_dim=HEAD_SIZE,
        max_position_embeddings=text.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )


def train_draft_model(
    target: PreTrainedModel, tokenizer: Any, tokens: Tokens, out: Path, data: Path, steps: int, rate: float, every: int
) -> None:
    """Train in `out`, or go on there; the checkpoint is `out`/model. `OutputError` where that cannot be a folder."""
    check_kind("target", target, PreTrainedModel)
    _Plan(steps=steps, rate=rate, every=every)
    out, data = Path(name_of(out, "out")), Path(name_of(data, "data"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draft = LlamaForCausalLM._from_config(draft_config(target.config), attn_implementation="sdpa")
    with only_trainer(out):
        distil(target, draft, tokens, out, data / "said.npy", steps, rate, every)
        with writing(out / "model"):
            draft.to(torch.bfloat16).save_pretrained(out / "model")
            tokenizer.save_pretrained(out / "model")
