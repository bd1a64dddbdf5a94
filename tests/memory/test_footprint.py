"""Bytes of a model from headers alone, beside those of the model once it is loaded."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

import published
import pytest
import torch
import toys
from decoders import decoders
from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo
from safetensors.torch import load_file, save_file
from transformers import JetMoeConfig, JetMoeForCausalLM

from echelon import LLM, EngineConfig, ModelLoadError, SpeculativeConfig, UnsupportedModelError
from echelon.checkpoint import folder, tensors
from echelon.checkpoint.tensors import StoredTensor
from echelon.drafters.heads import attach_head
from echelon.heads.checkpoints import build_head, load_head, save_head
from echelon.memory import residents
from echelon.memory.footprint import Outline, footprint_of
from echelon.memory.plan import footprint_of_head
from echelon.memory.residents import stored_head
from echelon.methods import method_names
from echelon.model.load.loading import adopt_model, load_model, serve_head
from echelon.model.patches.linear import weight_bytes
from echelon.ops import compiled

JETMOE = JetMoeConfig(vocab_size=80, hidden_size=64, num_hidden_layers=2, num_key_value_heads=2, kv_channels=16, intermediate_size=96,
                      num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=512)  # fmt: skip
KINDS = decoders(16, 32)
SMALL = 60_000  # bytes that vectors and rounded-up tiles of a toy may make


def saved(name: str, dtype: torch.dtype, parent: Path) -> Path:
    cls, config = KINDS[name]
    torch.manual_seed(0)
    cls(config).to(dtype).save_pretrained(parent / name)
    return parent / name


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.bfloat16, None), (torch.bfloat16, "int8"), (torch.bfloat16, "int4"), (torch.float32, None)],
    ids=["bfloat16", "int8", "int4", "float32"],
)
@pytest.mark.parametrize("name", KINDS)
def test_a_model_takes_what_its_headers_say(name: str, dtype: torch.dtype, quantization: str | None, tmp_path: Path) -> None:
    path = saved(name, dtype, tmp_path)
    planned, loaded = Outline.of(str(path)).footprint(quantization), footprint_of(load_model(path, quantization=quantization))
    assert loaded.weights <= planned.weights <= loaded.weights + SMALL
    assert (planned.layers, planned.pass_bytes, planned.vocab_size, planned.max_len, planned.dtype, planned.quantization) == (
        loaded.layers,
        loaded.pass_bytes,
        loaded.vocab_size,
        loaded.max_len,
        loaded.dtype,
        loaded.quantization,
    )


def test_a_model_whose_pass_depends_on_its_values_is_not_planned(tmp_path: Path) -> None:
    JetMoeForCausalLM(JETMOE).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="cannot be planned before its weights are read"):
        Outline.of(str(tmp_path)).footprint()


@pytest.mark.parametrize("kind", published.KINDS)
def test_a_published_model_takes_what_its_headers_say(kind: str, tmp_path: Path) -> None:
    published.publish(toys.llama(intermediate_size=128).bfloat16(), kind, tmp_path)
    planned, loaded = Outline.of(str(tmp_path)).footprint(), footprint_of(load_model(tmp_path))
    assert loaded.weights <= planned.weights <= loaded.weights + SMALL
    assert planned.quantization == loaded.quantization


@pytest.mark.parametrize("size", [96, 256])
def test_groups_that_kernels_split_are_planned_as_they_are_packed(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": size, "sym": False}
    monkeypatch.setitem(published.KINDS, "large groups", (settings, lambda w: published.gptq(w, size, True)))
    published.publish(toys.llama(hidden_size=768, intermediate_size=768, head_dim=192).bfloat16(), "large groups", tmp_path)
    planned, loaded = Outline.of(str(tmp_path)).footprint(), footprint_of(load_model(tmp_path))
    assert loaded.weights <= planned.weights <= loaded.weights + SMALL


def test_no_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved("llama", torch.bfloat16, tmp_path)

    def read(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(StoredTensor, "to", read)
    assert Outline.of(str(path)).footprint("int4").weights > 0


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    toys.llama().double().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="float64"):
        Outline.of(str(tmp_path))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("method", method_names(needs="head"))
def test_a_head_takes_what_its_headers_say(method: str, is_tied: bool, quantization: str | None, tmp_path: Path) -> None:
    if quantization is not None and not compiled.is_built():
        pytest.skip("integers need the compiled kernels")
    target = toys.llama(tie_word_embeddings=is_tied, hidden_size=64, intermediate_size=128)
    head = build_head(method, target)
    save_head(head, tmp_path, target)
    loaded = adopt_model(target, None, "toy")
    read = load_head(tmp_path, loaded.model)
    serve_head(read, quantization=quantization)
    found = footprint_of_head(attach_head(read, loaded))
    planned = stored_head(str(tmp_path), method, target.config.hidden_size, torch.float32, 64, quantization)
    assert planned.bytes_per_token == found.bytes_per_token and planned.feature_bytes == found.feature_bytes
    assert found.weights <= planned.weights <= found.weights + SMALL


def test_a_head_that_is_loaded_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the process, whose it is already."""
    counted: list[int] = []
    monkeypatch.setattr(residents, "process_bytes", lambda _, loaded: counted.append(loaded) or 0)
    target = toys.llama()
    head = build_head("eagle", target)
    loaded = adopt_model(target, None, "toy")
    residents.PlannedModels(EngineConfig(), SpeculativeConfig(method="eagle", model="x"), loaded, head=head)
    assert counted == [weight_bytes(loaded.model) + weight_bytes(head)]


