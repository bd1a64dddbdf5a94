"""`echelon verify` passes the engine, finds every published fault, and knows a tie from one."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import faults
import pytest
import torch
import toys

from echelon import LLM
from echelon.bench import verify as bench
from echelon.cli import main
from echelon.cli.verify import as_json
from echelon.demo import DRAFT, TARGET
from echelon.model.load.publishing import publish
from echelon.ops import compiled

SMALL = ["--num-prompts", "6", "--prompt-tokens", "48", "--max-tokens", "24", "--no-control", "--dtypes", "float32"]
IN_INTEGERS = ["--num-prompts", 4, "--prompt-tokens", 48, "--max-tokens", 24, "--batch-sizes", 3, "--json"]
needs_kernels = pytest.mark.skipif(not compiled.is_built(), reason="the compiled kernels are not built")


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["echelon", "verify", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main()
    out = capsys.readouterr()
    return int(stop.value.code or 0), out.out, out.err


@pytest.mark.parametrize(("name", "strategy"), [(None, "padded"), (None, "realign"), *((n, s) for n, (_, s) in faults.FAULTS.items())])
def test_every_published_fault_is_found(
    name: str | None, strategy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ["--strategies", strategy, "--batch-sizes", 3, "--json"]
    with faults.enacted(name):
        code, out, err = run(capsys, monkeypatch, TARGET, *where, *SMALL)
    found = json.loads(out)
    assert code == (1 if name else 0), err
    assert bool(found["num_faults"]) == bool(name)
    result = found["results"][-1]
    assert [r["drafter"] for r in found["results"]] == ["plain", "LLMA 5"]
    assert (result["dtype"], result["strategy"], result["batch_size"]) == ("float32", strategy, 3)
    if name is None:
        assert (result["num_exact"], result["exact_match"], result["partial_match"]) == (6, 1.0, 1.0)
    else:
        assert result["partial_match"] < 1.0
        assert "apart in float32" in err


def test_faults_of_a_batch_need_a_batch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As published: unaligned KV and position drift show only beyond batch 1, the other two at batch 1 as well."""
    for name, (_, strategy) in faults.FAULTS.items():
        with faults.enacted(name):
            code, _, _ = run(capsys, monkeypatch, TARGET, "--strategies", strategy, "--batch-sizes", 1, *SMALL)
        assert code == (0 if name in ("KV unaligned across rows", "position drift") else 1), name


def test_table_controls_and_both_dtypes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["--num-prompts", "3", "--prompt-tokens", "24", "--max-tokens", "6", "--batch-sizes", "2", "--strategies", "unpadded,padded-kv"]
    code, out, err = run(
        capsys, monkeypatch, TARGET, *few, "--speculative-config", json.dumps({"method": "draft_model", "model": str(DRAFT)})
    )
    assert code == 0, err
    for words in ("float32", "bfloat16", "padded-kv", "draft model auto", "transformers", "3 of 3"):
        assert words in out, words


@needs_kernels
def test_reference_and_judge_have_the_same_integers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str | None, str]] = []
    whole = LLM.__init__

    def noted(llm: LLM, *args: Any, **settings: Any) -> None:
        whole(llm, *args, **settings)
        made.append((llm.target.quantization, settings["kv_cache_dtype"]))

    monkeypatch.setattr(LLM, "__init__", noted)
    integers = ["--quantization", "int4", "--kv-cache-dtype", "int8", "--strategies", "unpadded"]
    code, out, err = run(capsys, monkeypatch, TARGET, *integers, *IN_INTEGERS)
    assert code == 0, err
    assert len(made) >= 5 and set(made) == {("int4", "int8")}
    assert "transformers is left out: it does not run weights in int4, keys and values in int8" in err
    found = json.loads(out)
    assert found["reference"] == "plain decoding at batch 1, weights in int4, keys and values in int8"
    assert (found["quantization"], found["kv_cache_dtype"]) == ("int4", "int8")
    results = [(r["dtype"], r["strategy"], r["num_exact"]) for r in found["results"]]
    assert results == [("float32", "unpadded", 4)] * 2 + [("bfloat16", "unpadded", 4)] * 2


