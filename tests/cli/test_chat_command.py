"""`echelon chat`: commands, answers, interrupts; piped as a process, in a terminal under tmux."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon import LLM, RequestError, SamplingParams
from echelon.cli.chat import AnswerStats, Chat, Commands
from echelon.demo import TARGET
from echelon.model.load.loading import LoadedModel, load_model

Shown = list[tuple[str, bool]]


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_model(str(TARGET), dtype="float32", device="cpu")


@pytest.fixture
def shown() -> Shown:
    return []


@pytest.fixture
def talk(target: LoadedModel, shown: Shown) -> Iterator[Chat]:
    llm = LLM(target, {"method": "ngram", "num_speculative_tokens": 4}, max_num_seqs=1)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    yield Chat(llm, params, lambda text, is_drafted: shown.append((text, is_drafted)))
    llm.close()


def test_a_turn_reads_only_what_is_new(talk: Chat) -> None:
    talk.ask("def main(argv): return 0")
    first = talk.last
    talk.ask("And now a class.")
    assert (first.num_cached_tokens, first.num_tokens) == (0, 24)
    assert talk.last.num_cached_tokens >= (first.num_prompt_tokens + first.num_tokens) // 16 * 16 - 16
    assert talk.total.num_tokens == 48


def test_the_answer_is_shown_piece_by_piece(talk: Chat, shown: Shown) -> None:
    talk.ask("for i in range(10): print(i)")
    assert "".join(text for text, _ in shown) == talk.messages[-1]["content"] != ""
    assert {is_drafted for _, is_drafted in shown} == {True, False}


def test_an_interrupt_ends_the_answer_and_the_chat_goes_on(talk: Chat, shown: Shown) -> None:
    show = talk.show

    def interrupting(text: str, is_drafted: bool) -> None:
        if len(shown) == 3:
            signal.raise_signal(signal.SIGINT)
        show(text, is_drafted)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background may have been told to ignore it
    talk.show = interrupting
    talk.ask("class Stack:")
    assert 0 < talk.last.num_tokens < 24
    assert talk.messages[-1]["content"] == "".join(text for text, _ in shown)
    talk.show = show
    talk.ask("go on")
    assert talk.last.num_tokens == 24
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_a_message_that_does_not_fit_is_dropped(talk: Chat) -> None:
    with pytest.raises(RequestError, match="the conversation"):
        talk.ask("x = 1\n" * 4000)
    assert talk.messages == []


def test_commands(talk: Chat, tmp_path: Path) -> None:
    said: list[str] = []
    commands = Commands(talk, said.append)
    assert commands.run("/system You write Python.")
    talk.ask("def f():")
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant"]
    assert commands.run(f"/save {tmp_path / 'talk.json'}")
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert commands.run("/reset")
    assert [m["role"] for m in talk.messages] == ["system"]
    assert commands.run(f"/load {tmp_path / 'talk.json'}")
    assert talk.messages == saved
    assert commands.run("/stats")
    assert commands.run("/help")
    assert any("tokens a step" in line for line in said)
    assert any("KV kept" in line for line in said)
    assert any(line.startswith("/load FILE") for line in said)
    assert not commands.run("/exit")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nothing", "there is no command '/nothing'"),
        ("/save", "/save needs a file"),
        ("/save ~nobody-of-that-name/x", "nobody-of-that-name"),
        ("/load /no/such/file", "cannot read /no/such/file"),
        ("/save /no/such/folder/file", "cannot write"),
    ],
)
def test_commands_that_cannot_be_carried_out(talk: Chat, line: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Commands(talk, print).run(line)


@pytest.mark.parametrize("content", ["", "{", "5", '[{"role": 1}]', '["x"]', "\ud800"])
def test_a_file_that_is_no_conversation(talk: Chat, tmp_path: Path, content: str) -> None:
    (tmp_path / "talk.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    talk.messages = before = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError):
        Commands(talk, print).run(f"/load {tmp_path / 'talk.json'}")
    assert talk.messages is before


def test_stats_of_no_answer() -> None:
    assert str(AnswerStats()) == "0 tokens, first after 0.00 s, 0 of 0 prompt tokens cached"


def test_piped_it_answers_line_by_line_and_ends_well(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "echelon", "chat", str(TARGET), "--max-tokens", "6", "--temperature", "0", "--dtype", "float32"]
    given = "hello\n\n/stats\nhello again\n"
    done = subprocess.run(words, input=given, text=True, capture_output=True, env=os.environ | {"NO_COLOR": "1"}, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "last answer: 6 tokens (cut off)" in done.stdout
    failing = subprocess.run(words, input="/what\nhello\n", text=True, capture_output=True, timeout=120, check=False)
    assert failing.returncode == 3 and failing.stdout.startswith("\n"), "answers stand at the lines of what was asked"
    assert "there is no command '/what'" in failing.stderr
