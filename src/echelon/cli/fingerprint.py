"""What decides the text of a run, by name: from it `echelon generate --resume` says what differs."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from echelon import LLM
from echelon.errors import ConfigError
from echelon.inputs import cache_folder, dtype_name
from echelon.ops import compiled

KINDS = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")  # settings, template, tokenizer and weights of a checkpoint
WORTH_NOTING = 2**20  # bytes; smaller files are read again
MOST_NOTED = 1000  # files
SETTLED_NS = 2_000_000_000  # a file that changed since may change again within one tick of the file system's clock


def settings_of(llm: LLM, model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that may change a row: `given` (input, sampling parameters), how the model runs, and the contents of its files.

    What drafts counts where the rule of acceptance lets it change the text, and so do costs that are named; with "exact" they cannot.
    """
    spec, config = llm.speculative_config, llm.config
    settings: dict[str, Any] = {
        **given,
        "model": folder_hashes(model),
        "max_model_len": llm.max_len,
        "dtype": dtype_name(llm.target.model.dtype),
        "device": llm.target.device.type,
        "kernels": kernels(llm.target.device),
        "numerics": "fast" if llm.target.is_fast else "invariant",
        "quantization": llm.target.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "strategy": config.strategy,
        "pad": config.pad,
        "grouping": config.grouping,
        "speculative_config": spec.model_dump(mode="json") if spec else None,
    }
    if spec is not None and spec.acceptance != "exact":
        settings["draft"] = folder_hashes(spec.model) if spec.model is not None and spec.own_copy is None else spec.own_copy
        settings["costs"] = None if spec.cost_table is None else noted_hash(Path(spec.cost_table))[:16]
    return flat(settings)


def kernels(device: torch.device) -> str:
    """What computes there: families of processor instructions round differently, and so do PyTorch and devices."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return compiled.isa() if compiled.is_built() else "PyTorch"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def folder_hashes(name: str) -> dict[str, str]:
    """File → hash of its content, for all files of a checkpoint that decide what it computes; `name` is a folder or a hub name."""
    folder = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, local_files_only=True))
    files = sorted({path for kind in KINDS for path in folder.rglob(kind) if path.is_file()})
    return {str(path.relative_to(folder)): noted_hash(path)[:16] for path in files}


def hash_of(value: Any) -> str:
    """SHA-256 of a value that JSON can write."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of its content.

    Raises
    ------
    ConfigError  it cannot be read
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}; check the path") from error


def noted_hash(path: Path) -> str:
    """The same; a large file is read once, and again only when it has changed (its place on the disk, size or times)."""
    stat = path.stat()
    if stat.st_size < WORTH_NOTING:
        return file_hash(path)
    key = ":".join(map(str, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)))
    notes = _read_notes()
    if key not in notes:
        found = file_hash(path)
        if time.time_ns() - max(stat.st_ctime_ns, stat.st_mtime_ns) < SETTLED_NS:
            return found
        notes = dict(list(notes.items())[1 - MOST_NOTED :]) | {key: found}
        _write_notes(notes)
    return notes[key]


def _notes_file() -> Path:
    return cache_folder() / "hashes.json"


def _read_notes() -> dict[str, str]:
    """Known hashes; none where the file is missing or unreadable."""
    try:
        notes = json.loads(_notes_file().read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}


def _write_notes(notes: Mapping[str, str]) -> None:
    """Without them the files are read again, so a folder that cannot be written does no harm."""
    file = _notes_file()
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(notes), "utf-8")
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
