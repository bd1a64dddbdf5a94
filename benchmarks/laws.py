"""Scylla's scaling laws, on a target of one's own: `python -m benchmarks.laws --target DIR [--work FOLDER] [--steps N] [PREFIX ...]`.

Heads are trained in the work folder (build/laws), where an interrupted run goes on; a cell is one trained head, or one comparison, and its
record goes to the output folder. Two cores take about an hour for a lineage of heads on a target of 20 million parameters.

oracle      tokens a step of trees that the target drafts for itself: the most that any drafter's trees of this size can have
sharpness   the same of all heads at temperature 1, where trees grow by the published scores and by those that the engine has, which are
            sharper; everywhere else by the published ones at temperature 1
dD_sS_tP    Scylla's head of D layers, seed S, pretrained for P per cent of the steps at a constant rate, then fine-tuned while the rate
            falls; each goes on from the constant part of the one before
eagle …     EAGLE's head and EAGLE-3's, trained on as many tokens; Scylla's without pretraining, fine-tuning or the norm behind its layers
tasks_…     tokens a step by category of Spec-Bench (`--questions FILE`)
speed_bN    Table 5 of the paper on the target grown to `--parameters`: plain decoding, EAGLE-2 with 60 nodes, and all heads under "auto",
            in steps that read no prompt while all rows are taken; what is below 0.67 × plain in its first round takes no more
"""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import sys
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.adaptive import FullSteps, take_turns
from benchmarks.cells import Cell, Record, Records, asked_of, chosen, is_here, run_cells
from benchmarks.laws_document import NAMES, PUBLISHED_SHARPNESS, write_laws
from benchmarks.questions import other_questions
from benchmarks.workloads import VERIFIED, VERIFIED_TREE, tokens_a_step
from echelon import LLM, ConfigError, SamplingParams
from echelon.bench.inflate import inflate_with_heads
from echelon.bench.throughput import environment
from echelon.model.load.loading import LoadedModel, adopt_model, load_model, load_plain
from echelon.ops.devices import chosen_device
from echelon.train.heads import TrainingConfig, train_head
from echelon.train.sources import HELD_OUT
from echelon.train.text import Data, fingerprint, prepare
from echelon.trees import SHARPNESS

SHARES = (0, 1, 2, 5, 10, 20, 50, 100)  # per cent of the steps of pretraining
DEPTHS, SEEDS = (1, 2, 5), (0, 1, 2)  # several seeds for the shallowest head only
TEMPERATURES = (0.0, 1.0)
BATCHES = (1, 2, 4, 8, 16, 32, 40, 48, 64)
WAVES = {1: 6, 2: 4, 4: 3, 8: 2}  # prompts a row
LARGEST_BATCH = 4096  # tokens: 64 rows with 61 each fit
NUM_PROMPTS, PROMPT, NEW = 32, 64, 64
CONTINUATIONS = 4096  # texts that the target writes, unless told otherwise
TASK_PROMPTS, TASK_PROMPT = 12, 512
EAGLE_2: dict[str, Any] = {"tree": "dynamic", "num_speculative_tokens": 60, "tree_top_k": 10, "tree_depth": 6}
ADAPTIVE: dict[str, Any] = {"tree": "dynamic", "num_speculative_tokens": "auto"}
STAGES = Literal["both", "pretraining", "fine-tuning", "neither"]


