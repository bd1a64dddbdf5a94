"""Nothing that a drafter raises, proposes or takes its time for changes a text: one table of each, and a clock that is told the time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import toys
from torch import Tensor

from echelon import LLM, SamplingParams
from echelon.draft import Draft, RowVerdict, Verdict
from echelon.drafters.base import Drafter
from echelon.drafters.guard import MOST_FAILURES, GuardedDrafter
from echelon.errors import EchelonError
from echelon.sampling import Sampler
from echelon.sequence import PlannedRow, Sequence
from echelon.stats import Usage

Rows = SequenceOf[PlannedRow]
LENGTHS = (5, 1, 17)
PARAMS = [SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=6) for i in range(len(LENGTHS))]
CONFIGS: dict[str, dict[str, Any]] = {
    "exact": {"method": "ngram", "num_speculative_tokens": 4},
    "rejection": {"method": "draft_model", "num_speculative_tokens": 4, "acceptance": "rejection"},
    "typical": {"method": "draft_model", "num_speculative_tokens": 4, "acceptance": "typical"},
}


@cache
def engine_of(acceptance: str) -> LLM:
    """One for all cases; each has a guard of its own."""
    model = toys.adopted(toys.llama())
    config = CONFIGS[acceptance]
    draft = toys.adopted(toys.noisy_copy(toys.llama(), 0.02)) if config["method"] == "draft_model" else None
    return LLM(model, config, draft, max_num_seqs=len(LENGTHS), block_size=4)


@cache
def truth() -> list[list[int]]:
    return tokens_of(LLM(toys.adopted(toys.llama()), max_num_seqs=1))


def tokens_of(llm: LLM) -> list[list[int]]:
    outputs = [o.outputs[0] for o in llm.generate(toys.prompts(LENGTHS), PARAMS)]
    assert [o.error for o in outputs] == [None] * len(outputs)
    return [o.token_ids for o in outputs]


# What is raised


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("nor can this be told")

    __repr__ = __str__


class QuitterError(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class NoTextError(Exception):
    def __str__(self) -> Any:  # type: ignore[override]
        return 5  # noqa: PLE0307


class PlacelessError(EchelonError):
    @property
    def place(self) -> str:  # type: ignore[override]
        raise GeneratorExit


class CauselessError(Exception):
    @property
    def __cause__(self) -> Any:  # type: ignore[override]
        raise MuteError


class Nameless(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise SystemExit(4)


class UnnamedError(Exception, metaclass=Nameless): ...


def endless() -> None:
    endless()


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


ERRORS: dict[str, Callable[[], None]] = {
    "RuntimeError": raising(RuntimeError("out of luck")),
    "MemoryError": raising(MemoryError()),
    "RecursionError": endless,
    "StopIteration": raising(StopIteration()),
    "SystemExit": raising(SystemExit(1)),
    "GeneratorExit": raising(GeneratorExit()),
    "CancelledError": raising(asyncio.CancelledError()),
    "BaseException": raising(BaseException("bare")),
    "group": raising(ExceptionGroup("two", [ValueError("a"), KeyError("b")])),
    "base group": raising(BaseExceptionGroup("two", [SystemExit(2), MuteError()])),
    "str raises": raising(MuteError()),
    "str exits": raising(QuitterError()),
    "str is none": raising(NoTextError()),
    "huge text": raising(ValueError("x" * 10**7)),
    "place raises": raising(PlacelessError()),
    "cause raises": raising(CauselessError()),
    "name raises": raising(UnnamedError()),
}


class Scripted(Drafter):
    """Proposes noise; `instead` is done in place of one of the calls, or made of a proposal."""

    hidden_state_names: tuple[str, ...] = ()

    def __init__(self, call: str, instead: Callable[..., Any]) -> None:
        self._call, self._instead = call, instead

    def propose(self, rows: Rows) -> Any:
        if self._call == "propose":
            self._instead()
        good = Draft.chains([[7] * row.max_draft_tokens for row in rows])
        return self._instead(good) if self._call == "draft" else good

    def observe(self, rows: Rows, verdict: Verdict, hidden_states: Tensor | None) -> None:
        if self._call == "observe":
            self._instead()

    def forget(self, row: int) -> None:
        if self._call == "forget":
            self._instead()


def behind_a_wall(acceptance: str, drafter: Scripted) -> tuple[list[list[int]], GuardedDrafter]:
    llm = engine_of(acceptance)
    guard = GuardedDrafter(drafter, toys.VOCABULARY, grows_trees=acceptance == "typical", clock=lambda: 0.0)
    own, llm.engine.drafter = llm.engine.drafter, guard
    found = None
    try:
        found = tokens_of(llm)
    except (KeyboardInterrupt, AssertionError):
        raise
    except BaseException:
        pass  # what came through is not even to be shown
    finally:
        llm.engine.drafter = own
    assert found is not None, "it came through the wall"
    toys.assert_all_blocks_free(llm)
    return found, guard


@pytest.mark.parametrize("call", ["propose", "observe", "forget"])
@pytest.mark.parametrize("error", ERRORS)
def test_whatever_a_drafter_raises_costs_no_token(error: str, call: str) -> None:
    found, guard = behind_a_wall("exact", Scripted(call, ERRORS[error]))
    assert found == truth()
    assert guard.faults["raised"] >= MOST_FAILURES


def test_a_drafter_does_not_stop_who_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt):
        behind_a_wall("exact", Scripted("propose", raising(KeyboardInterrupt())))
    assert behind_a_wall("exact", Scripted("", lambda: None))[0] == truth()


# What is proposed


class Trap:
    """Whatever is asked of it ends the process."""

    def __getattr__(self, name: str) -> Any:
        raise SystemExit(name)


class Liar(Draft):
    """Says something else whenever it is asked again."""

    def row(self, i: int) -> list[int]:
        return [toys.VOCABULARY + 5] * len(super().row(i))

    def row_parents(self, i: int) -> list[int]:
        return [9] * len(super().row(i))


@dataclass
class Fickle:
    """A draft whose tokens are out of the vocabulary when they are read for the second time."""

    good: Draft

    def __post_init__(self) -> None:
        self._reads = itertools.count()

    @property
    def tokens(self) -> Any:
        return self.good.tokens + (0 if next(self._reads) == 0 else toys.VOCABULARY)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.good, name)


# of the right array of a field, something of another type, length or value
CHANGES: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "text": lambda _: "tokens",
    "number": lambda _: 5,
    "list": lambda a: a.tolist(),
    "trap": lambda _: Trap(),
    "floats": lambda a: a.astype(np.float64),
    "halves": lambda a: a.astype(np.float16),
    "bools": lambda a: a.astype(bool),
    "strings": lambda a: a.astype(str),
    "complex": lambda a: a.astype(np.complex128),
    "objects": lambda a: a.astype(object),
    "traps": lambda a: np.array([Trap() for _ in a.reshape(-1)] or [Trap()], dtype=object),
    "unsigned": lambda a: a.astype(np.uint32),
    "bytes": lambda a: a.astype(np.int8),
    "swapped bytes": lambda a: a.astype(a.dtype.newbyteorder()),
    "dates": lambda a: a.astype(np.int64).astype("datetime64[s]"),
    "tensor": torch.from_numpy,
    "masked": np.ma.masked_all_like,
    "scalar": lambda a: a.reshape(-1)[:1].reshape(()) if a.size else np.zeros((), a.dtype),
    "two columns": lambda a: np.stack([a, a], -1),
    "short": lambda a: a[:-1],
    "long": lambda a: np.concatenate([a, a[-1:], a[-1:]]),
    "empty": lambda a: a[:0],
    "negative": lambda a: a - 1000,
    "huge": lambda a: a.astype(np.int64) + 2**62,
    "nan": lambda a: np.full(a.shape, np.nan),
    "infinite": lambda a: np.full(a.shape, np.inf),
    "backwards": lambda a: a[::-1],
    "cyclic": lambda a: np.arange(len(a), dtype=np.int32)[::-1].copy(),
}
FIELDS: dict[str, Callable[[Draft], Any]] = {
    "tokens": lambda draft: draft.tokens,
    "parents": lambda draft: draft.parents,
    "indptr": lambda draft: draft.indptr,
    "probs": lambda draft: np.full((len(draft.tokens), toys.VOCABULARY), 1 / toys.VOCABULARY),
}
WHOLE: dict[str, Callable[[Draft], Any]] = {
    "none": lambda _: None,
    "text": lambda _: "draft",
    "trap": lambda _: Trap(),
    "class": lambda _: Draft,
    "liar": lambda draft: Liar(draft.tokens, draft.parents, draft.indptr),
    "fickle": Fickle,
    "twins": lambda draft: Draft.trees([([7] * n, [-1] * n) for n in draft.num_draft_tokens.tolist()]),
}


DRAFTS: dict[str, Callable[[Draft], Any]] = WHOLE | {
    f"{field}: {name}": lambda draft, f=field, n=name: replace(draft, **{f: CHANGES[n](FIELDS[f](draft))})  # type: ignore[misc]
    for field, name in itertools.product(FIELDS, CHANGES)
}
OWN_RULE = [name for name in DRAFTS if toys.PROVE or name.startswith(("probs", "liar"))]  # what another rule reads


@pytest.mark.parametrize(("acceptance", "name"), [("exact", n) for n in DRAFTS] + [(a, n) for a in list(CONFIGS)[1:] for n in OWN_RULE])
def test_whatever_a_drafter_proposes_costs_no_token(acceptance: str, name: str) -> None:
    """Where drafts are kept by another rule than equality, a good one may change the text, and only refused ones are compared."""
    found, guard = behind_a_wall(acceptance, Scripted("draft", DRAFTS[name]))
    is_refused = guard.faults["raised"] + guard.faults["garbage"] >= MOST_FAILURES
    assert found == truth() if acceptance == "exact" or is_refused else len(found) == len(truth())


# What it takes its time for


class Slow(Drafter):
    """Takes `seconds` for one kind of call, by a clock that only it and the steps of the target move."""

    hidden_state_names: tuple[str, ...] = ()

    def __init__(self, call: str, seconds: float) -> None:
        self.call, self.seconds, self.now = call, seconds, 0.0
        self.calls: list[float] = []

    def _take(self, call: str) -> None:
        if call == self.call:
            self.calls.append(self.now)
            self.now += self.seconds

    def propose(self, rows: Rows) -> Draft:
        self._take("propose")
        return Draft.chains([[7] if row.max_draft_tokens else [] for row in rows])

    def observe(self, rows: Rows, verdict: Verdict, hidden_states: Tensor | None) -> None:
        self._take("observe")

    def forget(self, row: int) -> None:
        self._take("forget")


def rows_of(num_new: int) -> list[PlannedRow]:
    return [PlannedRow(Sequence(4, [1, 2], 2, Sampler(SamplingParams(), 4), frozenset(), 9), 0, num_new, 3, 3)]


def steps(guard: GuardedDrafter, slow: Slow, seconds: float, count: int, num_new: int = 1) -> None:
    """So many steps of the target, each with a row that is dropped."""
    rows = rows_of(num_new)
    for _ in range(count):
        guard.propose(rows)
        slow.now += seconds
        guard.observe(rows, [RowVerdict(1, [], [], 1)], None)
        guard.forget(4)


def guarded(slow: Slow) -> GuardedDrafter:
    return GuardedDrafter(slow, toys.VOCABULARY, clock=lambda: slow.now)


@pytest.mark.parametrize("call", ["propose", "observe", "forget"])
@pytest.mark.parametrize("step", [0.001, 0.01, 0.09])
@pytest.mark.parametrize("share", [1.1, 1.5, 5.0, 50.0])
@pytest.mark.parametrize("seconds", [0.45, 0.6, 1.9, 2.1, 9.5, 10.5, 60.0])
def test_a_slow_drafter_keeps_a_stream_waiting_2_seconds_and_one_call(seconds: float, share: float, step: float, call: str) -> None:
    """Then it is left out, whatever of it is slow."""
    step = min(step, seconds / 20 / share)  # so that it takes more than 20 steps
    slow = Slow(call, seconds)
    guard = guarded(slow)
    steps(guard, slow, step, 100)
    first = [at for at in slow.calls if at < slow.calls[0] + 29.0]
    assert guard.faults["too slow"] >= 1 and guard.faults["cut off"] > 0
    assert len(first) * (seconds - 20 * step) <= 2.0 + seconds
    assert seconds <= 2.0 or len(first) == 1


def test_pauses_of_a_drafter_that_stays_slow_double() -> None:
    slow = Slow("propose", 9.5)
    guard = guarded(slow)
    steps(guard, slow, 0.25, 4 * 600)
    pauses = np.diff(slow.calls)
    assert pauses.round().tolist() == [40, 70, 130, 250]
    assert guard.faults == {"too slow": 5, "cut off": guard.faults["cut off"]}
    slow.seconds = 0.0
    steps(guard, slow, 1.0, 700)
    assert guard.faults["too slow"] == 5  # it drafts again,
    slow.seconds = 9.5
    last = len(slow.calls)
    steps(guard, slow, 0.25, 4 * 50)
    assert np.diff(slow.calls[last:]).round().tolist() == [40]  # and all is forgiven


@pytest.mark.parametrize(("seconds", "step"), [(0.019, 0.001), (0.49, 0.025), (1.9, 0.1), (1.99, 0.5), (3.0, 3.1), (29.0, 30.0)])
@pytest.mark.parametrize("call", ["propose", "observe", "forget"])
def test_a_drafter_may_take_as_long_as_20_steps(seconds: float, step: float, call: str) -> None:
    slow = Slow(call, seconds)
    guard = guarded(slow)
    steps(guard, slow, step, 300)
    assert not guard.faults
    assert len(slow.calls) == 300


@pytest.mark.parametrize("call", ["propose", "observe"])
def test_a_drafter_may_read_a_prompt_as_long_as_the_target_does(call: str) -> None:
    """Which takes many steps' time; once it has read it, it has that no more."""
    slow = Slow(call, 0.0)
    guard = guarded(slow)
    steps(guard, slow, 0.01, 100)
    slow.seconds = 25.0
    steps(guard, slow, 30.0, 1, num_new=512)
    assert not guard.faults
    slow.seconds = 0.0
    steps(guard, slow, 0.01, 100)
    slow.seconds = 25.0
    steps(guard, slow, 0.01, 1)
    assert guard.faults == {"too slow": 1}


