"""Weights rounded as they are read: the same as those of a model that was read whole, in less memory than it."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import toys
from test_published import mixture
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    JetMoeConfig,
    JetMoeForCausalLM,
    PreTrainedModel,
)

from echelon.memory.footprint import Outline
from echelon.model.load.loading import adopt_model, load_model
from echelon.model.load.rounding import rounded_as_read
from echelon.model.patches.linear import linear_parts, packed_weights, routers_of, weight_bytes
from echelon.model.patches.packing import Packing
from echelon.ops import compiled

pytestmark = pytest.mark.skipif(not compiled.is_built(), reason="the compiled kernels are not built")


def gpt2() -> PreTrainedModel:
    config = GPT2Config(vocab_size=toys.VOCABULARY, n_positions=toys.CONTEXT, n_embd=64, n_layer=2, n_head=4, eos_token_id=None)
    return toys.randomised(GPT2LMHeadModel, config, 0, 0.1)


def bert(is_tied: bool) -> PreTrainedModel:
    """Its output layer lies in a block of the model, behind a layer of its own."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": toys.VOCABULARY, "max_position_embeddings": toys.CONTEXT, "pad_token_id": None}
    return toys.randomised(BertLMHeadModel, BertConfig(**sizes, **tokens, is_decoder=True, tie_word_embeddings=is_tied), 0, 0.1)


MIXTURE = {"vocab_size": toys.VOCABULARY, "max_position_embeddings": toys.CONTEXT, "num_hidden_layers": 2, "hidden_size": 64}
MIXTURE |= {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
CHOOSING = {  # mixtures whose routers hold a linear layer
    "AFMoE": lambda: toys.randomised(
        AfmoeForCausalLM, AfmoeConfig(**MIXTURE, head_dim=16, moe_intermediate_size=64, num_experts=4, num_dense_layers=1), 0, 0.1
    ),
    "HunYuan": lambda: toys.randomised(
        HunYuanMoEV1ForCausalLM, HunYuanMoEV1Config(**MIXTURE, head_dim=16, num_experts=4, moe_topk=2), 0, 0.1
    ),
    "JetMoE": lambda: toys.randomised(
        JetMoeForCausalLM, JetMoeConfig(**MIXTURE, kv_channels=16, num_local_experts=4, tie_word_embeddings=False), 0, 0.1
    ),
}
MODELS = {
    "untied": lambda: toys.llama(intermediate_size=128),
    "tied": lambda: toys.llama(tie_word_embeddings=True),
    "mixture": mixture,
    "transposed": gpt2,
    "output layer within, untied": lambda: bert(False),
    "output layer within, tied": lambda: bert(True),
    **CHOOSING,
}


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_read_is_what_a_whole_model_becomes(kind: str, quantization: str, tmp_path: Path) -> None:
    MODELS[kind]().save_pretrained(tmp_path)
    read = load_model(tmp_path, quantization=quantization)
    whole = adopt_model(load_model_whole(tmp_path), None, kind, keep_weights=False, quantization=quantization)
    ours, theirs = packed_weights(read.model), packed_weights(whole.model)
    key = lambda w: (w.columns, w.depth, w.integers, w.data.flatten().view(torch.uint8)[:4096].tolist())  # noqa: E731
    assert sorted(map(key, ours)) == sorted(map(key, theirs))
    assert int(quantization[-1]) in {w.integers.bits for w in ours}


@pytest.mark.parametrize("kind", CHOOSING)
def test_routers_and_nothing_else_of_a_mixture_stay(kind: str, tmp_path: Path) -> None:
    CHOOSING[kind]().save_pretrained(tmp_path)
    model = load_model(tmp_path, quantization="int8").model
    routers = [linear_parts(router.forward)[0] for router in routers_of(model)]
    assert routers and {w.columns for w in routers} == {4}
    stayed = {w.data.data_ptr() for w in packed_weights(model) if not w.integers.bits}
    assert stayed == {w.data.data_ptr() for w in routers}


@pytest.mark.parametrize("kind", ["AFMoE", "HunYuan"])  # JetMoE cannot be planned before it is read
def test_routers_are_planned_as_they_stay(kind: str, tmp_path: Path) -> None:
    CHOOSING[kind]().save_pretrained(tmp_path)
    planned = Outline.of(str(tmp_path)).footprint("int8").weights
    assert planned == pytest.approx(weight_bytes(load_model(tmp_path, quantization="int8").model), rel=0.02)


def load_model_whole(folder: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def test_only_this_thread_and_only_inside() -> None:
    def filled() -> str:
        layer = torch.nn.Linear(64, 64)
        layer.weight = torch.nn.Parameter(torch.ones(64, 64))
        return type(layer.weight).__name__

    with rounded_as_read(Packing(bits=8), frozenset({toys.VOCABULARY})), ThreadPoolExecutor(1) as other:
        assert other.submit(filled).result() == "Parameter"
        assert filled() == "PackedParameter"
    assert filled() == "Parameter"


def test_threads_load_at_once(tmp_path: Path) -> None:
    toys.llama(intermediate_size=128, num_hidden_layers=4).save_pretrained(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(lambda _: load_model(tmp_path, quantization="int8"), range(8)))
    assert len({weight_bytes(m.model) for m in loaded}) == 1


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_peak_memory_is_below_the_numbers(quantization: str, tmp_path: Path) -> None:
    """Of a process of its own; the model is large beside what Python takes meanwhile."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 1024, "head_dim": 128}
    model = toys.llama(**sizes).bfloat16()
    numbers = sum(p.numel() * 2 for p in model.parameters())
    model.save_pretrained(tmp_path / "model")
    toys.llama().bfloat16().save_pretrained(tmp_path / "model-tiny")
    script = Path(toys.__file__).with_name("peak_memory.py")
    words = [sys.executable, str(script), str(tmp_path / "model"), quantization]
    said = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    share = {"int8": 0.51, "int4": 0.30}[quantization]
    assert said["weights"] < (share + 0.05) * numbers, "with the embedding in 16 bits"
    assert said["peak"] < numbers, f"{said['peak']:,} of {numbers:,} bytes"


def test_bytes_of_weights_are_those_in_memory(tmp_path: Path) -> None:
    toys.llama(intermediate_size=128).bfloat16().save_pretrained(tmp_path)
    sizes = {q: weight_bytes(load_model(tmp_path, quantization=q).model) for q in (None, "int8", "int4")}
    assert sizes["int4"] < sizes["int8"] < sizes[None]
