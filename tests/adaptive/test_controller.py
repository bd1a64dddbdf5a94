"""Decisions by price: who drafts, when a level no longer pays, what is verified, and what is noticed later."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import numpy as np
import plans
import pytest
import toys

from echelon import LLM
from echelon.adaptive.controller import IDLE, KNOWN, PROBE, PROBED, REMEMBERED, SETTLED, BatchController
from echelon.adaptive.corrections import StepFactors
from echelon.adaptive.cost_table import CostCurve, CostTable, TablePieces
from echelon.adaptive.hindsight import LONGEST, ChainFates, Hindsight
from echelon.adaptive.row_controller import RowController
from echelon.adaptive.standing import DECIDED, HELD, MOST_HELD, MOST_RESTED, RESTED, Standing
from echelon.draft import Draft, RowVerdict
from echelon.sampling import Sampler, SamplingParams
from echelon.sequence import PlannedRow, Sequence
from echelon.stats import PARTS, StepRecord

FREE = CostTable(step=CostCurve(tokens=(1, 64), milliseconds=(10.0, 10.5)))
DEAR = CostTable(step=CostCurve(tokens=(1, 64), milliseconds=(10.0, 640.0)), drafting=CostCurve(tokens=(1,), milliseconds=(5.0,)))


def rows(count: int, depth: int = 4) -> list[PlannedRow]:
    found = []
    for number in range(count):
        sampler = Sampler(SamplingParams(temperature=0.0, max_tokens=50), number)
        sequence = Sequence(number, [1, 2, 3], 3, sampler, frozenset(), 100)
        found.append(PlannedRow(sequence, 2, 1, depth, depth))
    return found


def step(
    controller: Any,
    planned: list[PlannedRow],
    accepted: int,
    score: float = np.log(0.9),
    took: Callable[[int], float] = lambda num_drafted: 2.0 * len(PARTS),  # noqa: ARG005
    most: int = LONGEST,
) -> Draft:
    """A step whose drafts are as long as planned, or `most`, of which so many tokens are kept; it takes so many milliseconds."""
    lengths = [min(row.max_draft_tokens, most) for row in planned]
    draft = controller.chosen(planned, Draft.chains([[7] * n for n in lengths], scores=np.full(sum(lengths), score)))
    verdict = []
    for i in range(len(planned)):
        count = min(accepted, int(draft.num_draft_tokens[i]))
        verdict.append(RowVerdict(int(draft.num_draft_tokens[i]), list(range(count)), [7] * count, 9))
    controller.observe(
        StepRecord(planned, verdict, [1] * len(planned), 0, dict.fromkeys(PARTS, 0.0) | {"forward": 1e-3 * took(len(draft.tokens))})
    )
    return draft


def test_where_tokens_are_free_all_draft_and_where_they_are_dear_none_does() -> None:
    free, dear = BatchController(FREE, corrects=False), BatchController(DEAR, corrects=False)
    assert [row.max_draft_depth for row in free.planned(rows(3))] == [4, 4, 4]
    assert [row.max_draft_depth for row in dear.planned(rows(3))] == [0, 0, 0]


def test_a_row_with_no_room_never_drafts() -> None:
    planned = BatchController(FREE, corrects=False).planned([*rows(1), *rows(1, depth=0)])
    assert [row.max_draft_tokens for row in planned] == [4, 0]


def test_what_is_never_right_is_soon_left_alone_and_tried_again_now_and_then() -> None:
    costs = CostTable(step=CostCurve(tokens=(1, 8), milliseconds=(10.0, 11.0)), drafting=CostCurve(tokens=(1,), milliseconds=(1.0,)))
    controller = BatchController(costs, corrects=False)
    drafted = [len(step(controller, controller.planned(rows(1)), 0).tokens) for _ in range(40 + 2 * (PROBE + 1))]
    assert drafted[0] > 0
    assert sum(n > 0 for n in drafted[:40]) < 25
    later = drafted[-2 * (PROBE + 1) :]
    assert max(later) == 1
    assert 2 <= sum(later) <= len(later) // 12


def test_plain_steps_now_and_then_show_what_drafts_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table says that a drafted token costs a millisecond. It costs 3.9, more than a quarter of a step of four rows, so that none
    pays; or 2, so that all do, and then few steps are given away. The clock stands: deciding costs what the machine has it cost.
    """
    monkeypatch.setattr("echelon.adaptive.controller.perf_counter", lambda: 0.0)
    costs = CostTable(step=CostCurve(tokens=(1, 4, 8, 64), milliseconds=(10.0, 13.0, 17.0, 73.0)))
    for ms_each, pays in ((3.9, False), (2.0, True)):
        controller = BatchController(costs)
        drafts = (step(controller, controller.planned(rows(4, 1)), 1, took=lambda n, ms=ms_each: 13.0 + ms * n) for _ in range(600))
        num_drafted = [len(draft.tokens) for draft in drafts]
        assert controller.step_factors.at(np.array([4, 8])) == pytest.approx([1.0, (13.0 + 4 * ms_each) / 17.0], rel=0.1)
        assert sum(n > 0 for n in num_drafted[200:]) > 380 if pays else sum(num_drafted[200:]) < 40