def test_one_that_is_deaf_stays_so_when_another_proposal_was_slow() -> None:
    """Steps of lanes: it was slow to hear of one, and slow before to propose for another, which is settled later."""
    slow = Slow("observe", 0.0)
    guard, kept = guarded(slow), [RowVerdict(1, [], [], 1)]
    steps(guard, slow, 0.1, 20)
    lanes = [[PlannedRow(Sequence(i, [1, 2], 2, Sampler(SamplingParams(), i), frozenset(), 9), 0, 1, 3, 3)] for i in (5, 6)]
    for rows in lanes:
        guard.propose(rows)
    slow.seconds = 9.5
    guard.observe(lanes[0], kept, None)
    assert guard._is_deaf
    guard._proposed[6] = (slow.now, 9.5)
    guard.observe(lanes[1], kept, None)
    assert guard._is_deaf and 6 in guard._unheard


def test_a_slow_drafter_costs_no_token_and_metrics_say_why() -> None:
    llm = engine_of("exact")
    slow = Slow("propose", 9.5)
    own, faults = llm.engine.drafter, llm.stats.drafter_faults
    guard = guarded(slow)
    llm.engine.drafter, llm.stats.drafter_faults = guard, guard.faults
    try:
        assert tokens_of(llm) == truth()
        reported = llm.get_counters()["drafter_faults"]
    finally:
        llm.engine.drafter, llm.stats.drafter_faults = own, faults
    assert reported["too slow"] == 1 and reported["cut off"] > 0
    assert len(slow.calls) == 1


