"""Whatever a drafter does wrong, and wherever the model's logits are no numbers: every drafter there is, in chains and trees.

`make test` has each drafter do one thing wrong; PROVE=1 all of them, with every shape of draft, greedy and sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import servers
import test_heads_lossless as lossless
import torch
import toys
from test_server_faults import neighbours

import heads
from echelon import LLM, SamplingParams
from echelon.batch import Span
from echelon.draft import Draft, node_depths
from echelon.drafters.draft_model import DraftModelDrafter
from echelon.drafters.guard import MOST_FAILURES, GuardedDrafter
from echelon.drafters.heads import HeadDrafter
from echelon.drafters.ngram import NgramDrafter
from echelon.heads.checkpoints import build_head
from echelon.sequence import PlannedRow
from echelon.stats import StepRecord

LENGTHS = (5, 1, 17, 9, 33, 2, 16, 7)
NUM_NEW = 30
VICTIM = 3
FAILING = range(3, 3 + MOST_FAILURES)  # which of its proposals fail
STEP_SECONDS = 10.0
TEMPERATURES = (0.0, 0.9)
CHAINS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4},
}
METHODS = CHAINS | {f"{m} {t}": {"method": m, **shape} for m in lossless.PUBLISHED for t, shape in lossless.TREES.items()}

Rows = SequenceOf[PlannedRow]
Broken = Callable[[Draft, Rows, int], Any]  # of a good proposal, its rows and the size of the vocabulary


def garbage(rows: Rows) -> Draft:
    """A proposal with which nothing is wrong but its tokens: as long a chain as each row has room for."""
    return Draft.chains([[7] * row.max_draft_depth for row in rows])


def with_parents(parents_of: Callable[[int], list[int]]) -> Broken:
    return lambda _, rows, _size: Draft.trees([([7] * r.max_draft_depth, parents_of(r.max_draft_depth)) for r in rows])


def with_token(token_of: Callable[[int], int]) -> Broken:
    """The last one of every row."""
    return lambda _, rows, size: Draft.chains([[7] * (r.max_draft_depth - 1) + [token_of(size)] for r in rows if r.max_draft_depth])


def raising(error: Exception) -> Broken:
    def broken(_draft: Draft, _rows: Rows, _size: int) -> Draft:
        raise error

    return broken


def certain_of_nothing(_: Draft, rows: Rows, size: int) -> Draft:
    draft = garbage(rows)
    return replace(draft, probs=np.zeros((len(draft.tokens), size)))


# fault → (what becomes of a proposal, how it is counted)
FAULTS: dict[str, tuple[Broken, str]] = {
    "raises": (raising(RuntimeError("out of luck")), "raised"),
    "has no memory": (raising(MemoryError()), "raised"),
    "raises midway": (lambda draft, *_: draft, "raised"),
    "proposes nothing": (lambda *_: None, "raised"),
    "id −1": (with_token(lambda _: -1), "garbage"),
    "id V": (with_token(lambda size: size), "garbage"),
    "id 2³¹ − 1": (with_token(lambda _: 2**31 - 1), "garbage"),
    "too many tokens": (lambda _, rows, _size: Draft.chains([[7] * (row.max_draft_tokens + 1) for row in rows]), "garbage"),
    "too few rows": (lambda _, rows, _size: Draft.chains([[7]] * (len(rows) - 1)), "garbage"),
    "parent −2": (with_parents(lambda n: [-2] * n), "garbage"),
    "own parent": (with_parents(lambda n: list(range(n))), "garbage"),
    "parent after its child": (with_parents(lambda n: list(range(1, n + 1))), "garbage"),
    "certain of nothing": (certain_of_nothing, "garbage"),
    "too slow": (lambda draft, *_: draft, "too slow"),
}
# what a proposal calls for every row, or for every token of a path
INNER: dict[type, Callable[[Any], tuple[Any, str]]] = {
    NgramDrafter: lambda drafter: (drafter, "_propose_row"),
    DraftModelDrafter: lambda drafter: (drafter, "_choose"),
    HeadDrafter: lambda drafter: (drafter.growth, "grow"),
}
QUICK = ["raises midway", "id V", "parent −2", "id −1", "too slow", "raises midway", "too many tokens"]
QUICK_METHODS = ["draft_model", "ngram", "medusa static", "clover dynamic", "clover2 chain", "eagle dynamic", "eagle3 static"]
CELLS = (
    [(m, f, t) for m in METHODS for f in FAULTS for t in TEMPERATURES]
    if toys.PROVE
    else [(m, f, TEMPERATURES[i % 2]) for i, (m, f) in enumerate(zip(QUICK_METHODS, QUICK, strict=True))]
)


class Failing:
    """A drafter some of whose proposals fail after the work was done, or from one inner call to another."""

    def __init__(self, llm: LLM, fault: str, patch: pytest.MonkeyPatch, which: range = FAILING) -> None:
        self._guard, self._which, self._fault, self._broken = guard_of(llm), which, fault, FAULTS[fault][0]
        self.clock, self.num_proposals, self._num_inner = 0.0, 0, 0
        self.hit: set[int] = set()  # rows of proposals that failed
        self.drafted: dict[tuple[int, int], int] = {}  # later: (row, length of its text) → tokens drafted
        self._propose = self._guard.drafter.propose
        patch.setattr(self._guard, "_clock", lambda: self.clock)
        patch.setattr(self._guard.drafter, "propose", self.propose)
        if fault == "raises midway":
            self._interrupt(patch)

    def propose(self, rows: Rows) -> Any:
        if not any(row.max_draft_tokens for row in rows):  # nothing to break
            return self._propose(rows)
        self.num_proposals, self._num_inner = self.num_proposals + 1, 0
        if self.num_proposals not in self._which:
            draft = self._propose(rows)
            self._note(rows, draft)
            return draft
        self.hit |= {row.sequence.id for row in rows}
        draft = self._propose(rows)
        self.clock += 1.0 if self._fault == "too slow" else 0.0
        return self._broken(draft, rows, self._guard._vocab_size)

    def _note(self, rows: Rows, draft: Draft) -> None:
        """A row that has just been read in cannot be drafted for by every drafter."""
        for row, count in zip(rows, draft.num_draft_tokens.tolist(), strict=True):
            if self.num_proposals >= self._which.stop and row.start > 0 and row.num_new == 1 and row.max_draft_depth > 0:
                self.drafted[row.sequence.id, len(row.sequence)] = count

    def _interrupt(self, patch: pytest.MonkeyPatch) -> None:
        """The second inner call of a failing proposal raises."""
        drafter: Any = self._guard.drafter
        owner, name = INNER[type(drafter)](drafter)
        inner = getattr(owner, name)

        def interrupted(*args: Any) -> Any:
            self._num_inner += 1
            if self.num_proposals in self._which and self._num_inner == 2:
                raise RuntimeError("not now")
            return inner(*args)

        patch.setattr(owner, name, interrupted)


def guard_of(llm: LLM) -> GuardedDrafter:
    assert isinstance(llm.engine.drafter, GuardedDrafter)
    return llm.engine.drafter


def params(temperature: float) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, seed=i, max_tokens=NUM_NEW, ignore_eos=True) for i in range(len(LENGTHS))]


@cache
def truth(temperature: float) -> list[list[int]]:
    plain = LLM(toys.adopted(lossless.target()), max_num_seqs=1)
    return [o.outputs[0].token_ids for o in plain.generate(toys.prompts(LENGTHS), params(temperature))]


@cache
def knowing(method: str, temperature: float) -> tuple[Any, heads.Knowing]:
    """A target and a published head on it that has read the texts, so that it is right now and then."""
    served, own = lossless.published(method)
    return served, heads.Knowing(own, truth(temperature), toys.VOCABULARY).eval()


@cache
def pair() -> tuple[Any, Any]:
    return toys.adopted(lossless.target()), toys.adopted(toys.noisy_copy(lossless.target(), 0.02))


def build(method: str, temperature: float) -> LLM:
    config, settings = METHODS[method], {"max_num_seqs": 6, "block_size": 4, "kv_cache_memory_bytes": 1 << 22}
    if method in CHAINS:
        target, draft = pair()
        return toys.watch(LLM(target, config, draft if method == "draft_model" else None, **settings), is_faulty=True)
    target, head = knowing(config["method"], temperature)
    return lossless.checked(toys.watch(LLM(target, config, draft_head=head, **settings), is_faulty=True))


@pytest.mark.parametrize(("method", "fault", "temperature"), CELLS)
def test_a_faulty_drafter_costs_no_token(method: str, fault: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three proposals fail; it is left out for 30 s, kept current, and then drafts again for the rows that were there."""
    llm = build(method, temperature)
    failing = Failing(llm, fault, monkeypatch)

    def tick(_: StepRecord) -> None:
        failing.clock += STEP_SECONDS

    llm.engine.observers.append(tick)
    outputs = llm.generate(toys.prompts(LENGTHS), params(temperature))
    assert [o.outputs[0].token_ids for o in outputs] == truth(temperature)
    assert llm.get_counters()["drafter_faults"] == {FAULTS[fault][1]: MOST_FAILURES, "cut off": 2}
    assert failing.hit <= {row for row, _ in failing.drafted}
    assert method == "ngram" or all(failing.drafted.values())  # a look-up may find nothing
    assert llm.stats.num_accepted_tokens > 0
    toys.assert_all_blocks_free(llm)


