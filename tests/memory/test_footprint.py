"""Bytes of a model from headers alone, beside those of the model once it is loaded."""

from __future__ import annotations

from pathlib import Path

import published
import pytest
import torch
import toys
from decoders import decoders

from echelon import LLM, UnsupportedModelError
from echelon.checkpoint.tensors import StoredTensor
from echelon.drafters.heads import attach_head
from echelon.heads.checkpoints import build_head, load_head, save_head
from echelon.memory.footprint import Outline, footprint_of
from echelon.memory.plan import footprint_of_head
from echelon.memory.residents import stored_head
from echelon.methods import method_names
from echelon.model.load.loading import adopt_model, load_model, serve_head

KINDS = decoders(16, 32)
SMALL = 60_000  # bytes that vectors and rounded-up tiles of a toy may make


def saved(name: str, dtype: torch.dtype, folder: Path) -> Path:
    cls, config = KINDS[name]
    torch.manual_seed(0)
    cls(config).to(dtype).save_pretrained(folder / name)
    return folder / name


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", KINDS)
def test_a_model_takes_what_its_headers_say(name: str, dtype: torch.dtype, quantization: str | None, tmp_path: Path) -> None:
    folder = saved(name, dtype, tmp_path)
    planned, loaded = Outline.of(str(folder)).footprint(quantization), footprint_of(load_model(folder, quantization=quantization))
    assert loaded.weights <= planned.weights <= loaded.weights + SMALL
    assert (planned.layers, planned.pass_bytes, planned.vocab_size, planned.max_len, planned.dtype, planned.quantization) == (
        loaded.layers,
        loaded.pass_bytes,
        loaded.vocab_size,
        loaded.max_len,
        loaded.dtype,
        loaded.quantization,
    )


@pytest.mark.parametrize("kind", published.KINDS)
def test_a_published_model_takes_what_its_headers_say(kind: str, tmp_path: Path) -> None:
    published.publish(toys.llama(intermediate_size=128).bfloat16(), kind, tmp_path)
    planned, loaded = Outline.of(str(tmp_path)).footprint(), footprint_of(load_model(tmp_path))
    assert loaded.weights <= planned.weights <= loaded.weights + SMALL
    assert planned.quantization == loaded.quantization


def test_no_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved("llama", torch.bfloat16, tmp_path)

    def read(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(StoredTensor, "to", read)
    assert Outline.of(str(folder)).footprint("int4").weights > 0


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    toys.llama().double().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="float64"):
        Outline.of(str(tmp_path))


@pytest.mark.parametrize("method", method_names(needs="head"))
def test_a_head_takes_what_its_headers_say(method: str, tmp_path: Path) -> None:
    target = toys.llama()
    head = build_head(method, target)
    save_head(head, tmp_path, target)
    loaded = adopt_model(target, None, "toy")
    read = load_head(tmp_path, loaded.model)
    serve_head(read)
    found = footprint_of_head(attach_head(read, loaded))
    planned = stored_head(str(tmp_path), method, target.config.hidden_size, torch.float32, 64)
    assert planned.bytes_per_token == found.bytes_per_token and planned.feature_bytes == found.feature_bytes
    assert found.weights <= planned.weights <= found.weights + SMALL


def test_medusa_keeps_the_heads_that_are_used(tmp_path: Path) -> None:
    target = toys.llama()
    save_head(build_head("medusa", target), tmp_path, target)
    loaded = adopt_model(target, None, "toy")
    weights = []
    for longest in (5, 3):
        spec = {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": longest}
        llm = LLM(loaded, spec, max_num_seqs=2, max_model_len=64)
        assert llm.storage.head is not None and llm.storage.head.head.max_depth == longest
        weights.append(footprint_of_head(llm.storage.head).weights)
        planned = stored_head(str(tmp_path), "medusa", target.config.hidden_size, torch.float32, longest).weights
        assert weights[-1] <= planned <= weights[-1] + SMALL
    assert weights[1] < weights[0]
