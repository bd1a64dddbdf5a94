"""docs/claims.md is what the evidence says: verdicts follow from rules, commands can be given, and no paper is outdone elsewhere."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from test_code_blocks import check_command

from benchmarks.claims import PAPERS, judged_rows, write_claims
from benchmarks.claims_of_eagle import by_log_of_batch, gains_by_task, over_plain_at, table_5_steps, times_head
from benchmarks.claims_of_echelon import beside_peers, equal_on_device, fastest_unpadded, long_speed
from benchmarks.claims_of_equality import steps_by_batch, tail
from benchmarks.claims_of_heads import dear_answers, spec_bench
from benchmarks.claims_of_memory import one_more, within_bound
from benchmarks.claims_of_padding import device_inputs_over_keys
from benchmarks.gpu import DeviceCells, DeviceSize
from benchmarks.long_outputs import HOW
from benchmarks.reasons import dear_steps, longer_steps
from benchmarks.verdicts import (
    FAILS,
    HOLDS,
    NOT_HERE,
    NOT_MEASURED,
    OPTIONS,
    AtLeast,
    AtMost,
    Claim,
    Crosses,
    Evidence,
    Judged,
    Measured,
    Ordered,
    VerdictRule,
    Within,
    judge,
    sampled,
    verdict_of,
)
from echelon.bench.throughput import ThroughputResult
from echelon.ops.devices import chosen_device

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ROWS = [row for rows in judged_rows(Evidence(DOCS / "evidence")).values() for row in rows]
CLAIMS = {row.claim.name: row.claim for row in ROWS}
COMMANDS = sorted({claim.command for claim in CLAIMS.values()})
NAMES = r"EMS-SD|EQSPEC|EXSPEC|SpecMemo|Scylla|Clover|Medusa|EAGLE(?:-[123])?|[Pp]ublish\w*|[Tt]he paper\w*"


def test_the_page_is_what_the_command_writes(tmp_path: Path) -> None:
    (tmp_path / "evidence").symlink_to(DOCS / "evidence")
    written = write_claims(tmp_path).read_text("utf-8")
    assert (DOCS / "claims.md").read_text("utf-8") == written, "run: python -m benchmarks.claims"


def test_there_are_rows_enough_and_none_twice() -> None:
    assert len(ROWS) == len(CLAIMS) >= 25
    assert len(PAPERS) == 8


RULED: list[tuple[VerdictRule, Measured, bool]] = [
    (AtLeast(1.5), Measured([1.0, 1.5, 9.0]), True),
    (AtLeast(1.5), Measured([1.0, 1.49, 9.0]), False),
    (AtLeast(1.0), Measured([1.1, 0.9], labels=["a", "b"]), False),
    (AtMost(0.5), Measured([0.5]), True),
    (AtMost(0.5), Measured([0.1, 0.6], labels=["a", "b"]), False),
    (Within(0.97, 1.03), Measured([0.5, 1.0, 2.0]), True),
    (Within(0.97, 1.03), Measured([1.04]), False),
    (Ordered(), Measured([1.0, 2.0, 3.0], labels=["a", "b", "c"]), True),
    (Ordered(), Measured([1.0, 3.0, 2.0], labels=["a", "b", "c"]), False),
    (Ordered(rises=False), Measured([3.0, 2.0], labels=["a", "b"]), True),
    (Crosses(), Measured([2.0, 1.1, 0.9], labels=["a", "b", "c"]), True),
    (Crosses(), Measured([2.0, 1.1, 1.0], labels=["a", "b", "c"]), False),
]


@pytest.mark.parametrize(("rule", "measured", "holds"), RULED)
def test_rules(rule: VerdictRule, measured: Measured, holds: bool) -> None:
    claim = Claim("a", "A.", "1", "make test", rule, lambda _: measured)
    assert rule.holds(measured) is holds
    assert verdict_of(claim, measured) == (HOLDS if holds else FAILS)


def test_what_is_not_measured_says_whether_it_could_be() -> None:
    claim = Claim("a", "A.", "1", "make test", AtLeast(1.0), lambda _: None)
    assert verdict_of(claim, None) == NOT_MEASURED
    needing = Claim("a", "A.", "1", "make test", AtLeast(1.0), lambda _: None, needs="a hub")
    assert verdict_of(needing, None) == f"{NOT_HERE}: it takes a hub"
    assert verdict_of(needing, Measured([2.0])) == HOLDS, "what was measured decides"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.claim.name)
def test_every_verdict_follows_from_its_rule(row: Judged) -> None:
    if row.measured is None or not row.measured.samples:
        assert row.verdict == (f"{NOT_HERE}: it takes {row.claim.needs}" if row.claim.needs else NOT_MEASURED)
    else:
        assert row.verdict == (HOLDS if row.claim.rule.holds(row.measured) else FAILS)
        assert row.records, "a figure has evidence"
    assert not row.is_worse or row.claim.why is not None, "why ours is worse"


def test_what_needs_a_device_names_the_cell_that_decides() -> None:
    cells = {cell.name for cell in DeviceCells(DeviceSize(), chosen_device("cpu"), "invariant").all}
    needing = [claim for claim in CLAIMS.values() if "CUDA" in claim.needs]
    assert len(needing) >= 6
    for claim in needing:
        found = re.search(r"the cell `([^`]+)` of `scripts/gpu_check.sh`", claim.needs)
        assert found is not None
        assert found[1] in cells
        assert claim.command == f"scripts/gpu_check.sh {found[1]}"


def speeds(**by_method: float) -> dict[str, Any]:
    """A record of speeds, three rounds each; names are METHOD__STRATEGY."""
    named = [(*name.split("__"), value) for name, value in by_method.items()]
    results = [
        ThroughputResult(method.replace("_", " "), 8, [value] * 3, 4.2, 0.5, 0, 0, [], strategy.replace("_", "-"), [value] * 3, [], STEP)
        for method, strategy, value in named
    ]
    return {"environment": WHERE, "results": [asdict(r) for r in results]}


WHERE = dict.fromkeys(("cpu", "threads", "torch", "transformers", "commit"), "x")
STEP = {"draft": 1.0, "forward": 7.0, "verify": 0.5, "layout": 1.0, "host": 0.5}
TABLE = speeds(
    plain__unpadded=50, replay_LLMA__padded=100, replay_LLMA__padded_kv=150, replay_LLMA__padded_inputs=120, replay_LLMA__unpadded=160
)
TABLE["results"][1] |= {"padded_input_share": 0.5, "padded_kv_share": 0.25}
ROWS_EQUAL = {"batch_size": 4, "num_rows": 480, "num_exact": 12, "partial_match": 0.3}
TASK = {"plain": [10.0, 10.0], "ours": [20.0, 30.0], "steps": 100, "tokens": 400}
ARRIVED: dict[str, tuple[dict[str, Any], dict[str, str]]] = {  # evidence → record, and the verdicts that follow
    "alike/opt_b08": (TABLE, {"padding-8": HOLDS, "gain-8": HOLDS, "inputs-first": HOLDS}),
    "alike/opt_b24": (TABLE, {"padding-24": FAILS, "gain-24": HOLDS}),
    "gpu_check": (
        {"table-OPT-6.7B-08": TABLE | {"results": [*TABLE["results"], TABLE["results"][-1] | {"method": "replay LLMA, no graphs"}]}},
        {"device-replay-8": HOLDS, "device-plain-8": HOLDS},
    ),
    "benchmarks/realign-random-08": (speeds(draft_model__realign=90, draft_model__same_length=80), {"overhead-40": FAILS}),
    "alike/windows_b08": ({"windows": [[8, 0.1, 50.0], [16, 0.4, 55.0]]}, {"groups-by-window": HOLDS}),
    "alike/trees_eagle_b04": (speeds(plain__unpadded=50, tree__padded=110), {"specmemo-batch-4": HOLDS}),
    "equivalence/bonus_token_from_the_draft": ({"results": [ROWS_EQUAL]}, {"fault-bonus-draft": HOLDS}),
    "equivalence/unpadded": ({"results": [ROWS_EQUAL | {"num_exact": 480}]}, {"equal-4": HOLDS}),
    "equivalence/rows": ({"num_rows": 10_080, "num_exact": 10_079}, {"own-equal-ten-thousand": FAILS}),
    "categories/eagle_b1_t0": (
        {"tasks": {"qa": TASK}, "overall": {"speed_up": 2.5, "tokens_per_step": 4.0}, "num_questions": 2},
        {"spec-bench-eagle-speed": HOLDS, "spec-bench-eagle-tokens": FAILS},
    ),
    "clover/small_b04": (
        {
            "results": [
                r | {"method": n, "strategy": "unpadded"}
                for n, r in zip(("plain", "clover, 4", "medusa, 4"), TABLE["results"], strict=False)
            ]
        },
        {"clover-small-4": HOLDS, "clover-over-medusa-small": FAILS},
    ),
    "long/b08": ({"num_rows": 8, "num_exact": 7}, {"own-long-equal": FAILS}),
    "memory/bound": (
        {
            "rounds": [
                {"none": {"speed": 10.0}, "draft_model": {"least": 2**30, "limit": 2**30 - 2**20, "speed": v}} for v in (12.0, 9.0, 15.0)
            ],
            "below": {"limit": 2**29, "died": "of it"},
        },
        {"specmemo-bound": HOLDS},
    ),
    "soak": (
        {"part-01": {"environment": WHERE, "minutes": 60.0, "requests": 9, "mib_an_hour": 2.0, "violations": 0}},
        {"own-soak-wrong": HOLDS, "own-soak-memory": FAILS},
    ),
}


@pytest.mark.parametrize("name", ARRIVED)
def test_records_decide_as_they_come(name: str, tmp_path: Path) -> None:
    record, verdicts = ARRIVED[name]
    path = tmp_path / "evidence" / f"{name}.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record), "utf-8")
    rows = {r.claim.name: r for own in judged_rows(Evidence(tmp_path / "evidence")).values() for r in own}
    assert {n: rows[n].verdict for n in verdicts} == verdicts
    text = write_claims(tmp_path).read_text("utf-8")
    assert all(f"`{n}`: " in text.split("## How verdicts are made")[0] for n, v in verdicts.items() if v == FAILS), "first, and why"


def evidence_of(folder: Path, **records: dict[str, Any]) -> Evidence:
    """Records by names in which __ stands for a folder."""
    for name, record in records.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record), "utf-8")
    return Evidence(folder)


HERE = WHERE | {"isa": "avx2"}


@pytest.mark.parametrize(
    ("other", "note"),
    [
        ({"commit": "y", "torch": "y"}, ""),
        ({"cpu": f"{WHERE['cpu']} family 25 model 17"}, ""),
        ({"cpu": "another"}, "of 2 kinds of machines or numbers of threads"),
        ({"isa": "avx512"}, "of 2 kinds of machines or numbers of threads"),
        ({"threads": "8"}, "of 2 kinds of machines or numbers of threads"),
    ],
)
@pytest.mark.parametrize("own", ["", "counted"])
def test_figures_of_more_than_one_kind_of_processor_say_so(own: str, other: dict[str, str], note: str, tmp_path: Path) -> None:
    evidence = evidence_of(tmp_path, a={"environment": HERE, "speed": 2.0}, b={"environment": HERE | other, "speed": 4.0})
    claim = Claim("c", "C.", "1", "make test", AtLeast(1.0), lambda e: sampled([(e.record(n) or {})["speed"] for n in "ab"], note=own))
    measured = judge(claim, evidence).measured
    assert measured is not None and measured.note == "; ".join(filter(None, (own, note)))


def test_of_a_device_the_cell_that_decides_is_the_evidence(tmp_path: Path) -> None:
    """Whatever other cells the same file has, of other machines too."""
    cells = {"a": {"environment": HERE, "speed": 2.0}, "b": {"environment": HERE | {"cpu": "another"}, "speed": 4.0}, "c": {"failed": "it"}}
    evidence = evidence_of(tmp_path, gpu_check=cells)
    judged = judge(Claim("c", "C.", "1", "make test", AtLeast(1.0), lambda e: sampled([e.device("a")["speed"]])), evidence)
    assert judged.records == {"gpu_check/a": cells["a"]}
    assert judged.measured == sampled([2.0])
    assert evidence.device("c") == evidence.device("none") == {}


def test_long_texts_are_judged_by_every_quarter_of_both_batches(tmp_path: Path) -> None:
    assert long_speed(Evidence(tmp_path)) is None
    assert long_speed(evidence_of(tmp_path, long__b01={"plain": [10.0, 10.0], "speed": [20.0, 15.0]})) is None, "measured otherwise"
    one = evidence_of(tmp_path, long__b01={"settings": HOW, "plain": [10.0, 10.0], "speed": [20.0, 15.0]})
    assert long_speed(one) is None, "the claim is of both batches"
    both = evidence_of(tmp_path, long__b08={"settings": HOW, "plain": [40.0, 50.0], "speed": [44.0, 45.0], "tokens_a_row": 3500.0})
    assert str(long_speed(both)).startswith("batch 1, quarter 1: 2.00, batch 1, quarter 2: 1.50, ")
    assert str(long_speed(both)).endswith(
        "batch 8, quarter 1: 1.10, batch 8, quarter 2: 0.90; until the first of 8 rows ends, when rows have 3,500 tokens"
    )


def test_a_lower_bound_is_judged_by_the_middle_round_and_needs_less_to_die(tmp_path: Path) -> None:
    bound: dict[str, Any] = ARRIVED["memory/bound"][0]
    found = str(within_bound(evidence_of(tmp_path, memory__bound=bound)))
    assert found.startswith("1.20 (0.90 to 1.50, 3 samples); of 1,024 MiB that the plan says it needs, 1,023 are data")
    assert found.endswith("under 512 MiB it dies")
    below = {"limit": 2**29, "speed": 11.0}
    assert within_bound(evidence_of(tmp_path, memory__bound=bound | {"below": below})) is None


def test_a_plan_that_held_fewer_queries_than_it_says_is_no_bound(tmp_path: Path) -> None:
    """One that died has not tried one more."""
    fits = {"planned": 15, "held": 15, "holds_one_more": True}
    assert "1 more query fits than it says" in one_more(evidence_of(tmp_path, memory__ratio_llama_15=fits))
    died = {"planned": 9, "held": 0, "died": "of it"}
    assert "9 did not fit: the plan is no bound" in one_more(evidence_of(tmp_path, memory__ratio_llama_plan=died))


def test_steps_that_are_longer_are_the_reason(tmp_path: Path) -> None:
    """Of the row's own record, or of what is emitted and gained; what takes no time to draft is not said to."""
    record = speeds(plain__unpadded=50, tree__padded=60)
    record["results"][1] |= {"step_ms": {"draft": 12.0, "forward": 88.0}, "tokens_per_step": 3.0}
    record["results"][0] |= {"step_ms": {"draft": 0.0, "forward": 40.0}}
    evidence = evidence_of(tmp_path, alike__trees_eagle_b04=record)
    told = dear_steps("alike/trees_eagle_b04", "tree", 2.5, evidence, strategy="padded")
    assert told == "a step with drafts takes 100 ms, 12 of them to draft, and emits 3.00 tokens a row, where a plain one takes 40 ms"
    assert dear_steps("alike/trees_eagle_b04", "tree", 3.1, evidence, strategy="padded").startswith("a step emits fewer tokens here")
    assert dear_steps("alike/trees_eagle_b04", "tree", 2.5, evidence) == "how long a step takes was not kept"
    assert longer_steps(4.0, 0.5) == "a step with drafts emits 4.00 tokens a row and takes 8.0 times as long as a plain one"


