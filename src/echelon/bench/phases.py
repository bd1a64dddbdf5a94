"""Which part of a run is decoding, and where its time goes.

The papers' speeds leave prefill out. A step counts as *decoding* if every row in it fed the target its last known token and its draft, and
nothing else. The tokens and the seconds of other steps are both left out, so the speed without prefill is that of all steps that read no
prompt. What a drafter has to catch up with in such a step is part of it.
"""

from __future__ import annotations

import time

from echelon.stats import Stats

SPLIT = ("draft", "forward", "verify", "layout", "host")


def read(stats: Stats) -> dict[str, float]:
    """The engine's counters now.

    "layout" is choosing slots, building the batch, and moving keys and values; the last happens inside the passes of the two models.
    """
    part, target, draft = stats.seconds, stats.target, stats.draft
    return {
        "draft": part["draft"] - draft.layout_seconds,
        "forward": part["forward"] - target.layout_seconds,
        "verify": part["verify"],
        "layout": part["layout"] + target.layout_seconds + draft.layout_seconds,
        "steps": stats.num_steps,
        "row_steps": stats.num_row_steps,
        "tokens": stats.num_emitted_tokens,
        "draft_tokens": stats.num_draft_tokens,
        "fed": target.num_tokens,
        "draft_fed": draft.num_tokens,
        "inputs": target.num_inputs,
        "live": target.num_live,
        "touched": target.num_touched,
        "kv_bytes_touched": target.kv_bytes_touched,
        "kv_bytes_reserved": target.kv_bytes_reserved,
        "index_bytes": target.index_bytes,
        "passes": target.num_passes,
        "group_choices": stats.num_group_choices,
        "group_hits": stats.num_group_hits,
    }


class Sums:
    """What happened in some steps, by the names above, and "seconds"; "host" is what is left of the time."""

    def __init__(self, values: dict[str, float] | None = None) -> None:
        self._values = values or {}

    def __add__(self, other: Sums) -> Sums:
        return Sums({name: self[name] + other[name] for name in self._values | other._values})

    def __getitem__(self, name: str) -> float:
        if name == "host":
            return self["seconds"] - sum(self[part] for part in SPLIT if part != "host")
        return float(self._values.get(name, 0.0))

    def per(self, name: str, unit: str) -> float:
        """0 where there is none of the unit."""
        return self[name] / self[unit] if self[unit] else 0.0


class Recorder:
    """Call it after every step: `whole` sums all of them, `decode` those that read no prompt. What a step settles the device has done."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self.whole, self.decode = Sums(), Sums()
        self.start()

    def start(self) -> None:
        """The next step begins now."""
        self._before, self._clock = read(self._stats), time.perf_counter()

    def __call__(self, reads_prompts: bool = False) -> None:
        """Add the step that is just done; `reads_prompts`: it is known to be none of decoding."""
        now, after = time.perf_counter(), read(self._stats)
        step = Sums({name: after[name] - self._before[name] for name in after} | {"seconds": now - self._clock})
        self.whole += step
        if not reads_prompts and step["fed"] <= step["row_steps"] + step["draft_tokens"]:
            self.decode += step
        self._before, self._clock = after, time.perf_counter()
