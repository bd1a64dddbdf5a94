"""Of every causal model of `transformers`: what docs/models.md says of it is so, and nothing served is wrong.

`make test` examines a sample; PROVE=1 all of them in both dtypes (`-k` takes a model type or a dtype; eight minutes of one core).
"""

from __future__ import annotations

import json
from pathlib import Path

import census
import pytest
import torch
import toys
import transformers
from transformers import BertConfig, BertLMHeadModel

from echelon.errors import Refusal, UnsupportedModelError
from echelon.model.load.selftest import self_test
from echelon.model.load.shrink import shrunken
from tools.models import document

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "docs" / "evidence" / "census.json").read_text("utf-8"))
SAMPLE = [
    ("llama", "float32"),
    ("gemma3", "float32"),  # built with its vision tower
    ("glm4_moe", "float32"),  # a router with weights of its own
    ("jetmoe", "float32"),
    ("phimoe", "bfloat16"),
    ("gpt2", "bfloat16"),
    ("bert", "float32"),
    *((name, "float32") for name in ("mamba", "bloom", "bart", "llama4_text", "doge", "xlnet", "musicgen", "lfm2", "deepseek_v32")),
]
ALL = [(name, dtype) for name in census.NAMES for dtype in census.DTYPES]
is_same_release = transformers.__version__ == RECORD["transformers"]


@pytest.mark.parametrize(("name", "dtype"), ALL if toys.PROVE else SAMPLE)
def test_models_are_served_exactly_or_refused_for_a_reason(name: str, dtype: str) -> None:
    finding = census.examine(name, dtype)
    assert finding.verdict in {"served", *(r.name for r in Refusal)}, finding.detail
    if is_same_release:
        assert finding.verdict == RECORD["models"][name][dtype], finding.detail


def test_the_table_of_models_is_the_record_and_names_every_class() -> None:
    models = RECORD["models"]
    assert (ROOT / "docs" / "models.md").read_text("utf-8") == document(models, RECORD["transformers"])
    assert {v for m in models.values() for v in (m["float32"], m["bfloat16"])} <= {"served", *(r.name for r in Refusal)}
    if is_same_release:
        assert list(models) == census.NAMES


@pytest.mark.parametrize(
    "name", ["gemma3_text", "deepseek_v3", "gemma3n_text", "laguna", "dots3_note_text", "gemma4_text", "dbrx", "falcon"]
)
def test_small_configurations_keep_every_kind_of_layer_and_the_ratios(name: str) -> None:
    config = census.configuration(name)
    before = config.to_json_string(use_diff=False)
    small = shrunken(config)
    assert config.to_json_string(use_diff=False) == before
    for key in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, key, None)
        assert kinds is None or set(getattr(small, key)) == set(kinds)
        assert kinds is None or len(getattr(small, key)) == small.num_hidden_layers
    assert small.vocab_size <= 64
    assert getattr(small, "sliding_window", None) in (None, 4)
    model = census.class_of(name)._from_config(small, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) < 5_000_000


def test_a_model_of_few_tokens_is_tried_like_any_other() -> None:
    config = census.configuration("llama")
    config.vocab_size = 6
    self_test(census.class_of("llama"), config)


def test_a_refusal_says_what_is_and_what_can_be_done() -> None:
    for refusal in Refusal:
        error = UnsupportedModelError.because("SomeForCausalLM", refusal, "layer 3")
        assert str(error) == f"SomeForCausalLM {refusal} (layer 3); {refusal.remedy}"
        assert error.refusal is refusal
    with pytest.raises(UnsupportedModelError, match="set is_decoder to true") as caught:
        self_test(BertLMHeadModel, BertConfig())
    assert caught.value.refusal is Refusal.NOT_CAUSAL