def test_a_drafter_is_not_asked_where_no_row_may_draft() -> None:
    slow = Slow("propose", 0.0)
    guard = guarded(slow)
    rows = rows_of(1)
    draft = guard.propose([rows[0].drafting(0, 0)])
    assert draft.num_rows == 1 and not len(draft.tokens)
    assert not slow.calls
    assert len(guard.propose(rows).tokens) == 1
    assert len(slow.calls) == 1


def test_a_drafter_left_out_for_hearing_slowly_starts_anew() -> None:
    """It is told nothing meanwhile, and forgets the rows of which it missed something."""
    slow = Slow("observe", 5.0)
    forgotten: list[int] = []
    slow.forget = forgotten.append  # type: ignore[method-assign]
    guard = guarded(slow)
    rows, verdict = rows_of(1), [RowVerdict(1, [], [], 1)]
    for _ in range(20):
        guard.propose(rows)
        slow.now += 0.01
        guard.observe(rows, verdict, None)
    assert len(slow.calls) == 1 and forgotten == []
    slow.now += 31.0
    slow.seconds = 0.0
    assert not len(guard.propose(rows).tokens)
    assert forgotten == [], "the blocks of this step are reserved"
    guard.observe(rows, verdict, None)
    assert forgotten == [4] and len(slow.calls) == 2
    assert len(guard.propose(rows).tokens) == 1