def test_where_nothing_is_drafted_no_step_is_longer(tmp_path: Path) -> None:
    speeds = {"plain": [100.0], "scylla, auto": [99.0], "eagle, 60 nodes": [50.0]}
    record = {"speeds": speeds, "tokens_per_step": {"plain": 1.0, "scylla, auto": 1.0, "eagle, 60 nodes": 5.0}}
    evidence = evidence_of(tmp_path, laws__speed_b16=record)
    assert table_5_steps("scylla, auto", 16, 2.2, evidence).startswith("no draft pays at this batch")
    assert table_5_steps("eagle, 60 nodes", 16, 1.1, evidence).endswith(
        "emits 5.00 tokens a row and takes 10.0 times as long as a plain one"
    )
    assert str(over_plain_at("eagle, 60 nodes", 16, evidence)) == "0.50 (one sample); 5.00 tokens a step"


def test_texts_on_a_device_are_counted_by_line(tmp_path: Path) -> None:
    cell = {"environment": WHERE, "lines": [["texts at batch 1", "383 of 384 rows", "all", False]]}
    evidence = evidence_of(tmp_path, gpu_check={"equality-float16": cell})
    assert str(equal_on_device("float16", evidence)) == "99.7 % (one sample); 384 rows"
    assert equal_on_device("float32", evidence) is None


