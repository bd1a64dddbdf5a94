"""What a checkpoint may not be, and that a refusal names file, tensor and remedy."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toys
from decoders import decoders
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from echelon import LLM, ConfigError, ModelLoadError, RequestError, SamplingParams, UnsupportedModelError
from echelon.demo import DRAFT, TARGET
from echelon.model.load.loading import load_model, load_plain
from echelon.model.load.selftest import self_test
from echelon.speculative_config import SpeculativeConfig

DECODERS = decoders(12, 32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    toys.llama().save_pretrained(tmp_path / "toy")
    return tmp_path / "toy"


def test_a_saved_toy_loads_and_generates(folder: Path) -> None:
    llm = LLM(str(folder), max_num_seqs=2)
    expected = LLM(toys.adopted(toys.llama())).generate([[1, 2, 3]], SamplingParams(temperature=0))
    assert llm.generate([[1, 2, 3]], SamplingParams(temperature=0))[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_is_honoured(folder: Path, dtype: str) -> None:
    assert load_model(str(folder), dtype=dtype).model.dtype == getattr(torch, dtype)


def test_ends_outside_the_vocabulary_are_none() -> None:
    """Some configurations say −1 where a text has no end, and ids of tokens that were left out."""
    loaded = toys.adopted(toys.llama())
    loaded.model.generation_config.eos_token_id = -1
    assert not loaded.eos_token_ids
    loaded.model.generation_config.eos_token_id = [2, -1, toys.VOCABULARY, 5]
    assert loaded.eos_token_ids == {2, 5}


def test_own_code_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UnsupportedModelError, match="auto_map"):
        load_model(str(folder))


def test_pickled_weights_are_refused(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin.*safetensors"):
        load_model(str(folder))


def test_torn_file_is_named(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelLoadError, match=r"toy/model\.safetensors is torn: .*; copy it again"):
        load_model(str(folder))


@pytest.mark.parametrize("fault", ["missing", "surplus", "shape"])
def test_tensors_that_do_not_fit_are_named(folder: Path, fault: str) -> None:
    state = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        del state[name]
    elif fault == "shape":
        state[name] = state[name][:-1].contiguous()
    else:
        name = "model.layers.7.extra.weight"
        state[name] = torch.zeros(2)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="toy") as caught:
        load_model(str(folder))
    assert name in str(caught.value)
    assert ("model.safetensors" in str(caught.value)) == (fault != "missing"), "a tensor that is nowhere is in no file"
    assert "\n" not in str(caught.value)


def test_missing_folder_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_model(str(tmp_path / "nowhere"))
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="not JSON"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (BloomForCausalLM, BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)),
        (MambaForCausalLM, MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)),
    ],
)
def test_architectures_that_cannot_batch_are_refused_by_name(tmp_path: Path, cls: type, config: object) -> None:
    cls(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=cls.__name__):
        load_model(str(tmp_path))


SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})),
        (Llama4ForCausalLM, Llama4TextConfig(**SIZES, attention_chunk_size=16, head_dim=16, num_key_value_heads=2)),
    ],
)
def test_positions_or_masks_that_depend_on_the_batch_are_refused(cls: type, config: object) -> None:
    with pytest.raises(UnsupportedModelError, match=cls.__name__):
        self_test(cls, config)


def test_vocabularies_of_other_sizes_need_tokenizers() -> None:
    draft = toys.adopted(toys.llama(vocab_size=64))
    with pytest.raises(ConfigError, match="without both tokenizers"):
        LLM(toys.adopted(toys.llama()), {"method": "draft_model"}, draft_model=draft)


class Pieces:
    """A tokenizer of which only the vocabulary is asked."""

    def __init__(self, **changed: int) -> None:
        self._vocab = {f"piece{i}": i for i in range(toys.VOCABULARY)} | changed

    def get_vocab(self) -> dict[str, int]:
        return self._vocab


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"other": 17}, "token 17 is 'other' in the draft model 'toy' and 'piece17' in the target"), ({"more": 96}, "token 96 is 'more'")],
)
def test_vocabularies_are_compared_piece_by_piece(changed: dict[str, int], words: str) -> None:
    target, draft = toys.adopted(toys.llama()), toys.adopted(toys.llama(vocab_size=128))
    target, draft = replace(target, tokenizer=Pieces()), replace(draft, tokenizer=Pieces(**changed))
    with pytest.raises(ConfigError, match=words):
        LLM(target, {"method": "draft_model"}, draft_model=draft)


def test_prompts_out_of_range_are_refused_before_anything_runs() -> None:
    llm = LLM(toys.adopted(toys.llama()))
    for prompt, message in (([], "empty"), ([1] * 128, "context"), ([96], "vocabulary"), ([-1], "vocabulary")):
        with pytest.raises(RequestError, match=message):
            llm.generate([[1, 2], prompt])
        toys.assert_all_blocks_free(llm)
    assert llm.stats.num_steps == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "ngramm"}, "ngram"),
        ({"method": "ngram", "num_spec_tokens": 3}, "known keys: method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_min"),
        ({"method": "draft_model"}, "'model'"),
        ({}, "method"),
    ],
)
def test_speculative_config_is_strict(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(toys.adopted(toys.llama()), values)


@pytest.mark.parametrize(("given", "expected"), [({}, (1, 2)), ({"min": 3}, (3, 3)), ({"max": 4}, (4, 4)), ({"min": 1, "max": 5}, (1, 5))])
def test_a_lone_length_of_ngrams_is_both(given: dict[str, int], expected: tuple[int, int]) -> None:
    config = SpeculativeConfig(method="ngram", **{f"prompt_lookup_{name}": length for name, length in given.items()})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == expected


def test_settings_are_strict() -> None:
    model = toys.adopted(toys.llama())
    with pytest.raises(ConfigError, match="known keys"):
        LLM(model, max_num_sequences=3)
    with pytest.raises(ConfigError, match="context of 128"):
        LLM(model, max_model_len=129)
    with pytest.raises(ConfigError, match="no block"):
        LLM(model, kv_cache_memory_bytes=10)
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        LLM(model, max_num_batched_tokens=4, max_num_seqs=8)


def test_requests_larger_than_the_pool_are_refused() -> None:
    model = toys.adopted(toys.llama())
    block = LLM(model).memory_plan.block_bytes
    llm = LLM(model, kv_cache_memory_bytes=2 * block)
    with pytest.raises(RequestError, match="pool holds 32"):
        llm.generate([[1] * 30], SamplingParams(max_tokens=3))
    assert len(llm.generate([[1] * 30], SamplingParams(max_tokens=2))[0].outputs[0].token_ids) == 2


def test_a_prompt_larger_than_the_pool_is_to_be_shortened_where_nothing_limits_what_follows() -> None:
    model = toys.adopted(toys.llama())
    llm = LLM(model, kv_cache_memory_bytes=2 * LLM(model).memory_plan.block_bytes)
    with pytest.raises(RequestError, match="pool holds 32; raise kv_cache_memory_bytes or shorten the prompt"):
        llm.generate([[1] * 40], SamplingParams(max_tokens=None))


def test_llma_is_an_alias() -> None:
    assert LLM(toys.adopted(toys.llama()), {"method": "llma"}).speculative_config.method == "ngram"


def test_embedded_pair_is_what_it_says() -> None:
    target, draft = load_model(str(TARGET)), load_model(str(DRAFT))
    sizes = [sum(p.numel() for p in m.model.parameters()) for m in (target, draft)]
    assert 8e6 <= sizes[0] <= 11e6
    assert 0.8e6 <= sizes[1] <= 1.2e6
    for loaded in (target, draft):
        config = loaded.model.config
        assert type(loaded.model) is LlamaForCausalLM
        assert (config.head_dim, config.vocab_size, config.max_position_embeddings) == (64, 4096, 2048)
        assert 2048 % config.hidden_size == 0
        assert loaded.model.dtype == torch.bfloat16
    assert target.tokenizer is not None
    assert draft.tokenizer is not None
    assert target.tokenizer.get_vocab() == draft.tokenizer.get_vocab()
    files = [p for folder in (TARGET, DRAFT) for p in folder.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 25e6
    assert max(p.stat().st_size for p in files) < 16 * 2**20
    chat = target.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|user|>\nhi<|end|>\n<|assistant|>\n"


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_is_loaded_as_transformers_runs_it(name: str, tmp_path: Path) -> None:
    """Also where it has no attention but its own, as Gemma-2 and GPT-OSS: to train heads, and to be compared with."""
    cls, config = DECODERS[name]
    cls(config).save_pretrained(tmp_path)
    model, _ = load_plain(tmp_path)
    assert type(model) is cls and model.config._attn_implementation == ("sdpa" if cls._supports_sdpa else "eager")


def test_plain_loading_leaves_the_model_alone(tmp_path: Path) -> None:
    shutil.copytree(DRAFT, tmp_path / "copy")
    model, tokenizer = load_plain(str(tmp_path / "copy"))
    assert tokenizer is not None
    assert model.config._attn_implementation == "sdpa"
    assert "forward" not in vars(model.model.layers[0].mlp.up_proj)
