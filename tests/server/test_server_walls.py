"""What goes wrong in one row ends that row, and what goes wrong in a drafter ends nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import toys
from torch import Tensor

from echelon import LLM, CompletionOutput, RequestOutput, SamplingParams
from echelon.acceptance import largest_rows
from echelon.bench.verify import STRATEGY_SETTINGS
from echelon.draft import Draft, RowVerdict, Verdict
from echelon.drafters.base import Drafter
from echelon.drafters.guard import MOST_FAILURES, NUM_GOOD, GuardedDrafter, problem_of
from echelon.errors import RowError, location_of
from echelon.model.load.loading import LoadedModel
from echelon.outputs import OutputBuilder
from echelon.sampling import Sampler
from echelon.sequence import PlannedRow, Sequence

NUM_NEW = 20
VICTIM = 3
LENGTHS = (5, 1, 17, 9, 33, 2, 16, 7)
METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
    "rejection": {"method": "draft_model", "num_speculative_tokens": 3, "acceptance": "rejection"},
}


@pytest.fixture(scope="module")
def models() -> tuple[LoadedModel, LoadedModel]:
    target = toys.llama()
    return toys.adopted(target), toys.adopted(toys.noisy_copy(target, 0.02))


def build(models: tuple[LoadedModel, LoadedModel], method: str) -> LLM:
    config = METHODS[method]
    draft = models[1] if config and config["method"] == "draft_model" else None
    return toys.watch(LLM(models[0], config, draft, max_num_seqs=len(LENGTHS), block_size=4), is_faulty=True)


def params(temperature: float, **changes: Any) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, seed=i, max_tokens=NUM_NEW, **changes) for i in range(len(LENGTHS))]


def tokens_of(outputs: SequenceOf[RequestOutput]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


def poison(llm: LLM, victim: int, position: int, value: float, everywhere: bool) -> None:
    """The logits that choose the victim's token at `position` of its text hold `value`: in one entry, or in all."""
    run, pack = llm.engine.target.run, llm.engine.target.pack
    spans: list[Any] = []

    def packed(given: Any) -> Any:
        spans[:] = given
        return pack(given)

    def poisoned(batch: Any) -> Any:
        logits, hidden_states = run(batch)
        logits = logits.clone()
        start = 0
        for span in spans:
            place = position - 1 - (span.start + len(span.tokens) - span.num_logits)
            if span.row == victim and 0 <= place < span.num_logits:
                logits[start + place, slice(None) if everywhere else 50] = value
            start += span.num_logits
        return logits, hidden_states

    llm.engine.target.run, llm.engine.target.pack = poisoned, packed  # type: ignore[method-assign]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("value", "everywhere"), [(np.nan, False), (np.nan, True), (np.inf, False), (-np.inf, True)])
def test_logits_that_are_no_numbers_end_their_row_alone(
    models: tuple[LoadedModel, LoadedModel], method: str, temperature: float, value: float, everywhere: bool
) -> None:
    given = toys.prompts(LENGTHS)
    truth = build(models, method).generate(given, params(temperature))
    llm = build(models, method)
    poison(llm, VICTIM, LENGTHS[VICTIM] + 7, value, everywhere)
    outputs = llm.generate(given, params(temperature))
    hurt, whole = outputs.pop(VICTIM).outputs[0], truth.pop(VICTIM).outputs[0]
    assert tokens_of(outputs) == tokens_of(truth)
    assert all(o.outputs[0].error is None for o in outputs)
    assert (hurt.finish_reason, hurt.token_ids) == ("error", whole.token_ids[:7])
    assert hurt.error is not None and "overflowed" in hurt.error
    toys.assert_all_blocks_free(llm)


