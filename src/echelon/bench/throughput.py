"""Tokens per second of several methods on the same prompts, interleaved, with a check that the text is the same."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import transformers

from echelon import LLM, SamplingParams
from echelon.bench.clock import time_parts
from echelon.bench.phases import SPLIT, Recorder, Sums
from echelon.bench.verify import STRATEGY_SETTINGS, check_strategies
from echelon.model.load.loading import LoadedModel
from echelon.model.patches.linear import weight_bytes
from echelon.ops import compiled
from echelon.ops.devices import cpu_name
from echelon.sizes import mebibytes
from echelon.speculative_config import SpeculativeConfig
from echelon.stats import Stats

Prompts = SequenceOf[SequenceOf[int]]
HEAD_TOKENS = 2  # of a peer's text, left out of its decoding: with the second token a draft model has read the prompt as well
LEAST_DECODED = 0.25  # of a run's tokens, by steps that read no prompt
SLICE = 0.5  # seconds of steps until it is another run's turn: machines that are shared change their speed within some
MOST_BESIDE_STEPS = 0.1  # of a run's time
NUM_DRAFTED = 4  # tokens of a draft model's draft, where nothing else is said
NAMES = {"ngram": "LLMA", "draft_model": "draft model"}  # of methods, in tables


@dataclass(frozen=True)
class DecodingMethod:
    """A name for the table, what drafts, how rows become a batch, and what is done to an engine before it runs."""

    name: str
    config: Mapping[str, Any] | None
    strategy: str = "unpadded"
    prepare: Callable[[LLM], None] | None = None

    def unnamed(self, draft: LoadedModel | None) -> LoadedModel | None:
        """What is loaded already drafts where the settings name no model."""
        return draft if self.config is not None and "model" not in self.config else None


ADAPTIVE = [  # the engine decides how much is drafted
    DecodingMethod("LLMA auto", {"method": "ngram", "prompt_lookup_max": 2}),
    DecodingMethod("draft model auto", {"method": "draft_model"}),
]
# drafts end where the draft model is no longer sure, of unequal length as LLMA's
CONFIDENT = DecodingMethod("confident draft model", {"method": "draft_model", "num_speculative_tokens": 7, "confidence_threshold": 0.3})


def default_methods() -> list[DecodingMethod]:
    """Plain decoding, LLMA with the paper's match length, and a draft model."""
    return [
        DecodingMethod("plain", None),
        DecodingMethod("LLMA", {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 2}),
        DecodingMethod("draft model", {"method": "draft_model", "num_speculative_tokens": NUM_DRAFTED}),
    ]


def methods_of(configs: SequenceOf[Mapping[str, Any]], strategies: SequenceOf[str]) -> list[DecodingMethod]:
    """Plain decoding unpadded, and every strategy with each of these settings of what drafts, named by what they say."""
    check_strategies(strategies)
    found = [DecodingMethod("plain", None)]
    for config, strategy in product(configs, strategies):
        spec = SpeculativeConfig(**config)
        words = [
            NAMES.get(spec.method, spec.method),
            "" if spec.tree == "chain" else f"{spec.tree} tree",
            str(spec.num_speculative_tokens),
        ]
        words += [f"at least {spec.confidence_threshold:g}"] if spec.confidence_threshold else []
        name = " ".join(word for word in words if word)
        same = sum(m.name.split(" #")[0] == name and m.strategy == strategy for m in found)
        found.append(DecodingMethod(f"{name} #{same + 1}" if same else name, config, strategy))
    return found


@dataclass(frozen=True)
class ThroughputResult:
    """One method at one batch size.

    tokens_per_second         new tokens over the whole call, prefill included; one a round
    decode_tokens_per_second  of steps that read no prompt (see `phases`); one a round, 0 where nothing was decoded after it
    tokens_per_step           emitted per row and step
    num_identical             rows whose token ids equal plain decoding alone
    acceptance                [num_draft_tokens, num_accepted, count] of every pair that occurred
    accepted_by_position      share of drafted tokens kept, by position in the draft

    The rest is of decoding steps, all rounds together: milliseconds by part of a step, share of padding in the rows fed to the layers
    and in the KV slots that attention loads, bytes of KV a step (those reserved are what no other row can use), and EXSPEC's group rate.
    `notes` say what to make of the speed of decoding; `adaptive` is what `LLM.get_counters` says of it where draft lengths are "auto".
    """

    method: str
    batch_size: int
    tokens_per_second: list[float]
    tokens_per_step: float
    acceptance_rate: float
    num_identical: int
    num_rows: int
    acceptance: list[list[int]] = field(default_factory=list)
    strategy: str = "unpadded"
    decode_tokens_per_second: list[float] = field(default_factory=list)
    accepted_by_position: list[float] = field(default_factory=list)
    step_ms: dict[str, float] = field(default_factory=dict)
    padded_input_share: float = 0.0
    padded_kv_share: float = 0.0
    kv_bytes_reserved: float = 0.0
    kv_bytes_touched: float = 0.0
    index_bytes: float = 0.0
    group_rate: float | None = None
    notes: list[str] = field(default_factory=list)
    adaptive: dict[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)

    @property
    def decode_median(self) -> float:
        return statistics.median(self.decode_tokens_per_second or [0.0])

    @property
    def name(self) -> str:
        return display_name(self.method, self.strategy)