def test_other_engines_count_in_their_best_mode_and_ours_with_auto(tmp_path: Path) -> None:
    def result(method: str, batch: int, *speeds: float) -> dict[str, Any]:
        return {"method": method, "batch_size": batch, "decode_tokens_per_second": list(speeds)}

    ours = [
        result("plain", 8, 900.0),
        result("LLMA auto", 8, 100.0, 140.0, 120.0),
        result("draft model auto", 8, 110.0),
        result("LLMA auto", 1, 9.0),
    ]
    peers = [
        {"result": result(name, 8, *speeds)}
        for name, *speeds in (("vllm, plain", 90.0, 30.0, 20.0), ("vllm, draft model", 50.0, 70.0, 60.0), ("openvino, plain", 40.0))
    ]
    evidence = evidence_of(tmp_path, peers__int8={"ours": ours, "peers": peers})
    assert str(beside_peers("int8", 8, evidence)) == (
        "2.00 (2.00 to 2.00, 3 samples); LLMA auto 120 tokens/s, vllm, draft model 60 tokens/s"
    )
    assert beside_peers("int8", 1, evidence) is None, "no other engine ran there"
    assert beside_peers("int8", 16, evidence) is None


def test_gains_are_set_beside_those_of_other_tasks(tmp_path: Path) -> None:
    own, other = (
        [[task, t, e] for task, e in emitted] + [["qa", 1.0, 9.0]]
        for t, emitted in (
            (0.0, (("qa", 4.4), ("summarization", 1.8), ("math", 2.2), ("rag", 2.2))),
            (0.0, (("qa", 2.0), ("summarization", 2.0), ("math", 2.0), ("rag", 2.0))),
        )
    )
    evidence = evidence_of(tmp_path, laws__tasks_scylla={"tasks": own}, laws__tasks_eagle={"tasks": other})
    assert str(gains_by_task(evidence)) == "summarization: 0.82, qa: 2.00"