def test_hope_alone_makes_no_step_much_longer() -> None:
    """A token a row costs a tenth of a step: at first two of each are drafted; once that has gone well, all eight."""
    costs = CostTable(step=CostCurve(tokens=(1, 8, 72), milliseconds=(10.0, 10.0, 18.0)))
    controller = BatchController(costs, corrects=False)
    drafted = [len(step(controller, controller.planned(rows(8, depth=8)), 8).tokens) for _ in range(8)]
    assert drafted[0] == 8 * 2
    assert drafted[-1] == 8 * 8


def test_a_drafter_that_has_become_right_is_noticed() -> None:
    """Drafting pays from a chance of a half on: probes are verified though they do not pay themselves."""
    costs = CostTable(step=CostCurve(tokens=(1, 64), milliseconds=(10.0, 42.0)))
    controller = BatchController(costs, corrects=False)
    for _ in range(300):
        step(controller, controller.planned(rows(8)), 0)
    plain = [len(step(controller, controller.planned(rows(8)), 0).tokens) for _ in range(PROBE)]
    assert sum(plain) <= PROBE // RESTED, "nothing is right, and nothing pays"
    drafted = [len(step(controller, controller.planned(rows(8)), 4).tokens) for _ in range(20 * PROBE)]
    assert sum(drafted[-10:]) >= 10 * 8, "all rows draft again"


COPIED = DEAR.model_copy(update={"drafting": None})


def until_probed(controller: BatchController, planned: Callable[[], list[PlannedRow]]) -> list[PlannedRow]:
    """Plain steps, and the rows of the first one that has drafts, as they are planned."""
    for _ in range(IDLE + 2 * (PROBE + RESTED)):
        found = controller.planned(planned())
        if any(row.max_draft_tokens for row in found):
            return found
        step(controller, found, 0)
    raise AssertionError("no probe")


def with_scores(planned: SequenceOf[PlannedRow], chances: SequenceOf[float]) -> Draft:
    return Draft.chains([[7] * row.max_draft_tokens for row in planned], scores=np.log(chances))


def test_a_probe_takes_the_likeliest_of_all_that_can_be_copied() -> None:
    """Asking costs nothing then, and all rows are asked that have room."""
    controller = BatchController(COPIED, corrects=False)
    planned = until_probed(controller, lambda: [*rows(3), *rows(4, depth=0)[3:]])
    assert [row.max_draft_tokens for row in planned] == [1, 1, 1, 0]
    assert controller.chosen(planned, with_scores(planned, [0.2, 0.9, 0.5])).num_draft_tokens.tolist() == [0, 1, 0, 0]


def test_rows_take_turns_at_probes_where_drafting_takes_time() -> None:
    """Whoever reads a prompt, or has no room, has none."""
    controller, probed = BatchController(DEAR, corrects=False), []
    for _ in range(3):
        planned = until_probed(controller, lambda: [replace(rows(1, 8)[0], num_new=3, start=0), *rows(4)[1:3], *rows(4, depth=0)[3:]])
        probed.append([row.max_draft_tokens for row in planned])
        step(controller, planned, 0)
    assert probed == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0]]


