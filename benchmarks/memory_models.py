"""Models whose memory is planned and measured, the embedded one and random ones, the settings they run with, and what the system counts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from benchmarks.workloads import ROOT, Size
from echelon import ConfigError
from echelon.bench.inflate import inflate, plan_growth
from echelon.demo import DRAFT, TARGET
from echelon.model.load.loading import load_plain

BUILD = ROOT / "build" / "memory"
Settings = dict[str, Any]

SIZES: Mapping[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4
        ),
    ),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config(
            vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=12, num_attention_heads=14, num_key_value_heads=2
        ),
    ),
    "opt": (OPTForCausalLM, OPTConfig(vocab_size=50272, hidden_size=1024, ffn_dim=4096, num_hidden_layers=12, num_attention_heads=16)),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig(
            vocab_size=32000,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=2,
            num_local_experts=8,
            max_position_embeddings=4096,
        ),
    ),
}
MODELS = ("embedded", *SIZES)
SETTINGS: Mapping[str, tuple[Settings, Settings | None, int, int]] = {  # engine, drafter, length of texts, and of prompts within
    "chain": ({"max_num_seqs": 8}, {"method": "draft_model", "num_speculative_tokens": 4}, 384, 352),
    "tree": ({"max_num_seqs": 4}, {"method": "draft_model", "tree": "dynamic", "num_speculative_tokens": 24}, 384, 352),
    "int8": ({"max_num_seqs": 8, "quantization": "int8"}, None, 384, 352),
    "int8_kv": ({"max_num_seqs": 8, "kv_cache_dtype": "int8"}, None, 384, 352),
    "long": ({"max_num_seqs": 2}, None, 2048, 2016),
    "prefixes": ({"max_num_seqs": 4}, {"method": "ngram", "num_speculative_tokens": 7}, 768, 736),
}


def folder_of(model: str) -> tuple[Path, Path]:
    """A model, random where it is none of ours, and a draft model beside it with its vocabulary."""
    if model == "embedded":
        return TARGET, DRAFT
    if model == "grown":
        if not (BUILD / model / "config.json").exists():
            plain, tokenizer = load_plain(str(TARGET))
            inflate(plain, plan_growth(plain, Size().pair_parameters)).save_pretrained(BUILD / model)
            if tokenizer is not None:
                tokenizer.save_pretrained(BUILD / model)
        return BUILD / model, DRAFT
    cls, config = SIZES[model]
    target, draft = BUILD / model, BUILD / f"{model}-draft"
    if not (draft / "config.json").exists():
        torch.manual_seed(0)
        cls(config).bfloat16().save_pretrained(target)
        small = LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4
        )
        LlamaForCausalLM(small).bfloat16().save_pretrained(draft)
    return target, draft


def engine_settings(model: str, setting: str) -> tuple[Settings, Settings | None, int, int]:
    engine, drafter, length, prompt = SETTINGS[setting]
    if drafter is not None and drafter["method"] == "draft_model":
        drafter = drafter | {"model": str(folder_of(model)[1])}
    return engine | {"max_model_len": length}, drafter, length, prompt


def status(key: str) -> int:
    """Bytes that the system counts for this process under `key`."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"))
    if found is None:
        raise ConfigError(f"/proc/self/status has no {key}; memory is measured on Linux")
    return 1024 * int(found[1])