def test_a_draft_model_left_out_for_hearing_slowly_drafts_again() -> None:
    """It gives back blocks of rows of which it missed something, and none of a step that it drafts for."""
    config = {"method": "draft_model", "num_speculative_tokens": 3}
    llm = LLM(toys.adopted(toys.llama()), config, toys.adopted(toys.llama()), max_num_seqs=4, block_size=4)
    guard, now = llm.engine.drafter, 0.0
    assert isinstance(guard, GuardedDrafter)
    guard._clock = lambda: now
    hear, num_heard = guard.drafter.observe, 0

    def observe(*given: Any) -> None:
        nonlocal now, num_heard
        num_heard += 1
        now += 5.0 if num_heard == 3 else 0.0
        hear(*given)

    guard.drafter.observe = observe  # type: ignore[method-assign]
    requests = [
        llm.inputs.samples(prompt, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True), False) for prompt in ([5, 6], [7])
    ]
    for _ in llm.run(requests):
        now += 2.0
    assert guard.faults == {"too slow": 1, "cut off": guard.faults["cut off"]}
    assert guard.faults["cut off"] < 25 and llm.stats.num_accepted_tokens > 20


def test_a_text_that_grew_while_a_drafter_was_left_out_may_be_read_at_once() -> None:
    slow, rows, kept = Slow("propose", 9.5), rows_of(1), [RowVerdict(1, [], [], 1)]
    guard = guarded(slow)
    for seconds in (0.0, 9.5, *[0.0] * 30, 4.0):
        slow.seconds = seconds
        guard.propose(rows)
        slow.now += 1.0
        guard.observe(rows, kept, None)
    assert guard.faults == {"too slow": 1, "cut off": 30}
    slow.seconds = 4.0
    guard.propose(rows)
    guard.observe(rows, kept, None)
    assert guard.faults["too slow"] == 2, "once"