def test_a_probe_that_finds_nothing_stays_due() -> None:
    controller = BatchController(COPIED, corrects=False)
    planned = until_probed(controller, lambda: rows(2))
    for _ in range(RESTED):
        step(controller, planned, 0, most=0)
        planned = controller.planned(rows(2))
    assert [row.max_draft_tokens for row in planned] == [1, 1], "at the next decision"


def test_what_a_probe_finds_worth_its_place_ends_the_plain_steps() -> None:
    """One that is surer than what was hoped for."""
    costs = CostTable(step=CostCurve(tokens=(1, 64), milliseconds=(10.0, 10.0 + 63 * 9.5)))
    controller = BatchController(costs, corrects=False)
    planned = until_probed(controller, lambda: rows(1))
    assert len(controller.chosen(planned, with_scores(planned, [0.9999])).tokens) == 1
    assert not controller.rests([row.sequence for row in planned])


@pytest.mark.parametrize("share", [0.03, 0.08, 0.5])
def test_probes_take_little_time(share: float) -> None:
    """A token that is `share` of a plain step dearer; at the latest after PROBE steps there is one."""
    costs = CostTable(step=CostCurve(tokens=(4, 64), milliseconds=(10.0, 10.0 + 600.0 * share)))
    controller = BatchController(costs, corrects=False)
    for _ in range(200):
        step(controller, controller.planned(rows(4)), 0)
    num_probes = sum(len(step(controller, controller.planned(rows(4)), 0).tokens) for _ in range(1000))
    assert 1000 // PROBE - 1 <= num_probes <= max(1000 * PROBED / share, 1000 / PROBE) + 1


def test_what_is_known_of_rows_goes_with_them() -> None:
    llm = LLM(toys.adopted(toys.llama()), {"method": "ngram"}, max_num_seqs=2)
    llm.generate(toys.prompts((9, 5, 7)), SamplingParams(temperature=0.0, max_tokens=20))
    assert isinstance(llm.engine.controller, BatchController)
    assert not llm.engine.controller.survival._rows


def test_steps_that_emitted_nothing_have_no_regret() -> None:
    hindsight = Hindsight()
    hindsight.observe(1.0, 1.0, 0, np.zeros(LONGEST + 1), np.ones(LONGEST + 1))
    assert hindsight.regret == 0.0


def test_a_step_without_rows_says_nothing() -> None:
    controller = BatchController(FREE)
    assert len(step(controller, controller.planned([]), 0).tokens) == 0
    assert controller.hindsight.num_steps == 0


def test_a_level_that_does_not_pay_ends_drafting() -> None:
    costs = CostTable(step=CostCurve(tokens=(1, 8), milliseconds=(10.0, 11.0)), drafting=CostCurve(tokens=(1,), milliseconds=(1.0,)))
    controller = BatchController(costs, corrects=False)
    controller.planned(rows(2, depth=8))
    sure, unsure = np.log(0.99), -30.0
    assert controller.goes_on(np.array([0, 1]), np.array([[sure], [sure]])).tolist() == [True, True]
    for _ in range(200):
        controller.survival.observe(np.array([5]), np.array([1]), np.array([unsure]), np.array([False]))
    assert controller.goes_on(np.array([0, 1]), np.array([[sure, sure], [sure, unsure]])).tolist()[1] is False
    assert controller.goes_on(np.array([0]), np.array([[sure] * 8])).tolist() == [False]


def test_of_all_rows_the_likeliest_tokens_are_verified() -> None:
    costs = CostTable(step=CostCurve(tokens=(1, 3, 64), milliseconds=(10.0, 10.0, 300.0)))
    controller = BatchController(costs, corrects=False)
    planned = controller.planned(rows(2))
    for _ in range(100):
        controller.survival.observe(np.array([8, 8]), np.array([0, 0]), np.log(np.array([0.9, 0.1])), np.array([True, False]))
    draft = Draft.chains([[7], [7]], scores=np.log(np.array([0.1, 0.9])))
    assert controller.chosen(planned, draft).num_draft_tokens.tolist() == [0, 1]


