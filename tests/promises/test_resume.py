"""An output file survives whatever ends the run that writes it."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import toys

from echelon import ConfigError
from echelon.cli.output import Mode, OutputFile
from echelon.demo import TARGET
from echelon.errors import OutputError

NUM_KILLS = 20 if toys.PROVE else 7
ROWS = [{"index": i, "text": "wörld\n" * i} for i in range(4)]

# A process that has imported everything and forks runs of the command: each child is killed once the file has grown by some bytes,
# the last is left to finish. A child that is to be killed is at most some rows ahead of what has been seen of it, so that it cannot end
# before. Where in a row a kill falls is up to the machine; what must come out is not.
KILLER = """
import os, signal, sys
from pathlib import Path
import torch
from functools import partial
from echelon import build
from echelon.cli import main
from echelon.cli.output import OutputFile

build.GuardedDrafter = partial(build.GuardedDrafter, clock=lambda: 0.0)  # how busy the machine is decides nothing
append, AHEAD = OutputFile.append, 4

def seen():
    return Path(output).read_bytes() if Path(output).exists() else b""

output, growth, num_kills, *arguments = sys.argv[1:]
killed = 0
for attempt in range(int(num_kills) + 1):
    before, num_rows = seen(), 0
    may_append, give = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(give)
        if attempt < int(num_kills):
            OutputFile.append = lambda file, row: append(file, row) if os.read(may_append, 1) else os._exit(1)
        torch.set_num_threads(1)
        sys.argv = ["echelon", *arguments, "--output", output, *(["--resume"] if attempt else [])]
        main()
    while attempt < int(num_kills):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        os.sched_yield()
        now = seen()
        if num_rows < now.count(b"\\n") - before.count(b"\\n") + AHEAD:
            num_rows += os.write(give, b".")
        if len(now) >= len(before) + int(growth) + 97 * attempt:
            os.kill(child, signal.SIGKILL)
            killed += 1
            done, status = os.waitpid(child, 0)
            break
    else:
        done, status = os.waitpid(child, 0)
    os.close(may_append)
    os.close(give)
print(killed, os.waitstatus_to_exitcode(status))
"""


def rows_of(path: Path) -> list[dict[str, Any]]:
    _, *lines = path.read_text("utf-8").rstrip("\n").split("\n")
    return sorted((json.loads(line) for line in lines), key=lambda row: row["index"])


def test_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"def f{i}(x):\n    return", "params": {"temperature": i % 2, "seed": i}}) for i in range(160)]
    source.write_text("\n".join([*lines[:80], "{torn", *lines[80:]]) + "\n")
    generate = ["generate", str(TARGET), "--input", str(source), "--max-tokens", "24", "--max-num-seqs", "4",
                "--speculative-config", '{"method":"ngram","num_speculative_tokens":5}']  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path / "killed.jsonl"), "600", str(NUM_KILLS), *generate],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(NUM_KILLS), "3"], done.stderr[-2000:]
    whole = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path / "whole.jsonl"), "0", "0", *generate], capture_output=True, text=True, check=True
    )
    assert whole.stdout.split() == ["0", "3"], whole.stderr[-2000:]
    assert rows_of(tmp_path / "killed.jsonl") == rows_of(tmp_path / "whole.jsonl")
    assert len(rows_of(tmp_path / "whole.jsonl")) == 161


SETTINGS = {"model.config.json": "abc", "params.temperature": 0.5}


def written(path: Path) -> bytes:
    with OutputFile(path, Mode.overwrite) as file:
        file.begin(SETTINGS)
        for row in ROWS:
            file.append(row)
    return path.read_bytes()


def test_a_file_cut_anywhere_resumes_at_its_last_whole_row(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    content = written(path)
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        num_whole = max(content[:length].count(b"\n") - 1, 0)
        with OutputFile(path, Mode.resume) as file:
            file.begin(SETTINGS)
            assert file.rows == ROWS[:num_whole]
            for row in ROWS[num_whole:]:
                file.append(row)
        assert path.read_bytes() == content


def test_another_configuration_is_refused_by_name_and_the_file_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    content = written(path)

    def resume(settings: dict[str, Any]) -> None:
        with OutputFile(path, Mode.resume) as file:
            file.begin(settings)

    for changed, words in (
        ({"model.config.json": "xyz"}, r"configuration: model.config.json differs; repeat"),
        ({"params.temperature": 0.0}, r"configuration: params.temperature = 0.5 there, 0.0 here; repeat"),
        ({"draft.config.json": "new"}, r"draft.config.json = none there, 'new' here"),
        ({f"params.p{i}": i for i in range(9)}, r"p4 = none there, 4 here and 4 more"),
    ):
        with pytest.raises(ConfigError, match=words):
            resume(SETTINGS | changed)
        assert path.read_bytes() == content
    for foreign, words in (
        (b'{"index": 0}\n', "no settings"),
        (b'{"index": 0}', "no settings"),  # without its end
        (b"[1]\n", "no rows"),
        (b"text\n", "not JSON"),
        (b"[" * 9999 + b"\n", "not JSON"),
        (content + b'{"text": "a"}\n', "no rows"),
        (content + b'{"index": "a"}\n', "no rows"),
    ):
        path.write_bytes(foreign)
        with pytest.raises(ConfigError, match=words):
            resume(SETTINGS)
        assert path.read_bytes() == foreign


def test_two_runs_cannot_write_one_file(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out.jsonl") as file:
        with pytest.raises(ConfigError, match="another run"):
            OutputFile(tmp_path / "out.jsonl")
        file.begin(SETTINGS)
        file.append(ROWS[0])
        for mode in Mode:
            with pytest.raises(ConfigError, match="another run"):
                OutputFile(tmp_path / "out.jsonl", mode)
    assert rows_of(tmp_path / "out.jsonl") == ROWS[:1]


def test_the_lock_goes_on_to_the_file_without_failed_rows(tmp_path: Path) -> None:
    path, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(path)
    with OutputFile(path) as file:
        file.begin(SETTINGS)
        file.append(ROWS[0])
        file.append({"index": 1, "error": "no room"})
    with OutputFile(link, Mode.resume) as file:
        file.begin(SETTINGS)
        assert file.rows == ROWS[:1] == rows_of(path)
        with pytest.raises(ConfigError, match="another run"):
            OutputFile(path, Mode.resume)
        file.append(ROWS[1])
    assert link.is_symlink() and rows_of(path) == ROWS[:2] and sorted(tmp_path.iterdir()) == [link, path]


def test_a_full_disk_is_one_line_and_can_be_resumed(tmp_path: Path) -> None:
    """The limit on file size stands for the full disk: the kernel cuts a write short and refuses the next."""
    path = tmp_path / "out.jsonl"
    content = written(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) - 9, limits[1]))
        with pytest.raises(OutputError, match=rf"{os.strerror(errno.EFBIG)}; 3 rows are saved: .*--resume"):
            written(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with OutputFile(path, Mode.resume) as file:
        file.begin(SETTINGS)
        file.append(ROWS[3])
    assert path.read_bytes() == content


def test_no_such_place(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere" / "out.jsonl", tmp_path, Path("/dev/null")):
        with pytest.raises(ConfigError, match="choose another --output"):
            OutputFile(path)


def test_a_run_that_never_begins_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), OutputFile(tmp_path / "out.jsonl"):
        raise RuntimeError("the model cannot be loaded")
    assert not list(tmp_path.iterdir())
