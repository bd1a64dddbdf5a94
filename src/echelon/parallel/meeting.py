"""Where ranks of one or several machines meet: a store of `torch.distributed`, in which they prove that they hold the same token, and gloo.

Gloo and the store ask nobody who they are (docs/parallel.md). So nothing that comes by them is run before each rank has answered all
others' random numbers by the token; what rank 0 tells afterwards is signed by a key that follows from both.
"""

from __future__ import annotations

import ctypes
import hmac
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
from torch.distributed import DistError, PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from echelon.errors import ConfigError, RankError
from echelon.inputs import first_line
from echelon.parallel.group import AGAIN
from echelon.parallel.pulse import ENDED, MOST_CHARACTERS, Pulse, reason_in
from echelon.parallel.summons import TOKEN, Summons

JOIN_SECONDS = 300.0  # that ranks wait for one another at the start
TICK = timedelta(seconds=0.2)  # between looks at whether the others still live
NEVER = timedelta(days=365)  # the limit of one message: who hangs is known by the pulse
LOOK_SECONDS = 0.02  # between looks into the store
SIGNATURE = 64  # characters of one there


class Meeting:
    """All ranks of `summons` have come, and hold the same token.

    setting   how the model is split, which all must have been told alike
    key       what ranks sign by
    has_left  it is over
    """

    def __init__(self, setting: str, summons: Summons) -> None:
        self.rank, self.size, self.has_left, self._own = summons.rank, summons.size, False, summons.own
        self._groups: list[Any] = []
        prefix = f"echelon/{summons.round}"
        try:
            self._base = _store(summons)
            self.store = PrefixStore(prefix, self._base)
            self.key = self._prove(summons.token.encode(), setting)
            host = self._base.host
            pulse_store = TCPStore(host, self._base.port, None, False, timedelta(seconds=JOIN_SECONDS))
            self.pulse = Pulse(PrefixStore(prefix, pulse_store), self.rank, self.size)
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} cannot meet the others at {summons.host}:{summons.port}: {first_line(error)}") from error

    def _prove(self, token: bytes, setting: str) -> bytes:
        """Answer everybody's random number, and check all answers."""
        if self.store.add(f"joined/{self.rank}", 1) != 1:
            raise RankError(f"rank {self.rank} has come already: two processes have its number, or {AGAIN} with all ranks")
        self.store.set(f"number/{self.rank}", secrets.token_hex(16))
        numbers = b"/".join(self._given("number", rank) for rank in range(self.size))
        said = f"echelon {version('echelon')}, torch {torch.__version__}, {setting} = {self.size}, ".encode()

        def answer(who: str) -> bytes:
            return hmac.digest(token, said + who.encode() + numbers, "sha256")

        self.store.set(f"answer/{self.rank}", answer(str(self.rank)).hex())
        for rank in range(self.size):
            given = self._given("answer", rank)
            if not hmac.compare_digest(given, answer(str(rank)).hex().encode()):
                raise RankError(f"rank {rank} has another {TOKEN} than rank {self.rank}, or other settings or versions of echelon or torch")
        return answer("key")

    def _given(self, what: str, rank: int) -> bytes:
        """What a rank has put into the store, awaited."""
        until = time.monotonic() + JOIN_SECONDS
        while not self.store.check([f"{what}/{rank}"]):
            if time.monotonic() > until:
                raise RankError(f"rank {rank} has not come within {JOIN_SECONDS:.0f} s; start all {self.size} ranks")
            time.sleep(LOOK_SECONDS)
        return bytes(self.store.get(f"{what}/{rank}"))

    def post(self, name: str, value: bytes) -> None:
        """Put a signed value into the store."""
        self.store.set(name, (self._signature(name, value) + value).decode())

    def read(self, name: str, check: Callable[[], None]) -> bytes:
        """What another rank has posted, awaited; `check` raises where it is gone."""
        try:
            while not self.store.check([name]):
                check()
                time.sleep(LOOK_SECONDS)
            signed = bytes(self.store.get(name))
        except DistError as error:
            raise RankError(f"the store in which ranks meet is gone ({first_line(error)}); {AGAIN}") from error
        signature, value = signed[:SIGNATURE], signed[SIGNATURE:]
        if not hmac.compare_digest(signature, self._signature(name, value)):
            raise RankError(f"{name!r} in the store is not what a rank has signed; {AGAIN}")
        return value

    def _signature(self, name: str, value: bytes) -> bytes:
        return hmac.digest(self.key, name.encode() + b"\0" + value, "sha256").hex().encode()

    def group(self, name: str, *members: int) -> Any:
        """A way among some ranks, this one among them; all of them make it. It listens at this machine's address on the way to rank 0."""
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        device = {"interface": interface} if interface else {"hostname": self._own}
        options._devices, options._timeout, options._threads = (
            [gloo.create_device(**device)],
            timedelta(seconds=JOIN_SECONDS),
            1,
        )
        group = gloo(PrefixStore(name, self.store), members.index(self.rank), len(members), options)
        group._set_default_timeout(NEVER)
        self._groups.append(group)
        return group

    def wait(self, work: Any) -> None:
        """Until a message has gone, or come.

        Raises
        ------
        RankError  another rank has ended, or hangs
        """
        while not work.is_completed():
            try:
                work.wait(TICK)
            except RuntimeError:
                if not work.is_completed():
                    self.check()
        try:
            work.wait(TICK)
        except RuntimeError as error:
            raise RankError(self.reason() or f"another rank has ended ({first_line(error)}); {AGAIN}") from error

    def check(self) -> None:
        """Raise `RankError` where a rank has ended or hangs."""
        self.pulse.check()

    def say_why(self, reason: str) -> None:
        """Tell the others, as far as they can be reached, why this rank ends."""
        try:
            self.store.set(ENDED, f"rank {self.rank}: {reason}"[:MOST_CHARACTERS])
        except RuntimeError:
            return

    def reason(self) -> str:
        """Why another rank has ended, as it has said; empty where it has not."""
        try:
            return reason_in(self.store)
        except RuntimeError:
            return ""

    def leave(self, has_failed: bool) -> None:
        """Give no more signs of life. After a failure nobody waits for messages under way, as the end of a group of gloo would."""
        if self.has_left:
            return
        self.has_left = True
        self.pulse.stop()
        for group in self._groups if has_failed else ():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _store(summons: Summons) -> TCPStore:
    """The store at the address that all ranks know. Rank 0 opens it there and nowhere else, where `torchrun` has not."""
    patience = timedelta(seconds=JOIN_SECONDS)
    if summons.rank or summons.has_store:
        return TCPStore(summons.host, summons.port, None, False, patience)
    try:
        family = socket.AF_INET6 if ":" in summons.own else socket.AF_INET
        listener = socket.create_server((summons.own, summons.port), family=family)
    except OSError as error:
        where = f"{summons.own}:{summons.port}"
        raise ConfigError(f"rank 0 cannot listen at {where} ({error.strerror}); choose another MASTER_PORT or MASTER_ADDR") from error
    return TCPStore(summons.own, summons.port, None, True, patience, False, master_listen_fd=listener.detach())