def test_speed_on_spec_bench_is_that_of_drafts_as_long_as_the_engine_decides(tmp_path: Path) -> None:
    """Tokens a step are those of the published length, since the published figure is."""
    published, decided = {"speed_up": 0.96, "tokens_per_step": 5.2}, {"speed_up": 2.4, "tokens_per_step": 4.1}
    record = {"overall": published, "auto": {"overall": decided}, "num_questions": 2}
    evidence = evidence_of(tmp_path, categories__eagle_b1_t0=record)
    assert str(spec_bench("eagle", "speed_up", evidence)) == "2.40 (one sample); 2 questions; 0.96 with drafts of the published length"
    assert str(spec_bench("eagle", "tokens_per_step", evidence)) == "5.20 (one sample); 2 questions"


def test_what_an_answer_costs_is_said_of_the_drafts_that_are_judged(tmp_path: Path) -> None:
    published, decided = {"speed_up": 0.5, "tokens_per_step": 5.0}, {"speed_up": 2.0, "tokens_per_step": 4.0}
    record = {"overall": published, "num_questions": 2}
    evidence = evidence_of(tmp_path, categories__medusa_b1_t0=record, categories__eagle_b1_t0=record | {"auto": {"overall": decided}})
    assert dear_answers("medusa", evidence).endswith(
        "emits 5.00 tokens and takes, with its share of reading the prompts, 10.0 times as long as a plain one"
    )
    assert "emits 4.00 tokens" in dear_answers("eagle", evidence) and " 2.0 times as long" in dear_answers("eagle", evidence)
    assert dear_answers("ngram", evidence) == "it has not been measured"


