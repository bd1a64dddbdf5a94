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

from echelon import ConfigError
from echelon.cli.output import HASH, OutputFile, config_hash
from echelon.demo import TARGET
from echelon.errors import OutputError

ROWS = [{"index": i, "text": "wörld\n" * i} for i in range(4)]

# A process that has imported everything and forks runs of the command: each child is killed once the file has grown by some bytes,
# the last is left to finish. Where in a row a kill falls is up to the machine; what must come out is not.
KILLER = """
import os, signal, sys
from pathlib import Path
import torch
from echelon.cli import main

output, growth, num_kills, *arguments = sys.argv[1:]
killed = 0
for attempt in range(int(num_kills) + 1):
    size = Path(output).stat().st_size if Path(output).exists() else 0
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        sys.argv = ["echelon", *arguments, "--output", output, *(["--resume"] if attempt else [])]
        main()
    while attempt < int(num_kills):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if Path(output).exists() and Path(output).stat().st_size >= size + int(growth) + 97 * attempt:
            os.kill(child, signal.SIGKILL)
            killed += 1
            done, status = os.waitpid(child, 0)
            break
    else:
        done, status = os.waitpid(child, 0)
print(killed, os.waitstatus_to_exitcode(status))
"""


def rows_of(path: Path) -> list[dict[str, Any]]:
    _, *lines = path.read_text("utf-8").rstrip("\n").split("\n")
    return sorted((json.loads(line) for line in lines), key=lambda row: row["index"])


def test_twenty_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"def f{i}(x):\n    return", "params": {"temperature": i % 2, "seed": i}}) for i in range(160)]
    source.write_text("\n".join([*lines[:80], "{torn", *lines[80:]]) + "\n")
    generate = ["generate", str(TARGET), "--input", str(source), "--max-tokens", "24", "--max-num-seqs", "4",
                "--speculative-config", '{"method":"ngram"}']  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path / "killed.jsonl"), "600", "20", *generate], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["20", "3"], done.stderr[-2000:]
    whole = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path / "whole.jsonl"), "0", "0", *generate], capture_output=True, text=True, check=True
    )
    assert whole.stdout.split() == ["0", "3"], whole.stderr[-2000:]
    assert rows_of(tmp_path / "killed.jsonl") == rows_of(tmp_path / "whole.jsonl")
    assert len(rows_of(tmp_path / "whole.jsonl")) == 161


def written(path: Path) -> bytes:
    with OutputFile(path, "abc", resume=False) as file:
        for row in ROWS:
            file.append(row)
    return path.read_bytes()


def test_a_file_cut_anywhere_resumes_at_its_last_whole_row(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    content = written(path)
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        num_whole = max(content[:length].count(b"\n") - 1, 0)
        with OutputFile(path, "abc", resume=True) as file:
            assert file.rows == ROWS[:num_whole]
            for row in ROWS[num_whole:]:
                file.append(row)
        assert path.read_bytes() == content


def test_another_configuration_is_refused_and_the_file_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    content = written(path)
    with pytest.raises(ConfigError, match=r"has the hash abc, this configuration xyz; repeat the options"):
        OutputFile(path, "xyz", resume=True)
    assert path.read_bytes() == content
    for foreign, words in ((b'{"index": 0}\n', "no hash"), (b"[1]\n", "no hash"), (b"text\n", "not JSON")):
        path.write_bytes(foreign)
        with pytest.raises(ConfigError, match=words):
            OutputFile(path, "xyz", resume=True)


def test_two_runs_cannot_write_one_file(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out.jsonl", "abc", resume=False) as file:
        file.append(ROWS[0])
        with pytest.raises(ConfigError, match="another run"):
            OutputFile(tmp_path / "out.jsonl", "abc", resume=False)
    assert rows_of(tmp_path / "out.jsonl") == ROWS[:1]


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
    with OutputFile(path, "abc", resume=True) as file:
        file.append(ROWS[3])
    assert path.read_bytes() == content


def test_no_such_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose another --output"):
        OutputFile(tmp_path / "nowhere" / "out.jsonl", "abc", resume=False)


def test_the_hash_does_not_depend_on_the_order_of_keys() -> None:
    assert config_hash({"a": 1, "b": [2, None]}) == config_hash({"b": [2, None], "a": 1}) != config_hash({"a": 1, "b": [2, 0]})
    assert HASH == "config_hash"
