"""Checkpoints with one thing wrong, and what becomes of each: `python corruptions.py KIND STEP PLACE` prints a line of JSON a case.

KIND is `model` or `head`; every STEP-th case is run. A case is a file of the folder and a change of it. Whatever runs away meets a limit
of the process: it is killed, and the lines that are missing tell of it.
"""

from __future__ import annotations

import copy
import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import toys
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from echelon import LLM, EchelonError, SamplingParams
from echelon.heads.checkpoints import build_head, save_head

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
MEMORY, SECONDS = 4 * 2**30, 600  # address space beside what the process has, processor time in all
VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "zero": 0,
    "minus one": -1,
    "seven": 7,
    "a million": 10**6,
    "10^12": 10**12,
    "10^40": 10**40,
    "float": 0.5,
    "1e308": 1e308,
    "infinite": float("inf"),
    "nan": float("nan"),
    "text": "x",
    "long text": "x" * 5000,
    "list": [],
    "list of text": ["x"],
    "list of lists": [[1], [2]],
    "object": {},
    "nested": {"a": {"b": [1, {"c": None}]}},
}
Change = Callable[[Path], None]


def pieces() -> PreTrainedTokenizerFast:
    vocabulary = {f"w{i}": i for i in range(toys.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1", chat_template=CHAT)


def save_model(folder: Path) -> None:
    """A toy in bfloat16 and two shards, with every file that a model's folder can hold."""
    model = toys.llama().bfloat16()
    model.save_pretrained(folder, max_shard_size="60KB")
    model.generation_config.save_pretrained(folder)
    pieces().save_pretrained(folder)
    (folder / "special_tokens_map.json").write_text(json.dumps({"unk_token": "w0", "eos_token": "w1"}))
    (folder / "added_tokens.json").write_text(json.dumps({"w95": 95}))


def save_toy_head(folder: Path, method: str) -> None:
    target = toys.llama(num_hidden_layers=4)
    options = {"draft_vocab_size": 40} if method == "eagle3" else {}
    save_head(build_head(method, target, **options), folder, target)


def of_bytes(name: str) -> Iterator[tuple[str, Change]]:
    """What can befall any file."""
    contents: dict[str, Callable[[bytes], bytes]] = {
        "empty": lambda _: b"",
        "half": lambda b: b[: len(b) // 2],
        "last byte gone": lambda b: b[:-1],
        "a byte more": lambda b: b + b"x",
        "no text": lambda _: bytes(range(256)) * 4,
        "zeros": lambda b: bytes(len(b)),
        "number": lambda _: b"5",
        "list": lambda _: b"[]",
        "empty object": lambda _: b"{}",
        "null": lambda _: b"null",
        "deep lists": lambda _: b"[" * 100_000,
        "deep objects": lambda _: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "deep enough to be read": lambda _: b'{"a":' * 150 + b"1" + b"}" * 150,
        "long number": lambda _: b'{"model_type": ' + b"9" * 10_000 + b"}",
    }
    for label, change in contents.items():
        yield label, lambda folder, change=change: (folder / name).write_bytes(change((folder / name).read_bytes()))
    yield "a folder", lambda folder: ((folder / name).unlink(), (folder / name).mkdir())[1]
    yield "gone", lambda folder: (folder / name).unlink()
    yield "a link to nowhere", lambda folder: ((folder / name).unlink(), (folder / name).symlink_to(folder / "nowhere"))[1]
    yield "a link to itself", lambda folder: ((folder / name).unlink(), (folder / name).symlink_to(folder / name))[1]


def of_keys(name: str, folder: Path) -> Iterator[tuple[str, Change]]:
    """Every value of every key of a JSON file, down to the third level; and every key gone."""
    for path in key_paths(json.loads((folder / name).read_text())):
        for label, value in VALUES.items():
            yield f"{'.'.join(map(str, path))} = {label}", lambda folder, path=path, value=value: rewrite(folder / name, path, value)
        yield f"{'.'.join(map(str, path))} gone", lambda folder, path=path: rewrite(folder / name, path, KeyError)


def key_paths(value: Any, depth: int = 3) -> Iterator[list[Any]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for i, (key, inner) in enumerate(entries):
        if i >= 3 and depth < 3:  # vocabularies, weight maps
            return
        yield [key]
        if depth > 1:
            yield from ([key, *rest] for rest in key_paths(inner, depth - 1))


def rewrite(file: Path, path: list[Any], value: Any) -> None:
    raw = json.loads(file.read_text())
    inner = raw
    for key in path[:-1]:
        inner = inner[key]
    if value is KeyError:
        del inner[path[-1]]
    else:
        inner[path[-1]] = copy.deepcopy(value)
    file.write_text(json.dumps(raw))


def of_headers(name: str, folder: Path) -> Iterator[tuple[str, Change]]:
    """The header of a safetensors file, whose length is kept right."""
    header = json.loads(read_header((folder / name).read_bytes())[0])
    first = next(key for key in header if key != "__metadata__")
    for key in ("dtype", "shape", "data_offsets"):
        for label, value in (VALUES | {"int8": "I8", "f8": "F8_E4M3", "f64": "F64", "huge": [2**40, 2**40], "negative": [-1, 4]}).items():
            yield f"{key} = {label}", lambda folder, key=key, value=value: reheader(folder / name, lambda h: h[first].update({key: value}))
    yield "another name", lambda folder: reheader(folder / name, lambda h: h.update({"x" * 5000: h.pop(first)}))
    yield "twice", lambda folder: reheader(folder / name, lambda h: h.update(again=h[first]))
    yield "length", lambda folder: (folder / name).write_bytes(b"\xff" * 7 + b"\x7f" + (folder / name).read_bytes()[8:])


def read_header(data: bytes) -> tuple[bytes, bytes]:
    length = int.from_bytes(data[:8], "little")
    return data[8 : 8 + length], data[8 + length :]


def reheader(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw, rest = read_header(file.read_bytes())
    header = json.loads(raw)
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + rest)


def of_tensors(name: str, folder: Path) -> Iterator[tuple[str, Change]]:
    """Values and dtypes of a whole file."""
    for label in ("int8", "int64", "bool", "float64", "float32"):
        yield label, lambda folder, label=label: retensor(folder / name, lambda t: t.to(getattr(torch, label)))
    for label, value in {"nan": torch.nan, "inf": torch.inf, "minus inf": -torch.inf}.items():
        yield label, lambda folder, value=value: retensor(folder / name, lambda t: t.index_fill(0, torch.tensor([len(t) - 1]), value))
    yield "no rows", lambda folder: retensor(folder / name, lambda t: t[:0])
    yield "a number", lambda folder: retensor(folder / name, lambda t: t.flatten()[0])
    yield "transposed", lambda folder: retensor(folder / name, lambda t: t.t().contiguous())


def retensor(file: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    save_file({k: change(t) if t.is_floating_point() else t for k, t in load_file(file).items()}, file, {"format": "pt"})


def cases(folder: Path) -> Iterator[tuple[str, Change]]:
    """All of a folder, named `file: change`."""
    for file in sorted(folder.iterdir()):
        kinds = [of_bytes(file.name)]
        if file.suffix == ".json":
            kinds.append(of_keys(file.name, folder))
        if file.suffix == ".safetensors":
            kinds += [of_headers(file.name, folder), of_tensors(file.name, folder)]
        for kind in kinds:
            yield from ((f"{file.name}: {label}", change) for label, change in kind)


def use_model(folder: Path) -> None:
    LLM(str(folder), max_num_seqs=2, kv_cache_memory_bytes=2**20).generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=2))


def use_head(folder: Path) -> None:
    target = toys.adopted(toys.llama(num_hidden_layers=4))
    method = folder.parent.name
    config = {"method": method, "model": str(folder), "num_speculative_tokens": 2}
    LLM(target, config, max_num_seqs=2, kv_cache_memory_bytes=2**20).generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=4))


def outcome(use: Callable[[Path], None], folder: Path) -> dict[str, Any]:
    """How it ended, the processor seconds it took and the bytes it added to the largest memory so far."""
    started, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        use(folder)
        ended = {"error": None, "is_ours": True, "message": ""}
    except EchelonError as error:
        ended = {"error": type(error).__name__, "is_ours": True, "message": str(error)}
    except BaseException as error:
        ended = {"error": type(error).__name__, "is_ours": False, "message": str(error)[:300]}
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)
    return ended | {"seconds": time.process_time() - started, "bytes": grown}


def main(kind: str, step: int, place: Path) -> None:
    sources = [place / "model"] if kind == "model" else [place / m / "head" for m in ("medusa", "clover", "clover2", "eagle", "eagle3")]
    use = use_model if kind == "model" else use_head
    for source in sources:
        source.mkdir(parents=True)
        save_model(source) if kind == "model" else save_toy_head(source, source.parent.name)
        use(source)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + MEMORY, pages + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    every = [(source, name, change) for source in sources for name, change in cases(source)]
    for source, name, change in every[::step]:
        changed = place / "changed" / source.parent.name / "head"
        shutil.rmtree(changed.parent, ignore_errors=True)
        shutil.copytree(source, changed)
        change(changed)
        print(json.dumps({"case": f"{source.parent.name if kind == 'head' else kind}/{name}"} | outcome(use, changed)), flush=True)
    print(json.dumps({"cases": len(every)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
