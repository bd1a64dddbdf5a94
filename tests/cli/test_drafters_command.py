"""`echelon drafters`: what fits is run and ranked, what does not says why, and the flags run as printed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import toys
from commands import Run, in_process

from echelon.bench.throughput import Run as MeasuredRun
from echelon.cli.drafters import Candidate, _print
from echelon.demo import DRAFT, EAGLE, TARGET

SIZES = ["--batch-size", 2, "--num-prompts", 2, "--max-tokens", 12, "--rounds", 1]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return in_process(capsys, monkeypatch)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"def f{i}(x):\n    return x +"}) + "\n" for i in range(3)))
    return file


def test_drafters_are_ranked_and_the_flags_run(run: Run, prompts: Path, tmp_path: Path) -> None:
    toys.llama().save_pretrained(tmp_path / "other")
    given = ["--drafter", DRAFT, "--drafter", EAGLE, "--drafter", tmp_path / "other", "--drafter", tmp_path / "none"]
    done = run("drafters", TARGET, *given, "--input", prompts, *SIZES, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    found = {d["name"]: d for d in report["drafters"]}
    assert set(found) == {"ngram", str(DRAFT), str(EAGLE), f"{EAGLE} (tree)", str(tmp_path / "other"), str(tmp_path / "none")}
    assert found[str(DRAFT)]["speculative_config"] == {"method": "draft_model", "model": str(DRAFT)}
    assert found[f"{EAGLE} (tree)"]["speculative_config"] == {"method": "eagle", "model": str(EAGLE), "tree": "dynamic"}
    assert "vocabular" in found[str(tmp_path / "other")]["problem"] or "tokenizer" in found[str(tmp_path / "other")]["problem"]
    assert "problem" in found[str(tmp_path / "none")]
    served = [d for d in found.values() if "problem" not in d]
    assert all(d["tokens_per_step"] >= 1.0 and d["over_plain"] > 0.0 for d in served)
    assert found[str(DRAFT)]["weight_bytes"] > found["ngram"]["weight_bytes"] == 0
    best = report["best"]
    assert best is None or best["over_plain"] == max(d["over_plain"] for d in served)
    flags = report["flags"] or f"--speculative-config {shlex.quote(json.dumps(found[str(EAGLE)]['speculative_config']))}"
    again = run("generate", TARGET, "x = 1", "--max-tokens", 4, *shlex.split(flags))
    assert again.returncode == 0, again.stderr


def test_a_table_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    run_of = lambda seconds: MeasuredRun([[1] * 10], seconds, (10.0, seconds))  # noqa: E731
    plain = Candidate("plain", {}, runs=[run_of(1.0)], tokens_per_step=1.0, memory=100)
    fast = Candidate("fast", {"method": "ngram"}, runs=[run_of(0.5)], tokens_per_step=2.5, memory=100)
    none = Candidate("gone", {}, "there is no such folder")
    _print([fast, none], plain, fast, 4)
    said = capsys.readouterr().out
    assert "2.00" in said
    assert """The fastest: --speculative-config '{"method": "ngram"}'""" in said
    assert "gone cannot draft for this model: there is no such folder" in said
    _print([none], plain, None, 4)
    assert "leave speculation out" in capsys.readouterr().out


def test_too_few_prompts_are_refused(run: Run, prompts: Path) -> None:
    done = run("drafters", TARGET, "--input", prompts, "--num-prompts", 9)
    assert done.returncode == 2
    assert "gives 3 prompts" in done.stderr
