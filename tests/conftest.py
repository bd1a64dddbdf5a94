from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from functools import partial
from tempfile import TemporaryDirectory

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; tests of threads ask for two, which must not spin
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():  # Triton decides when it is first imported, by whomever
    os.environ["TRITON_INTERPRET"] = "1"

import toys
from families import FAMILIES

from echelon import build, scheduler
from echelon.drafters.guard import GuardedDrafter
from echelon.ops import compiled

CACHE = TemporaryDirectory(prefix="echelon-tests-")
os.environ["XDG_CACHE_HOME"] = CACHE.name  # nothing of this user is read or kept

settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.load_profile("fixed")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Frameworks and tests stay until the end: the collector need not go over them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def unhurried() -> Iterator[None]:
    """How busy the machine is decides neither in what pieces prompts are read nor which drafter is too slow."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(scheduler, "StepCosts", toys.CostsByTokens)
        monkeypatch.setattr(build, "GuardedDrafter", partial(GuardedDrafter, clock=lambda: 0.0))
        yield


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The test runs with one and with two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=FAMILIES if compiled.is_built() else ["none"])
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs with the kernels of every instruction family that this machine has."""
    best = compiled.isa()
    if request.param not in compiled.offered_isas():
        pytest.skip(f"this machine has no {request.param}")
    compiled.set_isa(request.param)
    yield request.param
    compiled.set_isa(best)