def test_tensors_that_loading_drops_take_no_memory(tmp_path: Path) -> None:
    """The target's embedding under an author's name, and its output layer in a file of Clover-2."""
    target = toys.llama()
    for method, name in (("eagle", "model.embed_tokens.weight"), ("clover2", "lm_head.weight")):
        save_head(build_head(method, target), tmp_path / method, target)
        before = stored_head(str(tmp_path / method), method, target.config.hidden_size, torch.float32, 8)
        file = tmp_path / method / "model.safetensors"
        save_file(load_file(file) | {name: target.get_input_embeddings().weight.detach().clone()}, file)
        assert stored_head(str(tmp_path / method), method, target.config.hidden_size, torch.float32, 8) == before


def test_what_a_head_keeps_of_the_target_is_counted() -> None:
    """Clover's own rows of the output layer, where embeddings are not tied."""
    target = toys.llama(tie_word_embeddings=False)
    head = build_head("clover", target)
    held = sum(t.numel() * t.element_size() for t in head.state_dict().values())
    assert head.rows.numel() * 4 < held <= footprint_of_head(attach_head(head, adopt_model(target, None, "toy"))).weights


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


class Hub:
    """Stands for the hub: a folder of it, of which a snapshot holds what has been fetched."""

    def __init__(self, folder: Path, snapshot: Path) -> None:
        self.folder, self.snapshot, self.fetched = folder, snapshot, list[str]()

    def download(self, name: str, allow_patterns: list[str]) -> str:
        assert name == "org/model"
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if any(fnmatch(path.name, pattern) for pattern in allow_patterns):
                self.fetched.append(path.name)
                shutil.copy(path, self.snapshot)
        return str(self.snapshot)

    def headers(self, name: str) -> SafetensorsRepoMetadata:
        assert name == "org/model"
        files = {}
        for path in self.folder.glob("*.safetensors"):
            raw = path.read_bytes()
            header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
            tensors = {k: TensorInfo(e["dtype"], e["shape"], tuple(e["data_offsets"])) for k, e in header.items() if k != "__metadata__"}
            files[path.name] = SafetensorsFileMetadata({}, tensors)
        return SafetensorsRepoMetadata(None, len(files) > 1, {}, files)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "of-the-hub", tmp_path / "models" / "snapshots" / "0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder, "snapshot_download", hub.download)
    monkeypatch.setattr(tensors, "get_safetensors_metadata", hub.headers)
    return hub


@pytest.mark.parametrize("shard_size", ["10GB", "50KB"], ids=["one file", "several"])
def test_a_hub_name_is_planned_without_its_weights_and_loads_with_them(shard_size: str, hub: Hub) -> None:
    toys.llama().bfloat16().save_pretrained(hub.folder, max_shard_size=shard_size)
    planned = Outline.of("org/model").footprint()
    assert hub.fetched and not any(name.endswith(".safetensors") for name in hub.fetched)
    loaded = footprint_of(load_model("org/model"))
    assert sum(name.endswith(".safetensors") for name in hub.fetched) == len(list(hub.folder.glob("*.safetensors")))
    assert loaded.weights <= planned.weights <= loaded.weights + SMALL
    assert Outline.of("org/model").footprint().weights == planned.weights, "from what is here now"


def test_a_head_of_the_hub_is_planned_without_its_weights(hub: Hub) -> None:
    target = toys.llama()
    save_head(build_head("eagle", target), hub.folder, target)
    planned = stored_head("org/model", "eagle", target.config.hidden_size, torch.float32, 8)
    assert not any(name.endswith(".safetensors") for name in hub.fetched)
    assert planned == stored_head(str(hub.folder), "eagle", target.config.hidden_size, torch.float32, 8) and planned.weights > 0


def test_a_hub_without_safetensors_is_refused(hub: Hub) -> None:
    toys.llama().save_pretrained(hub.folder)
    (hub.folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="no weights"):
        load_model("org/model")


def test_a_hub_that_does_not_answer_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    toys.llama().save_pretrained(hub.folder)

    def down(_: str) -> SafetensorsRepoMetadata:
        raise OSError("no route to host")

    monkeypatch.setattr(tensors, "get_safetensors_metadata", down)
    with pytest.raises(ModelLoadError, match="cannot read the headers of 'org/model': no route to host"):
        Outline.of("org/model")
