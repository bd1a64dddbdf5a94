"""Engines under a hard limit of memory (RLIMIT_DATA), each in a process of its own, which may die of it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from random import Random

import torch

from benchmarks.cells import Record
from benchmarks.memory_models import Settings, engine_settings, folder_of, status
from benchmarks.workloads import source
from echelon import LLM, ConfigError, EngineConfig, SamplingParams
from echelon.bench.phases import Recorder
from echelon.memory.lower_bound import least_memory
from echelon.memory.residents import PlannedModels
from echelon.speculative_config import speculative

RATIOS = (2, 3, 5, 8, 15)  # weights over keys and values
DEVICE, WEIGHTS = 16.0, 13.5  # GB of SpecMemo's smaller device, and of the model that it serves there
QUERY, ANSWER = 128, 32  # tokens of a query, and of its answer among them
CONVERSATIONS = 200
BOUND_ROUNDS = 3
MARGIN = 32 * 2**20  # bytes below what a process took


def limit_data(planned: int) -> int:
    """Let this process map no more than a plan of so many bytes allows. What is counted is memory that is mapped to be written: so pages
    of files are taken from the plan, and what is mapped and not resident now is added.
    """
    torch.ones(2**20).exp_()  # starts the threads that will compute: their stacks are mapped, and hardly resident
    limit = planned - status("RssFile") + max(0, status("VmData") - status("RssAnon"))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return limit


def survived(model: str, extra: int) -> Record:
    """Under a limit of data equal to the plan and `extra` bytes: conversations of random lengths, and how many came to their end."""
    engine, drafter, length, _ = engine_settings(model, "chain")
    config, spec = EngineConfig(**engine), speculative(drafter)
    planned = PlannedModels(config, spec, folder_of(model)[0]).plan(config, spec).total_bytes
    record: Record = {"planned": planned, "limit": limit_data(planned + extra), "survived": 0}
    say(record)
    random = Random(1)
    llm = LLM(folder_of(model)[0], drafter, **engine)
    while record["survived"] < CONVERSATIONS:
        lengths = [random.randrange(2, length) for _ in range(config.max_num_seqs)]
        answers = [random.randrange(1, min(32, n)) for n in lengths]
        prompts = [[random.randrange(5, 4000) for _ in range(n - a)] for n, a in zip(lengths, answers, strict=True)]
        sampled = [SamplingParams(max_tokens=a, temperature=0.8, seed=i, ignore_eos=True) for i, a in enumerate(answers)]
        llm.generate(prompts, sampled, use_tqdm=False)
        record |= {"survived": record["survived"] + len(prompts), "data": status("VmData")}
        say(record)
    return record


def of_ratio(model: str, ratio: str) -> Record:
    """Keys and values of 1/`ratio` of the weights, or by plan, under a limit in the proportion of SpecMemo's device to its model: queries
    that are held at once, planned and as they run. 0 are planned where the plan of these settings exceeds the limit.
    """
    settings: Settings = {"max_num_seqs": 512, "max_num_batched_tokens": 512, "max_model_len": QUERY, "enable_prefix_caching": False}
    models = PlannedModels(EngineConfig(), None, folder_of(model)[0])
    weights = models.residents(EngineConfig(), None).target.weights
    beside = models.plan(EngineConfig(**settings), None).terms
    budget = beside["runtime"] + beside["tokenizer"] + int(weights * DEVICE / WEIGHTS)

    def needed(count: int, given: int | None = None) -> int:
        config = EngineConfig(**settings | {"max_num_seqs": count, "kv_cache_memory_bytes": given or "auto"})
        return models.plan(config, None).total_bytes

    per_query = models.plan(EngineConfig(**settings | {"max_num_seqs": 1}), None).terms["keys and values"]
    if ratio == "plan":
        count = max((n for n in range(1, 513) if needed(n) <= budget), default=1)
        given, planned = count * per_query, count
    else:
        given = weights // int(ratio)
        count = given // per_query
        planned = count if needed(count, given) <= budget else 0
    record: Record = {"ratio": ratio, "bytes": given, "budget": budget, "limit": limit_data(budget), "planned": planned, "held": 0}
    say(record)
    llm = LLM(folder_of(model)[0], **settings | {"kv_cache_memory_bytes": given})
    return record | {"held": count if are_held(llm, count) else 0, "holds_one_more": are_held(llm, count + 1)}


def are_held(llm: LLM, count: int) -> bool:
    """Whether so many queries run at once from the first to the last token, and none is put off."""
    before, most = llm.get_counters()["num_preemptions"], 0

    def watch(_: object) -> None:
        nonlocal most
        most = max(most, len(llm.engine.scheduler.running))

    prompts = [[5 + i % 90] * (QUERY - ANSWER) for i in range(count)]
    with llm.engine.observed(watch):
        llm.generate(prompts, SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True), use_tqdm=False)
    return most == count and llm.get_counters()["num_preemptions"] == before


def bounded(drafter: str, extra: int) -> Record:
    """Under a limit of data that one row with this drafter needs by plan, and `extra` bytes: tokens a second of decoding."""
    target, draft = folder_of("grown")
    drafting = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4} if drafter == "draft_model" else None
    config, spec = EngineConfig(max_num_seqs=1, max_model_len=384), speculative(drafting)
    shapes = least_memory(PlannedModels(config, spec, target), config, spec)  # plain decoding first, then this drafter's one shape
    least = shapes[0 if spec is None else -1].bytes
    limit = limit_data(least + extra)
    llm = LLM(target, drafting, max_num_seqs=1, max_model_len=384)
    prompts = source(llm.target, 4, 128, is_ragged=False)
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    recorder = Recorder(llm.stats)
    llm.generate(prompts, params, on_step=recorder)
    return {"least": least, "limit": limit, "data": status("VmData"), "speed": recorder.decode["tokens"] / recorder.decode["seconds"]}


def bound() -> Record:
    """By turns plain decoding and drafting, each in the least memory by plan; then drafting in less than its process took."""
    folder_of("grown")  # made here, so that no measured process holds what is left of making it
    rounds = [{drafter: in_process("bound", drafter, "0") for drafter in ("none", "draft_model")} for _ in range(BOUND_ROUNDS)]
    last = rounds[-1]["draft_model"]
    extra = last["data"] - last["limit"] - MARGIN
    below = limited("bound", "draft_model", str(extra))
    return {"rounds": rounds, "below": below | {"limit": last["limit"] + extra}}


def drafting_gains(bound: Record) -> list[float]:
    """Decoding with drafts over without, each in its least memory, by round."""
    return [r["draft_model"]["speed"] / r["none"]["speed"] for r in bound["rounds"]]


def say(record: Record) -> None:
    """What is known so far, for whoever reads the output should this process die."""
    print(json.dumps(record), flush=True)


def in_process(*words: str) -> Record:
    """A measurement in a process of its own.

    Raises
    ------
    ConfigError  it died
    """
    record = limited(*words)
    if "died" in record:
        raise ConfigError(f"{' '.join(words)} {record['died']}")
    return record


def limited(*words: str) -> Record:
    """A measurement in a process of its own; of one that died, what it had said, and "died": of what."""
    run = subprocess.run([sys.executable, "-m", "benchmarks.memory", "--measure", *words], capture_output=True, text=True, check=False)
    said = [line for line in run.stdout.splitlines() if line.startswith("{")]
    record: Record = json.loads(said[-1]) if said else {}
    if not run.returncode:
        return record
    return record | {"died": f"ended with status {run.returncode}: {' '.join(run.stderr.strip().splitlines()[-1:])[-200:]}"}