@dataclass(frozen=True)
class Lineage:
    """Heads of one kind that were pretrained for several `shares` of the steps. `stages`: those that the steps are made of; "neither" is
    for methods that do not pretrain.
    """

    name: str
    method: str = "scylla"
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0
    shares: tuple[int, ...] = (100,)
    stages: STAGES = "both"

    def training(self, share: int, steps: int, fine_tuning: int, batch_size: int) -> TrainingConfig:
        """Settings of the head with this share; a checkpoint lies where its constant part ends."""
        first, most = share * steps // 100, share * steps // 100 + fine_tuning
        numbers = {"both": (first, fine_tuning), "pretraining": (most, 0), "fine-tuning": (0, most), "neither": (most, None)}[self.stages]
        every = max(first // 4, min(first, steps // 10)) if self.stages == "both" and first else max(1, most // 4)
        return TrainingConfig(
            self.method, numbers[0], every=every, seed=self.seed, options=self.options, fine_tuning=numbers[1], batch_size=batch_size
        )


def lineages() -> list[Lineage]:
    """The laws' first."""
    found = [
        Lineage(f"d{depth}_s{seed}", options=(("num_layers", depth),), seed=seed, shares=SHARES)
        for depth, seed in product(DEPTHS, SEEDS)
        if depth == DEPTHS[0] or seed == SEEDS[0]
    ]
    two = ("num_layers", 2)
    return [
        *found,
        Lineage("eagle", "eagle", stages="neither"),
        Lineage("eagle3", "eagle3", stages="neither"),
        Lineage("no_pretraining", options=(two,), stages="fine-tuning"),
        Lineage("no_fine_tuning", options=(two,), stages="pretraining"),
        Lineage("no_norm", options=(two, ("norm", False))),
    ]


COMPARED = {"eagle": "eagle", "eagle3": "eagle3", "scylla": "d2_s0"}  # of each method the lineage that it is compared by


@dataclass(eq=False)
class LawStudy:
    """A target with texts to learn from, and the heads that are trained for it; all made when first asked for.

    folder, work        of the target, and of training runs
    steps, fine_tuning  batches of `batch_size` texts; shares of a hundredth of the first are measured too
    text, questions     what is learned from; Spec-Bench's questions
    parameters          that the target is grown to for speeds; 0: as it is
    continuations       texts that the target writes for its heads
    device              that heads are trained on

    Raises
    ------
    ConfigError  `steps` has no hundredth
    """

    folder: str
    work: Path
    steps: int
    fine_tuning: int
    text: list[Path] | None = None
    questions: Path | None = None
    parameters: int = 0
    continuations: int = CONTINUATIONS
    batch_size: int = 8
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.steps < 100 or self.steps % 100:
            raise ConfigError(f"--steps {self.steps} cannot be divided into shares of a hundredth; give a multiple of 100")
        self._lineages = {lineage.name: lineage for lineage in lineages()}

    @cached_property
    def _teaching(self) -> tuple[Any, Data]:
        """The target as it is trained with, and texts."""
        plain, tokenizer = load_plain(self.folder)
        plain = plain.to(chosen_device(self.device))
        return plain, prepare(plain, tokenizer, self.text, self.work / "data", self.continuations)

    @cached_property
    def settings(self) -> Record:
        """What a record depends on, besides the sources: a record of other settings is measured again."""
        return {
            "target": fingerprint(load_plain(self.folder)[0]),
            "steps": self.steps,
            "fine_tuning": self.fine_tuning,
            "batch_size": self.batch_size,
            "continuations": self.continuations,
            "text": None if self.text is None else _digest(self.text),
        }

    @cached_property
    def target(self) -> LoadedModel:
        return load_model(self.folder, device="cpu")

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Held-out text, from places that lie evenly apart."""
        held_out = self._teaching[1].text[HELD_OUT]
        starts = np.linspace(0, len(held_out) - PROMPT, NUM_PROMPTS).astype(np.int64)
        return [held_out[start : start + PROMPT].tolist() for start in starts.tolist()]

    def head(self, name: str, share: int = 100) -> str:
        """The folder of a head, trained as far as it is not yet; heads with smaller shares of its lineage come first."""
        lineage = self._lineages[name]
        folder = self.work / name / f"{share:03d}"
        config, end = lineage.training(share, self.steps, self.fine_tuning, self.batch_size), folder / "constant.pt"
        if (folder / "model.safetensors").exists():
            kept = json.loads((folder / "training.json").read_text("utf-8"))
            asked = json.loads(json.dumps(asdict(config) | asdict(config.recipe)))
            if other := [name for name, value in asked.items() if name in kept and kept[name] != value]:
                raise ConfigError(f"{folder} holds a head trained with other settings ({', '.join(other)}); choose another --work")
            return str(folder)
        earlier = [s for s in lineage.shares if 0 < s < share]
        if earlier and not (folder / "checkpoint.pt").exists():
            before = Path(self.head(name, earlier[-1])) / "constant.pt"
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(before, folder / "checkpoint.pt")

        def report(done: int, _: int, loss: float) -> None:
            if done % config.every == 0:
                print(f"  {name}, {share} %: step {done} of {config.num_steps}, loss {loss:.3f}", flush=True)
            if done == config.steps and lineage.stages == "both":
                shutil.copy(folder / "checkpoint.pt", end)

        target, data = self._teaching
        train_head(target, data, folder, config, report)
        return str(folder)

    def emitted(self, config: dict[str, Any], draft: LoadedModel | None = None, temperatures: tuple[float, ...] = TEMPERATURES) -> Record:
        """Tokens a step by temperature and drafted tokens that are verified."""
        found = [
            [
                t,
                budget,
                self._a_step(config, budget, t, draft, PUBLISHED_SHARPNESS if t and config.get("tree") != "chain" else None),
            ]
            for t, budget in product(temperatures, VERIFIED)
        ]
        return {"emitted": found}

    def _a_step(self, config: dict[str, Any], budget: int, t: float, draft: LoadedModel | None, sharpness: float | None) -> float:
        tree = {**VERIFIED_TREE, **config, "num_speculative_tokens": budget}
        return tokens_a_step(self.target, tree, self.prompts, NEW, t, draft, sharpness)

    def sharpness(self) -> Record:
        """Tokens a step at temperature 1 by drafter, sharpness of scores and drafted tokens that are verified."""
        found = []
        for name in (*NAMES, "oracle"):
            is_oracle = name == "oracle"
            how = {"method": "draft_model"} if is_oracle else {"method": self._lineages[name].method, "model": self.head(name)}
            for sharpness, budget in product((PUBLISHED_SHARPNESS, SHARPNESS), VERIFIED):
                emitted = self._a_step(how, budget, 1.0, self.target if is_oracle else None, sharpness)
                found.append([name, sharpness, budget, emitted])
        return {"drawn": found}

    def oracle(self) -> Record:
        """Greedy texts are chains that the target foresees to the last token; at a temperature its likeliest trees are the best."""
        parts = ("chain", 0.0), ("dynamic", 1.0)
        found = [self.emitted({"method": "draft_model", "tree": tree}, self.target, (t,))["emitted"] for tree, t in parts]
        return {"emitted": [entry for part in found for entry in part]}

    def of_head(self, name: str, share: int) -> Record:
        a_step = self.batch_size * (self._teaching[1].continuations.shape[1] - 1)
        return {
            "pretrained": share * self.steps // 100 * a_step,
            **self.emitted({"method": self._lineages[name].method, "model": self.head(name, share)}),
        }

    def tasks(self, method: str) -> Record:
        """Tokens a step by category and temperature, trees of 60 nodes."""
        if self.questions is None:
            raise ConfigError("categories need Spec-Bench's question.jsonl; name it with --questions")
        prompts: dict[str, list[list[int]]] = {}
        inputs = LLM(self.target, max_num_seqs=1).inputs
        for line in self.questions.read_text("utf-8").splitlines():
            question = json.loads(line)
            own = prompts.setdefault(question["category"], [])
            if len(own) < TASK_PROMPTS:
                own.append(inputs.encode(question["turns"][0])[-TASK_PROMPT:])
        config = {"method": method, "model": self.head(COMPARED[method]), **VERIFIED_TREE, "num_speculative_tokens": VERIFIED[-1]}
        found = [[name, t, tokens_a_step(self.target, config, own, NEW, t)] for (name, own), t in product(prompts.items(), TEMPERATURES)]
        return {"tasks": found}

    @cached_property
    def _grown(self) -> tuple[LoadedModel, dict[str, str]]:
        plain, tokenizer = load_plain(self.folder)
        grown, folders = inflate_with_heads(
            plain, self.parameters, {m: self.head(name) for m, name in COMPARED.items()}, self.work / "grown"
        )
        return adopt_model(grown, tokenizer, "the study's target, grown", keep_weights=False), folders

    def speed(self, batch_size: int, rounds: int) -> Record:
        """Tokens a second by setting, one a round, and tokens a step."""
        target, folders = self._grown
        configs: dict[str, dict[str, Any] | None] = {
            "plain": None,
            "eagle, 60 nodes": {"method": "eagle", "model": folders["eagle"], **EAGLE_2},
        }
        configs |= {f"{method}, auto": {"method": method, "model": folder, **ADAPTIVE} for method, folder in folders.items()}
        settings = {"max_num_batched_tokens": LARGEST_BATCH}
        runs = {name: FullSteps(name, config, target, None, batch_size, **settings) for name, config in configs.items()}
        prompts = [self.prompts[i % len(self.prompts)] for i in range(WAVES.get(batch_size, 1) * batch_size)]
        params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
        speeds, found = take_turns(runs, [prompts] * rounds, params, batch_size)
        a_step = {name: runs[name].result(batch_size, own).tokens_per_step for name, own in found.items()}
        return {"parameters": self.parameters, "rounds": rounds, "speeds": speeds, "tokens_per_step": a_step}


def all_heads() -> dict[str, tuple[str, int]]:
    """Lineage and share of every trained head, by the name of its cell."""
    return {f"{line.name}_t{share:03d}": (line.name, share) for line in lineages() for share in line.shares}


def cells(study: LawStudy, rounds: int) -> list[Cell]:
    """Everything that the page is made of."""
    return [
        Cell("oracle", study.oracle),
        Cell("sharpness", study.sharpness),
        *(Cell(name, partial(study.of_head, *head)) for name, head in all_heads().items()),
        *(Cell(f"tasks_{method}", partial(study.tasks, method), inputs=other_questions(study.questions)) for method in COMPARED),
        *(Cell(f"speed_b{batch:02d}", partial(study.speed, batch, rounds)) for batch in BATCHES),
    ]


def summary(records: Mapping[str, Record]) -> str:
    """A line a head: tokens a step with the largest trees, greedy and drawn."""
    lines = []
    for name, record in records.items():
        largest = [e for _, budget, e in record.get("emitted", []) if budget == VERIFIED[-1]]
        if largest:
            lines.append(f"{name}: " + ", ".join(f"{e:.2f}" for e in largest))
        elif "speeds" in record:
            lines.append(f"{name}: " + ", ".join(f"{n} {statistics.median(v):.0f}" for n, v in record["speeds"].items()))
    return "\n".join(lines)


def _digest(places: SequenceOf[Path]) -> str:
    """Of the names and sizes of files, and of what lies in folders."""
    files = sorted(path for place in places for path in ([place] if place.is_file() else place.rglob("*")) if path.is_file())
    return hashlib.sha256(json.dumps([(path.name, path.stat().st_size) for path in files]).encode()).hexdigest()[:16]


def main(arguments: list[str] | None = None) -> int:
    """Measure the cells that have no record of these settings, write the page; 1 if a cell fails."""
    more: dict[str, dict[str, Any]] = {
        "--target": {"required": True, "help": "folder of the model that heads are trained for"},
        "--work": {"type": Path, "default": Path("build/laws"), "help": "folder of training runs"},
        "--text": {"type": Path, "action": "append", "help": "files and folders to learn from; Python source of this machine without"},
        "--questions": {"type": Path, "help": "Spec-Bench's question.jsonl"},
        "--steps": {"type": int, "default": 2400, "help": "of pretraining"},
        "--fine-tuning-steps": {"type": int, "default": 240},
        "--batch-size": {"type": int, "default": 8, "help": "texts of 256 tokens a step"},
        "--device": {"choices": ("auto", "cpu", "cuda"), "default": "auto", "help": "that heads are trained on"},
        "--train": {"action": "store_true", "help": "train the heads and measure nothing: on another machine, say"},
        "--parameters": {"type": int, "default": 1_100_000_000, "help": "that the target is grown to for speeds; 0: as it is"},
        "--rounds": {"type": int, "default": 3},
        "--continuations": {"type": int, "default": CONTINUATIONS, "help": "texts that the target writes for its heads"},
    }
    asked = asked_of(__doc__, "laws", more, arguments)
    names = ("work", "steps", "text", "questions", "parameters", "continuations", "batch_size", "device")
    study = LawStudy(asked.target, fine_tuning=asked.fine_tuning_steps, **{name: getattr(asked, name) for name in names})
    if asked.train:
        for name, (lineage, share) in all_heads().items():
            if not asked.prefixes or name.startswith(tuple(asked.prefixes)):
                study.head(lineage, share)
        return 0
    where, records = environment(), Records(asked.output)
    common = {"settings": study.settings, "environment": where}
    asked_for = chosen(cells(study, asked.rounds), asked.prefixes)
    of_speeds = {"parameters": asked.parameters, "rounds": asked.rounds}

    def is_current(_: str, record: Record) -> bool:
        is_fast_here = of_speeds.items() <= record.items() and is_here(record, where)
        told = {"continuations": CONTINUATIONS, "text": study.settings["text"]} | record["settings"]  # older records name neither
        return told == study.settings and ("speeds" not in record or is_fast_here)

    found = run_cells(asked_for, records, common, is_current)
    print(summary(found))
    print(f"wrote {write_laws(asked.output.parents[1], records.read())}")
    return int(any("failed" in record for record in found.values()))


if __name__ == "__main__":
    sys.exit(main())