def display_name(method: str, strategy: str) -> str:
    """A method and a strategy as one name; the engine's own strategy goes without saying."""
    return method if strategy not in STRATEGY_SETTINGS or strategy == "unpadded" else f"{method}, {strategy}"


@dataclass(frozen=True)
class Run:
    """Token ids of every prompt, and how long they took with prefill and (tokens, seconds) without."""

    outputs: list[list[int]]
    seconds: float
    decode: tuple[float, float]

    @property
    def decoding_speed(self) -> float:
        """Tokens a second of the steps that read no prompt; 0 where there were none."""
        tokens, seconds = self.decode
        return tokens / seconds if seconds else 0.0


T = TypeVar("T")
Stepping = Generator[None, None, T]  # a run that gives control back after every step


def ended(steps: Stepping[T]) -> T:
    """What a run comes to when nothing is done between its steps."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            found: T = stop.value
            return found


def in_turn(going: Mapping[str, Stepping[T]]) -> dict[str, T]:
    """What runs come to whose steps take turns, each for SLICE seconds, one step at least."""
    found, waiting = dict[str, T](), deque(going.items())
    while waiting:
        name, steps = waiting.popleft()
        end = time.perf_counter() + SLICE
        try:
            next(steps)
            while time.perf_counter() < end:
                next(steps)
            waiting.append((name, steps))
        except StopIteration as stop:
            found[name] = stop.value
    return {name: found[name] for name in going}


class Contender(Protocol):
    """Something that generates at a batch size, on equal terms with the others."""

    name: str

    def warm_up(self, prompts: Prompts, params: SamplingParams) -> None: ...

    def run(self, prompts: Prompts, params: SamplingParams) -> Run: ...

    def result(self, batch_size: int, runs: SequenceOf[Run]) -> ThroughputResult: ...


class EngineRun:
    """A method in the engine, and what its decoding steps added up to. `notes`: where these are few, or do not fill the time of a run."""

    def __init__(
        self, method: DecodingMethod, target: LoadedModel, draft: LoadedModel | None, batch_size: int, settings: Mapping[str, Any]
    ) -> None:
        self._method = method
        self.name = display_name(method.name, method.strategy)
        settings = STRATEGY_SETTINGS[method.strategy] | {"max_num_seqs": batch_size, "enable_prefix_caching": False, **settings}
        self._llm = LLM(target, method.config, method.unnamed(draft), **settings)
        time_parts(self._llm)
        if method.prepare is not None:
            method.prepare(self._llm)
        self.begin()
        self.notes: set[str] = set()

    @property
    def memory(self) -> int:
        """Bytes of the weights that draft."""
        storage = self._llm.storage
        of_head = sum(p.nbytes for p in storage.head.head.parameters()) if storage.head is not None else 0
        return of_head + sum(weight_bytes(runner.loaded.model) for runner in storage.runners[1:])

    def warm_up(self, prompts: Prompts, params: SamplingParams) -> None:
        ended(self._timed(prompts, params))

    def begin(self) -> None:
        """Count from here on: what was run before was to get warm."""
        self._decode, self._stats = Sums(), Stats()

    def run(self, prompts: Prompts, params: SamplingParams) -> Run:
        return ended(self.stepping(prompts, params))

    def stepping(self, prompts: Prompts, params: SamplingParams) -> Stepping[Run]:
        """The same step by step: what happens between two of them takes no time."""
        with self._llm.engine.observed(self._stats.count):
            outputs, seconds, recorder = yield from self._timed(prompts, params)
        decode = recorder.decode
        self._decode += decode
        self._note(sum(map(len, outputs)), seconds, recorder)
        return Run(outputs, seconds, (decode["tokens"], decode["seconds"]))

    def _note(self, num_tokens: int, seconds: float, recorder: Recorder) -> None:
        share, stepping = recorder.decode["tokens"] / max(num_tokens, 1), recorder.whole["seconds"] / seconds
        if share < LEAST_DECODED:
            self.notes.add(f"only {share:.0%} of the tokens come from steps that read no prompt: take longer texts, or fewer prompts")
        if abs(1.0 - stepping) > MOST_BESIDE_STEPS:
            self.notes.add(f"steps fill {stepping:.0%} of the time of a run: they and the wall clock disagree")

    def _timed(self, prompts: Prompts, params: SamplingParams) -> Stepping[tuple[list[list[int]], float, Recorder]]:
        requests = [self._llm.inputs.samples(list(prompt), params, watch_text=False) for prompt in prompts]
        recorder, seconds, start = Recorder(self._llm.stats), 0.0, time.perf_counter()
        for _ in self._llm.run(requests):
            recorder()
            seconds += time.perf_counter() - start
            yield
            recorder.start()
            start = time.perf_counter()
        return [sequence.output_tokens for sequence, *_ in requests], seconds, recorder

    def result(self, batch_size: int, runs: SequenceOf[Run]) -> ThroughputResult:
        adaptive = self._llm.get_counters()["adaptive"] or {}
        faults = ", ".join(f"{kind} {count} ×" for kind, count in self._llm.stats.drafter_faults.items())
        failed = {f"steps without drafts, since the drafter failed: {faults}"} if faults else set()
        return replace(
            engine_result(self._method, batch_size, runs, self._stats, self._decode), notes=sorted(self.notes | failed), adaptive=adaptive
        )


def engine_result(method: DecodingMethod, batch_size: int, runs: SequenceOf[Run], stats: Stats, decode: Sums) -> ThroughputResult:
    """The engine's counters as a result; rows are compared with plain decoding later."""
    drafted, accepted = stats.num_drafts_by_position, stats.num_accepted_by_position
    return ThroughputResult(
        method.name,
        batch_size,
        [sum(map(len, r.outputs)) / r.seconds for r in runs],
        stats.tokens_per_step,
        stats.acceptance_rate,
        0,
        0,
        stats.histogram(),
        method.strategy,
        [r.decoding_speed for r in runs],
        [a / d for a, d in zip(accepted, drafted, strict=True)],
        {part: 1e3 * decode.per(part, "steps") for part in SPLIT},
        1.0 - decode.per("fed", "inputs") if decode["inputs"] else 0.0,
        1.0 - decode.per("live", "touched") if decode["touched"] else 0.0,
        decode.per("kv_bytes_reserved", "passes"),
        decode.per("kv_bytes_touched", "passes"),
        decode.per("index_bytes", "passes"),
        decode.per("group_hits", "group_choices") if decode["group_choices"] else None,
    )


