"""Checkpoints in integers as others publish them: what they compute, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toys
from published import KINDS, publish, set_config
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from echelon import LLM, ConfigError, ModelLoadError, SamplingParams, UnsupportedModelError
from echelon.model.load.loading import LoadedModel, load_model
from echelon.ops import compiled

pytestmark = pytest.mark.skipif(not compiled.is_built(), reason="the compiled kernels are not built")

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def mixture() -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(vocab_size=toys.VOCABULARY, max_position_embeddings=toys.CONTEXT, eos_token_id=None, **sizes, **heads)
    return toys.randomised(Qwen3MoeForCausalLM, config, 0, 0.2)


def rounded(x: Tensor) -> Tensor:
    """Every token's activations in 8 bits."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def defined(model: PreTrainedModel, meant: dict[str, Tensor], prompt: list[int]) -> Tensor:
    """Logits [T, V] by plain PyTorch: weights as they are meant, activations in 8 bits before each of them."""
    for name, module in model.named_modules():
        if f"{name}.weight" in meant:
            assert isinstance(module, nn.Linear)
            module.weight.data = meant[f"{name}.weight"]
            module.forward = lambda x, m=module: F.linear(rounded(x), m.weight, m.bias)  # type: ignore[method-assign]
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0]


def served(loaded: LoadedModel, prompt: list[int]) -> list[list[tuple[int, float]]]:
    """Of every token of the prompt but the first, the likeliest tokens before it, with log-probabilities."""
    llm = LLM(loaded, enable_prefix_caching=False)
    output = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=5))[0]
    assert output.prompt_logprobs is not None
    return [[(token, found.logprob) for token, found in entry.items()] for entry in output.prompt_logprobs if entry is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_computes_what_its_format_means(kind: str, tmp_path: Path) -> None:
    model = toys.llama()
    meant = publish(model, kind, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.quantization == ("int8" if kind == "int-quantized" else "int4")
    expected = defined(model, meant, PROMPT).log_softmax(-1)
    found = served(loaded, PROMPT)
    assert len(found) == len(PROMPT) - 1
    for row, entry in zip(expected, found, strict=False):
        for token, logprob in entry:
            assert abs(logprob - float(row[token])) < 2e-2, kind
    rough = sum(
        float(row[token])
        for row, entry in zip(defined(toys.llama(), {}, PROMPT).log_softmax(-1), found, strict=False)
        for token, _ in entry
    )
    near = sum(float(row[token]) for row, entry in zip(expected, found, strict=False) for token, _ in entry)
    told = sum(logprob for entry in found for _, logprob in entry)
    assert abs(told - near) < 0.02 * abs(told - rough) + 0.02, "it is as near to the weights before they were rounded"


@pytest.mark.parametrize("kind", ["int-quantized", "gptq", "awq"])
def test_experts_that_a_checkpoint_has_one_by_one(kind: str, tmp_path: Path) -> None:
    """Their gate and up projections are put side by side, as the module has them."""
    meant = publish(mixture(), kind, tmp_path / "integers")
    loaded = load_model(tmp_path / "integers")
    plain = mixture()
    plain.save_pretrained(tmp_path / "numbers")
    file = tmp_path / "numbers" / "model.safetensors"
    save_file({k: meant.get(k, t).contiguous() for k, t in load_file(file).items()}, file, {"format": "pt"})
    numbers = served(load_model(tmp_path / "numbers"), PROMPT)
    integers = served(loaded, PROMPT)
    assert len(meant) == 2 * (4 + 4 * 3)
    apart = [abs(a - dict(b).get(token, a)) for one, b in zip(numbers, integers, strict=True) for token, a in one]
    assert max(apart) < 0.35 and sum(apart) / len(apart) < 0.05  # activations are rounded in one of them alone


@pytest.mark.parametrize("kind", ["int-quantized", "gptq with zeros", "awq"])
def test_drafts_change_nothing(kind: str, tmp_path: Path) -> None:
    publish(toys.llama(), kind, tmp_path)
    loaded, params = load_model(tmp_path), SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    prompts = toys.prompts()[:6]
    plain = [o.outputs[0].token_ids for o in LLM(loaded).generate(prompts, params)]
    for config in ({"method": "ngram", "num_speculative_tokens": 3}, {"method": "draft_model", "num_speculative_tokens": 3}):
        draft = loaded if config["method"] == "draft_model" else None
        assert [o.outputs[0].token_ids for o in LLM(loaded, config, draft).generate(prompts, params)] == plain


@pytest.mark.parametrize("value", [0.0, 0.5])
@pytest.mark.parametrize("build", [toys.llama, mixture])
def test_biases_that_say_nothing_are_left_out(build: Callable[[], PreTrainedModel], value: float, tmp_path: Path) -> None:
    """Some writers of GPTQ give every layer a bias of zeros, experts' among them."""
    publish(build(), "gptq", tmp_path)
    expected = served(load_model(tmp_path), PROMPT)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors |= {k.replace("scales", "bias"): torch.full((t.shape[1],), value).half() for k, t in tensors.items() if k.endswith("scales")}
    save_file(tensors, file, {"format": "pt"})
    if value:
        with pytest.raises(ModelLoadError, match=r"has surplus tensors: .*bias"):
            load_model(tmp_path)
    else:
        assert served(load_model(tmp_path), PROMPT) == expected


def test_what_is_published_in_integers_is_asked_for_in_no_others(tmp_path: Path) -> None:
    publish(toys.llama(), "awq", tmp_path)
    assert load_model(tmp_path, quantization="int4").quantization == "int4"
    with pytest.raises(ConfigError, match=r"'int8' is wanted, and .* is published in 4 bits; leave it out"):
        load_model(tmp_path, quantization="int8")


# ---- what is wrong


LAYER = "model.layers.1.mlp.down_proj"


def change(folder: Path, part: str, how: Callable[[Tensor], Tensor | None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed = how(tensors.pop(f"{LAYER}.{part}"))
    save_file(tensors | ({} if changed is None else {f"{LAYER}.{part}": changed.contiguous()}), file, {"format": "pt"})


def with_entry(value: float) -> Callable[[Tensor], Tensor]:
    return lambda t: t.index_fill(0, torch.tensor([1]), value)


@pytest.mark.parametrize(
    ("kind", "part", "how", "message"),
    [
        ("int-quantized", "weight_scale", with_entry(0.0), r"'model.layers.1.mlp.down_proj.weight_scale' of .* has a scale of 0"),
        ("awq", "scales", with_entry(torch.nan), "down_proj.scales' .* NaN or infinite"),
        ("gptq", "scales", with_entry(torch.inf), "down_proj.scales' .* NaN or infinite"),
        ("pack-quantized", "weight_packed", lambda t: t[:, :-1], r"groups of 32 in config.json do not divide the 88 entries"),
        ("pack-quantized", "weight_scale", lambda t: t[:, :-1], r"is F32 \[64, 2\], and quantization_config asks for \[64, 3\]"),
        ("gptq", "qzeros", lambda t: t[:, :-1], r"is I32 \[3, 7\], and quantization_config asks for I32 \[3, 8\]"),
        ("gptq", "qzeros", lambda t: t.long(), r"is I64 \[3, 8\], and quantization_config asks for I32 \[3, 8\]"),
        ("gptq", "qweight", lambda t: t[:, :-1], r"asks for \[3, 63\]"),
        ("gptq", "g_idx", lambda t: t.flip(0), r"entries into groups out of order \(desc_act, actorder\)"),
        ("awq", "qweight", lambda _: None, "has 'model.layers.1.mlp.down_proj.scales' without 'model.layers.1.mlp.down_proj.qweight'"),
        ("awq", "qzeros", lambda _: None, "has 'model.layers.1.mlp.down_proj.scales' without 'model.layers.1.mlp.down_proj.qzeros'"),
        ("gptq", "qzeros", lambda _: None, "has 'model.layers.1.mlp.down_proj.scales' without 'model.layers.1.mlp.down_proj.qzeros'"),
        ("awq", "qweight", lambda t: t.to(torch.int8), "is I8 .* asks for I32 of two dimensions for 4 bits"),
        ("int-quantized", "weight", lambda t: t.to(torch.int32), "is I32 .* asks for I8 of two dimensions for 8 bits"),
        ("int-quantized", "weight", lambda t: t[:, :-1], r"has shape \[64, 95\], and config.json asks for \[64, 96\]"),
        ("awq", "scales", lambda _: None, "lacks tensors: model.layers.1.mlp.down_proj.weight"),
    ],
)  # fmt: skip
def test_a_part_that_does_not_fit_is_named(kind: str, part: str, how: Any, message: str, tmp_path: Path) -> None:
    publish(toys.llama(), kind, tmp_path)
    change(tmp_path, part, how)
    with pytest.raises((ModelLoadError, UnsupportedModelError), match=message) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_configuration_of_4_bits_over_tensors_of_8(tmp_path: Path) -> None:
    publish(toys.llama(), "int-quantized", tmp_path)
    set_config(tmp_path, quantization_config=KINDS["pack-quantized"][0])
    with pytest.raises(ModelLoadError, match=r"has 'model.layers.0.* without '.*weight_packed'"):
        load_model(tmp_path)
    set_config(tmp_path, quantization_config=KINDS["awq"][0])
    with pytest.raises(ModelLoadError, match=r"says that it is quantised \(awq\), and no tensor is named .scales"):
        load_model(tmp_path)


def settings_of(kind: str, **changes: Any) -> dict[str, Any]:
    return json.loads(json.dumps(KINDS[kind][0])) | changes


def weights_of(kind: str, **changes: Any) -> dict[str, Any]:
    settings = settings_of(kind)
    settings["config_groups"]["group_0"]["weights"] |= changes
    return settings


def activations_of(**changes: Any) -> dict[str, Any]:
    settings = settings_of("int-quantized")
    settings["config_groups"]["group_0"]["input_activations"] |= changes
    return settings


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"quant_method": "fp8"}, UnsupportedModelError, "quantised by fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, UnsupportedModelError, "quantised by bitsandbytes"),
        (settings_of("gptq", bits=8), UnsupportedModelError, "by gptq: gptq of 8 bits"),
        (settings_of("gptq", bits=3), UnsupportedModelError, "gptq of 3 bits"),
        (settings_of("gptq", checkpoint_format="marlin"), UnsupportedModelError, "checkpoint_format marlin"),
        (settings_of("awq", version="gemv"), UnsupportedModelError, "version gemv"),
        (settings_of("gptq", bits="4"), ModelLoadError, "wrong quantization_config .bits: "),
        (settings_of("gptq", group_size=48), ModelLoadError, "groups of 48 in config.json do not divide"),
        (settings_of("gptq", group_size=0), ModelLoadError, "groups of 0 in config.json do not divide"),
        (settings_of("gptq", group_size=-32), ModelLoadError, "groups of -32 in config.json do not divide"),
        (settings_of("int-quantized", format="float-quantized"), UnsupportedModelError, "float-quantized of 8 bits"),
        (settings_of("int-quantized", kv_cache_scheme={"num_bits": 8}), UnsupportedModelError, "a kv_cache_scheme"),
        (settings_of("int-quantized", transform_config={"config_groups": {"R1": {}}}), UnsupportedModelError, "a transform_config"),
        (settings_of("int-quantized", config_groups={}), ModelLoadError, "wrong quantization_config .config_groups"),
        (weights_of("pack-quantized", num_bits=8), UnsupportedModelError, "pack-quantized of 8 bits"),
        (weights_of("int-quantized", type="float"), UnsupportedModelError, "of type float"),
        (weights_of("int-quantized", symmetric=False), UnsupportedModelError, "weights of 8 bits with zeros of their own"),
        (weights_of("int-quantized", strategy="block"), UnsupportedModelError, "by block"),
        (activations_of(symmetric=False), UnsupportedModelError, "integers of 8 bits, each token by itself and around 0"),
    ],
)
def test_other_formats_are_refused_by_name(settings: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    publish(toys.llama(), "gptq" if "gptq" in str(settings) else "int-quantized", tmp_path)
    set_config(tmp_path, quantization_config=settings)
    with pytest.raises(error, match=message) as caught:
        load_model(tmp_path)
    assert "bfloat16" in str(caught.value) or "copy" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "settings", "part"),
    [
        ("gptq", settings_of("gptq", desc_act=True), "g_idx"),
        ("pack-quantized with zeros", weights_of("pack-quantized", symmetric=False), "weight_zero_point"),
        ("pack-quantized", weights_of("pack-quantized", actorder="group"), "weight_g_idx"),
        ("pack-quantized", weights_of("pack-quantized", actorder=True), "weight_g_idx"),
    ],
)
def test_a_part_that_the_configuration_tells_of_is_missed(kind: str, settings: dict[str, Any], part: str, tmp_path: Path) -> None:
    publish(toys.llama(), kind, tmp_path)
    set_config(tmp_path, quantization_config=settings)
    if f"{LAYER}.{part}" in load_file(tmp_path / "model.safetensors"):
        load_model(tmp_path)  # with all of its parts
        change(tmp_path, part, lambda _: None)
    with pytest.raises(ModelLoadError, match=rf"without '[\w.]+\.{part}', which its config.json says is there; copy the checkpoint"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gptq", settings_of("gptq", desc_act=False)),
        ("awq", settings_of("awq", desc_act=True)),
        ("pack-quantized", weights_of("pack-quantized", actorder="weight")),
        ("int-quantized", weights_of("int-quantized", actorder="group")),
    ],
)
def test_an_order_of_entries_is_missed_only_where_a_format_keeps_one(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    publish(toys.llama(), kind, tmp_path)
    set_config(tmp_path, quantization_config=settings)
    if kind == "gptq":
        change(tmp_path, "g_idx", lambda _: None)
    assert load_model(tmp_path).quantization == ("int8" if kind == "int-quantized" else "int4")
