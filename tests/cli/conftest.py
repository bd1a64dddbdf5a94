"""The command in the test's own process."""

from __future__ import annotations

import sys

import pytest
from commands import Done, Run

from echelon.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command in this process: exit code, standard output, standard error."""

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["echelon", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        out = capsys.readouterr()
        return Done(int(stop.value.code or 0), out.out, out.err)

    return call
