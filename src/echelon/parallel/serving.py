"""What a worker does once it lives: its share of the model, its keys and values, and one pass a plan."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers.utils import logging

from echelon.checkpoint.digest import checkpoint_digest
from echelon.errors import EchelonError
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache
from echelon.model.attention import record_layers
from echelon.model.load.loading import LoadedModel
from echelon.model.runner import ModelRunner
from echelon.ops import compiled
from echelon.parallel.pass_plan import PassPlan, PlanReader
from echelon.parallel.splits import SPLITS, STAGES, Split
from echelon.parallel.stages import WorkerStage

SPIN_SECONDS = 3e-3  # for which a worker looks for a plan before it sleeps; between plain steps rank 0 takes 1 to 2 ms of its own


class WayToFirst(Protocol):
    """A worker's way to rank 0."""

    def link(self, split: Split) -> Any:
        """The way to all ranks in a pass."""

    def message(self) -> bytes:
        """The next that rank 0 sends; empty when there will be none."""

    def answer(self, value: dict[str, Any]) -> None:
        """Tell rank 0 that what it asked is done, or why it cannot be."""


class SocketWay:
    """The socket that is the standard input of a worker which rank 0 has started, and the memory that both have."""

    def __init__(self, rank: int, size: int, descriptor: int, spins: int) -> None:
        self._memory = descriptor, rank, size, _go_on, spins
        self._socket, self._poll = socket.socket(fileno=os.dup(0)), select.poll()
        self._socket.setblocking(True)  # it is not where an application has set a default timeout
        self._poll.register(self._socket, select.POLLIN)
        self._spin_seconds = SPIN_SECONDS if spins else 0.0

    def link(self, split: Split) -> Any:
        """The shared memory."""
        return split.memory(*self._memory)

    def message(self) -> bytes:
        """The next one; empty where the socket is closed before the end of it."""
        until = time.monotonic() + self._spin_seconds
        while not self._poll.poll(0) and time.monotonic() < until:
            pass
        try:
            return self._read(int.from_bytes(self._read(8), "big"))
        except ConnectionResetError:  # closed before what this worker has answered was read
            return b""

    def _read(self, count: int) -> bytes:
        """So many bytes, or none."""
        received, end = bytearray(count), 0
        with memoryview(received) as room:
            while end < count and (more := self._socket.recv_into(room[end:])):
                end += more
        return bytes(received) if end == count else b""

    def answer(self, value: dict[str, Any]) -> None:
        """As JSON."""
        message = json.dumps(value).encode()
        self._socket.sendall(len(message).to_bytes(8, "big") + message)


def _go_on() -> None:
    """Rank 0 watches: it ends all workers when one is gone, and a thread of each ends it when rank 0 is."""


def serve(way: WayToFirst) -> None:
    """Load, make room for keys and values, then run what rank 0 plans, until there is nothing more."""
    asked = json.loads(way.message() or "{}")
    if not asked:
        return
    split = SPLITS[asked["split"]]
    link = way.link(split)
    if (loaded := _loaded(way, split, link, asked)) is None or not (room := json.loads(way.message() or "{}")):
        return
    cache, run = _runner(loaded, asked["split"], link, room)
    way.answer({})
    reader = PlanReader()
    while message := way.message():
        plan = reader.read(message)
        cache.tables.copies.extend(plan.copies)
        with link.connected(plan.hash):
            run(plan)


def _loaded(way: WayToFirst, split: Split, link: Any, asked: dict[str, Any]) -> LoadedModel | None:
    """The part that the first message asks for; None where it cannot be loaded, which rank 0 is told."""
    try:
        logging.disable_progress_bar()
        torch.set_num_threads(asked.get("threads", torch.get_num_threads()))
        compiled.set_isa(asked["isa"])
        if asked.get("digest", "") not in ("", checkpoint_digest(asked["model"])):
            way.answer({"error": f"{asked['model']!r} is another checkpoint here than on rank 0; copy it from there"})
            return None
        loaded = split.load(link, asked["model"], asked["dtype"], asked["quantization"])
    except EchelonError as error:
        way.answer({"error": str(error)})
        return None
    way.answer({})
    return loaded


def _runner(loaded: LoadedModel, split: str, link: Any, room: dict[str, Any]) -> tuple[KVCache, Callable[[PassPlan], object]]:
    """Blocks like those of rank 0, with this rank's heads and layers, and what runs a pass; which block is whose, rank 0 alone knows."""
    tables = BlockTables(room["num_blocks"], room["block_size"], 1)
    shapes = record_layers(loaded.model)
    cache = KVCache(shapes, tables, loaded.model.dtype, loaded.device, is_rounded=room["is_rounded"])
    if split == STAGES:
        return cache, WorkerStage(loaded, cache, link, room["wanted"]).run_plan
    runner = ModelRunner(loaded, cache)
    return cache, lambda plan: runner.run(plan.batch)
