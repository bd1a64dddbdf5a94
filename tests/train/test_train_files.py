"""Files of a training run: damaged checkpoints, a second trainer, a full disk."""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from test_train_heads import counting, tiny_target

from echelon.errors import ConfigError, ModelLoadError, OutputError
from echelon.train import files
from echelon.train.heads import TrainingConfig, train_head

STATE = {"step": 3, "head": {"weight": torch.arange(600.0)}}
PLAN = TrainingConfig("medusa", steps=6, every=2)


def saved(folder: Path, *steps: int) -> Path:
    for step in steps:
        files.save_checkpoint(STATE | {"step": step}, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


def flipped(path: Path, bit: int) -> bytes:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    return bytes(content)


def test_a_checkpoint_comes_back_and_is_an_ordinary_file_of_torch(tmp_path: Path) -> None:
    path = saved(tmp_path, 1, 2)
    for state in (files.load_checkpoint(path), torch.load(path, weights_only=True)):
        assert state is not None and state["step"] == 2 and torch.equal(state["head"]["weight"], STATE["head"]["weight"])  # type: ignore[index]
    assert files.load_checkpoint(tmp_path / "none.pt") is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint.previous.pt", "checkpoint.pt"]


def test_every_flipped_bit_of_a_checkpoint_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where it is cut: the one before is taken, and the log names the damaged one."""
    path = saved(tmp_path, 1, 2)
    whole, bits = path.read_bytes(), 8 * path.stat().st_size
    damages = [flipped(path, int(bit)) for bit in np.linspace(0, bits - 1, 200)]
    damages += [whole[:size] for size in (0, 1, 50, len(whole) // 2, len(whole) - 1)] + [whole + b"x"]
    for content in damages:
        path.write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "echelon"):
            state = files.load_checkpoint(path)
        assert state is not None and state["step"] == 1
        assert str(path) in caplog.text and "damaged" in caplog.text


def test_where_both_checkpoints_are_damaged_training_says_so(tmp_path: Path) -> None:
    path = saved(tmp_path, 1, 2)
    for file in (path, files.previous(path)):
        file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ModelLoadError, match=r"damaged: .*checkpoint.pt, .*checkpoint.previous.pt; remove"):
        files.load_checkpoint(path)


def test_a_run_goes_on_from_the_predecessor_to_the_same_weights(tmp_path: Path) -> None:
    target, data = tiny_target(), counting()
    whole = train_head(target, data, tmp_path / "whole", PLAN)
    broken = tmp_path / "broken"
    train_head(target, data, broken, PLAN)
    (broken / "checkpoint.pt").write_bytes(flipped(broken / "checkpoint.pt", 80_001))
    again = train_head(target, data, broken, PLAN)
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True))
    steps = [[json.loads(line)["step"] for line in (tmp_path / f / "log.jsonl").read_text().splitlines()] for f in ("whole", "broken")]
    assert steps[0] == steps[1]


# ---- two at once

HOLD = """
import sys
from pathlib import Path
from echelon.train.files import only_trainer
with only_trainer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_trainer(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder until the end."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_trainer_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    target, data = tiny_target(), counting()
    with another_trainer(tmp_path):
        with pytest.raises(ConfigError, match=r"another process trains in .*; wait for it, or choose another folder"):
            train_head(target, data, tmp_path, PLAN)
        assert not (tmp_path / "log.jsonl").exists()
    train_head(target, data, tmp_path, PLAN)  # a killed one holds nothing
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [1, 2, 2, 3, 4, 4, 5, 6, 6]


# ---- a full disk


@contextmanager
def no_file_over(size: int) -> Iterator[None]:
    """Writes beyond so many bytes of a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_named_with_the_file_and_leaves_no_half(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    with no_file_over(900), pytest.raises(OutputError, match=r"cannot write '.*checkpoint.pt': .*free on its disk.*make room"):
        files.save_checkpoint(STATE, path)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]
    state = files.load_checkpoint(path)
    assert state is not None and state["step"] == 1


@pytest.mark.parametrize("size", [0, 60, 300, 1_500, 8_000, 20_000, 40_000, 60_000, 90_000, 150_000])
def test_wherever_a_run_meets_a_full_disk_it_ends_typed_and_goes_on_later(size: int, tmp_path: Path) -> None:
    """Settings, log, checkpoint, head and curves are files of different sizes: each is the first that fails somewhere."""
    target, data = tiny_target(), counting()
    with no_file_over(size), pytest.raises(OutputError, match="free on its disk") as refused:
        train_head(target, data, tmp_path, PLAN)
    assert str(tmp_path) in str(refused.value)
    assert not [p.name for p in tmp_path.iterdir() if ".tmp" in p.name]
    train_head(target, data, tmp_path, PLAN)
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 2, 3, 4, 4, 5, 6, 6]
