"""Files of a checkpoint: confined, checked while they are read, and of no account once they have been."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corruptions
import httpx
import pytest
import torch
import toys
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from echelon import ConfigError, EchelonError, ModelLoadError, UnsupportedModelError
from echelon.checkpoint import folder as hub_folder
from echelon.checkpoint import tensors as reading
from echelon.checkpoint.folder import Folder
from echelon.heads.checkpoints import build_head, load_head, save_head
from echelon.model.load.loading import load_model, load_plain
from echelon.ops import compiled, cpu

SUPPORT = Path(__file__).parents[1] / "support"
INDEX = "model.safetensors.index.json"
SECONDS, BYTES = 10, 256 * 2**20  # a case of a toy takes about a tenth of a second and a megabyte


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A toy in three shards, with tokenizer and generation settings."""
    corruptions.save_model(tmp_path / "toy")
    return tmp_path / "toy"


def run(script: str, *arguments: str) -> list[dict[str, Any]]:
    """The lines of JSON that a script of this folder prints, however it ends; libraries print others."""
    done = subprocess.run([sys.executable, str(SUPPORT / script), *arguments], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr
    return lines


# ---- what is served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Case → how its process ended; below zero: the signal that killed it."""
    return {line["case"]: line["status"] for line in run("served_files.py", str(tmp_path_factory.mktemp("served")))}


@pytest.mark.parametrize("change", ["truncated", "zeroed", "overwritten", "replaced", "unlinked"])
@pytest.mark.parametrize("who", ["target", "drafter", "head"])
def test_what_is_served_does_not_change_with_its_files(who: str, change: str, served: dict[str, int]) -> None:
    assert served[f"{who} {change}"] == 0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of mapped files")
@pytest.mark.parametrize("load", [load_model, load_plain])
def test_no_file_of_a_model_is_mapped_once_it_is_loaded(load: Callable[[str], Any], folder: Path) -> None:
    kept = load(str(folder))
    assert kept is not None
    assert str(folder) not in Path("/proc/self/maps").read_text()


PEAK = """
import gc, sys
from pathlib import Path
from echelon.model.load.loading import load_model
def status(key):
    return 1024 * int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key)).split()[1])
load_model(sys.argv[1])  # what libraries take once
gc.collect()
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
kept = load_model(sys.argv[2])
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists() or not compiled.is_built(), reason="no peak of memory, or no kernels")
@pytest.mark.parametrize("is_tied", [False, True] if toys.PROVE else [True])
def test_a_model_is_loaded_and_packed_in_little_more_memory_than_it_has_weights(is_tied: bool, folder: Path, tmp_path: Path) -> None:
    """Where the embedding is tied, that one tensor is half of the model."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 16 if toys.PROVE else 3, "vocab_size": 16384}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=12, tie_word_embeddings=is_tied, dtype="bfloat16"))
    names = {id(p): name for name, p in model.named_parameters()}
    state = {
        name: torch.empty_like(p, dtype=torch.bfloat16, device="cpu").fill_(0.01) for p in model.parameters() if (name := names[id(p)])
    }
    model.config.save_pretrained(tmp_path / "large")
    save_file(state, tmp_path / "large" / "model.safetensors", {"format": "pt"})
    del state
    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    done = subprocess.run([sys.executable, "-c", PEAK, str(folder), str(tmp_path / "large")], capture_output=True, text=True, check=True)
    assert 0.9 * size < int(done.stdout) < 1.1 * size + 8 * 2**20


@pytest.mark.skipif(not compiled.is_built(), reason="no kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(32, 32), (96, 64), (96, 33), (33, 64), (4096, 96), (64, 4096)])
def test_packing_in_place_gives_the_same_weight(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = cpu.pack(weight.clone())
    got = cpu.pack(own := weight.clone(), in_place=True)
    assert torch.equal(got.data, expected.data) and (got.columns, got.depth) == (expected.columns, expected.depth)
    fits = shape[0] % 32 == 0 and (dtype != torch.bfloat16 or shape[1] % 32 == 0)
    assert (got.data.data_ptr() == own.data_ptr()) == fits


# ---- files that change while they are read


def touch(path: Path) -> None:
    state = path.stat()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1_000_000))


def rewrite(path: Path) -> None:
    corruptions_of = path.read_bytes()
    with path.open("r+b") as file:
        file.write(corruptions_of[:-64] + bytes(64))
    touch(path)


def swap(path: Path) -> None:
    shutil.copy2(path, path.parent / "new")
    (path.parent / "new").replace(path)


WHILE_READING: dict[str, Callable[[Path], object]] = {
    "touched": touch,
    "overwritten": rewrite,
    "longer": lambda p: p.write_bytes(p.read_bytes() + b"x"),
    "shorter": lambda p: os.truncate(p, 64),
    "replaced": swap,
    "unlinked": lambda p: p.unlink(),
}


@pytest.mark.parametrize("change", WHILE_READING)
@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "config.json", INDEX])
def test_a_file_that_changes_under_the_reader_is_named(name: str, change: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = reader_changes(monkeypatch, lambda: WHILE_READING[change](folder / name))
    with pytest.raises(ModelLoadError, match=r"while it was being read.*load again") as caught:
        load_model(str(folder))
    assert name in str(caught.value) and changes == [None]


def reader_changes(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> list[None]:
    """Let `change` happen when the third tensor is read; what comes back has an entry once it has."""
    own_memory, calls, done = reading.own_memory, [0], []

    def counted(count: int, dtype: torch.dtype) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 3:
            change()
            done.append(None)
        return own_memory(count, dtype)

    monkeypatch.setattr(reading, "own_memory", counted)
    return done


@pytest.mark.parametrize("change", WHILE_READING)
def test_a_head_that_changes_under_the_reader_is_named(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = toys.llama()
    save_head(build_head("eagle", target), tmp_path, target)
    reader_changes(monkeypatch, lambda: WHILE_READING[change](tmp_path / "model.safetensors"))
    with pytest.raises(ModelLoadError, match=r"model\.safetensors .*while it was being read"):
        load_head(str(tmp_path), target)


# ---- files that lie elsewhere


def move_out(folder: Path, name: str) -> Path:
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    return Path(shutil.move(folder / name, elsewhere / name))


def remap(folder: Path, change: Callable[[str], Any]) -> None:
    raw = json.loads((folder / INDEX).read_text())
    raw["weight_map"] = {k: change(v) for k, v in raw["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(raw))


SHARD = "model-00001-of-00003.safetensors"


@pytest.mark.parametrize("name", [SHARD, INDEX, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("is_absolute", [True, False])
def test_links_out_of_the_folder_are_refused(name: str, is_absolute: bool, folder: Path) -> None:
    place = move_out(folder, name)
    (folder / name).symlink_to(place if is_absolute else Path("..") / "elsewhere" / name)
    with pytest.raises(ModelLoadError, match="leads out of the folder"):
        load_model(str(folder))


@pytest.mark.parametrize("form", ["absolute", "above", "above and back"])
def test_a_weight_map_stays_in_its_folder(form: str, folder: Path) -> None:
    place = move_out(folder, SHARD)
    names = {"absolute": str(place), "above": f"../elsewhere/{SHARD}", "above and back": f"../toy/../elsewhere/{SHARD}"}
    remap(folder, lambda n: names[form] if n == SHARD else n)
    with pytest.raises(ModelLoadError, match="leads out of the folder"):
        load_model(str(folder))


def test_the_hub_s_cache_is_served_and_only_its_own_files(folder: Path, tmp_path: Path) -> None:
    """snapshots/REVISION/ holds links into blobs/ of the same repository."""
    cache = tmp_path / "models--org--toy"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, cache / "blobs" / str(i))
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(i))
    loaded = load_model(str(snapshot))
    assert loaded.tokenizer is not None
    (snapshot / SHARD).unlink()
    (snapshot / SHARD).symlink_to(folder / SHARD)
    with pytest.raises(ModelLoadError, match="leads out of the folder"):
        load_model(str(snapshot))
    (tmp_path / "link").symlink_to(folder)
    assert load_model(str(tmp_path / "link")).vocab_size == toys.VOCABULARY


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (GatedRepoError, "is gated at the hub; ask for access on its page there, then set HF_TOKEN"),
        (RepositoryNotFoundError, "at the hub no model of that name, or a private one; check the name"),
        (OSError, "cannot be fetched from the hub: no route to host; give a folder"),
    ],
)
def test_a_name_that_the_hub_does_not_give_out_says_why(kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        if kind is OSError:
            raise OSError("no route to host")
        raise kind("401 Client Error. (Request ID: x)", response=httpx.Response(401, request=httpx.Request("GET", "https://hub.example")))

    monkeypatch.setattr(hub_folder, "snapshot_download", refuse)
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        load_model("org/model")


def test_a_file_in_place_of_a_folder_is_said(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json' is a file; give a folder"):
        load_model(folder / "config.json")


def test_a_head_s_files_stay_in_its_folder(tmp_path: Path) -> None:
    target = toys.llama()
    save_head(build_head("medusa", target), tmp_path / "toy", target)
    (tmp_path / "toy" / "model.safetensors").symlink_to(move_out(tmp_path / "toy", "model.safetensors"))
    with pytest.raises(ModelLoadError, match="leads out of the folder"):
        load_head(str(tmp_path / "toy"), target)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": 5}, r"wrong weight_map.a"),
        ({}, "wrong weight_map"),
        ([], "wrong weight_map"),
        (None, "wrong weight_map"),
        ({"a": "pytorch_model.bin"}, r"names 'pytorch_model.bin'; weights are read from files in .safetensors only"),
        ({"a": "x" * 5000}, "wrong weight_map.a"),
        ({"a": "gone.safetensors"}, "gone.safetensors cannot be read"),
        ({"a": ".safetensors\0"}, "only"),
        ({"a": ""}, "wrong weight_map.a"),
    ],
)
def test_a_wrong_weight_map_is_named(weight_map: object, message: str, folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelLoadError, match=message):
        load_model(str(folder))


@pytest.mark.parametrize("name", ["x" * 5000, "x/" * 3000, "org/" + "x" * 300, "", "a\0b", "a\nb/c/d", "x" * 256])
def test_names_that_can_be_none_are_refused_in_one_short_line(name: str) -> None:
    target = toys.llama()
    for load in (load_model, lambda n: load_head(n, target)):
        with pytest.raises((ModelLoadError, ConfigError)) as caught:
            load(name)
        assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


# ---- what does not fit


def set_config(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


@pytest.mark.parametrize(
    "changes", [{"quantization_config": {"quant_method": "fp8"}}, {"text_config": {"quantization_config": {"bits": 4}}}]
)
def test_quantised_models_are_refused_by_name(changes: dict[str, Any], folder: Path) -> None:
    set_config(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=r"is quantised( by fp8)? \(quantization_config in config.json\)"):
        load_model(str(folder))


@pytest.mark.parametrize(
    "key", ["num_attention_heads", "num_key_value_heads", "num_hidden_layers", "head_dim", "hidden_size", "vocab_size"]
)
@pytest.mark.parametrize("value", [0, -1, 7, 1_000_000, 10**12, 10**40])
def test_sizes_that_do_not_fit_are_refused_before_anything_is_built(
    key: str, value: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        pytest.fail("a tensor was read")

    set_config(folder, **{key: value})
    if (key, value) != ("num_hidden_layers", 7):  # what a deeper model lacks is known once its names are
        monkeypatch.setattr(reading.StoredTensor, "read", read)
    with pytest.raises(EchelonError):
        load_model(str(folder))


def change_tensors(file: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    save_file({k: change(k, t) for k, t in load_file(file).items()}, file, {"format": "pt"})


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64", "bool"])
def test_integers_are_not_cast_to_weights(dtype: str, folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    for shard in folder.glob("*.safetensors"):
        change_tensors(shard, lambda k, t: t.to(getattr(torch, dtype)) if k == name else t)
    with pytest.raises(ModelLoadError, match=rf"tensor '{name}' .* is stored as .*, and the model has bfloat16 there"):
        load_model(str(folder))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.input_layernorm.weight", "lm_head.weight"])
def test_weights_that_are_no_numbers_are_named(name: str, value: float, folder: Path) -> None:
    for shard in folder.glob("*.safetensors"):
        change_tensors(shard, lambda k, t: t.index_fill(0, torch.tensor([len(t) // 2]), value) if k == name else t)
    for load in (load_model, load_plain):
        with pytest.raises(ModelLoadError, match=f"tensor '{name}' .* has values that are NaN or infinite"):
            load(str(folder))


@pytest.mark.parametrize("place", [0, 1, 2**16 - 1, 2**16, 2**17, 2**17 + 4])
def test_every_entry_of_a_tensor_is_looked_at(place: int, tmp_path: Path) -> None:
    values = torch.zeros(2**17 + 5)
    values[place] = torch.nan
    save_file({"x": values}, tmp_path / "model.safetensors")
    with (
        reading.open_weights(Folder(str(tmp_path), tmp_path), ["model.safetensors"]) as weights,
        pytest.raises(ModelLoadError, match="NaN"),
    ):
        weights.tensors["x"].read(torch.bfloat16)


def test_values_beyond_the_wanted_dtype_are_named(folder: Path) -> None:
    for shard in folder.glob("*.safetensors"):
        change_tensors(shard, lambda k, t: t.index_fill(0, torch.tensor([0]), 1e6) if k == "lm_head.weight" else t)
    assert load_model(str(folder)).model.dtype == torch.bfloat16
    with pytest.raises(ModelLoadError, match=r"'lm_head.weight' .* has values beyond .* of float16; load it in bfloat16"):
        load_model(str(folder), dtype="float16")


def test_weights_of_a_head_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    target: PreTrainedModel = toys.llama()
    save_head(build_head("eagle", target), tmp_path, target)
    for value, message in ((torch.nan, "NaN or infinite"), (None, "is stored in int8")):
        change_tensors(
            tmp_path / "model.safetensors",
            lambda k, t, v=value: t if k != "fc.weight" else t.to(torch.int8) if v is None else torch.full_like(t, v),
        )
        with pytest.raises(ModelLoadError, match=message):
            load_head(str(tmp_path), target)
        save_head(build_head("eagle", target), tmp_path, target)


# ---- one thing wrong


@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_checkpoint_with_one_thing_wrong_is_loaded_or_refused_in_our_words(kind: str, tmp_path: Path) -> None:
    """In bounded time and memory. `make test` draws some of the cases, PROVE=1 takes all."""
    step = 1 if toys.PROVE else {"model": 17, "head": 37}[kind]
    *lines, end = run("corruptions.py", kind, str(step), str(tmp_path))
    assert end.get("cases") and len(lines) == len(range(0, end["cases"], step)), f"killed after {lines[-1:]}"
    for line in lines:
        assert line["is_ours"], line
        assert line["seconds"] < SECONDS and line["bytes"] < BYTES, line
        assert line["error"] is None or (len(line["message"]) < 1500 and "\n" not in line["message"]), line
        assert line["error"] is None or (";" in line["message"] or ":" in line["message"]), f"no remedy: {line}"
    assert any(line["error"] is None for line in lines) and any(line["error"] == "ModelLoadError" for line in lines)