def test_comparisons_at_batch_1_count_for_no_strategy(tmp_path: Path) -> None:
    """Nor do those without another strategy."""
    assert fastest_unpadded(Evidence(tmp_path)) is None
    batches = {b: speeds(plain__unpadded=50, replay_LLMA__padded=100, replay_LLMA__unpadded=own) for b, own in ((1, 90), (4, 110), (8, 99))}
    for batch, record in batches.items():
        for result in record["results"]:
            result["batch_size"] = batch
    evidence = evidence_of(tmp_path, **{f"benchmarks__table-opt-{b:02d}": record for b, record in batches.items()})
    assert str(fastest_unpadded(evidence)) == "50 % (one sample); 2 comparisons"


def test_padding_of_keys_is_set_over_that_of_inputs(tmp_path: Path) -> None:
    """On a device: where keys are padded, inputs are not, and the other way round."""
    evidence = evidence_of(tmp_path, gpu_check={"table-OPT-6.7B-08": TABLE})
    assert str(device_inputs_over_keys(evidence)) == "1.25 (1.25 to 1.25, 3 samples)"


def test_heads_are_compared_by_what_they_emit_greedy_at_60_nodes(tmp_path: Path) -> None:
    one, other = ({"emitted": [[0.0, 60, e], [1.0, 60, 9.0], [0.0, 8, 9.0]]} for e in (6.0, 4.0))
    evidence = evidence_of(tmp_path, laws__eagle3_t100=one, laws__eagle_t100=other)
    assert str(times_head("eagle3", "eagle", evidence)) == "1.50 (one sample)"
    assert times_head("d2_s0", "eagle", evidence) is None


