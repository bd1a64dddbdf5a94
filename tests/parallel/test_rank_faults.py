"""A worker that ends or hangs ends the requests with an error, and leaves no process and no memory behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import toys

from echelon import LLM, AsyncLLM, EchelonError, SamplingParams
from echelon.aio.engine_thread import STOPPED
from echelon.errors import RankError, UnavailableError
from echelon.ops import compiled
from echelon.parallel import group as room
from echelon.parallel.group import RankGroup

pytestmark = pytest.mark.skipif(not compiled.is_built(), reason="several ranks need the compiled kernels")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ranks") / "llama"
    toys.llama().save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No child, no name in shared memory, no open file, and as many threads as before."""
    files, threads, children = set(Path("/dev/shm").iterdir()), torch.get_num_threads(), set(psutil.Process().children())
    yield
    gc.collect()
    assert set(psutil.Process().children()) == children
    assert set(Path("/dev/shm").iterdir()) == files
    assert torch.get_num_threads() == threads


def split(folder: str) -> LLM:
    return LLM(folder, tensor_parallel_size=2, max_num_seqs=4, kv_cache_memory_bytes=1 << 20)


def in_gather(llm: LLM, which: int, do: Callable[[], None]) -> None:
    """Call `do` in the middle of a pass: before this rank's gather number `which`, counted from now."""
    exchange: Any = llm.engine.target.group.exchange  # type: ignore[attr-defined]
    gathered, count = exchange.gathered, 0

    def counting(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == which:
            do()
        return gathered(*args)

    exchange.gathered = counting


def pids_of(llm: LLM) -> list[int]:
    return llm.engine.target.group.pids  # type: ignore[attr-defined, no-any-return]


def test_a_worker_that_is_killed_while_nothing_runs(folder: str) -> None:
    llm = split(folder)
    prompts = toys.prompts((5, 9))
    assert len(llm.generate(prompts, GREEDY, use_tqdm=False)) == 2
    (pid,) = pids_of(llm)
    os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(EchelonError, match=r"rank 1 .*make a new LLM"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    assert not psutil.pid_exists(pid)
    assert not llm.engine.has_work
    llm.close()


@pytest.mark.parametrize("which", [3, 20])
def test_a_worker_that_is_killed_in_a_step(folder: str, which: int) -> None:
    """In the prompts' pass, of eight gathers besides that of logits, and in one that decodes."""
    with split(folder) as llm:
        (pid,) = pids_of(llm)
        in_gather(llm, which, lambda: os.kill(pid, signal.SIGKILL))
        with pytest.raises(RankError, match="rank 1 "):
            list(llm.stream(toys.prompts((5, 9)), GREEDY))
        assert not psutil.pid_exists(pid)
        assert not llm.engine.has_work


def test_a_worker_that_hangs(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known by its signs of life, which stop; the limit is shortened here, and above the time between two of them."""
    with split(folder) as llm:
        monkeypatch.setattr(room, "SILENT_SECONDS", 2.0)
        (pid,) = pids_of(llm)
        in_gather(llm, 12, lambda: os.kill(pid, signal.SIGSTOP))
        with pytest.raises(RankError, match="has given no sign of life for 2 s"):
            llm.generate(toys.prompts((5, 9)), GREEDY, use_tqdm=False)
        assert not psutil.pid_exists(pid)


def test_a_worker_that_ends_at_the_start(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = RankGroup._start

    def killed(self: RankGroup, *args: Any) -> None:
        start(self, *args)
        self._processes[-1].send_signal(signal.SIGKILL)

    monkeypatch.setattr(RankGroup, "_start", killed)
    with pytest.raises(RankError, match=r"rank 1 .*(ended|closed)"):
        split(folder)


def test_a_worker_that_hangs_at_the_start(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = RankGroup._start

    def stopped(self: RankGroup, *args: Any) -> None:
        start(self, *args)
        self._processes[-1].send_signal(signal.SIGSTOP)

    monkeypatch.setattr(RankGroup, "_start", stopped)
    monkeypatch.setattr(room, "SILENT_SECONDS", 0.5)
    with pytest.raises(RankError, match="no sign of life"):
        split(folder)


def test_there_is_no_memory_to_share(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(room, "shared_memory", full)
    with pytest.raises(EchelonError, match=r"no memory for 2 ranks to share \(No space left on device\)"):
        split(folder)


def test_an_engine_without_its_ranks_ends_all_requests_and_is_known_to_have_failed() -> None:
    """On the server too, whose engine runs in the same thread: no row is tried alone, and its exit status tells."""

    def without_ranks() -> Any:
        raise RankError("rank 1 has ended")

    async def run() -> None:
        async with AsyncLLM(toys.adopted(toys.llama()), max_num_seqs=4) as llm:
            llm.llm.engine.step = without_ranks  # type: ignore[method-assign]
            last = [output async for output in llm.generate([5, 9], GREEDY)][-1].outputs[0]
            assert (last.finish_reason, last.error) == ("error", STOPPED)
            assert llm._thread.has_failed
            await asyncio.to_thread(llm._thread._thread.join)
            with pytest.raises(UnavailableError):
                await llm.check_health()

    asyncio.run(run())


def test_workers_end_with_a_process_that_is_killed(folder: str) -> None:
    code = (
        "import os, signal, sys; from echelon import LLM; "
        f"llm = LLM({folder!r}, tensor_parallel_size=2, kv_cache_memory_bytes=1 << 20); "
        "print(*llm.engine.target.group.pids, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    worker = psutil.Process(int(ended.stdout)) if psutil.pid_exists(int(ended.stdout)) else None
    if worker is not None:
        worker.wait(10)
