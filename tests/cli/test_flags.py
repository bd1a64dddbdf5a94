"""One vocabulary of flags: a flag of a setting is the same in every verb, and verbs that do the same take the same flags."""

from __future__ import annotations

import pytest
import typer
from commands import Run, in_process

from echelon import EngineConfig, SamplingParams
from echelon.cli import app
from echelon.cli.shared import BATCHED, ENGINE, SAMPLING
from echelon.cli.words import SPECULATIVE
from echelon.demo import DRAFT, EAGLE, TARGET
from echelon.server.config import ServerConfig
from tools.reference import verbs

OPTIONS = {
    name.removeprefix("echelon "): {flag: option for option in verb.params if option.param_type_name == "option" for flag in option.opts}
    for name, verb in verbs(typer.main.get_command(app))
}
OTHERWISE = {  # what a setting's flag says of something else: devices on paper, peers' rounding, lengths of a measurement
    ("plan", "--device"),
    ("plan", "--tensor-parallel-size"),
    ("plan", "--pipeline-parallel-size"),
    ("quantize", "--quantization"),
    ("bench peers", "--quantization"),
    ("bench kernels", "--dtype"),
    ("bench step", "--dtype"),
    ("bench step", "--max-num-seqs"),
    ("train", "--seed"),
    ("bench latency", "--seed"),
    ("bench serve", "--seed"),
    ("bench serve", "--ignore-eos"),
}
LENGTHS = {"--max-tokens", "--temperature"}  # that measurements have their own words for


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return in_process(capsys, monkeypatch)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def test_the_flag_of_a_setting_says_the_same_everywhere() -> None:
    said: dict[str, set[str | None]] = {}
    for settings in (EngineConfig, SamplingParams, ServerConfig):
        for name, field in settings.model_fields.items():
            said.setdefault(flag_of(name), set()).add(field.description)
    for verb, options in OPTIONS.items():
        for flag in (options.keys() & said.keys()) - LENGTHS:
            assert (verb, flag) in OTHERWISE or options[flag].help in said[flag], f"{verb} {flag}"


def test_exceptions_are_none_by_chance() -> None:
    assert all(flag in OPTIONS[verb] for verb, flag in OTHERWISE), "a flag that is gone has no exception"


@pytest.mark.parametrize("verb", ["generate", "chat", "serve"])
def test_verbs_that_run_a_model_take_the_same_flags(verb: str) -> None:
    wanted = {flag_of(name) for name in ENGINE} | {SPECULATIVE}
    wanted |= {flag_of(name) for name in SAMPLING} if verb != "serve" else set()
    wanted |= {flag_of(name) for name in BATCHED} if verb != "chat" else set()
    assert wanted <= OPTIONS[verb].keys()


def test_what_drafts_and_where_results_go_have_one_name_each() -> None:
    known = {SPECULATIVE, "--drafter", "--draft-vocab-size"}  # the last is a number of tokens
    assert {flag for options in OPTIONS.values() for flag in options if "draft" in flag or "speculative" in flag} == known
    assert {flag for options in OPTIONS.values() for flag in options if flag.startswith("--out")} == {"--output"}


@pytest.mark.parametrize("words", [[], *(name.split() for name in OPTIONS)], ids=lambda words: " ".join(words) or "echelon")
def test_h_is_help(run: Run, words: list[str]) -> None:
    done = run(*words, "-h")
    assert done.returncode == 0 and "Usage: echelon" in done.stdout


def test_inspect_tells_of_heads_too(run: Run) -> None:
    done = run("inspect", TARGET, "--drafter", EAGLE, "--drafter", DRAFT)
    assert done.returncode == 0, done.stderr
    assert "a head of method eagle" in done.stdout and "of the target's parameters" in " ".join(done.stdout.split())
    other = run("inspect", DRAFT, "--drafter", EAGLE)
    assert other.returncode == 1 and "no: " in other.stdout


def test_chat_stops_where_it_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    answers = []
    for words in ((), ("--stop", "="), ("--top-k", "1", "--temperature", "1.0")):
        monkeypatch.setattr(sys, "stdin", io.StringIO("x = 1\n"))
        done = run("chat", TARGET, "--max-tokens", 12, *(words if "--temperature" in words else ("--temperature", 0, *words)))
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
    assert answers[2] == answers[0] != answers[1], "one token to draw from is greedy"