def test_a_row_is_not_hurt_by_places_its_text_never_reaches(models: tuple[LoadedModel, LoadedModel]) -> None:
    """Logits after a rejected token are NaN: plain decoding would not have computed them."""
    given = toys.prompts(LENGTHS)
    truth = tokens_of(LLM(models[0], max_num_seqs=8).generate(given, params(0.0)))
    llm = build(models, "ngram")
    llm.engine.drafter = toys.ScriptedDrafter({tuple(p): t for p, t in zip(given, truth, strict=True)}, 1)
    run = llm.engine.target.run
    llm.engine.target.run = lambda batch: (_poison_after_first(run(batch)[0], batch), None)  # type: ignore[method-assign]
    assert tokens_of(llm.generate(given, params(0.0))) == truth


@pytest.mark.parametrize("strategy", STRATEGY_SETTINGS)
def test_keys_that_are_no_numbers_hurt_nobody_who_comes_later(strategy: str) -> None:
    """A model overflows on one token. Prompts with it fail, and so does a row that drafts it where the framework's attention multiplies
    by zero what it must not see; nobody reads what they leave in the cache."""
    target, given, asked = toys.llama(), toys.prompts(LENGTHS), params(0.0)
    truth = tokens_of(LLM(toys.adopted(target), max_num_seqs=8).generate(given, asked))
    overflowing = next(t for t in range(toys.VOCABULARY) if not any(t in row for row in [*given, *truth]))
    with torch.no_grad():
        target.get_input_embeddings().weight[overflowing] = torch.nan
    model = toys.adopted(target)
    llm = LLM(model, METHODS["ngram"], max_num_seqs=4, **STRATEGY_SETTINGS[strategy])
    hurt = llm.generate([[5, overflowing, 9], [overflowing] * 20], asked[:2])
    assert [o.outputs[0].finish_reason for o in hurt] == ["error", "error"]
    assert tokens_of(llm.generate(given, asked)) == truth
    script = {tuple(p): t for p, t in zip(given, truth, strict=True)} | {tuple(given[VICTIM]): [overflowing] * 99}
    llm.engine.drafter = toys.ScriptedDrafter(script, 0)
    outputs = llm.generate(given, asked)
    hurt_by_draft = outputs.pop(VICTIM).outputs[0]
    if strategy == "unpadded":
        assert hurt_by_draft.token_ids == truth[VICTIM]
    else:
        assert hurt_by_draft.finish_reason == "error"
    assert tokens_of(outputs) == truth[:VICTIM] + truth[VICTIM + 1 :]
    llm.engine.drafter = toys.ScriptedDrafter(dict(zip(map(tuple, given), truth, strict=True)), 1)
    assert tokens_of(llm.generate(given, asked)) == truth


def _poison_after_first(logits: Any, batch: Any) -> Any:
    rows = torch.searchsorted(batch.indptr[1:].long(), batch.logit_rows, right=True)
    is_first = torch.ones(len(rows), dtype=torch.bool)
    is_first[1:] = rows[1:] != rows[:-1]
    return torch.where(is_first[:, None], logits, torch.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 128, 300, 1000])
def test_the_largest_value_betrays_a_nan_anywhere(dtype: torch.dtype, width: int) -> None:
    for place in range(width):
        logits = torch.randn(3, width, generator=torch.Generator().manual_seed(place)).to(dtype)
        logits[1, place] = torch.nan
        winners, values = largest_rows(logits)
        assert np.isnan(values[1])
        for row in (0, 2):
            assert values[row] == logits[row].float().max() == logits[row, winners[row]]


def raises(output: list[int], logits: Any) -> Any:
    if len(output) >= 4:
        raise KeyError("a processor of one request")
    return logits


class BrokenDecoder:
    """A tokenizer that gives up on a request's fifth token."""

    def __init__(self) -> None:
        self.text = ""
        self._num_seen = 0

    def push(self, token: int) -> bool:
        self._num_seen += 1
        if self._num_seen == 5:
            raise UnicodeError("torn")
        self.text += "x"
        return False

    def finish(self) -> str:
        raise UnicodeError("torn")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("site", ["processor", "shape", "forbidden", "logprobs", "detokenizer"])
