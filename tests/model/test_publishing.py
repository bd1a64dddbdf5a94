"""`echelon quantize`: what it writes is loaded here and by `transformers` with compressed-tensors, which compute the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import toys
from safetensors.torch import load_file
from test_published import PROMPT, defined, mixture, served
from transformers import AutoModelForCausalLM

from echelon import ConfigError, UnsupportedModelError
from echelon.cli import main
from echelon.errors import OutputError
from echelon.model.load import publishing
from echelon.model.load.loading import load_model
from echelon.model.load.publishing import publish
from echelon.ops import compiled
from echelon.settings import Quantization

pytestmark = pytest.mark.skipif(not compiled.is_built(), reason="the compiled kernels are not built")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    toys.llama(intermediate_size=128).bfloat16().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("shard", [10**9, 20_000])
def test_transformers_computes_the_same(quantization: Quantization, shard: int, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("compressed_tensors")
    monkeypatch.setattr(publishing, "SHARD_BYTES", shard)
    out = source.parent / "out"
    made = publish(str(source), out, quantization)
    assert made.num_layers == 14 and made.ignored == ["lm_head"]
    assert (out / "generation_config.json").exists()
    assert len(list(out.glob("*.safetensors"))) > 1 if shard < 10**6 else (out / "model.safetensors").exists()
    loaded = load_model(out, dtype="float32")
    assert loaded.quantization == quantization
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.inference_mode():
        said = theirs(torch.tensor([PROMPT])).logits[0].log_softmax(-1)  # which unpacks its weights
    meant = {f"{n}.weight": m.weight.detach().clone() for n, m in theirs.named_modules() if "_proj" in n and hasattr(m, "weight")}
    exact = defined(toys.llama(intermediate_size=128).bfloat16().float(), meant, PROMPT).log_softmax(-1)
    numbers = toys.llama(intermediate_size=128).bfloat16().float()
    numbers.load_state_dict(meant, strict=False)
    with torch.inference_mode():
        unrounded = numbers(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    found = served(loaded, PROMPT)
    noise = apart(found, unrounded)
    assert apart(found, exact) < 0.3 * noise, "not the weights that transformers reads, or not activations of 8 bits by definition"
    if quantization == "int8":  # compressed-tensors takes 127.5 for the largest activation, where 127 are the most here
        assert apart(found, said) < 1.5 * noise
    else:  # there activations stay numbers
        assert torch.allclose(said, unrounded, atol=3e-2)


def apart(found: list[list[tuple[int, float]]], expected: torch.Tensor) -> float:
    """Mean distance of log-probabilities."""
    differences = [abs(p - float(row[token])) for row, entry in zip(expected, found, strict=False) for token, p in entry]
    return sum(differences) / len(differences)


def test_weights_are_rounded_to_their_nearest(source: Path) -> None:
    weight = load_file(source / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    publish(str(source), source.parent / "8", "int8")
    file = load_file(source.parent / "8" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    error = file[f"{name}.weight"].float() * file[f"{name}.weight_scale"].float() - weight.float()
    assert bool((error.abs() <= 0.501 * file[f"{name}.weight_scale"].float()).all())
    assert file[f"{name}.weight"].dtype == torch.int8


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_scales_of_tiny_weights_stay_numbers(quantization: Quantization, tmp_path: Path) -> None:
    """In float16, whose smallest numbers are not small."""
    model = toys.llama(intermediate_size=128)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3] *= 1e-7  # type: ignore[operator, union-attr]
        model.model.layers[0].mlp.up_proj.weight[4] = 0  # type: ignore[operator, union-attr]
    model.half().save_pretrained(tmp_path / "source")
    templates = tmp_path / "source" / "additional_chat_templates"
    templates.mkdir()
    (templates / "x.jinja").write_text("x")
    publish(str(tmp_path / "source"), tmp_path / "out", quantization)
    assert load_model(tmp_path / "out").quantization == quantization
    assert (tmp_path / "out" / "additional_chat_templates" / "x.jinja").read_text() == "x"


def test_from_the_shell(source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["echelon", "quantize", str(source), str(source.parent / "out"), "--quantization", "int4"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    said = capsys.readouterr().err
    assert "14 linear layers in int4" in said and "as they were: lm_head" in said
    settings = json.loads((source.parent / "out" / "config.json").read_text())["quantization_config"]
    assert settings["config_groups"]["group_0"]["weights"]["group_size"] == 64


def test_what_cannot_be_written_is_refused(source: Path) -> None:
    with pytest.raises(ConfigError, match="is SRC itself"):
        publish(str(source), source, "int8")
    mixture().save_pretrained(source.parent / "mixture")
    with pytest.raises(UnsupportedModelError, match="mixture of experts"):
        publish(str(source.parent / "mixture"), source.parent / "out", "int8")
    publish(str(source), source.parent / "out", "int8")
    with pytest.raises(OutputError, match="holds weights already; choose an empty folder"):
        publish(str(source), source.parent / "out", "int4")
    toys.llama(hidden_size=48, intermediate_size=80, head_dim=12).save_pretrained(source.parent / "narrow")
    with pytest.raises(UnsupportedModelError, match="no layer whose width a group of 32 divides; write it in int8"):
        publish(str(source.parent / "narrow"), source.parent / "none", "int4")
    with pytest.raises(UnsupportedModelError, match="quantised by compressed-tensors"):
        publish(str(source.parent / "out"), source.parent / "again", "int8")