def test_only_what_was_verified_is_learned_from() -> None:
    controller = BatchController(FREE, corrects=False)
    planned = controller.planned(rows(1))
    step(controller, planned, 1)
    assert controller.survival._tried[:, :].sum() == 2.0  # the one that was kept, and the one after it


def test_a_decision_holds_for_some_steps_while_the_rows_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, decided = BatchController(FREE, corrects=False), []
    monkeypatch.setattr(controller, "_decided", lambda rows: decided.append(1) or BatchController._decided(controller, rows))
    for _ in range(SETTLED + 3 * HELD):
        step(controller, controller.planned(rows(2)), 4)
    assert len(decided) == SETTLED + 3
    others = rows(2)
    others[1].sequence.id = 5
    step(controller, controller.planned(others), 4)
    step(controller, controller.planned(rows(1)), 4)
    assert len(decided) == SETTLED + 5, "other rows, another decision"


def test_plain_steps_rest_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, decided = BatchController(DEAR, corrects=False), []
    monkeypatch.setattr(controller, "_decided", lambda rows: decided.append(1) or BatchController._decided(controller, rows))
    rested = []
    for _ in range(IDLE + 1 + 2 * RESTED):
        planned = rows(2)
        rested.append(controller.rests([row.sequence for row in planned]))
        step(controller, controller.planned(planned), 0)
    assert rested == [False] * (IDLE + 1) + 2 * [*[True] * (RESTED - 1), False]
    assert len(decided) == rested.count(False)
    assert RESTED < PROBE


