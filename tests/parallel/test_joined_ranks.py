"""Ranks that others have started (`torchrun`, or its variables) say what one process says, and end when one of them does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import toys
from meetings import free_port

from echelon import LLM, ConfigError, SamplingParams
from echelon.checkpoint.digest import checkpoint_digest
from echelon.config import RANKS
from echelon.errors import ModelLoadError, RankError
from echelon.ops import compiled
from echelon.parallel import joined, pulse, stages
from echelon.parallel.serving import serve
from echelon.parallel.splits import STAGES, TENSOR
from echelon.parallel.summons import TOKEN

pytestmark = pytest.mark.skipif(not compiled.is_built(), reason="several ranks need the compiled kernels")
SPEC = {"method": "ngram", "num_speculative_tokens": 3}
SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_memory_bytes": 1 << 20}
PROMPTS = toys.prompts((1, 5, 9, 40))
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, seed=5, ignore_eos=True, logprobs=2)
WORKER = "from echelon import LLM; LLM({model!r}, {setting}={size}); raise AssertionError('a worker came back')"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("joined") / "llama"
    toys.llama(num_hidden_layers=4).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def alone(folder: str) -> list[Any]:
    with LLM(folder, SPEC, **SETTINGS) as llm:
        return said(llm)


def said(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, DRAWN, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


class Beside:
    """The other ranks, as `torchrun` on other machines would start them; this process is rank 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.size, self.processes = size, list[subprocess.Popen[str]]()
        self._environment = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            TOKEN: "a token of this test",
        }
        for name, value in (self._environment | {"RANK": "0"}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(joined, "_has_met", False)
        monkeypatch.setattr(stages, "FEWEST_TOKENS", 4)

    def start(self, *command: str, **environment: str) -> None:
        environ = os.environ | self._environment | {"RANK": str(len(self.processes) + 1), "OMP_NUM_THREADS": "1"} | environment
        self.processes.append(subprocess.Popen([sys.executable, *command], env=environ, stderr=subprocess.PIPE, text=True))

    def ended(self) -> list[tuple[int, str]]:
        """Status and errors of each."""
        return [(process.wait(20), process.communicate()[1]) for process in self.processes]


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Beside] = []

    def make(size: int) -> Beside:
        made.append(Beside(monkeypatch, size))
        return made[-1]

    yield make
    for process in (p for one in made for p in one.processes):
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def listening() -> set[str]:
    """Addresses at which this process listens, from /proc."""
    return {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(("setting", "size"), [(TENSOR, 2), (STAGES, 2), *([(TENSOR, 4), (STAGES, 3), (STAGES, 4)] if toys.PROVE else [])])
def test_they_say_what_one_says(setting: str, size: int, folder: str, alone: list[Any], beside: Any, tmp_path: Path) -> None:
    """The worker is the same command, or the same lines of Python; it touches no file. All listen on loopback alone."""
    ranks, before = beside(size), listening()
    output = tmp_path / "out.jsonl"
    for rank in range(1, size):
        if rank == 1 and setting == TENSOR:
            command = ["-m", "echelon", "generate", folder, "-tp", str(size), "--output", str(output), "prompt"]
        else:
            command = ["-c", WORKER.format(model="elsewhere", setting=setting, size=size)]
        ranks.start(*command)
    with LLM(folder, SPEC, **{setting: size}, **SETTINGS) as llm:
        assert said(llm) == alone
        assert llm.stats.num_accepted_tokens > 0
        assert listening() - before <= {"127.0.0.1"}
    assert [status for status, _ in ranks.ended()] == [0] * (size - 1)
    assert not output.exists()
    with pytest.raises(ConfigError, match="have served it"):
        LLM(folder, **{setting: size})


def look_until_known(llm: LLM) -> None:
    while True:
        llm.storage.check_ranks()
        time.sleep(0.01)


CASES = [(setting, fault, phase) for setting in RANKS for fault in ("ends", "hangs") for phase in ("pass", "idle")]


@pytest.mark.parametrize(("setting", "fault", "phase"), CASES if toys.PROVE else [(STAGES, "ends", "idle")])
def test_one_that_fails(setting: str, fault: str, phase: str, folder: str, beside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = beside(2)
    ranks.start("-c", WORKER.format(model="elsewhere", setting=setting, size=2))
    with LLM(folder, SPEC, **{setting: 2}, **SETTINGS) as llm:
        if fault == "hangs":
            monkeypatch.setattr(pulse, "SILENT_SECONDS", 2.0)
        number = signal.SIGKILL if fault == "ends" else signal.SIGSTOP
        target: Any = llm.engine.target
        begin, left = target.begin, 3

        def struck(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                ranks.processes[0].send_signal(number)
            return begin(*arguments)

        if phase == "pass":
            target.begin = struck
        else:
            said(llm)
            ranks.processes[0].send_signal(number)
            with pytest.raises(RankError):
                look_until_known(llm)
        with pytest.raises(RankError, match="sign of life" if fault == "hangs" else "ended"):
            said(llm)
        assert not llm.engine.has_work
        with pytest.raises(RankError):
            said(llm)


@pytest.mark.skipif(not toys.PROVE, reason="PROVE=1")
def test_workers_end_with_a_rank_0_that_is_killed(folder: str, beside: Any) -> None:
    ranks = beside(2)
    ranks.start("-c", WORKER.format(model=folder, setting=TENSOR, size=2))
    code = f"import os; from echelon import LLM; llm = LLM({folder!r}, tensor_parallel_size=2); os.kill(os.getpid(), 9)"
    ranks.start("-c", code, RANK="0")
    (worker, why), (first, _) = ranks.ended()
    assert first == -signal.SIGKILL
    assert worker == 1 and "RankError" in why


def test_another_checkpoint_under_the_same_name_is_known(folder: str, tmp_path: Path) -> None:
    toys.llama(num_hidden_layers=4).save_pretrained(tmp_path / "same")
    toys.noisy_copy(toys.llama(num_hidden_layers=4), 0.01).save_pretrained(tmp_path / "other")
    digest = checkpoint_digest(folder)
    assert digest == checkpoint_digest(str(tmp_path / "same"))
    assert digest != checkpoint_digest(str(tmp_path / "other"))

    class OneMessage:
        answers: list[dict[str, Any]] = []  # noqa: RUF012

        def link(self, split: Any) -> Any:
            return None

        def message(self) -> bytes:
            return f'{{"split": "{TENSOR}", "model": "{tmp_path}/other", "isa": "{compiled.isa()}", "digest": "{digest}"}}'.encode()

        def answer(self, value: dict[str, Any]) -> None:
            self.answers.append(value)

    serve(OneMessage())
    assert "is another checkpoint here than on rank 0" in OneMessage.answers[0]["error"]
    with pytest.raises(ModelLoadError):
        checkpoint_digest("./nowhere")


TWO_MACHINES = """
import json, sys
from echelon import LLM, SamplingParams
setting, folder, output = sys.argv[1:]
with LLM(folder, {spec!r}, **{{setting: 4}}, **{settings!r}) as llm:
    outputs = llm.generate({prompts!r}, SamplingParams(**{params!r}), use_tqdm=False)
    json.dump([o.outputs[0].token_ids for o in outputs], open(output, "w"))
"""


@pytest.mark.skipif(not toys.PROVE, reason="PROVE=1")
@pytest.mark.parametrize("setting", RANKS)
def test_torchrun_on_two_machines(setting: str, folder: str, alone: list[Any], tmp_path: Path) -> None:
    """Two nodes of two processes each, all on loopback, by the program itself."""
    params = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 16, "seed": 5, "ignore_eos": True, "logprobs": 2}
    script, output, port = tmp_path / "script.py", tmp_path / "said.json", str(free_port())
    script.write_text(TWO_MACHINES.format(spec=SPEC, settings=SETTINGS, prompts=PROMPTS, params=params))
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2"),
                *("--master-addr", "127.0.0.1", "--master-port", port, str(script), setting, folder, str(output)),
            ]
        )
        for node in range(2)
    ]
    assert [node.wait(300) for node in nodes] == [0, 0]
    assert output.read_text() == str([ids for ids, _ in alone])