@pytest.mark.parametrize(("speed_of_64", "r_squared"), [(700.0, "1.00"), (300.0, "0.40")])
def test_speed_as_a_logarithm_of_the_batch(speed_of_64: float, r_squared: str, tmp_path: Path) -> None:
    measured = {1: 100.0, 4: 300.0, 16: 500.0, 64: speed_of_64}
    records = {f"laws__speed_b{b:02d}": {"speeds": {"scylla, auto": [v] * 3, "plain": [1.0] * 3}} for b, v in measured.items()}
    assert by_log_of_batch(evidence_of(tmp_path / "few", **dict(list(records.items())[:3]))) is None
    assert str(by_log_of_batch(evidence_of(tmp_path, **records))).startswith(f"{r_squared} (one sample); 4 batches")


def test_steps_of_eight_rows_and_of_one(tmp_path: Path) -> None:
    one, many = speeds(draft_model__unpadded=10), speeds(draft_model__unpadded=30)
    one["results"][0]["step_ms"] = {"forward": 3.0, "draft": 1.0}
    evidence = evidence_of(tmp_path, **{"benchmarks__realign-random-01": one, "benchmarks__realign-random-08": many})
    assert steps_by_batch(evidence) == "a step of 8 rows with drafts takes 10 ms and one of a single row 4 ms"