@pytest.mark.parametrize("temperature", TEMPERATURES if toys.PROVE else TEMPERATURES[1:])
@pytest.mark.parametrize("call", ["observe", "forget"])
@pytest.mark.parametrize("method", METHODS if toys.PROVE else ["eagle dynamic"])
def test_a_drafter_that_does_not_listen_costs_no_token(method: str, call: str, temperature: float) -> None:
    llm = build(method, temperature)
    guard, num_calls = guard_of(llm), 0
    original = getattr(guard.drafter, call)

    def deaf(*args: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls in FAILING:
            raise ValueError("did not listen")
        original(*args)

    setattr(guard.drafter, call, deaf)
    outputs = llm.generate(toys.prompts(LENGTHS), params(temperature))
    assert [o.outputs[0].token_ids for o in outputs] == truth(temperature)
    assert guard.faults["raised"] == MOST_FAILURES
    assert guard.faults["cut off"] > 0


# Logits that are no numbers


def poisoned(llm: LLM, victim: int, position: int, value: float, everywhere: bool) -> None:
    """All logits that could choose the victim's token at `position` of its text hold `value`, and so do hidden states there."""
    target: Any = llm.engine.target
    run, pack = target.run, target.pack
    spans: list[Span] = []

    def packed(given: Any) -> Any:
        spans[:] = given
        return pack(given)

    def ran(batch: Any) -> Any:
        logits, hidden_states = run(batch)
        logits, hidden_states = logits.clone(), None if hidden_states is None else hidden_states.clone()
        first_logit = first_token = 0
        for span in spans:
            for back in range(span.num_logits if span.row == victim else 0):
                place = len(span.tokens) - 1 - back
                if next_position(span, place) == position:
                    logits[first_logit + span.num_logits - 1 - back, slice(None) if everywhere else 50] = value
                    if hidden_states is not None:
                        hidden_states[first_token + place] = value
            first_logit += span.num_logits
            first_token += len(span.tokens)
        return logits, hidden_states

    target.run, target.pack = ran, packed


def next_position(span: Span, place: int) -> int:
    """Which token of the row's text the logits after the span's token at `place` choose."""
    num_known = len(span.tokens) - span.num_drafted
    if place < num_known or span.parents is None:
        return span.start + place + 1
    return span.text_len + node_depths(span.parents)[place - num_known] + 1


VALUES = [(np.nan, False), (np.nan, True), (np.inf, False), (-np.inf, True)]


@pytest.mark.parametrize(
    ("method", "temperature", "value", "everywhere"),
    [(m, t, *v) for m in METHODS for t in TEMPERATURES for v in VALUES]
    if toys.PROVE
    else [(m, TEMPERATURES[i % 2], *VALUES[i % 4]) for i, m in enumerate(QUICK_METHODS[2:])],
)
def test_a_row_whose_logits_are_no_numbers_ends_alone(method: str, temperature: float, value: float, everywhere: bool) -> None:
    """In trees, too: the row ends where its text reaches such a place, whatever was drafted beside and beyond it."""
    llm, own = build(method, temperature), list(truth(temperature))
    poisoned(llm, VICTIM, LENGTHS[VICTIM] + 9, value, everywhere)
    outputs = llm.generate(toys.prompts(LENGTHS), params(temperature))
    hurt, whole = outputs.pop(VICTIM).outputs[0], own.pop(VICTIM)
    assert [o.outputs[0].token_ids for o in outputs] == own
    assert all(o.outputs[0].error is None for o in outputs)
    assert (hurt.finish_reason, hurt.token_ids) == ("error", whole[:9])
    assert hurt.error is not None and "overflowed" in hurt.error
    assert not guard_of(llm).faults
    assert llm.stats.num_accepted_tokens > 0
    toys.assert_all_blocks_free(llm)


# Through the server


def served(method: str) -> LLM:
    """The embedded pair, or its target with a head as its training begins."""
    if method in CHAINS:
        return servers.build(method)
    target, _ = servers.pair()
    config = METHODS[method]
    torch.manual_seed(1)
    head: Any = build_head(config["method"], target.model).eval().requires_grad_(False)
    return LLM(target, config, draft_head=head, max_num_seqs=64, max_num_batched_tokens=512, kv_cache_memory_bytes=2**25)


@pytest.mark.parametrize("method", METHODS if toys.PROVE else ["eagle dynamic"])
def test_a_server_whose_drafter_fails_serves_on(method: str) -> None:
    """Every fault in turn, three times each: answers, canaries, blocks, threads, descriptors and memory are as before."""
    plain = servers.build("plain").generate([b["prompt"] for b in neighbours()], [servers.params(b) for b in neighbours()])
    with servers.serving(served(method)) as running, servers.unharmed(running):
        guard = guard_of(running.llm)
        for fault in FAULTS:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(guard, "_resumes_at", -1.0)
                patch.setattr(guard, "_num_failures", 0)
                Failing(running.llm, fault, patch, range(1, 10**9))
                answers = asyncio.run(servers.together(running.url, neighbours()))
                servers.settle(running)
            assert [a.json()["choices"][0]["text"] for a in answers] == [o.outputs[0].text for o in plain]
        assert guard.faults["raised"] >= MOST_FAILURES and guard.faults["garbage"] >= MOST_FAILURES
        assert guard.faults["cut off"] > 0
