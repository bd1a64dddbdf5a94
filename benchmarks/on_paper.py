"""Several devices on paper: `python -m benchmarks.on_paper [--output FOLDER] [PREFIX ...]` writes docs/on_paper.md and its evidence.

plans     bytes a device and expected speeds of published shapes on published devices, as `echelon plan` says them
here      the same model beside steps and ranks that were measured on this machine
stages    SpecMemo's eight stages with Medusa's trees, beside its published figures; what makes the difference
scylla    Table 5 of Scylla: 72 billion parameters on four devices
padding   EMS-SD's vanilla batches beside unpadded ones at 70 billion parameters and batch 8 to 64
replicas  what choosing among up to 1,000 replicas costs, and how evenly they are loaded

Half a minute on one core; only lookups in `replicas` are timed.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.cells import Cell, Record, Records, asked_of, run_asked
from benchmarks.on_paper_document import write_on_paper
from benchmarks.paper_checks import measured_here, scylla
from benchmarks.paper_padding import padding
from benchmarks.paper_replicas import replicas
from benchmarks.stages import stages
from echelon import EngineConfig
from echelon.estimate.devices import read_devices
from echelon.estimate.layout import Pass
from echelon.estimate.paper_plan import PaperPlan
from echelon.estimate.shapes import without_weights
from echelon.speculative_config import SpeculativeConfig

DRAFTS: dict[str, Any] = {"method": "eagle", "tree": "dynamic", "num_speculative_tokens": "auto", "max_speculative_tokens": 48}
ROWS, LENGTH = 32, 2048
PLANS = (  # shape, device, tensor ranks, stages
    ("llama-7b", "rtx-4090", 1, 1),
    ("llama-7b", "a100-40gb", 1, 1),
    ("llama-7b", "h100", 1, 1),
    ("llama-13b", "rtx-4090", 2, 1),
    ("llama-13b", "rtx-4090", 1, 2),
    ("llama-13b", "a100-80gb", 1, 1),
    ("llama-70b", "rtx-4090", 8, 1),
    ("llama-70b", "rtx-4090", 1, 8),
    ("llama-70b", "mi250-die", 1, 8),
    ("llama-70b", "a100-80gb", 4, 1),
    ("llama-70b", "h100", 4, 1),
    ("llama-70b", "h200", 2, 1),
    ("qwen2.5-72b", "h800", 4, 1),
    ("mixtral-8x7b", "a100-80gb", 2, 1),
    ("opt-66b", "a100-80gb", 4, 1),
)


def plans() -> Record:
    """Rows of LENGTH tokens, ROWS of them at most."""
    devices, spec, lines = read_devices(), SpeculativeConfig(**DRAFTS), []
    config = EngineConfig(max_num_seqs=ROWS, max_model_len=LENGTH)
    for shape, name, ranks, stages_ in PLANS:
        plan = PaperPlan(without_weights(shape), devices[name], ranks, stages_, config, spec)
        speeds = {line.plain.rows: [line.plain.tokens_per_second, line.speculative_speed, line.drafted] for line in plan.speeds()}
        traffic = plan.traffic(Pass(ROWS, 1, plan.context))
        lines.append(
            {
                "shape": shape,
                "device": name,
                "ranks": ranks,
                "stages": stages_,
                "bytes": max(d.total for d in plan.device_bytes),
                "memory": plan.device.memory_bytes,
                "fits": plan.fits,
                "least": plan.least_devices(),
                "sent": traffic.gathered + traffic.hidden_states,
                "speeds": speeds,
            }
        )
    return {"rows": ROWS, "length": LENGTH, "lines": lines}


def cells() -> list[Cell]:
    """Everything that the page is made of."""
    return [
        Cell("plans", plans),
        Cell("here", measured_here),
        Cell("stages", stages),
        Cell("scylla", scylla),
        Cell("padding", padding),
        Cell("replicas", replicas),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Compute what has no record of this commit, write the page; 1 if a cell fails."""
    asked = asked_of(__doc__, "on_paper", arguments=arguments)
    _, failed = run_asked(asked, cells())
    print(f"wrote {write_on_paper(asked.output.parents[1], Records(asked.output).read())}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
