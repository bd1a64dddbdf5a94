"""Rank 0's side of several ranks: starts the workers, tells them what to load and to run, and ends them all when one fails.

A worker that has ended is noticed at once where it is awaited, one that hangs by its signs of life, which a thread of it writes: however
long it computes, it lives. After a failure nothing runs any more; whoever made the engine makes a new one.
"""

from __future__ import annotations

import json
import os
import platform
import select
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from echelon.batch import RaggedBatch
from echelon.errors import ConfigError, ModelLoadError, RankError
from echelon.model.load.loading import LoadedModel, check_ranks
from echelon.ops import compiled, devices
from echelon.parallel.pass_plan import Copies, PlanWriter
from echelon.parallel.rank_memory import LINE, LOOK_SECONDS, MOST_RANKS, RECEIVED, SEEN, SPINS, shared_memory
from echelon.parallel.splits import SPLITS, STAGES
from echelon.text_process import receive, send

WORKER = Path(__file__).with_name("worker.py")
SILENT_SECONDS = 10.0  # without a sign of life, after which a worker hangs
ENDING_SECONDS = 2.0  # that a worker may take to end by itself
AGAIN = "make a new LLM, or start the server again"


class RankGroup:
    """The workers of one engine, direct children of this process. While there are any, it has a share of the threads, as each has.

    setting          which of the settings asks for them, and so how the model is split
    seconds_to_plan  from the start of packing the last plan until the last worker had it
    """

    def __init__(self, setting: str, size: int) -> None:
        cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
        self.setting, self.size, self.num_threads = setting, size, max(1, threads // size)
        spins = SPINS if size * self.num_threads <= cores else 0  # where ranks take turns, whoever waits makes room
        try:
            descriptor = shared_memory()
        except OSError as error:
            raise ConfigError(f"there is no memory for {size} ranks to share ({error.strerror}); free some, or take fewer ranks") from error
        self.memory = SPLITS[setting].memory(descriptor, 0, size, self.check, spins)
        self._writer, self._failure, self._planned_at = PlanWriter(), "", 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self.close = weakref.finalize(self, _end, os.getpid(), self._processes, self._connections, threads)
        torch.set_num_threads(self.num_threads)
        try:
            for rank in range(1, size):
                self._start(rank, descriptor, spins)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(descriptor)

    def _start(self, rank: int, descriptor: int, spins: int) -> None:
        ours, theirs = socket.socketpair()
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"OMP_NUM_THREADS": str(self.num_threads), "PYTHONPATH": os.pathsep.join(paths)}
        numbers = (rank, self.size, descriptor, rank * LINE + 8 * SEEN, spins, os.getpid())
        self.memory.seem_alive(rank)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), *map(str, numbers)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                env=environment,
            )
        self._processes.append(process)
        self._connections.append(ours)

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1, 2, …"""
        return [p.pid for p in self._processes]

    @property
    def seconds_to_plan(self) -> float:
        """From the start of packing the last plan until the last worker had read it."""
        return max(self.memory.number(rank, RECEIVED) - self._planned_at for rank in range(1, self.size)) / 1e9

    def tell(self, message: Mapping[str, Any]) -> None:
        """Ask all workers to load, or to make room for keys and values; `answers` waits until they have."""
        self._send(json.dumps(message).encode())

    def answers(self) -> None:
        """Wait for an answer of every worker.

        Raises
        ------
        ModelLoadError  one cannot do what it was asked
        RankError       one has ended, or hangs
        """
        for rank, connection in enumerate(self._connections, 1):
            while not select.select([connection], [], [], LOOK_SECONDS)[0]:
                self.check()
            try:
                answer = json.loads(receive(connection, time.monotonic() + SILENT_SECONDS))
            except (OSError, EOFError):
                self._fail(f"rank {rank} has ended while it was loading; see its own error above")
            if "error" in answer:
                raise ModelLoadError(f"rank {rank}: {answer['error']}")

    @contextmanager
    def running(self, batch: RaggedBatch, copies: Copies, ends: Sequence[int] = ()) -> Iterator[None]:
        """Inside, the workers run the pass over `batch` after `copies`, in stages cut behind the rows `ends`, and this process is to do so
        too. What goes wrong ends them all.

        Raises
        ------
        RankError  a worker has ended, hangs, or runs something else
        """
        if self._failure or not self.close.alive:
            raise RankError(self._failure or f"the workers of this model have ended; {AGAIN}")
        self._planned_at = time.monotonic_ns()
        message = self._writer.packed(batch, copies, ends)
        try:
            self._send(message)
            with self.memory.connected(self._writer.hash):
                yield
        except BaseException as error:  # the workers are in the middle of a pass that nobody ends
            self._give_up(str(error) if isinstance(error, RankError) else f"a pass failed on rank 0 ({type(error).__name__}); {AGAIN}")
            raise

    def _send(self, message: bytes) -> None:
        for rank, connection in enumerate(self._connections, 1):
            try:
                send(connection, message, time.monotonic() + SILENT_SECONDS)
            except TimeoutError:
                self._fail(f"rank {rank} has taken no message for {SILENT_SECONDS:.0f} s")
            except ConnectionError:
                self.check()
                self._fail(f"rank {rank} has closed its connection")

    def check(self) -> None:
        """Raise `RankError` where a worker has ended or hangs."""
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                self._fail(f"rank {rank} (process {process.pid}) has ended with status {process.returncode}")
            silent = (time.monotonic_ns() - self.memory.number(rank, SEEN)) / 1e9
            if silent > SILENT_SECONDS:
                self._fail(f"rank {rank} (process {process.pid}) has given no sign of life for {silent:.0f} s")

    def _fail(self, what: str) -> NoReturn:
        self._give_up(f"{what}; {AGAIN}")
        raise RankError(self._failure)

    def _give_up(self, failure: str) -> None:
        self._failure = self._failure or failure
        for process in self._processes:
            process.kill()
        self.close()


def _end(owner: int, processes: list[subprocess.Popen[bytes]], connections: list[socket.socket], threads: int) -> None:
    """Close the way to the workers, end those that do not end by themselves, and take `threads` threads again."""
    for connection in connections:
        connection.close()
    if os.getpid() != owner:
        return
    torch.set_num_threads(threads)
    until = time.monotonic() + ENDING_SECONDS
    for process in processes:
        try:
            process.wait(max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def load_in_ranks(name: str, setting: str, size: int, dtype: str, device: str, quantization: str | None) -> tuple[LoadedModel, RankGroup]:
    """Rank 0's part of a checkpoint that is split as `setting` has it, and the workers that have the others.

    Raises
    ------
    ConfigError                            this machine or model cannot be split so
    ModelLoadError, UnsupportedModelError  as of `load_model`
    RankError                              a worker has ended, or hangs
    """
    _check_machine(f"{setting} = {size}", size, device)
    check_ranks(name, size, setting == STAGES)
    group = RankGroup(setting, size)
    part = {"model": name, "dtype": dtype, "quantization": quantization}
    try:
        group.tell(part | {"split": setting, "threads": group.num_threads, "isa": compiled.isa()})
        loaded = SPLITS[setting].load(group.memory, name, dtype, quantization)
        group.answers()
    except BaseException:
        group.close()
        raise
    return loaded, group


def _check_machine(asked: str, size: int, device: str) -> None:
    if size > MOST_RANKS:
        raise ConfigError(f"{asked} is more than the {MOST_RANKS} ranks that are served; lower it")
    if devices.chosen_device(device).type != "cpu":
        raise ConfigError(f"{asked} is served on CPUs, and has not been run on GPUs; use device = 'cpu', or leave it out")
    if not compiled.is_built():
        raise ConfigError(f"{asked} needs the compiled kernels ({compiled.REASON}); {compiled.remedy()}")
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise ConfigError(f"{asked} is served on Linux on x86-64, not on {sys.platform} on {platform.machine()}; leave it out")