def test_an_exception_in_one_requests_work_ends_it_alone(
    models: tuple[LoadedModel, LoadedModel], method: str, temperature: float, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = toys.prompts(LENGTHS)
    truth = tokens_of(build(models, method).generate(given, params(temperature)))
    llm = build(models, method)
    asked = params(temperature)
    changes: dict[str, dict[str, Any]] = {
        "processor": {"logits_processors": (raises,)},
        "shape": {"logits_processors": (lambda _, logits: logits[:-1],)},
        "forbidden": {"allowed_token_ids": (4,), "stop_token_ids": (4,), "min_tokens": 3},
        "logprobs": {"logprobs": 2},
    }
    asked[VICTIM] = asked[VICTIM].model_copy(update=changes.get(site, {}))
    if site == "logprobs":
        monkeypatch.setattr("echelon.acceptance.logprobs_of", lambda *_: 1 / 0)
    if site == "detokenizer":
        monkeypatch.setattr(llm.inputs, "_detokenizer", lambda tokens, _: BrokenDecoder() if tokens == given[VICTIM] else None)
        outputs = [out for _, out in llm.stream(given, asked) if out.finished]
        outputs.sort(key=lambda out: given.index(out.prompt_token_ids))
    else:
        outputs = llm.generate(given, asked)
    hurt = outputs.pop(VICTIM).outputs[0]
    assert (hurt.finish_reason, bool(hurt.error)) == ("error", True)
    emitted = {"processor": 4, "detokenizer": 5}.get(site, 0)
    assert len(hurt.token_ids) == emitted
    assert tokens_of(outputs) == truth[:VICTIM] + truth[VICTIM + 1 :]
    toys.assert_all_blocks_free(llm)


class Letters:
    """A tokenizer that has letters for all tokens but those in `without`."""

    def __init__(self, *without: int) -> None:
        self.without = without

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        if set(token_ids) & set(self.without):
            raise IndexError("no such piece")
        return "".join(chr(97 + i % 26) for i in token_ids)


def test_a_text_that_cannot_be_decoded_ends_its_row_alone(models: tuple[LoadedModel, LoadedModel]) -> None:
    """Where nobody watches the text it is made at the end; and a row that has failed keeps what it has said."""
    llm, prompt = build(models, "ngram"), toys.prompts(LENGTHS)[0]

    def output(decoder: Letters, **changes: Any) -> CompletionOutput:
        asked = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, ignore_eos=True, **changes)
        rows = llm.inputs.samples(prompt, asked, watch_text=False)
        for _ in llm.run([rows]):
            pass
        return OutputBuilder(rows, prompt, decoder, "exact", "0").output().outputs[0]

    good = output(Letters())
    assert (good.finish_reason, len(good.text), good.error) == ("length", 8, None)
    torn = output(Letters(good.token_ids[3]))
    assert (torn.finish_reason, torn.text, torn.token_ids) == ("error", "", good.token_ids) and "IndexError" in str(torn.error)
    assert torn.logprobs is not None and torn.logprobs[3][good.token_ids[3]].decoded_token is None
    hurt = output(Letters(), logits_processors=(raises,))
    assert (hurt.finish_reason, hurt.text) == ("error", good.text[:4])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", METHODS)
def test_an_error_says_where_it_arose_and_holds_no_frame(models: tuple[LoadedModel, LoadedModel], method: str, temperature: float) -> None:
    """It lives as long as its request, and frames would hold the logits of a whole step as long."""
    llm = build(models, method)
    asked = SamplingParams(temperature=temperature, seed=1, max_tokens=NUM_NEW, logits_processors=(raises,))
    (row,) = llm.inputs.samples([5, 6, 7], asked, watch_text=False)
    for _ in llm.run([[row]]):
        pass
    assert isinstance(row.error, RowError) and isinstance(row.error.__cause__, KeyError)
    for error in (row.error, row.error.__cause__):
        assert error.__traceback__ is None and error.__context__ is None
    assert re.fullmatch(r"RowError in test_server_walls\.py:\d+ raises < .*", location_of(row.error))


