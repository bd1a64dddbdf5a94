"""Files of a model change while it is served: `python served_files.py PLACE` prints a line of JSON a case, each a process of its own.

A case is who reads the files (target, draft model, head) and what befalls them. What is said before and after must be the same, and as much
of what was drafted must be kept; a process that the system kills says nothing.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import toys

from echelon import LLM, SamplingParams
from echelon.drafters.guard import GuardedDrafter
from echelon.heads.checkpoints import build_head, save_head

WEIGHTS = "model.safetensors"


def overwrite(path: Path, data: bytes) -> None:
    """In place, as `cp` and `rsync --inplace` do it."""
    with path.open("r+b") as file:
        file.write(data)


def header(data: bytes) -> int:
    """Its length."""
    return 8 + int.from_bytes(data[:8], "little")


def replace(path: Path, data: bytes) -> None:
    (path.parent / "new").write_bytes(data)
    (path.parent / "new").replace(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda p: os.truncate(p, 0),
    "zeroed": lambda p: overwrite(p, bytes(p.stat().st_size)),
    "overwritten": lambda p: overwrite(p, (d := p.read_bytes())[: header(d)] + d[: header(d) - 1 : -1][: len(d) - header(d)]),
    "replaced": lambda p: replace(p, bytes(p.stat().st_size)),
    "unlinked": lambda p: p.unlink(),
}


def served(who: str, folder: Path) -> LLM:
    """An engine with the files in `folder` as its target, draft model or head; weights in bfloat16, as most checkpoints have them."""
    toys.llama().bfloat16().save_pretrained(folder / "target")
    if who == "target":
        return LLM(str(folder / "target"))
    if who == "drafter":
        toys.noisy_copy(toys.llama(), 0.3).bfloat16().save_pretrained(folder / "drafter")
        return LLM(str(folder / "target"), {"method": "draft_model", "model": str(folder / "drafter"), "num_speculative_tokens": 3})
    save_head(build_head("medusa", toys.llama(), num_heads=3), folder / "head", toys.llama().bfloat16())
    return LLM(str(folder / "target"), {"method": "medusa", "model": str(folder / "head"), "num_speculative_tokens": 3})


def said(llm: LLM) -> list[object]:
    """Texts, and how many drafted tokens were kept for them."""
    before = llm.stats.num_accepted_tokens
    params = SamplingParams(temperature=0, max_tokens=16)
    texts = [list(o.outputs[0].token_ids) for o in llm.generate(toys.prompts((1, 7, 33)), params)]
    return [texts, llm.stats.num_accepted_tokens - before]


def case(who: str, change: Callable[[Path], object], folder: Path) -> None:
    llm = served(who, folder)
    if isinstance(guard := llm.engine.drafter, GuardedDrafter):
        guard.timer.fixed = math.inf  # how busy the machine is decides nothing
    before = said(llm)
    for file in sorted((folder / who).iterdir()):
        if file.name == WEIGHTS:
            change(file)
    assert said(llm) == before, f"{before} became {said(llm)}"


def main(place: Path) -> None:
    for who in ("target", "drafter", "head"):
        for name, change in CHANGES.items():
            folder = place / who / name
            folder.mkdir(parents=True)
            child = os.fork()
            if child == 0:
                try:
                    case(who, change, folder)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            print(json.dumps({"case": f"{who} {name}", "status": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}), flush=True)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