def test_steps_that_rested_count_although_rows_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every eighth step one row comes as another goes: the steps stay plain, and what is known fades step by step."""
    controller, counted, rested = BatchController(DEAR, corrects=False), [], []
    monkeypatch.setattr(controller.survival, "rest", counted.append)
    for i in range(160):
        planned = rows(2)
        planned[1].sequence.id = 1 + i // 8
        rested.append(controller.rests([row.sequence for row in planned]))
        step(controller, controller.planned(plans.without_drafts(planned) if rested[-1] else planned), 0)
    assert sum(counted) >= 150
    assert sum(rested) >= 140, "all but those that decide, and probes"
    step(controller, controller.planned(rows(2)), 0)
    num_passed = controller._standing.num_passed
    assert not controller.rests([row.sequence for row in rows(1)]), "a smaller batch, another decision"
    controller.planned(plans.without_drafts(rows(1)))  # no row has room, since they rested
    assert controller._standing.num_passed == num_passed > 0


@pytest.mark.parametrize("num_rows", [2, 3])
def test_a_plain_step_of_other_rows_than_were_decided_on_teaches_nothing(num_rows: int) -> None:
    """One of as many rows may read more keys, or draw."""
    controller = BatchController(DEAR, corrects=False)
    for _ in range(IDLE + 1):
        step(controller, controller.planned(rows(2)), 0)
    before = controller.hindsight.num_steps
    for _ in range(2 * HELD):
        others = rows(num_rows)
        others[0].sequence.id = 7
        step(controller, controller.planned(others), 0)
    assert controller.hindsight.num_steps == before
    assert controller.rests([row.sequence for row in others])


def test_drafts_stay_short_until_chances_are_believed_however_dear_deciding_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr("echelon.adaptive.controller.perf_counter", lambda: next(clock) * 1e-3)
    costs = CostTable(step=CostCurve(tokens=(1, 8, 72), milliseconds=(10.0, 10.0, 18.0)))
    controller = BatchController(costs)
    drafted = [len(step(controller, controller.planned(rows(8, depth=8)), 8 * (i == 0)).tokens) for i in range(KNOWN)]
    assert max(drafted) == 8 * 2


@pytest.mark.parametrize(("may_draft", "least", "most"), [([True, False], HELD, MOST_HELD), ([False, False], RESTED, MOST_RESTED)])
def test_a_decision_stands_for_as_long_as_makes_it_cheap(may_draft: list[bool], least: int, most: int) -> None:
    for deciding_ms, is_settled, expected in (
        (0.0, True, least),
        (DECIDED * 10.0 * (least + 2), True, least + 2),
        (20.0, True, most),
        (0.0, False, 1),
        (20.0, False, HELD),
    ):
        standing = Standing()
        standing.may_draft = may_draft
        standing.stands(deciding_ms, 10.0, is_settled)
        num_steps, num_learned = 1, 1
        while standing.covers(2, 2, True):
            num_learned += not standing.passes()
            num_steps += 1
        assert num_steps == expected
        assert num_learned == num_steps if any(may_draft) else (num_steps > 1) < num_learned <= 2 + min(num_steps, RESTED) // HELD


def test_no_decision_holds_that_was_made_while_a_prompt_was_read() -> None:
    """The steps that follow are shorter than that one, and would be measured by what it was said to take."""
    controller = BatchController(FREE, corrects=False)
    for _ in range(SETTLED):
        step(controller, controller.planned(rows(2)), 4)
    reading = rows(2)
    controller._standing.falls()
    controller.planned([reading[0], replace(reading[1], num_new=30, start=-27)])
    assert not controller._standing.is_held
    step(controller, controller.planned(rows(2)), 4)
    assert controller._costs.shape.num_tokens == 2
    assert controller._standing.is_held


def test_what_several_steps_teach_is_learned_together() -> None:
    """As many tokens as were verified, and nothing of a row stays behind that has ended before they were counted."""
    controller = BatchController(FREE, corrects=False)
    for _ in range(SETTLED + 2):
        step(controller, controller.planned(rows(2)), 4)
    before = controller.survival._tried.sum()
    step(controller, controller.planned(rows(2)), 4)
    assert controller.survival._tried.sum() == before, "noted only"
    controller.forget(0)
    assert controller.survival._tried.sum() > before + 5
    step(controller, controller.planned(rows(2)), 4)
    for row in (0, 1):
        controller.forget(row)
    assert not controller.survival._rows and not controller._unlearned


def test_deciding_is_a_cost_of_drafts() -> None:
    """A step of half a millisecond, in which deciding takes as long as anybody's does: what little drafts would gain is not worth it."""
    costs = CostTable(step=CostCurve(tokens=(1, 2, 8), milliseconds=(0.5, 0.6, 1.2)))
    counted, uncounted = BatchController(costs), BatchController(costs, corrects=False)
    step(counted, counted.planned(rows(1)), 4)
    assert counted._own.of_drafts == 0.0, "a single step, which anything may have held up, says nothing"
    for controller in (counted, uncounted):
        for _ in range(REMEMBERED):
            step(controller, controller.planned(rows(1)), 4)
    assert counted._own.of_drafts > 0.0 == uncounted._costs.deciding_ms
    for took in [0.4] * REMEMBERED + [1000.0]:
        counted._own.observe(took)
    assert counted._own.of_drafts == 0.4
    counted._own.of_drafts = 10.0
    counted._standing.falls()
    assert counted.planned(rows(1))[0].max_draft_depth == 0 < uncounted.planned(rows(1))[0].max_draft_depth


def test_a_row_of_its_own_past_knows_no_neighbour() -> None:
    costs = CostTable(step=CostCurve(tokens=(1, 8), milliseconds=(10.0, 14.0)))
    alone, beside = RowController(costs, 4), RowController(costs, 4)
    found = []
    for controller, others in ((alone, 0), (beside, 3)):
        lengths = []
        for i in range(60):
            planned = controller.planned(rows(1 + others))
            lengths.append(planned[0].max_draft_tokens)
            verdict = [
                RowVerdict(row.max_draft_tokens, [*range(min(i % 2 if n == 0 else 4, row.max_draft_tokens))], [], 9)
                for n, row in enumerate(planned)
            ]
            controller.chosen(planned, Draft.chains([[7] * row.max_draft_tokens for row in planned]))
            controller.observe(StepRecord(planned, verdict, [1] * len(planned), 0, dict.fromkeys(PARTS, 0.0)))
        found.append(lengths)
    assert found[0] == found[1]
    assert len(set(found[0])) > 1