def test_slowest_answers_are_compared_round_by_round(tmp_path: Path) -> None:
    rounds = [
        {"strategy": s, "p99": p}
        for grouped, moved in ((3.0, 2.0), (8.0, 2.0), (2.0, 2.0))
        for s, p in (("same-length", grouped), ("realign", moved))
    ]
    evidence = evidence_of(tmp_path, **{"benchmarks__latency-08": {"latencies": rounds}})
    assert str(tail(8, evidence)) == "1.50 (1.00 to 4.00, 3 samples)"
    assert tail(4, evidence) is None


class ParsedError(Exception):
    """A command has understood its arguments: the first of `args`."""


def asked_of_benchmark(command: str, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """What a module parses of that which follows it; it does no more."""
    module, *arguments = shlex.split(command)[2:]
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        raise ParsedError(parse(parser, args, namespace))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    found = importlib.import_module(module)
    with pytest.raises(ParsedError) as parsed:
        found.parser().parse_args(arguments) if hasattr(found, "parser") else found.main()
    asked: argparse.Namespace = parsed.value.args[0]
    return asked


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = shlex.split(command)
    if program.startswith("scripts/"):
        assert (ROOT / program).exists()
    elif command.startswith("python scripts/"):
        runpy.run_path(str(ROOT / arguments[0]))["parser"]().parse_args(arguments[1:])
    elif command.startswith("python -m benchmarks."):
        asked_of_benchmark(command, monkeypatch)
    else:
        check_command(command)


OTHER_PLACES = {"ablation": "ablation", "plateau": "training", "eagle3_in_vllm": "eagle3_in_vllm", "tables": "benchmarks"}


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r.records and r.claim.command.startswith("python -m benchmarks.")], ids=lambda row: row.claim.name
)
def test_a_claim_is_judged_by_what_its_command_measures(row: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """By records of its folder, of cells whose names begin as it asks, and of its settings, unless records differ in these."""
    asked = asked_of_benchmark(row.command, monkeypatch)
    for name, values in row.settings.items():
        option = OPTIONS[name].removeprefix("--").replace("-", "_")
        assert len(values) > 1 or getattr(asked, option) == values[0]
        assert len(values) == 1 or f"{OPTIONS[name]} {values[0]} and" in row.differing
    module = shlex.split(row.claim.command)[2].removeprefix("benchmarks.")
    for name in row.records:
        place, _, cell = name.partition("/")
        assert place == OTHER_PLACES.get(module, asked.output.name)
        assert not cell or cell.startswith(tuple(vars(asked).get("prefixes") or vars(asked).get("cells") or [""])), name


def sentences() -> Iterator[tuple[str, str]]:
    """(document, sentence) of all that is written by hand and speaks of a paper in numbers."""
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        if path.name in ("claims.md", "benchmarks.md", "laws.md", "on_paper.md", "changelog.md"):
            continue  # written from evidence, or what changed
        text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
        for sentence in re.split(r"(?<=[.:;])\s+|\n\n|\n[-|]", text):
            if re.search(NAMES, sentence):
                yield path.name, " ".join(sentence.split())


def ratios(sentence: str) -> set[str]:
    """Numbers that outdo something: 2.17, 1.9 times, 96 %; no counts."""
    sentence = re.sub(r"[\d.]+(?: to [\d.]+)? (?:thousand|million|billion|B)\b", "", sentence)
    return set(re.findall(r"(?<![\w.,-])\d+\.\d+(?![\w.])|(?<![\w.,-])\d+(?= times\b| ?%)", sentence))


def test_no_paper_is_outdone_where_the_page_says_nothing() -> None:
    """Every ratio in a sentence that names a paper stands in the page of claims."""
    page = (DOCS / "claims.md").read_text("utf-8")
    known = set(re.findall(r"\d+(?:\.\d+)?", page))
    missing = {f"{name}: {r} in {sentence}" for name, sentence in sentences() for r in ratios(sentence) if r not in known}
    assert missing == set()


def test_the_page_is_linked() -> None:
    assert "docs/claims.md" in (ROOT / "README.md").read_text("utf-8")
    assert "claims.md" in (ROOT / "mkdocs.yml").read_text("utf-8")
