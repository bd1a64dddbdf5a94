"""`echelon drafters`: what fits is run and ranked, what does not says why, and the flags run as printed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import toys
from commands import Run, in_process

from echelon import LLM
from echelon.bench.throughput import Run as MeasuredRun
from echelon.checkpoint import folder
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
    assert f"{tmp_path / 'none'} cannot draft for this model: head folder" in done.stderr
    served = [d for d in found.values() if "problem" not in d]
    assert all(d["tokens_per_step"] >= 1.0 and d["over_plain"] > 0.0 for d in served)
    assert found[str(DRAFT)]["weight_bytes"] > found["ngram"]["weight_bytes"] == 0
    best = report["best"]
    assert best is None or best["over_plain"] == max(d["over_plain"] for d in served)
    flags = report["flags"] or f"--speculative-config {shlex.quote(json.dumps(found[str(EAGLE)]['speculative_config']))}"
    again = run("generate", TARGET, "x = 1", "--max-tokens", 4, *shlex.split(flags))
    assert again.returncode == 0, again.stderr


def test_published_drafters_are_tried_by_name(run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_the_hub = {"org/eagle": EAGLE, "org/draft": DRAFT}
    monkeypatch.setattr(folder, "snapshot_download", lambda name, **_: str(at_the_hub[name]))
    given = [word for name in at_the_hub for word in ("--drafter", name)]
    report = json.loads(run("drafters", TARGET, *given, "--input", prompts, *SIZES, "--json").stdout)
    found = {d["name"]: d["speculative_config"] for d in report["drafters"]}
    assert found["org/eagle"] == {"method": "eagle", "model": "org/eagle"}
    assert found["org/draft"] == {"method": "draft_model", "model": "org/draft"}


def test_the_model_is_tried_as_it_will_be_served(run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr("echelon.bench.throughput.LLM", lambda *a, **settings: made.append(settings) or LLM(*a, **settings))
    words = ["--quantization", "int8", "--kv-cache-dtype", "int8", "--drafter", DRAFT]
    assert run("drafters", TARGET, "--input", prompts, *SIZES, *words).returncode == 0
    assert len(made) == 3 and all(s["quantization"] == s["kv_cache_dtype"] == "int8" for s in made)


def test_the_rounds_are_those_of_the_speed(run: Run, prompts: Path) -> None:
    report = json.loads(run("drafters", TARGET, "--input", prompts, *SIZES[:-1], 2, "--json").stdout)
    for entry in report["drafters"]:
        assert len(entry["rounds"]) == 2 and min(entry["rounds"]) <= entry["tokens_per_second"] <= max(entry["rounds"])


def test_a_table_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    run_of = lambda seconds: MeasuredRun([[1] * 10], seconds, (10.0, seconds))  # noqa: E731
    plain = Candidate("plain", {}, runs=[run_of(1.0)], tokens_per_step=1.0, memory=100)
    fast = Candidate("fast", {"method": "ngram"}, runs=[run_of(0.5)], tokens_per_step=2.5, memory=100)
    none = Candidate("gone", {}, "there is no such folder")
    _print([fast, none], plain, fast, 4)
    said = capsys.readouterr().out
    assert "gone" not in said, "what cannot draft has been said before the runs"
    assert "2.00" in said
    assert """The fastest: --speculative-config '{"method": "ngram"}'""" in said
    _print([none], plain, None, 4)
    assert "leave speculation out" in capsys.readouterr().out


def test_names_with_brackets_stand_in_the_table_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [MeasuredRun([[1] * 10], 1.0, (10.0, 1.0))]
    plain, own = (Candidate(name, {}, runs=runs, tokens_per_step=1.0, memory=100) for name in ("plain", "my[b]draft"))
    _print([own], plain, None, 4)
    assert "my[b]draft" in capsys.readouterr().out


def test_too_few_prompts_are_refused(run: Run, prompts: Path) -> None:
    """Where so many are asked for; else all of a small file are tried."""
    assert run("drafters", TARGET, "--input", prompts, "--batch-size", 2, "--max-tokens", 12, "--rounds", 1).returncode == 0
    done = run("drafters", TARGET, "--input", prompts, "--num-prompts", 9)
    assert done.returncode == 2
    assert "gives 3 prompts" in done.stderr