def test_a_text_that_grew_while_nothing_was_asked_for_may_be_read_at_once() -> None:
    """As where drafts do not pay for a while; another row's wait allows it nothing."""
    (asked,), other = rows_of(1), PlannedRow(Sequence(5, [1, 2], 2, Sampler(SamplingParams(), 5), frozenset(), 9), 0, 1, 3, 3)
    resting = asked.drafting(0, 0)

    def faults_of(usage: Usage | None, *last: PlannedRow) -> dict[str, int]:
        slow = Slow("propose", 0.0)
        slow.usage = usage
        guard = guarded(slow)
        for rows, seconds in [([asked], 0.0), *[([resting], 0.0)] * 30, (list(last), 4.0)]:
            slow.seconds = seconds
            guard.propose(rows)
            slow.now += 1.0
            guard.observe(rows, [RowVerdict(1, [], [], 1)] * len(rows), None)
        return dict(guard.faults)

    assert faults_of(Usage(), asked) == {}
    assert faults_of(Usage(), resting, other) == {"too slow": 1}
    assert faults_of(None, asked) == {"too slow": 1}, "what copies from the text has nothing to read"


def test_a_drafter_that_never_hears_is_left_out_once_a_pause() -> None:
    """However many times it fails: pauses have an end, and hearing fails in them too."""
    guard = GuardedDrafter(Scripted("observe", raising(ValueError("x"))), toys.VOCABULARY, clock=lambda: 0.0)
    rows, verdict = rows_of(1), [RowVerdict(1, [], [], 1)]
    for _ in range(1_100):
        guard.propose(rows)
        guard.observe(rows, verdict, None)
    assert guard.faults["raised"] == 1_100 and guard._num_cuts == 1
    guard._num_cuts = 2_000
    guard._resumes_at = -np.inf
    guard.observe(rows, verdict, None)
    assert guard._resumes_at == 1800.0
