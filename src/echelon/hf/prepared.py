"""Served copies of a caller's models, kept until the model changes or goes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from echelon.model.load.loading import LoadedModel, load_model, served_copy

WORDS = 64  # of 8 bytes, whose sum is one entry of a fingerprint
PLAIN = (bool, int, float, str, type(None))


class Kept(NamedTuple):
    """A served copy, and what the model was when it was made."""

    loaded: LoadedModel
    made_from: tuple[Any, ...]


_kept: WeakKeyDictionary[PreTrainedModel, Kept] = WeakKeyDictionary()
Named = dict[tuple[str, str | None], LoadedModel]  # draft models by their names and quantization
_by_name: WeakKeyDictionary[PreTrainedModel, Named] = WeakKeyDictionary()  # beside their target
_locks: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()
_books = threading.Lock()  # held while one of these is looked up


@contextmanager
def in_use(*models: PreTrainedModel) -> Iterator[list[LoadedModel]]:
    """The models as the engine serves them, for this thread alone: others that want one of them wait."""
    with _books:
        locks = {id(lock): lock for lock in (_locks.setdefault(model, threading.RLock()) for model in models)}
    with ExitStack() as stack:
        for _, lock in sorted(locks.items()):
            stack.enter_context(lock)
        yield [_prepared(model) for model in models]


def named_assistant(name: str, quantization: str | None, target: PreTrainedModel, device: str) -> LoadedModel:
    """A draft model from a folder or hub name, read once for as long as its target lives; `target` must be in use."""
    with _books:
        read = _by_name.setdefault(target, {})
    if (name, quantization) not in read:
        read[name, quantization] = load_model(name, device=device, quantization=quantization)
    return read[name, quantization]


def release(model: PreTrainedModel) -> None:
    """Free what is kept beside a model: its packed weights, and draft models that were read by name; the next call makes them anew."""
    with _books:
        _kept.pop(model, None)
        _by_name.pop(model, None)


def _prepared(model: PreTrainedModel) -> LoadedModel:
    """The kept copy if the model is what it was then, else a new one. With hooks, which may hold the model, nothing is kept."""
    now = _fingerprint(model)
    with _books:
        kept = _kept.get(model)
        if kept is not None and kept.made_from == now:
            return kept.loaded
        _kept.pop(model, None)
    del kept  # before memory is taken for another
    loaded = served_copy(model)
    if not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        with _books:
            _kept[model] = Kept(loaded, now)
    return loaded


def _fingerprint(model: PreTrainedModel) -> tuple[Any, ...]:
    """Equal only while the model computes the same: its configuration, its modules with their plain attributes and hooks, and every bit of
    its tensors (so that a write past autograd, through `.data`, is seen as well). The weights are read once.
    """
    modules = tuple((name, type(m), id(type(m).forward), _attributes(m)) for name, m in model.named_modules(remove_duplicate=False))
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    sums: dict[int, bytes] = {}  # by identity: tied ones are read once
    for _, tensor in tensors:
        if id(tensor) not in sums:
            sums[id(tensor)] = _sums(tensor)
    states = tuple((name, tensor.shape, tensor.dtype, tensor.device, sums[id(tensor)]) for name, tensor in tensors)
    return str(model.config.to_dict()), modules, states


def _attributes(module: torch.nn.Module) -> tuple[Any, ...]:
    """Plain ones by their value, functions and the like by identity, and which hooks there are."""
    found: list[Any] = []
    for name, value in vars(module).items():
        if isinstance(value, PLAIN):
            found.append((name, value))
        elif name in ("_forward_hooks", "_forward_pre_hooks"):
            found.append((name, *((key, id(hook)) for key, hook in value.items())))
        elif callable(value):
            found.append((name, id(value)))
    return tuple(found)


def _sums(tensor: Tensor) -> bytes:
    """A digest of the sums of 512 bytes each, and of what is left over: much faster to make than one of the bytes."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    whole = len(data) - len(data) % (8 * WORDS)
    head = data[:whole]
    if head.storage_offset() % 8:
        head = head.clone()
    digest = hashlib.blake2b(head.view(torch.int64).view(-1, WORDS).sum(1).cpu().numpy().tobytes(), digest_size=16)
    digest.update(data[whole:].cpu().numpy().tobytes())
    return digest.digest()
