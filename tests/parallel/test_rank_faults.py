"""A worker that ends or hangs ends the requests with an error, and leaves no process and no memory behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import toys

from echelon import LLM, AsyncLLM, EchelonError, SamplingParams
from echelon.aio.engine_thread import STOPPED
from echelon.config import RANKS
from echelon.errors import RankError, UnavailableError
from echelon.ops import compiled
from echelon.parallel import children as room
from echelon.parallel import stages
from echelon.parallel.children import ChildRanks
from echelon.parallel.exchange import SharedExchange
from echelon.parallel.splits import STAGES, TENSOR

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


SPLIT = {"num_speculative_tokens": 3, "method": "ngram"}
FAULTS = {"ends": (signal.SIGKILL, r"rank 1 .*(ended|closed)"), "hangs": (signal.SIGSTOP, r"rank 1 .*has given no sign of life for \d+ s")}
WITHIN = {"ends": 5.0, "hangs": 7.0}  # seconds until requests have their error: 15 where one hangs, less the 8 by which it is known earlier
ROUNDS = range(50 if toys.PROVE else 1)  # of each
PHASES = ("prefill", "draft", "verify", "idle")
CASES = [(setting, fault, phase) for setting in RANKS for fault in FAULTS for phase in PHASES]
SHORT = [(TENSOR, "ends", "prefill"), (TENSOR, "ends", "idle"), (TENSOR, "hangs", "verify"), (STAGES, "ends", "verify")]


@pytest.fixture(autouse=True)
def rows_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """In stages one row is under way while another is drafted for and verified."""
    monkeypatch.setattr(stages, "FEWEST_IN_LANE", 1)


def split(folder: str, setting: str = TENSOR) -> LLM:
    return LLM(folder, SPLIT, **{setting: 2}, max_num_seqs=4, kv_cache_memory_bytes=1 << 20)


def group_of(llm: LLM) -> ChildRanks:
    return llm.engine.target.group  # type: ignore[attr-defined, no-any-return]


def strike(llm: LLM, phase: str, do: Callable[[], None]) -> None:
    """Call `do` once, in the middle of the prompts' pass or of one that verifies, before this rank writes for others; or before a draft."""
    owner: Any = llm.engine.drafter if phase == "draft" else llm.engine.target
    name = "propose" if phase == "draft" else "begin"
    call, left = getattr(owner, name), 1 if phase == "prefill" else 2

    def counting(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and phase == "draft":
            do()
        elif left == 0:
            before_writing(llm, do)
        return call(*args)

    setattr(owner, name, counting)


def before_writing(llm: LLM, do: Callable[[], None]) -> None:
    memory: Any = group_of(llm).memory
    written, left = memory._raise, 2 if isinstance(memory, SharedExchange) else 1  # in stages a pass has one hidden state to hand on

    def counting(*args: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            do()
        written(*args)

    memory._raise = counting


@pytest.mark.parametrize(("setting", "fault", "phase"), CASES if toys.PROVE else SHORT)
@pytest.mark.parametrize("_", ROUNDS)
def test_a_worker_that_fails(setting: str, fault: str, phase: str, _: int, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests end with its error, and every later one; no request is left in the engine. One that hangs is known by its signs of life,
    which stop; the limit is shortened here from 10 s, and above the time between two of them.
    """
    number, match = FAULTS[fault]
    prompts, struck = toys.prompts((5, 9)), [0.0]
    with split(folder, setting) as llm:
        if fault == "hangs":
            monkeypatch.setattr(room, "SILENT_SECONDS", 2.0)
        (pid,) = group_of(llm).pids

        def fail() -> None:
            struck[0] = time.monotonic()
            os.kill(pid, number)

        if phase == "idle":
            assert len(llm.generate(prompts, GREEDY, use_tqdm=False)) == 2
            fail()
        else:
            strike(llm, phase, fail)
        with pytest.raises(RankError, match=f"{match}.*make a new LLM"):
            list(llm.stream(prompts, GREEDY))
        assert not toys.PROVE or 0.0 < time.monotonic() - struck[0] < WITHIN[fault]
        assert not psutil.pid_exists(pid)
        assert not llm.engine.has_work
        with pytest.raises(EchelonError, match=r"rank 1 .*make a new LLM"):
            llm.generate(prompts, GREEDY, use_tqdm=False)


def test_two_engines_at_once_keep_apart(folder: str) -> None:
    """One fails; the other says what it has said, and the threads of this process come back with the last."""
    prompts = toys.prompts((5, 9))
    first, second = split(folder, TENSOR), split(folder, STAGES)
    expected = [o.outputs[0].token_ids for o in second.generate(prompts, GREEDY, use_tqdm=False)]
    assert [o.outputs[0].token_ids for o in first.generate(prompts, GREEDY, use_tqdm=False)] == expected
    os.kill(group_of(first).pids[0], signal.SIGKILL)
    with pytest.raises(RankError):
        first.generate(prompts, GREEDY, use_tqdm=False)
    first.close()
    assert [o.outputs[0].token_ids for o in second.generate(prompts, GREEDY, use_tqdm=False)] == expected
    second.close()


@pytest.mark.parametrize("setting", RANKS if toys.PROVE else RANKS[1:])
@pytest.mark.parametrize("_", ROUNDS)
def test_a_worker_may_be_late_and_may_not_be_told_something_else(setting: str, _: int, folder: str) -> None:
    """It stands still in a pass for a while, and the texts are the same; then it gets the last plan again, which does not follow it."""
    prompts = toys.prompts((5, 9))
    with split(folder, setting) as llm:
        group = group_of(llm)
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
        (pid,) = group.pids
        alarm = threading.Timer(0.7, os.kill, (pid, signal.SIGCONT))

        def stop() -> None:
            os.kill(pid, signal.SIGSTOP)
            alarm.start()

        strike(llm, "verify", stop)
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == expected
        alarm.join()
        packed, before = group._writer.packed, b""

        def again(*args: Any) -> bytes:
            nonlocal before
            before = before or packed(*args)
            return before

        group._writer.packed = again  # type: ignore[method-assign]
        with pytest.raises(RankError, match=r"rank 1 .*ended with status 1"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("setting", RANKS if toys.PROVE else RANKS[:1])
@pytest.mark.parametrize("_", ROUNDS)
def test_a_worker_that_ends_at_the_start(setting: str, _: int, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = ChildRanks._start

    def killed(self: ChildRanks, *args: Any) -> None:
        start(self, *args)
        self._processes[-1].send_signal(signal.SIGKILL)

    monkeypatch.setattr(ChildRanks, "_start", killed)
    with pytest.raises(RankError, match=r"rank 1 .*(ended|closed)"):
        split(folder, setting)


@pytest.mark.parametrize("setting", RANKS if toys.PROVE else RANKS[:1])
@pytest.mark.parametrize("_", ROUNDS)
def test_a_worker_that_hangs_at_the_start(setting: str, _: int, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = ChildRanks._start

    def stopped(self: ChildRanks, *args: Any) -> None:
        start(self, *args)
        self._processes[-1].send_signal(signal.SIGSTOP)

    monkeypatch.setattr(ChildRanks, "_start", stopped)
    monkeypatch.setattr(room, "SILENT_SECONDS", 0.5)
    with pytest.raises(RankError, match="no sign of life"):
        split(folder, setting)


@pytest.mark.parametrize("_", ROUNDS)
def test_there_is_no_memory_to_share(_: int, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with suppress(psutil.NoSuchProcess):  # it may have ended by now
        psutil.Process(int(ended.stdout)).wait(10)
