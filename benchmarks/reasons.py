"""Why ours falls short of a published speed: what steps with drafts emit and take, counted from the row's own records."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.verdicts import Evidence
from echelon.bench.throughput import ThroughputResult

NOT_KEPT = "how long a step takes was not kept"


def too_few(emitted: float, published: float) -> str:
    """Said before what steps take, where no step could be short enough."""
    few = "a step emits fewer tokens here than the published speed-up, which it could not exceed even if drafts cost nothing; "
    return few if emitted < published else ""


def longer_steps(emitted: float, speed_up: float, published: float = 0.0) -> str:
    """By how much a step with drafts takes longer than a plain one, from what it emits and the speed-up."""
    told = f"a step with drafts emits {emitted:.2f} tokens a row and takes {emitted / speed_up:.1f} times as long as a plain one"
    return too_few(emitted, published) + told


def compared_steps(plain: ThroughputResult, own: ThroughputResult, published: float = 0.0) -> str:
    """What a step with drafts takes and emits beside a plain one."""
    drafting = f", {own.step_ms['draft']:.0f} of them to draft," if own.step_ms["draft"] >= 1 else ""
    return too_few(own.tokens_per_step, published) + (
        f"a step with drafts takes {step_ms(own):.0f} ms{drafting} and emits {own.tokens_per_step:.2f} tokens a row, where a plain one "
        f"takes {step_ms(plain):.0f} ms"
    )


def dear_steps(name: str, method: str, published: float, evidence: Evidence, strategy: str = "unpadded") -> str:
    """The same of a method in a record of speeds."""
    return of_results(evidence.results(name), method, published, strategy)


def dear_device_steps(cell: str, method: str, published: float, evidence: Evidence) -> str:
    """The same in a cell of `scripts/gpu_check.sh`."""
    return of_results(evidence.device_results(cell), method, published)


def of_results(results: Iterable[ThroughputResult], method: str, published: float, strategy: str = "unpadded") -> str:
    found = {(r.method, r.strategy): r for r in results if r.step_ms}
    plain, own = found.get(("plain", "unpadded")), found.get((method, strategy))
    return compared_steps(plain, own, published) if plain and own else NOT_KEPT


def step_ms(result: ThroughputResult) -> float:
    """Milliseconds of a step, all parts together."""
    return sum(result.step_ms.values())
