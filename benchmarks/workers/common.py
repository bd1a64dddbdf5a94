"""What every worker does around its own engine: read the job, repeat it, write what came out. Needs nothing but Python."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Outputs = list[list[int]]  # token ids of every prompt


def read_job(path: str) -> dict[str, Any]:
    return dict(json.loads(Path(path).read_text("utf-8")))


def timed(generate: Callable[[int], Outputs], num_tokens: int) -> tuple[float, Outputs]:
    start = time.perf_counter()
    outputs = generate(num_tokens)
    return time.perf_counter() - start, outputs


def measured(job: dict[str, Any], generate: Callable[[int], Outputs], packages: list[str]) -> dict[str, Any]:
    """Rounds of the whole job, each after one that ends with the head; `generate` takes the number of new tokens a prompt."""
    generate(job["head_tokens"])  # warm-up
    rounds = [(timed(generate, job["head_tokens"])[0], *timed(generate, job["max_tokens"])) for _ in range(job["rounds"])]
    head_seconds, seconds, outputs = zip(*rounds, strict=True)
    return {"versions": versions(packages), "outputs": outputs[-1], "seconds": list(seconds), "head_seconds": list(head_seconds)}


def versions(packages: list[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def write_result(path: str, value: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(value), "utf-8")