class FaultyDrafter(Drafter):
    """Fails in one way at every `period`-th proposal; otherwise proposes noise."""

    hidden_state_names: tuple[str, ...] = ()

    def __init__(self, fault: str, period: int = 1) -> None:
        self.fault, self._period, self.num_calls, self.clock = fault, period, 0, 0.0
        self._noise = toys.ScriptedDrafter({}, None)

    def propose(self, rows: SequenceOf[PlannedRow]) -> Any:
        self.num_calls += 1
        draft = self._noise.propose(rows)
        return draft if self.num_calls % self._period else self._broken(draft, rows)

    def _broken(self, draft: Draft, rows: SequenceOf[PlannedRow]) -> Any:
        one = Draft.chains([[7] * r.max_draft_tokens for r in rows])
        size = len(one.tokens)
        if self.fault == "raise":
            raise RuntimeError("out of luck")
        if self.fault == "memory":
            raise MemoryError
        if self.fault == "slow":
            self.clock += 11.0
            return draft
        if self.fault == "nothing":
            return None
        changes: dict[str, dict[str, Any]] = {
            "negative": {"tokens": one.tokens - 8},
            "too large": {"tokens": one.tokens + toys.VOCABULARY},
            "floats": {"tokens": one.tokens.astype(np.float32)},
            "square": {"tokens": np.zeros((size, 2), np.int32)},
            "short": {"tokens": one.tokens[1:]},
            "parents": {"parents": np.arange(size, dtype=np.int32)},
            "wrong rows": {"indptr": one.indptr[1:]},
            "crossed": {"indptr": one.indptr[::-1].copy()},
            "probs": {"probs": np.full((size, toys.VOCABULARY), np.nan)},
        }
        if self.fault == "too many":
            return Draft.chains([[7] * (r.max_draft_tokens + 1) for r in rows])
        return replace(one, **changes[self.fault])

    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict, hidden_states: Tensor | None) -> None:
        if self.fault == "observe":
            raise ValueError("did not listen")

    def forget(self, row: int) -> None:
        if self.fault == "forget":
            raise ValueError("cannot forget")


FAULTS = [
    "raise", "memory", "slow", "nothing", "negative", "too large", "floats", "square", "short", "parents", "wrong rows", "crossed", "kept",
    "probs", "too many", "observe", "forget",
]  # fmt: skip


