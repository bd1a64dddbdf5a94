"""Clocks that know that a CUDA device works on after the host has asked: what is timed ends when the device is done.

Where a device may be at work the host's own clock is read here, or when the host has seen what the device found: after whole steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from echelon.llm import LLM
from echelon.stats import StepTimer

Clock = Callable[[], float]
HEAD_START = 1_000_000  # cycles, about half a millisecond: the device waits, so that launches are queued when it begins


def clock_of(device: torch.device) -> Clock:
    """Seconds; on a CUDA device, once it has done what it was given."""
    if device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def time_parts(llm: LLM) -> None:
    """From now on the parts of a step that is launched and settled at once are told apart by this clock. (What EXSPEC gathers counts as
    forward.)
    """
    clock = clock_of(llm.target.device)
    llm.engine.timer = StepTimer(clock)
    for runner in llm.storage.runners:
        runner.cache.clock = clock


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """How long a call takes; on a CUDA device, how long the device takes for it."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def kernel_seconds(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Seconds that a CUDA device spends in each kernel or copy by name while `call` runs; no gaps between them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize(device)
    return {event.key: event.self_device_time_total / 1e6 for event in profile.key_averages() if event.self_device_time_total > 0}
