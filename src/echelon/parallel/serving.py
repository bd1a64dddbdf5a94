"""What a worker does once it lives: its share of the model, its keys and values, and one pass a plan."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers.utils import logging

from echelon.errors import EchelonError
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache
from echelon.model.attention import record_layers
from echelon.model.load.loading import LoadedModel
from echelon.model.runner import ModelRunner
from echelon.ops import compiled
from echelon.parallel.handover import Handover
from echelon.parallel.pass_plan import PassPlan, PlanReader
from echelon.parallel.rank_memory import RECEIVED, RankMemory
from echelon.parallel.splits import SPLITS, Split
from echelon.parallel.stages import WorkerStage


def serve(rank: int, size: int, descriptor: int, spins: int) -> None:
    """Load, make room for keys and values, then run what rank 0 plans, until it closes the socket that is the standard input."""
    with socket.socket(fileno=os.dup(0)) as connection, connection.makefile("rwb") as stream:
        asked = json.loads(_message(stream) or "{}")
        if not asked:
            return
        split = SPLITS[asked["split"]]
        memory = split.memory(descriptor, rank, size, _go_on, spins)
        if (loaded := _loaded(stream, split, memory, asked)) is None or not (room := json.loads(_message(stream) or "{}")):
            return
        cache, run = _runner(loaded, memory, room)
        _answer(stream, {})
        reader = PlanReader()
        while message := _message(stream):
            memory.note(RECEIVED, time.monotonic_ns())
            plan = reader.read(message)
            cache.tables.copies.extend(plan.copies)
            with memory.connected(plan.hash):
                run(plan)


def _go_on() -> None:
    """Rank 0 watches: it ends all workers when one is gone, and a thread of each ends it when rank 0 is."""


def _loaded(stream: Any, split: Split, memory: RankMemory, asked: dict[str, Any]) -> LoadedModel | None:
    """The part that the first message asks for; None where it cannot be loaded, which rank 0 is told."""
    try:
        logging.disable_progress_bar()
        torch.set_num_threads(asked["threads"])
        compiled.set_isa(asked["isa"])
        loaded = split.load(memory, asked["model"], asked["dtype"], asked["quantization"])
    except EchelonError as error:
        _answer(stream, {"error": str(error)})
        return None
    _answer(stream, {})
    return loaded


def _runner(loaded: LoadedModel, memory: RankMemory, room: dict[str, Any]) -> tuple[KVCache, Callable[[PassPlan], object]]:
    """Blocks like those of rank 0, with this rank's heads and layers, and what runs a pass; which block is whose, rank 0 alone knows."""
    tables = BlockTables(room["num_blocks"], room["block_size"], 1)
    shapes = record_layers(loaded.model)
    cache = KVCache(shapes, tables, loaded.model.dtype, loaded.device, is_rounded=room["is_rounded"])
    if isinstance(memory, Handover):
        return cache, WorkerStage(loaded, cache, memory, room["wanted"]).run_plan
    runner = ModelRunner(loaded, cache)
    return cache, lambda plan: runner.run(plan.batch)


def _message(stream: Any) -> bytes:
    """The next one; empty when there will be none."""
    head = stream.read(8)
    return bytes(stream.read(int.from_bytes(head, "big"))) if len(head) == 8 else b""


def _answer(stream: Any, value: dict[str, Any]) -> None:
    message = json.dumps(value).encode()
    stream.write(len(message).to_bytes(8, "big") + message)
    stream.flush()