def test_a_row_drafts_the_best_of_the_lengths_that_it_may() -> None:
    """Four tokens are worth a step of thrice the time, fewer are not."""
    controller = RowController(CostTable(step=CostCurve(tokens=(1, 2, 5), milliseconds=(10.0, 30.0, 30.0))), 4)
    assert [controller.planned(rows(1, depth))[0].max_draft_depth for depth in (4, 3, 2, 1)] == [4, 0, 0, 0]


def test_a_row_counts_no_place_as_tried_where_nothing_stood() -> None:
    """Of a tree the kept path ends at a leaf, and a branch beside it is longer."""
    costs = CostTable(step=CostCurve(tokens=(1, 64), milliseconds=(10.0, 10.1)))
    controller = RowController(costs, 3, 2.0)
    planned = controller.planned(rows(1, 6))
    number = planned[0].sequence.id
    controller.chosen(planned, Draft.trees([([1, 2, 3, 4], [-1, -1, 1, 2])]))
    for path, tried in (([0], [1, 0, 0]), ([1], [1, 1, 0]), ([1, 2, 3], [1, 1, 1]), ([], [1, 0, 0])):
        controller._rows[number].tried = np.zeros(3)
        controller.observe(StepRecord(planned, [RowVerdict(4, path, [], 9)], [1], 0, dict.fromkeys(PARTS, 0.0)))
        assert controller._rows[number].tried.tolist() == tried


def test_pieces_of_prompts_follow_from_the_table() -> None:
    pieces = TablePieces(CostTable(step=CostCurve(tokens=(1, 101), milliseconds=(10.0, 110.0))), StepFactors((1, 101)))
    piece = pieces.largest_piece(2048, 1)
    assert 10.0 + piece <= 10.0 * 2.75 < 10.0 + piece + 1
    assert TablePieces(FREE, StepFactors((1, 64))).largest_piece(64, 1) == 64
    assert pieces.largest_piece(3, 1) == 3


def test_what_single_lengths_would_have_emitted_counts_known_tokens_and_expects_unknown_ones() -> None:
    """Rows: two right, a third wrong; two right, no more verified; not asked, where half of all have a draft; two, which was all there was;
    a right one, then beside.
    """
    draft = Draft.trees([([1, 2, 3], [-1, 0, 1]), ([1, 2], [-1, 0]), ([], []), ([1, 2], [-1, 0]), ([1, 2, 3], [-1, 0, 0])])
    is_kept = np.array([1, 1, 0, 1, 1, 1, 1, 1, 0, 1], np.bool_)
    is_likeliest = np.array([1, 1, 1, 1, 1, 1, 1, 1, 1, 0], np.bool_)
    chances, share = np.full((5, LONGEST), 0.5), np.array([1.0, 1.0, 0.5, 1.0, 1.0])
    chances[1] = 0.25
    fates = ChainFates.of(draft, is_kept, is_likeliest, np.array([8, 8, 8, 2, 8]), share, chances)
    assert fates.num_right.tolist() == [2, 2, 0, 2, 1]
    assert fates.is_open.tolist() == [False, True, True, True, False]
    found = [fates.only([row]).emitted()[:5].tolist() for row in range(5)]
    assert found == [[1, 2, 3, 3, 3], [1, 2, 3, 3.25, 3.3125], [1, 1.25, 1.375, 1.4375, 1.46875], [1, 2, 3, 3, 3], [1, 2, 2, 2, 2]]
    assert fates.emitted()[:5].tolist() == np.sum(found, 0).tolist()
    assert fates.drafted()[:5].tolist() == [0, 4.5, 9, 12.5, 16]


