"""The command in the test's own process: exit code, standard output, standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from echelon.cli import main


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


def in_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """What calls the command with arguments."""

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["echelon", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        out = capsys.readouterr()
        return Done(int(stop.value.code or 0), out.out, out.err)

    return call