def plain_outputs(target: LoadedModel, prompts: Prompts, params: SamplingParams, **settings: Any) -> list[list[int]]:
    """Token ids of plain decoding, each prompt alone: what everything else is compared with; `settings` are the engine's."""
    llm = LLM(target, max_num_seqs=1, **settings)
    return [llm.generate([p], params, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]


def measure(
    target: LoadedModel,
    draft: LoadedModel | None,
    methods: SequenceOf[DecodingMethod],
    prompts: Prompts,
    params: SamplingParams,
    batch_size: int,
    rounds: int,
    truth: list[list[int]] | None = None,
    on_run: Callable[[str], None] = lambda _: None,
    others: SequenceOf[Contender] = (),
    **settings: Any,
) -> list[ThroughputResult]:
    """Run every method, and `others`, `rounds` times in turn, after one warm-up each; `settings` are the engine's.

    `truth` is found by plain decoding, row by row, if it is not given; an empty one compares nothing.
    """
    truth = plain_outputs(target, prompts, params, **settings) if truth is None else truth
    contenders: list[Contender] = [*(EngineRun(m, target, draft, batch_size, settings) for m in methods), *others]
    warm_up = params.model_copy(update={"max_tokens": 4})
    for contender in contenders:
        contender.warm_up(prompts[:batch_size], warm_up)
    runs: dict[Contender, list[Run]] = {contender: [] for contender in contenders}
    for _, (contender, own) in product(range(rounds), runs.items()):
        own.append(contender.run(prompts, params))
        on_run(contender.name)
    return [compared(contender.result(batch_size, own), own[-1].outputs, truth) for contender, own in runs.items()]


def compared(result: ThroughputResult, outputs: SequenceOf[SequenceOf[int]], truth: SequenceOf[SequenceOf[int]]) -> ThroughputResult:
    """With the number of rows that equal plain decoding; a replayed text means nothing, and without a truth nothing is compared."""
    if result.method.startswith("replay") or not truth:
        return result
    return replace(result, num_identical=sum(a == b for a, b in zip(outputs, truth, strict=True)), num_rows=len(truth))


def environment() -> dict[str, str]:
    """What the figures were measured on."""
    return gpu() | {
        "cpu": f"{cpu_name()} ({os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()})",
        "isa": compiled.isa() if compiled.is_built() else "none",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def gpu() -> dict[str, str]:
    """The CUDA device that engines choose, where there is one."""
    if not torch.cuda.is_available():
        return {}
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"gpu": f"{device.name} ({mebibytes(device.total_memory)}, CUDA {torch.version.cuda})"}


SOURCES = (":/src", ":/benchmarks")  # below the root of a working tree


def commit() -> str:
    """The commit of the working tree this package runs from, if it is one, with a plus where sources of it or of benchmarks are others."""
    package = Path(__file__).parents[1]
    try:
        number, changed = (
            subprocess.run(["git", "-C", str(package), *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no", "--", *SOURCES))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{number}+" if changed else number


def as_json(results: SequenceOf[ThroughputResult]) -> dict[str, Any]:
    return {"environment": environment(), "results": [asdict(r) | {"median": r.median} for r in results]}


def from_json(value: dict[str, Any]) -> list[ThroughputResult]:
    """The results that `as_json` wrote."""
    return [ThroughputResult(**{k: v for k, v in entry.items() if k != "median"}) for entry in value["results"]]