def test_a_token_that_was_not_verified_is_expected_by_its_own_chance() -> None:
    """A sure token and two doubtful ones, of which the first alone is worth its place."""
    controller = BatchController(CostTable(step=CostCurve(tokens=(1, 2, 9), milliseconds=(10.0, 10.1, 80.0))), corrects=False)
    planned = controller.planned(rows(1, 3))
    scores = np.log([0.99, 0.05, 0.05])
    draft = Draft.chains([[7, 7, 7]], scores=scores)
    expected = controller.survival.chances(np.ones(3), np.arange(3), scores)
    assert len(controller.chosen(planned, draft).tokens) == 1
    controller.observe(StepRecord(planned, [RowVerdict(1, [0], [7], 9)], [2], 0, dict.fromkeys(PARTS, 1e-3)))
    assert controller.hindsight.tokens[2] == pytest.approx(2.0 + expected[1])


def test_how_often_a_drafter_has_something_is_noted() -> None:
    controller = BatchController(FREE, corrects=False)
    for found in (1, 0, 0):
        planned = controller.planned(rows(1, 1))
        draft = controller.chosen(planned, Draft.chains([[7] * found]))
        verdict = [RowVerdict(found, list(range(found)), [7] * found, 9)]
        controller.observe(StepRecord(planned, verdict, [1 + len(draft.tokens)], 0, dict.fromkeys(PARTS, 1e-3)))
    assert controller.hindsight.share_found == 2 / 4


@pytest.mark.parametrize("best", [1, 2, 4])
def test_a_single_length_that_is_held_to_has_no_regret_in_its_own_hindsight(best: int) -> None:
    """Drafts of which the first tokens are always right and the next never: what "auto" does then is that length, within its learning."""
    costs = CostTable(step=CostCurve(tokens=(1, 64), milliseconds=(10.0, 20.0)))
    controller = BatchController(costs, corrects=False)
    for _ in range(400):
        step(controller, controller.planned(rows(4, 8)), best)
    assert controller.hindsight.as_metrics()["best_length"] == best
    assert abs(controller.hindsight.regret) < 0.05


def test_rows_without_a_match_cost_a_single_length_nothing() -> None:
    """Half of the rows have nothing to copy: a length of two is twice two tokens for them all, not four times."""
    controller = BatchController(CostTable(step=CostCurve(tokens=(1, 65), milliseconds=(10.0, 74.0))), corrects=False)
    planned = controller.planned(rows(4, 2))
    draft = controller.chosen(planned, Draft.chains([[7] * row.max_draft_tokens * (i < 2) for i, row in enumerate(planned)]))
    verdict = [RowVerdict(int(n), list(range(n)), [7] * int(n), 9) for n in draft.num_draft_tokens]
    controller.observe(StepRecord(planned, verdict, [1] * 4, 0, dict.fromkeys(PARTS, 1e-3)))
    assert (controller.hindsight.ms - controller.hindsight.ms[0])[:3].tolist() == [0.0, 2.0, 4.0]


def test_no_single_length_is_said_to_cost_less_than_none() -> None:
    """Deciding takes time with drafts alone, and of ten rows that were asked for one nine had none."""
    controller = BatchController(COPIED)
    controller._own.of_drafts, controller.hindsight.num_asked = 5.0, 9
    step(controller, controller.planned(rows(1)), 0)
    assert np.all(np.diff(controller.hindsight.ms) >= 0.0)


def test_regret_is_what_the_best_single_length_would_have_gained() -> None:
    hindsight = Hindsight()
    assert (hindsight.regret, hindsight.error) == (0.0, 0.0)
    ms, tokens = 10.0 + np.arange(LONGEST + 1.0), 2.0 + 2.0 * np.minimum(np.arange(LONGEST + 1), 2)
    for _ in range(10):
        hindsight.observe(12.0, 10.0, 6, tokens, ms)
    assert hindsight.error == pytest.approx(0.2)
    assert hindsight.regret == pytest.approx(0.0)
    wasteful = Hindsight()
    wasteful.observe(18.0, 18.0, 6, tokens, ms)
    assert wasteful.regret == pytest.approx(1.0 - (6 / 18.0) / (6 / 12.0))
    assert wasteful.as_metrics()["best_length"] == 2
