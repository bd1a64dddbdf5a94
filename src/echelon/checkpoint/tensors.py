"""Tensors of safetensors files, read one at a time into the process's own memory and checked on the way.

Nothing is mapped: what a process has read stays as it is, whatever becomes of the file.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import EllipsisType
from typing import Self

import torch
from huggingface_hub import get_safetensors_metadata
from safetensors import SafetensorError, safe_open
from torch import Tensor

from echelon.checkpoint.folder import PICKLED, Folder
from echelon.checkpoint.schemas import Index
from echelon.errors import ModelLoadError, UnsupportedModelError
from echelon.inputs import first_line, shown

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
STORED = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PIECE = 2**16  # entries that are read, cast and checked at a time: they stay in the processor's caches
MAPPED = 2**20  # bytes from which a tensor has pages of its own, which go back to the system with it


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open file, not read yet. `[...]` and `to` are those of a tensor, so that `transformers` reads it by them."""

    name: str
    file: Path
    descriptor: int
    code: str  # its dtype, as the format calls it
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    rows: tuple[int, int] | None = field(default=None, kw_only=True)  # the first that is wanted, and the one after the last; None: all

    def __getitem__(self, index: EllipsisType) -> Self:
        return self

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """`read`, and where a device is given, there."""
        tensor = self.read(dtype)
        return tensor if device is None else tensor.to(device)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it is stored in.

        Raises
        ------
        UnsupportedModelError  a format that is not served, as quantised weights have it
        """
        if self.code not in STORED:
            raise UnsupportedModelError(
                f"tensor {shown(self.name)} of {self.file} is stored as {self.code}, as in quantised models, which are not served; "
                f"use a checkpoint in {', '.join(('BF16', 'F16', 'F32'))}"
            )
        return STORED[self.code]

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, in its own dtype or cast to `dtype`, in memory of its own; where some rows are wanted, the others hold anything, and
        large ones take no memory.

        Raises
        ------
        ModelLoadError         the file has become shorter, a value is NaN or infinite, or integers stand for weights or the reverse
        UnsupportedModelError  as `dtype`
        """
        stored, wanted = self.dtype, dtype or self.dtype
        if stored.is_floating_point != wanted.is_floating_point:
            raise ModelLoadError(
                f"tensor {shown(self.name)} of {self.file} is stored as {self.code}, and the model has "
                f"{str(wanted).removeprefix('torch.')} there; use the checkpoint as it was trained"
            )
        out = own_memory(self.numel, wanted)
        scratch = None if wanted == stored else torch.empty(min(PIECE, self.numel), dtype=stored)
        begin, end = (self.numel // self.shape[0] * row for row in self.rows) if self.rows else (0, self.numel)
        for first in range(begin, end, PIECE):
            part = out[first : min(first + PIECE, end)]
            raw = part if scratch is None else scratch[: len(part)]
            self._fill(raw, first * stored.itemsize)
            if raw is not part:
                part.copy_(raw)
            self._check_finite(raw, part)
        return out.view(self.shape)

    def _fill(self, part: Tensor, start: int) -> None:
        """The bytes from `start` of the tensor on, into a contiguous part."""
        buffer, done = memoryview(part.view(torch.uint8).numpy()), 0  # type: ignore[arg-type]
        while done < len(buffer):
            try:
                count = os.preadv(self.descriptor, [buffer[done:]], self.offset + start + done)
            except OSError as error:
                raise ModelLoadError(f"{self.file} cannot be read ({error.strerror}); check the disk it lies on") from error
            if count == 0:
                raise ModelLoadError(f"{self.file} has become shorter while it was being read; load again once nothing writes to it")
            done += count

    def _check_finite(self, raw: Tensor, part: Tensor) -> None:
        """The largest and smallest value tell of every NaN and infinity."""
        if not part.is_floating_point() or all(math.isfinite(v) for v in map(float, torch.aminmax(part))):
            return
        if all(math.isfinite(v) for v in map(float, torch.aminmax(raw))):
            raise ModelLoadError(
                f"tensor {shown(self.name)} of {self.file} has values beyond {torch.finfo(part.dtype).max:.3g}, the largest of "
                f"{str(part.dtype).removeprefix('torch.')}; load it in bfloat16 or float32"
            )
        raise ModelLoadError(f"tensor {shown(self.name)} of {self.file} has values that are NaN or infinite; copy the checkpoint again")


@dataclass
class Weights:
    """All tensors of a checkpoint, by name."""

    folder: Folder
    tensors: dict[str, StoredTensor] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Number of elements of all tensors."""
        return sum(t.numel for t in self.tensors.values())

    @property
    def largest_dimension(self) -> int:
        """Largest dimension of any tensor."""
        return max((max(t.shape, default=1) for t in self.tensors.values()), default=1)

    def first_float(self) -> torch.dtype | None:
        """The dtype of the first tensor that is stored in one of floating point."""
        return next((STORED[t.code] for t in self.tensors.values() if t.code in STORED and STORED[t.code].is_floating_point), None)


@contextmanager
def open_weights(folder: Folder, files: list[str]) -> Iterator[Weights]:
    """Tensors of the named files, of which only headers have been read; the files are open inside the context, and compared at its end.

    Raises
    ------
    ModelLoadError  a file is outside the folder, torn, or was changed before the end of the context
    """
    weights = Weights(folder)
    with ExitStack() as stack:
        for name in files:
            path = folder.file(name)
            descriptor = _open(path)
            stack.callback(os.close, descriptor)
            weights.tensors |= _header(path, descriptor)
        try:
            yield weights
        except ModelLoadError:
            folder.check_unchanged()  # the better reason
            raise
        folder.check_unchanged()


def weight_files(folder: Folder) -> list[str]:
    """The safetensors files that hold a model's weights: one, or those that its index names.

    Raises
    ------
    ModelLoadError  there are none, only pickled ones, or the index is wrong
    """
    names = _named_files(folder)
    folder.fetch_weights(names)
    if names == [WEIGHTS] and not folder.has(WEIGHTS):
        raise ModelLoadError(f"{folder.shown} holds {_without_weights(folder)}")
    return names


def _named_files(folder: Folder) -> list[str]:
    """Those that the index names, or without one the only file that there may be."""
    if folder.has(WEIGHTS) or not folder.has(INDEX):
        return [WEIGHTS]
    names = sorted(set(folder.read_as(INDEX, Index).weight_map.values()))
    if odd := [n for n in names if not n.endswith(".safetensors")]:
        raise ModelLoadError(f"{folder.label(INDEX)} names {shown(odd[0])}; weights are read from files in .safetensors only")
    return names


@contextmanager
def weight_headers(folder: Folder) -> Iterator[Weights]:
    """Names, types and shapes of a model's tensors. Of a hub's repository whose weights are not here, the hub is asked for the headers of
    its files, and nothing is fetched.

    Raises
    ------
    ModelLoadError  as of `open_weights`; the hub does not answer
    """
    names = _named_files(folder)
    if folder.is_of_the_hub and not all(folder.has(name) for name in names):
        yield _asked_of_the_hub(folder)
        return
    with open_weights(folder, weight_files(folder)) as weights:
        yield weights


def _asked_of_the_hub(folder: Folder) -> Weights:
    try:
        files = get_safetensors_metadata(folder.name).files_metadata
    except Exception as error:  # the hub's own errors share no base
        raise ModelLoadError(
            f"cannot read the headers of {folder.shown}: {first_line(error)}; give a folder, or a hub name that this machine can reach"
        ) from error
    found = Weights(folder)
    for file, metadata in files.items():
        path = folder.path / file
        found.tensors |= {k: StoredTensor(k, path, -1, t.dtype, tuple(t.shape), t.data_offsets[0]) for k, t in metadata.tensors.items()}
    return found


def own_memory(count: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor [count]. A large one has pages of its own, large pages where the system has them."""
    size = count * dtype.itemsize
    if size < MAPPED or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.empty(count, dtype=dtype)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ModelLoadError(f"there is no memory for a tensor of {size:,} bytes ({error.strerror}); use a smaller model") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=count)


def _without_weights(folder: Folder) -> str:
    pickled = sorted(p.name for pattern in PICKLED for p in folder.path.glob(pattern))
    found = f"only pickled weights ({shown(', '.join(pickled), quote=False)})" if pickled else "no weights"
    return f"{found}; safetensors are needed: convert with `model.save_pretrained(folder)` where you trust it"


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error.strerror}); check its permissions") from error


def _header(path: Path, descriptor: int) -> dict[str, StoredTensor]:
    """The tensors of a file whose header safetensors accepts: it covers the file without gaps or overlaps."""
    try:
        with safe_open(path, "pt", backend="pread"):
            length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
            header = json.loads(os.pread(descriptor, length, 8))
        return {
            name: StoredTensor(name, path, descriptor, e["dtype"], tuple(e["shape"]), 8 + length + e["data_offsets"][0])
            for name, e in header.items()
            if name != "__metadata__"
        }
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is torn: {first_line(error)}; copy it again") from error
