"""How ranks find and prove one another, and what they send by gloo, with a thread in the place of each process."""

from __future__ import annotations

import re
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from meetings import at_once, meetings, summonses
from torch import Tensor

from echelon.config import RANKS
from echelon.errors import ConfigError, RankError
from echelon.model.patches.split import Part, Parts, parts_of
from echelon.parallel import joined, meeting, pulse, summons
from echelon.parallel.joined import summons_for
from echelon.parallel.meeting import Meeting
from echelon.parallel.messages import FRAME, GroupExchange, GroupHandover, Told
from echelon.parallel.summons import NEEDED, TOKEN, summoned

LOOPBACK = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
GOOD, OTHER = "a token of this test", "a token of others'"


@pytest.fixture(autouse=True)
def nobody_is_summoned(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NEEDED, TOKEN, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def test_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert summoned() is None
    for name, value in LOOPBACK.items():
        monkeypatch.setenv(name, value)
    found = summoned()
    assert found is not None
    assert (found.rank, found.size, found.own, found.is_loopback, found.has_store) == (1, 2, "127.0.0.1", True, False)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 4, and WORLD_SIZE is 2.*unset RANK"):
        summons_for("tensor_parallel_size = 4", 4)
    monkeypatch.setenv("WORLD_SIZE", "1")  # one process, which starts its ranks itself
    assert summons_for("tensor_parallel_size = 4", 4) is None


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"MASTER_PORT": None, "RANK": None}, "RANK, MASTER_PORT not"),
        ({"RANK": "2"}, "RANK is 2 where WORLD_SIZE is 2"),
        ({"MASTER_PORT": "many"}, "MASTER_PORT is 'many'"),
        ({"MASTER_ADDR": "no.such.host.invalid"}, "MASTER_ADDR 'no.such.host.invalid' cannot be reached"),
        ({TOKEN: "short"}, f"{TOKEN} has 5 characters; set one of at least 16"),
    ],
)
def test_what_torchrun_cannot_say(changed: dict[str, str | None], match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (LOOPBACK | changed).items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=match):
        summoned()


def test_beyond_loopback_there_has_to_be_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summons, "_own_address", lambda *_: "192.0.2.7")
    for name, value in (LOOPBACK | {"MASTER_ADDR": "192.0.2.8"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"is not set, and ranks meet beyond loopback, at 192\.0\.2\.8"):
        summoned()
    monkeypatch.setenv(TOKEN, GOOD)
    found = summoned()
    assert found is not None and not found.is_loopback


def refused(*tokens: str, settings: tuple[str, str] = (RANKS[0], RANKS[0])) -> list[Any]:
    asked = summonses(2, *tokens)
    return at_once(lambda rank: Meeting(settings[rank], asked[rank]), 2)


def test_who_has_another_token_is_known_by_all() -> None:
    for rank, error in enumerate(refused(GOOD, OTHER)):
        assert isinstance(error, RankError) and re.search(f"rank {1 - rank} has another {TOKEN}", str(error)), error


def test_who_splits_another_way_is_known_by_all() -> None:
    assert all("or other settings" in str(error) for error in refused(GOOD, GOOD, settings=RANKS))


def test_a_rank_that_never_comes_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = count(0.0, 100.0)
    with monkeypatch.context() as patch:
        patch.setattr(meeting, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None))
        with pytest.raises(RankError, match=r"rank 1 has not come within 300 s; start all 2 ranks"):
            Meeting(RANKS[0], summonses(2)[0])
    monkeypatch.setattr(meeting, "JOIN_SECONDS", 0.2)
    with pytest.raises(RankError, match="rank 1 cannot meet the others at 127"):
        Meeting(RANKS[0], summonses(2)[1])


def test_a_number_is_given_once() -> None:
    with meetings(2) as (first, _):
        assert first.store.add("joined/1", 1) == 2
    asked = summonses(2)
    twice = at_once(lambda rank: Meeting(RANKS[0], asked[min(rank, 1)]), 3)
    assert sum(isinstance(one, RankError) and "has come already" in str(one) for one in twice) == 1
    for one in twice:
        if isinstance(one, Meeting):
            one.leave(has_failed=False)


def test_an_address_that_is_taken() -> None:
    asked = summonses(2)
    with meetings(2) as (first, _):
        taken = type(asked[0])(0, 2, "127.0.0.1", first._base.port, "127.0.0.1", "", False, "0")
        with pytest.raises(ConfigError, match=r"rank 0 cannot listen at 127.*choose another MASTER_PORT"):
            Meeting(RANKS[0], taken)


