"""Rotary embeddings that depend on the length of a text: as under `generate`, whatever runs beside, and no module is written to."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import pytest
import torch
import toys
import transformers as tr

from echelon import LLM, SamplingParams, UnsupportedModelError
from echelon.model.load.selftest import self_test
from echelon.model.patches.rope import LONG_TEXT

LIMIT, NUM_NEW = 40, 30
PROMPTS = toys.prompts((3, 10, 30, 39, 40, 41, 55), vocabulary=90)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [3.0] * 8,
    "original_max_position_embeddings": LIMIT,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": LIMIT},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": LIMIT,
    },
    "longrope": LONGROPE,
}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ANEW = {"original_max_position_embeddings": LIMIT}
MSCALES = {"short_mscale": 1.0, "long_mscale": 1.3}
CLASSES = {
    "llama": (tr.LlamaForCausalLM, tr.LlamaConfig, {}),
    "qwen2": (tr.Qwen2ForCausalLM, tr.Qwen2Config, {}),
    "phi3": (tr.Phi3ForCausalLM, tr.Phi3Config, ANEW),
}


@cache
def model(name: str, kind: str) -> Any:
    cls, config, more = CLASSES[name]
    return toys.randomised(cls, config(**SIZES, **more, rope_parameters=dict(ROPES[kind])), 0, 0.25)


def by_transformers(of: Any) -> list[list[int]]:
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = of.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0)
        rows.append(out[0, len(prompt) :].tolist())
    return rows


def texts(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW)
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "longrope"), ("qwen2", "longrope"), ("phi3", "longrope"), *(("llama", k) for k in ROPES if k != "longrope")],
)
def test_a_text_that_outgrows_the_original_context_is_that_of_generate(name: str, kind: str) -> None:
    llm = toys.watch(
        LLM(
            toys.adopted(model(name, kind)), {"method": "ngram", "num_speculative_tokens": 5}, max_num_seqs=4, kv_cache_memory_bytes=1 << 20
        )
    )
    assert texts(llm, PROMPTS) == by_transformers(model(name, kind))


def test_a_row_of_phimoe_has_the_scale_of_its_own_text() -> None:
    """Its rotary embedding looks at the longest text of a call in its own forward too."""
    rope = LONGROPE | MSCALES
    config = tr.PhimoeConfig(**SIZES, **ANEW, num_local_experts=4, num_experts_per_tok=2, rope_parameters=rope)
    of = toys.randomised(tr.PhimoeForCausalLM, config, 0, 0.25)
    llm = LLM(toys.adopted(of), max_num_seqs=8, kv_cache_memory_bytes=1 << 20)
    assert texts(llm, PROMPTS) == by_transformers(of)


def test_frequencies_that_follow_the_whole_call_are_refused_by_name() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        self_test(tr.LlamaForCausalLM, tr.LlamaConfig(**SIZES, rope_parameters=rope))


def test_no_pass_writes_frequencies() -> None:
    loaded = toys.adopted(model("phi3", "longrope"))
    before = {name: (b._version, b.clone()) for name, b in loaded.model.named_buffers() if not b.is_inference()}
    assert before
    texts(LLM(loaded, max_num_seqs=4, kv_cache_memory_bytes=1 << 20), PROMPTS)
    for name, buffer in loaded.model.named_buffers():
        assert buffer._version == before[name][0]
        assert torch.equal(buffer, before[name][1])


def test_two_engines_in_two_threads_keep_their_own_frequencies() -> None:
    """One pass stops inside its rotary embedding until a pass of the other engine is done."""
    loaded = toys.adopted(model("phi3", "longrope"))
    rope: Any = loaded.model.model.rotary_emb  # type: ignore[union-attr]
    short, long = torch.arange(8)[None], torch.arange(50)[None] + LONG_TEXT
    x = torch.zeros(1, 1, 64)
    expected, whole = rope(x, short), rope(x, long)
    inner, is_first = rope.forward._forward, [True]

    def interrupted(module: Any, *args: Any) -> Any:
        if is_first[0]:
            is_first[0] = False
            other = threading.Thread(target=lambda: seen.append(rope(x, long)))
            other.start()
            other.join()
        return inner(module, *args)

    seen: list[Any] = []
    rope.forward._forward = interrupted
    got = rope(x, short)
    assert all(torch.equal(a, b) for a, b in zip(expected + whole, got + seen[0], strict=True))