@pytest.mark.parametrize("period", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_drafter_costs_no_token(models: tuple[LoadedModel, LoadedModel], fault: str, period: int) -> None:
    given = toys.prompts(LENGTHS)
    truth = tokens_of(LLM(models[0], max_num_seqs=8).generate(given, params(0.9)))
    llm = build(models, "ngram")
    faulty = FaultyDrafter(fault, 10**9 if fault in ("observe", "forget") else period)
    llm.engine.drafter = guard = GuardedDrafter(faulty, toys.VOCABULARY, clock=lambda: faulty.clock)
    outputs = llm.generate(given, params(0.9))
    assert tokens_of(outputs) == truth
    assert guard.faults.total() >= 1
    if period == 1 and fault not in ("slow", "observe", "forget"):
        assert faulty.num_calls == MOST_FAILURES
        assert guard.faults["cut off"] > 0
    toys.assert_all_blocks_free(llm)


class FailingRunner:
    """A draft model whose passes fail from one to another: half a proposal is in its cache then."""

    def __init__(self, llm: LLM, passes: range) -> None:
        runner = llm.engine.drafter.unguarded._runner  # type: ignore[attr-defined]
        self._feed, self._passes, self.num_passes = runner.feed, passes, 0
        runner.feed = self.feed

    def feed(self, spans: Any) -> Any:
        self.num_passes += 1
        if self.num_passes in self._passes:
            raise RuntimeError("not now")
        return self._feed(spans)


def test_a_draft_model_that_comes_back_is_current(models: tuple[LoadedModel, LoadedModel]) -> None:
    """It fails until it is cut off, is tried again later, and then accepts as many tokens as if nothing had been."""
    given = toys.prompts(LENGTHS)
    asked = params(0.0, ignore_eos=True)
    truth = tokens_of(LLM(models[0], max_num_seqs=8).generate(given, asked))
    llm = build(models, "draft_model")
    guard = llm.engine.drafter
    assert isinstance(guard, GuardedDrafter)
    now = [0.0]
    guard._clock = lambda: now[0]
    runner = FailingRunner(llm, range(2, 5))  # the second pass of a proposal, then twice the first of one
    steps = llm.engine.step

    def step() -> Any:
        now[0] += 10.0
        return steps()

    llm.engine.step = step  # type: ignore[method-assign]
    assert tokens_of(llm.generate(given, asked)) == truth
    assert guard.faults["raised"] == MOST_FAILURES
    assert 1 <= guard.faults["cut off"] <= 3
    assert runner.num_passes > 8
    whole = build(models, "draft_model")
    whole.generate(given, asked)
    before = llm.stats.num_accepted_tokens, llm.stats.num_draft_tokens
    assert tokens_of(llm.generate(given, asked)) == truth
    accepted, drafted = llm.stats.num_accepted_tokens - before[0], llm.stats.num_draft_tokens - before[1]
    assert (accepted, drafted) == (whole.stats.num_accepted_tokens, whole.stats.num_draft_tokens)
    toys.assert_all_blocks_free(llm)


def test_failures_are_forgiven_after_many_good_proposals() -> None:
    faulty, rows = FaultyDrafter("raise", NUM_GOOD + 2), planned()
    guard = GuardedDrafter(faulty, toys.VOCABULARY)
    for _ in range(5 * (NUM_GOOD + 2)):
        guard.propose(rows)
    assert guard.faults == {"raised": 5}
    guard.drafter = FaultyDrafter("raise")
    for _ in range(5):
        guard.propose(rows)
    assert guard.faults == {"raised": 5 + MOST_FAILURES - 1, "cut off": 3}


def planned(*, tokens: int = 3, depth: int = 3) -> list[PlannedRow]:
    """Two rows, 4 and 7, with room for a draft."""
    sequences = [Sequence(i, [1, 2], 2, Sampler(SamplingParams(), i), frozenset(), 9) for i in (4, 7)]
    return [PlannedRow(s, 0, 2, tokens, depth) for s in sequences]


@pytest.mark.parametrize(("fault", "period", "anew"), [("raise", 1, []), ("observe", 9, [4, 7])])
def test_a_drafter_starts_anew_only_where_it_missed_a_verdict(fault: str, period: int, anew: list[int]) -> None:
    """After a proposal that failed it hears that nothing was drafted; a head could not read the rows again."""
    faulty, rows = FaultyDrafter(fault, period), planned()
    forgotten: list[int] = []
    faulty.forget = forgotten.append  # type: ignore[method-assign]
    guard = GuardedDrafter(faulty, toys.VOCABULARY)
    guard.propose(rows)
    guard.observe(rows, [RowVerdict(0, [], [], 1)] * 2, None)
    assert guard.faults == {"raised": 1}
    assert forgotten == anew


def test_a_tree_is_no_deeper_than_its_row_has_room() -> None:
    rows = planned(tokens=6, depth=2)
    chain = ([7], [-1])
    for parents, is_good in (([-1, -1, 0, 1], True), ([-1, 0, 1, -1], False), ([-1, 0, 0, 0], True), ([-1, 0, 1, 2], False)):
        problem = problem_of(Draft.trees([chain, ([3, 4, 5, 6], parents)]), rows, toys.VOCABULARY, grows_trees=True)
        assert (problem is None) == is_good, parents


def test_only_where_trees_are_asked_for_may_a_draft_branch() -> None:
    """Rejection and the rectangular strategies know chains alone."""
    draft, rows = Draft.trees([([3, 4], [-1, -1]), ([5, 6], [-1, 0])]), planned()
    assert problem_of(draft, rows, toys.VOCABULARY, grows_trees=True) is None
    assert problem_of(draft, rows, toys.VOCABULARY, grows_trees=False) == "a tree where only chains may be drafted"
