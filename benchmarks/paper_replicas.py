"""How the cost of replicas grows to 1,000: what one that chooses among them does for a request, and how evenly they are loaded.

A conversation goes where the hash of its beginning says, on a ring with several points a replica; with a bound, to the next replica that
has no more than so many times its share. Times are measured here, in Python; loads are simulated.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from benchmarks.cells import Record

REPLICAS = (1, 10, 100, 1000)
POINTS, BOUND = 64, 1.25  # of a replica on the ring; times its share of what is under way
CONVERSATIONS, TURNS = 32, 6  # of each replica at once; of each conversation
PROMPT, REPLY, TOKEN_BYTES, EVENT_BYTES = 1000, 200, 4, 200  # tokens; bytes of a token of text, and of an event of a stream
PROBE_SECONDS, PROBE_BYTES = 5.0, 300
REPLICA_REQUESTS = 2.0  # a second, that a replica serves
LOOKUPS = 2000


def point(text: str) -> int:
    """Where a text lies on the ring."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


class HashRing:
    """Replicas 0 … n − 1 on a ring of 64-bit numbers."""

    def __init__(self, size: int) -> None:
        placed = sorted((point(f"{replica}:{i}"), replica) for replica in range(size) for i in range(POINTS))
        self.size, self._points, self._owners = size, [p for p, _ in placed], [r for _, r in placed]

    def choose(self, key: int, loads: Sequence[int] | None = None, total: int = 0) -> int:
        """The replica of a key; with `loads`, which are `total` in all, the first that has room by the bound."""
        start = bisect.bisect(self._points, key) % len(self._points)
        if loads is None:
            return self._owners[start]
        most = math.ceil(BOUND * (total + 1) / self.size)
        places = ((start + i) % len(self._owners) for i in range(len(self._owners)))
        return next(self._owners[place] for place in places if loads[self._owners[place]] < most)


def lookup_us(size: int) -> float:
    """Microseconds to hash the beginning of a prompt and find its replica: the median of several rounds."""
    ring, prompts = HashRing(size), ["x" * PROMPT * TOKEN_BYTES + str(i) for i in range(LOOKUPS)]
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for prompt in prompts:
            ring.choose(point(prompt))
        rounds.append((time.perf_counter() - start) / LOOKUPS * 1e6)
    return statistics.median(rounds)


def loads_of(size: int, seed: int = 0) -> dict[str, list[float]]:
    """By rule: the largest load over the mean, and the share of turns that find their conversation's replica again."""
    found = {}
    keys = [random.Random(seed + i).getrandbits(64) for i in range(size * CONVERSATIONS)]
    ring = HashRing(size)
    found["hash alone"] = [_evenness([ring.choose(key) for key in keys], size), 1.0]
    drawn, loads = random.Random(seed), [0] * size
    for _ in keys:
        pair = [drawn.randrange(size) for _ in range(2)]
        loads[min(pair, key=loads.__getitem__)] += 1
    found["the emptier of two"] = [max(loads) * size / len(keys), 1.0 / size if size > 1 else 1.0]
    found[f"hash, at most {BOUND} of the share"] = _bounded(ring, keys, seed)
    return found


def _bounded(ring: HashRing, keys: list[int], seed: int) -> list[float]:
    """Conversations take their turns in an order of chance; a turn leaves the replica of the one before it, and is chosen for anew."""
    loads, places, kept = [0] * ring.size, dict[int, int](), 0
    for total, key in enumerate(keys):
        places[key] = ring.choose(key, loads, total)
        loads[places[key]] += 1
    order, moved = [key for key in keys for _ in range(TURNS - 1)], 0
    random.Random(seed).shuffle(order)
    for key in order[: 4 * len(keys)]:
        loads[places[key]] -= 1
        replica = ring.choose(key, loads, len(keys) - 1)
        kept, moved = kept + (replica == places[key]), moved + (replica != places[key])
        places[key] = replica
        loads[replica] += 1
    return [max(loads) * ring.size / len(keys), kept / (kept + moved)]


def _evenness(chosen: list[int], size: int) -> float:
    return max(Counter(chosen).values()) * size / len(chosen)


def replicas() -> Record:
    """By number of replicas."""
    lines = []
    for size in REPLICAS:
        taken = lookup_us(size)
        requests = size * REPLICA_REQUESTS
        lines.append(
            {
                "replicas": size,
                "lookup_us": taken,
                "requests_per_second": requests,
                "core_share": requests * taken / 1e6,
                "megabytes_per_second": requests * (PROMPT * TOKEN_BYTES + REPLY * EVENT_BYTES) / 1e6,
                "probes_per_second": size / PROBE_SECONDS,
                "probe_kilobytes_per_second": size / PROBE_SECONDS * PROBE_BYTES / 1e3,
                "ring_kilobytes": size * POINTS * 16 / 1e3,
                "loads": loads_of(size),
            }
        )
    grown = [b["lookup_us"] / a["lookup_us"] for a, b in pairwise(lines)]  # type: ignore[operator]
    return {"lines": lines, "lookup_growth": grown}
