"""Prompts are read in pieces that cost a few steps beside rows that decode, and whole beside none."""

from __future__ import annotations

import pytest
import toys

from echelon import LLM, SamplingParams
from echelon.draft import RowVerdict
from echelon.kv.blocks import BlockTables
from echelon.sampling import Sampler
from echelon.scheduler import Scheduler
from echelon.sequence import PlannedRow, Sequence
from echelon.stats import StepRecord
from echelon.step_costs import PIECE, SMALLEST_PIECE, Step, StepCosts

LIMIT = 512


def sequence(number: int, length: int) -> Sequence:
    params = SamplingParams(max_tokens=50, temperature=0)
    return Sequence(number, [1] * length, length, Sampler(params, 0, 0, length), frozenset(), 4096)


def record(seconds: float, *counts: int, drafted: int = 0) -> StepRecord:
    """A step of rows that feed so many tokens, and drafts beside a single one, of a model that takes so long."""
    rows = [PlannedRow(sequence(i, 4000), 0, count, 0, 0) for i, count in enumerate(counts)]
    verdict = [RowVerdict(drafted if count == 1 else 0, [], [], 1) for count in counts]
    return StepRecord(rows, verdict, [0] * len(rows), 0, {"forward": seconds / 2, "verify": seconds / 2})


def learned(decoding: float, token: float) -> StepCosts:
    """Of a row that decodes, alone and beside a hundred tokens of a prompt."""
    costs = StepCosts()
    for _ in range(20):
        costs.observe(record(decoding, 1))
        costs.observe(record(decoding + 100 * token, 1, 100))
    return costs


@pytest.mark.parametrize(("decoding", "token"), [(0.1, 0.01), (0.1, 0.001), (0.02, 0.0005)])
def test_a_piece_costs_so_many_steps(decoding: float, token: float) -> None:
    piece = learned(decoding, token).largest_piece(LIMIT, 1)
    assert piece == pytest.approx(PIECE * decoding / token, abs=1)


def test_a_piece_is_bounded_at_both_ends() -> None:
    assert learned(0.1, 1.0).largest_piece(LIMIT, 1) == SMALLEST_PIECE
    assert learned(0.1, 1e-6).largest_piece(LIMIT, 1) == LIMIT
    assert learned(0.1, 0.0).largest_piece(LIMIT, 1) == LIMIT
    assert learned(0.1, 1.0).largest_piece(3, 1) == 3


def test_nothing_is_bounded_by_what_was_not_seen() -> None:
    costs = StepCosts()
    assert costs.largest_piece(LIMIT, 1) == LIMIT
    costs.observe(record(0.1, 1))
    assert costs.largest_piece(LIMIT, 1) == LIMIT
    costs = StepCosts()
    costs.observe(record(9.0, 1, 500))  # what of it was decoding is not known
    assert costs.token is None
    costs.observe(record(0.1, *[1] * 40))
    costs.observe(record(0.1, *[1] * 30, 9))  # nor is a token's share, where a step has as many with a prompt as without
    assert costs.token is None
    assert costs.largest_piece(LIMIT, 1) == LIMIT


def test_a_prompt_read_alone_says_what_a_token_costs() -> None:
    costs = StepCosts()
    costs.observe(record(1.0, 500))
    costs.observe(record(0.1, 1))
    assert costs.largest_piece(LIMIT, 1) == int(PIECE * 0.1 / (1.0 / 500))


@pytest.mark.parametrize("drafted", [0, 6])
def test_pieces_do_not_shrink_while_more_and_more_rows_decode_beside_them(drafted: int) -> None:
    """A step of 40 ms and 2.5 a token: no step without prompts says what rows cost that came since, and their own time is no prompt's."""

    def seconds(tokens: int) -> float:
        return 0.04 + 0.0025 * tokens

    costs = StepCosts()
    costs.observe(record(seconds(1 + drafted), 1, drafted=drafted))
    for num_decoding in range(1, 32):
        costs.observe(record(seconds(num_decoding * (1 + drafted) + 20), *[1] * num_decoding, 20, drafted=drafted))
    beside = seconds(31 * (1 + drafted))
    assert costs.largest_piece(4 * LIMIT, 31) == pytest.approx(PIECE * beside / 0.0025, abs=1)
    assert costs.largest_piece(4 * LIMIT, 1) == pytest.approx(PIECE * seconds(1 + drafted) / 0.0025, abs=1), "once they have ended"


def test_what_a_step_of_many_rows_took_is_not_what_one_row_takes() -> None:
    """Of 31 of 32 rows that ended a prompt was read beside the last, which no step without prompts has shown alone."""
    costs = StepCosts()
    costs.observe(record(0.12, *[1] * 32))
    costs.observe(record(0.0425 + 0.0025 * 10, 1, 10))
    assert costs.largest_piece(LIMIT, 1) == pytest.approx(PIECE * 0.0425 / 0.0025, abs=1)


def test_a_step_is_never_cheaper_than_its_tokens() -> None:
    """A prompt that cost less than a line through the steps before says, at most, that all of a step's time is its tokens'."""
    costs = StepCosts()
    costs.observe(record(0.001, 1))
    costs.observe(record(1.0, 1, 9))
    assert costs.token == pytest.approx(0.1)
    assert costs.largest_piece(LIMIT, 4) == int(PIECE * 4)


def planned(scheduler: Scheduler) -> list[int]:
    return [row.num_new for row in scheduler.next_step().rows]


def running(costs: StepCosts, *prompts: tuple[int, int]) -> Scheduler:
    """Rows of (tokens, cached tokens)."""
    tables = BlockTables(1000, 16, 200)
    scheduler = Scheduler([tables], 8, LIMIT)
    scheduler.piece_sizes = costs
    for number, (length, cached) in enumerate(prompts):
        scheduler.add(sequence(number, length))
        if cached:
            tables.reserve(number, cached)
            tables.commit(number, cached)
            scheduler.running.append(scheduler.waiting.pop())
    return scheduler


def test_the_scheduler_reads_in_pieces_beside_rows_that_decode() -> None:
    costs = learned(0.1, 0.01)
    piece = costs.largest_piece(LIMIT, 1)
    assert planned(running(costs, (40, 39), (900, 0))) == [1, piece]
    assert planned(running(costs, (40, 39), (900, 100))) == [1, piece]
    piece = costs.largest_piece(LIMIT, 2)  # two rows take longer than one
    assert planned(running(costs, (40, 39), (50, 49), (900, 100), (900, 0))) == [1, 1, piece // 2, piece - piece // 2]


def test_alone_a_prompt_is_read_whole() -> None:
    assert planned(running(learned(0.1, 0.01), (900, 0))) == [LIMIT]
    assert planned(running(learned(0.1, 0.01), (900, 100))) == [LIMIT]


def test_an_engine_learns_and_texts_stay() -> None:
    target = toys.adopted(toys.llama())
    prompts = [[5, 6], [7] * 60, [8, 9] * 25]
    params = SamplingParams(max_tokens=12, temperature=0)
    alone = [LLM(target).generate([p], params)[0].outputs[0].token_ids for p in prompts]
    llm = LLM(target, max_num_seqs=3)
    costs = llm.engine.scheduler.piece_sizes
    costs.decoding, costs.token = Step(1.0, 100.0), 100.0  # pieces of SMALLEST_PIECE at first
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == alone
    assert max(costs.decoding.seconds, costs.token) < 99.0