@needs_kernels
@pytest.mark.parametrize("name", [None, *faults.FAULTS])
def test_in_integers_the_frameworks_attention_is_no_fault(
    name: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = faults.FAULTS[name][1] if name else "padded"
    with faults.enacted(name):
        code, out, err = run(capsys, monkeypatch, TARGET, "--quantization", "int8", "--strategies", strategy, *IN_INTEGERS)
    assert code == (1 if name else 0), err
    assert bool(json.loads(out)["num_faults"]) == bool(name)


@needs_kernels
def test_a_published_checkpoint(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    publish(str(TARGET), tmp_path, "int4")
    few = ["--num-prompts", 2, "--prompt-tokens", 24, "--max-tokens", 6, "--batch-sizes", 2, "--strategies", "unpadded,padded"]
    code, out, err = run(capsys, monkeypatch, tmp_path, "--dtypes", "bfloat16", *few)
    assert code == 0, err
    assert "compared with plain decoding at batch 1, weights in int4" in " ".join(out.split())
    assert "transformers" not in out and "transformers is left out: it does not run weights in int4" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kv-cache-dtype", "int8"], "belongs to strategy = 'unpadded'"),
        (["--strategies", "paddled"], "same-length"),
        (["--dtypes", "int4"], "bfloat16"),
        (["--speculative-config.method", "oracle"], "ngram"),
        (["--speculative-config.method", "draft_model"], "needs the key 'model'"),
        (["--batch-sizes", "0"], "1,4,8"),
    ],
)
def test_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run(capsys, monkeypatch, TARGET, *arguments)
    assert code == 2
    assert words in err


def test_where_texts_part() -> None:
    assert bench.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert bench.first_difference([1, 5, 3], [1, 2, 3]) == 1
    assert bench.first_difference([1, 2], [1, 2, 3]) == 2
    assert bench.first_difference([1, 2, 3, 4], [1, 2, 3]) == 3
    assert bench.cut([4, 2, 7, 2], frozenset({2})) == [4, 2]
    assert bench.cut([4], frozenset({2})) == [4]


@cache
def engine() -> LLM:
    return LLM(toys.adopted(toys.llama()), max_num_seqs=1)


def test_logits_after_are_those_of_the_model() -> None:
    prompt = toys.prompts((9,))[0]
    with torch.inference_mode():
        expected = toys.llama()(input_ids=torch.tensor([prompt])).logits[0, -1]
    assert torch.allclose(bench.logits_after(engine(), prompt), expected, atol=1e-4)
    toys.assert_all_blocks_free(engine())


@pytest.mark.parametrize(
    ("error", "tokens", "is_tie"),
    [
        (0.06, (1, 0), True),  # top two, 0.1 apart, the dtype errs by 0.06
        (0.04, (1, 0), False),  # further apart than twice the error
        (9.00, (2, 0), False),  # the third is no candidate, however large the error
        (9.00, (1, None), False),  # a text that ended
    ],
)
def test_a_tie_is_two_top_tokens_within_twice_the_error(
    error: float, tokens: tuple[int, int | None], is_tie: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = torch.tensor([5.0, 4.9, 4.85, 0.0])
    seen: list[list[int]] = []

    def logits(llm: Any, prefix: list[int]) -> torch.Tensor:
        seen.append(prefix)
        return exact if llm == "exact" else exact + torch.tensor([0.0, 0.0, 0.0, error])

    monkeypatch.setattr(bench, "logits_after", logits)
    token, expected = tokens
    texts = [7, token], [7] if expected is None else [7, expected]
    mismatch = bench.Judge("exact", "rounded").compare(0, [8, 9], *texts, 1)  # type: ignore[arg-type]
    assert mismatch.is_tie == is_tie
    assert all(prefix == [8, 9, 7] for prefix in seen)
    result = bench.EqualityResult(bench.Case("bfloat16", "padded", "plain", 2), 1, 0, 0.5, mismatches=[mismatch])
    assert result.num_faults == (0 if is_tie else 1)
    assert json.loads(json.dumps(as_json(result), allow_nan=False))["num_faults"] == result.num_faults


@pytest.mark.parametrize(("error", "is_tie"), [(0.08, True), (0.07, False)])
def test_in_integers_a_third_token_may_lie_between(error: float, is_tie: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.tensor([5.0, 4.9, 4.85, 0.0])
    monkeypatch.setattr(bench, "logits_after", lambda llm, _: exact if llm == "exact" else exact + error)
    judge = bench.Judge("exact", "rounded", in_integers=True)  # type: ignore[arg-type]
    assert judge.compare(0, [8, 9], [7, 2], [7, 0], 1).is_tie == is_tie
