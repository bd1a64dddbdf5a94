"""What a worker does once it lives: its share of the model, its keys and values, and one pass a plan."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

import torch
from transformers.utils import logging

from echelon.errors import EchelonError
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache
from echelon.model.attention import record_layers
from echelon.model.load.loading import LoadedModel, load_share
from echelon.model.patches.split import Share
from echelon.model.runner import ModelRunner
from echelon.ops import compiled
from echelon.parallel.exchange import RECEIVED, SharedExchange
from echelon.parallel.pass_plan import PlanReader


def serve(rank: int, size: int, descriptor: int, spins: int) -> None:
    """Load, make room for keys and values, then run what rank 0 plans, until it closes the socket that is the standard input."""
    exchange = SharedExchange(descriptor, rank, size, _go_on, spins)
    with socket.socket(fileno=os.dup(0)) as connection, connection.makefile("rwb") as stream:
        if (loaded := _loaded(stream, Share(exchange))) is None:
            return
        runner = _runner(loaded, json.loads(_message(stream) or "{}"))
        _answer(stream, {})
        reader = PlanReader()
        while message := _message(stream):
            exchange.note(RECEIVED, time.monotonic_ns())
            plan = reader.read(message)
            runner.cache.tables.copies.extend(plan.copies)
            with exchange.connected(plan.hash):
                runner.run(plan.batch)


def _go_on() -> None:
    """Rank 0 watches: it ends all workers when one is gone, and a thread of each ends it when rank 0 is."""


def _loaded(stream: Any, share: Share) -> LoadedModel | None:
    """The share that the first message asks for; None where it cannot be loaded, which rank 0 is told."""
    asked = json.loads(_message(stream) or "{}")
    try:
        logging.disable_progress_bar()
        torch.set_num_threads(asked["threads"])
        compiled.set_isa(asked["isa"])
        loaded = load_share(asked["model"], share, asked["dtype"], asked["quantization"])
    except EchelonError as error:
        _answer(stream, {"error": str(error)})
        return None
    _answer(stream, {})
    return loaded


def _runner(loaded: LoadedModel, room: dict[str, Any]) -> ModelRunner:
    """Blocks like those of rank 0, with this rank's heads; which block is whose, rank 0 alone knows."""
    tables = BlockTables(room["num_blocks"], room["block_size"], 1)
    shapes = record_layers(loaded.model)
    return ModelRunner(loaded, KVCache(shapes, tables, loaded.model.dtype, loaded.device, is_rounded=room["is_rounded"]))


def _message(stream: Any) -> bytes:
    """The next one; empty when there will be none."""
    head = stream.read(8)
    return bytes(stream.read(int.from_bytes(head, "big"))) if len(head) == 8 else b""


def _answer(stream: Any, value: dict[str, Any]) -> None:
    message = json.dumps(value).encode()
    stream.write(len(message).to_bytes(8, "big") + message)
    stream.flush()