def test_ranks_of_one_process_serve_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "_has_met", True)
    with pytest.raises(ConfigError, match="serve one LLM, and have served it; start all of them again"):
        joined.JoinedRanks(RANKS[0], summonses(2)[0])


PARTS: list[Parts] = [parts_of(96, 2), parts_of(200, 2, 8), (Part(0, 3, 4), Part(3, 4, 4)), (Part(0, 0, 5), Part(0, 5, 5))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_rank_gets_the_columns_of_all(dtype: torch.dtype) -> None:
    """Also of no row, and where a rank has no column; the first alone gets what is its own."""
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(1, rows, parts[0].whole, generator=generator).to(dtype) for parts in PARTS for rows in (0, 1, 7)]
    with meetings(2) as met:

        def work(rank: int) -> list[Tensor]:
            link, got = GroupExchange(met[rank]), []
            with link.connected(7):
                for number, whole in enumerate(wholes):
                    parts = PARTS[number // 3]
                    own = whole[..., parts[rank].first : parts[rank].last]
                    got += [link.gathered(own, parts), link.gathered_by_first(own, parts)]
            return got

        first, second = at_once(work, 2)
    assert isinstance(first, list) and isinstance(second, list), (first, second)
    for number, whole in enumerate(wholes):
        assert all(torch.equal(got, whole) for got in (first[2 * number], first[2 * number + 1], second[2 * number]))
        assert second[2 * number + 1].shape == whole.shape


@pytest.mark.parametrize("size", [2, 3])
def test_hidden_states_go_round(size: int) -> None:
    parts = [torch.randint(99, (1 + i % 5, 24), generator=torch.Generator().manual_seed(i)).float() for i in range(7)]
    with meetings(size) as met:

        def work(rank: int) -> list[Tensor]:
            link, got = GroupHandover(met[rank]), []
            with link.connected(1):
                for number, part in enumerate(parts):
                    if rank:
                        link.send(link.receive(torch.empty_like(part), 1) + 1, 1)
                        continue
                    link.send(part, 1)
                    if number >= size - 1:
                        got.append(link.receive(torch.empty_like(parts[number - size + 1]), 1))
                got += [] if rank else [link.receive(torch.empty_like(part), 1) for part in parts[len(parts) - size + 1 :]]
            return got

        got, *_ = at_once(work, size)
    assert isinstance(got, list), got
    assert all(torch.equal(a, b + size - 1) for a, b in zip(got, parts, strict=True))


def test_ranks_with_other_plans_notice() -> None:
    with meetings(2) as met:

        def work(rank: int) -> None:
            link = GroupExchange(met[rank])
            with link.connected(rank):
                link.gathered(torch.zeros(1, 1), parts_of(2, 2))

        assert all("runs another plan" in str(error) for error in at_once(work, 2))


def test_what_rank_0_tells_is_signed() -> None:
    """Short and long messages come in order; one that somebody else has signed is refused."""
    messages = [b"", b"one", b"x" * FRAME, bytes(range(256)) * 100, b"the last"]
    with meetings(2) as met:

        def work(rank: int) -> list[bytes]:
            told = Told(met[rank])
            if rank:
                got = [told.next() for _ in messages]
                with pytest.raises(RankError, match=r"message 6 is not what rank 0 has signed"):
                    told.next()
                return got
            for message in messages:
                told.tell(message)
            met[0].key = b"another"
            told.tell(b"and more")
            told._meeting.wait(told._under_way[-1][-1][0])
            return messages

        assert at_once(work, 2) == [messages, messages]


def test_what_ranks_post_is_signed() -> None:
    with meetings(2) as (first, second):
        second.post("done/1/1", b"{}")
        assert first.read("done/1/1", first.check) == b"{}"
        second.store.set("done/1/2", b"0" * 64 + b"{}")
        with pytest.raises(RankError, match="is not what a rank has signed"):
            first.read("done/1/2", first.check)


def test_who_is_silent_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever waits for a message, too."""
    with meetings(2) as met:
        groups = at_once(lambda rank: met[rank].group("way", 0, 1), 2)
        met[1].pulse.stop()
        monkeypatch.setattr(pulse, "SILENT_SECONDS", 0.3)
        group: Any = groups[0]
        work = group.broadcast(torch.zeros(1), 1)
        with pytest.raises(RankError, match=r"rank 1 has given no sign of life for \d+ s"):
            met[0].wait(work)
        other: Any = groups[1]
        other.broadcast(torch.zeros(1), 1).wait()
        met[1].say_why("it was told to")
        assert met[0].reason() == "rank 1: it was told to"
