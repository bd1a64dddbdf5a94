"""EMS-SD's vanilla batches against unpadded ones on paper: rows of 70 billion parameters at batch 8 to 64, which nobody has published.

Texts are replayed from the histogram of drafted and accepted tokens that was measured for LLMA, moved to EMS-SD's mean. Vanilla feeds every
row as many tokens as the longest draft, gives every row as many slots as the row that accepts most, and keeps rows that have ended. Steps
take what the roofline says. EMS-SD's own kernel reads all keys and values of a row once for every token of it, and twice in a step of
several tokens; here that is one of two ways of attention, and the other reads them once a row, as ours does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.cells import Record
from benchmarks.document_parts import PUBLISHED
from benchmarks.replayed import AcceptanceHistogram, rescaled
from echelon.estimate.devices import Device, Work, read_devices
from echelon.estimate.layout import Held, Pass, split_among
from echelon.estimate.shapes import without_weights

HISTOGRAMS = Path("docs/evidence/benchmarks/histogram.json")
TOKENS_PER_STEP, NEW = 4.2, 128  # of LLMA in EMS-SD; tokens of each text
MEAN_PROMPT, SPREAD, MOST_PROMPT = 900, 400, 1919  # of CNN/DailyMail in OPT's tokens: assumed, cut as there
TRIALS = 4
CELLS = (
    ("opt-6.7b", "a100-40gb", 1, tuple(PUBLISHED)),
    ("llama-70b", "a100-80gb", 8, (8, 16, 32, 64)),
    ("llama-70b", "h100", 4, (8, 16, 32, 64)),
)


@dataclass(frozen=True)
class StepSizes:
    """What a step reads: tokens fed of each row, keys that each row reads, and how often they are read."""

    fed: np.ndarray
    keys: np.ndarray
    reads: np.ndarray


@dataclass(frozen=True)
class PaddedDevice:
    """One rank of a model, and how long steps take on it."""

    held: Held
    device: Device
    bytes_each: int = 2

    def seconds(self, sizes: StepSizes) -> float:
        """Linear layers by all tokens fed; attention by the keys that each row reads."""
        run = Pass(1, float(sizes.fed.sum()), 0)
        bare = replace(self.held, query_size=0, kv_bytes=0)
        linear = sum(bare.seconds(self.device, "float16", self.bytes_each, run).values())
        flops = 2.0 * float((sizes.fed * sizes.keys).sum()) * self.held.query_size
        read = self.held.kv_bytes * float((sizes.reads * sizes.keys).sum())
        return linear + self.device.seconds(Work(flops, read), "float16")


def simulated(rank: PaddedDevice, batch: int, law: AcceptanceHistogram, seed: int, by_token: bool) -> dict[str, float]:
    """Seconds that the batch's texts take: plain, vanilla, unpadded; and mean shares of padding in vanilla's tokens and keys."""
    generator = np.random.default_rng(seed)
    prompts = np.clip(generator.normal(MEAN_PROMPT, SPREAD, batch), 100, MOST_PROMPT).astype(np.int64)
    seconds = {"plain": 0.0, "vanilla": 0.0, "unpadded": 0.0}
    for step in range(NEW):
        seconds["plain"] += rank.seconds(_sizes(np.ones(batch, np.int64), prompts + step + 1, by_token))
    done, slots, fed, keys = np.zeros(batch, np.int64), int(prompts.max()), [0, 0], [0, 0]
    while (done < NEW).any():
        drawn = np.array([law.draw(float(u)) for u in generator.random(batch)])
        active = done < NEW
        counts, accepted = np.where(active, drawn[:, 0] + 1, 0), np.where(active, drawn[:, 1] + 1, 0)
        own = _sizes(counts[active], (prompts + done + counts)[active], by_token)
        wide = np.full(batch, counts.max())
        padded = _sizes(wide, np.full(batch, slots + counts.max()), by_token)
        seconds["unpadded"] += rank.seconds(own)
        seconds["vanilla"] += rank.seconds(padded)
        fed, keys = [fed[0] + own.fed.sum(), fed[1] + padded.fed.sum()], [keys[0] + own.keys.sum(), keys[1] + padded.keys.sum()]
        slots += int(accepted.max())
        done = done + accepted
    return seconds | {"padded_tokens": 1 - fed[0] / fed[1], "padded_keys": 1 - keys[0] / keys[1]}


def _sizes(fed: np.ndarray, keys: np.ndarray, by_token: bool) -> StepSizes:
    reads = fed * (2 if int(fed.max()) > 1 else 1) if by_token else np.ones_like(fed)
    return StepSizes(fed, keys, reads)


def padding() -> Record:
    """Every shape and batch, with both ways of attention."""
    histogram = json.loads(HISTOGRAMS.read_text("utf-8"))["histograms"]["LLMA"]
    law = AcceptanceHistogram.from_counts(rescaled(histogram, TOKENS_PER_STEP), "LLMA")
    found = []
    for shape, device, ranks, batches in CELLS:
        part = split_among(without_weights(shape, "float16"), ranks, 1)[0][0]
        rank = PaddedDevice(part.held + part.output, read_devices()[device])
        for batch in batches:
            line: dict[str, object] = {"shape": shape, "device": device, "ranks": ranks, "batch": batch, "published": None}
            if shape.startswith("opt"):
                line["published"] = PUBLISHED[batch]
            for name, by_token in (("once a token", True), ("once a row", False)):
                runs = [simulated(rank, batch, law, seed, by_token) for seed in range(TRIALS)]
                line[name] = {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
            found.append(line)
    return {"tokens_per_step": TOKENS_PER_STEP, "lines": found}
