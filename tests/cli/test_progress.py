"""Progress where nobody watches a terminal: a line now and then, none for what is over sooner, and an interrupt at any time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from echelon.cli import shared


def test_a_pipe_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    monkeypatch.setattr(shared.time, "monotonic", lambda: now[0])
    with shared.progress(8, "generating") as update:
        for _ in range(4):
            now[0] += 4.0
            update(advance=1)
            update(note="12 tokens/s")
        update(completed=8, description="done")
        now[0] += 10.0
        update()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["generating: 3/8 after 12 s, about 20 s left (12 tokens/s)", "done: 8/8 after 26 s, about 0 s left (12 tokens/s)"]


def test_an_interrupt_while_the_command_loads_leaves_no_trace() -> None:
    code = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
sys.argv = ["echelon", "doctor"]
from echelon.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_what_is_over_at_once_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with shared.progress(3, "generating") as update:
        update(advance=3)
    assert capsys.readouterr().err == ""
