"""What a kept prefix saves and costs: `python -m benchmarks.prefixes [--output FOLDER] [PREFIX ...]`, resumable by cell.

turn         the second turn of a conversation of 1,500 tokens: its first token beside a pass over what is new in it, and a plain step
hashing      looking a prompt of 1,984 tokens up, beside reading it
cold         prompts that begin like no others: all tokens a second with the cache over those without, rounds interleaved
mt_bench     Spec-Bench's conversations of two turns through `LLM.chat` (`--questions FILE`, its question.jsonl; without it, none): share of
             prompt tokens found, and seconds to the first token
another_key  a server with two API keys: seconds of a prompt that the other key has sent before and of one that nobody has, in turn, with
             the Mann–Whitney test of whether they can be told apart; and of one that the same key has sent
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import torch
from pydantic import SecretStr

from benchmarks.cells import Cell, Record, asked_of, run_asked
from benchmarks.questions import other_questions
from benchmarks.workloads import Models, Size, greedy, source
from echelon import LLM, SamplingParams
from echelon.batch import Span
from echelon.bench.inflate import inflate, plan_growth
from echelon.bench.peers import Peer, run_worker
from echelon.bench.report import table
from echelon.demo import TARGET
from echelon.engine import Engine
from echelon.model.load.loading import load_plain
from echelon.sequence import Sequence
from echelon.server.app import create_app
from echelon.server.config import ServerConfig
from echelon.server.http import serving_in_thread

DRAFTERS: dict[str, dict[str, Any] | None] = {"plain": None, "draft_model": {"method": "draft_model", "num_speculative_tokens": 4}}
KEYS = ("the-first-tenant-of-two", "the-second-tenant-of-two")


@dataclass(frozen=True)
class Lengths:
    """Tokens, rounds and pairs of each cell."""

    conversation: int = 1500
    turn: int = 40
    prompt: int = 1984
    cold_prompts: int = 8
    cold_prompt: int = 256
    rounds: int = 9
    conversations: int = 80
    answer: int = 32
    pairs: int = 200


@contextmanager
def alone(llm: LLM, tokens: list[int], params: SamplingParams) -> Iterator[tuple[Engine, Sequence]]:
    """One row in the engine, taken out at the end."""
    (sequence,) = llm.inputs.samples(tokens, params, watch_text=False)
    with llm.exclusive() as engine:
        engine.add(sequence)
        try:
            yield engine, sequence
        finally:
            if not sequence.is_finished:
                engine.abort(sequence)


def seconds_to_first(llm: LLM, tokens: list[int], params: SamplingParams) -> tuple[float, list[float], Sequence]:
    """Seconds until the row has a token, and of its steps after that."""
    with alone(llm, tokens, params) as (engine, sequence):
        start = time.perf_counter()
        while not sequence.num_output_tokens:
            engine.step()
        first, steps = time.perf_counter() - start, []
        while not sequence.is_finished:
            start = time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - start)
    return first, steps, sequence


def turn(models: Models, drafter: str, lengths: Lengths) -> Record:
    """Medians over rounds, each with a conversation of its own."""
    config = DRAFTERS[drafter]
    llm = LLM(models.grown, config, models.draft if config else None, max_num_seqs=1, max_model_len=2048)
    plain = LLM(models.grown, max_num_seqs=1, max_model_len=2048, enable_prefix_caching=False)
    texts = source(models.grown, lengths.rounds, lengths.conversation, is_ragged=False)
    found: dict[str, list[float]] = {"first": [], "pass": [], "step": [], "cold": []}
    cached = 0
    for number, text in enumerate(texts):
        asked = [5 + (number + i) % 90 for i in range(lengths.turn)]
        cold, _, sequence = seconds_to_first(llm, text[: -lengths.turn], greedy(lengths.turn))
        first, _, second = seconds_to_first(llm, sequence.tokens + asked, greedy(2))
        cached = second.num_cached_tokens or 0
        found["cold"].append(cold)
        found["first"].append(first)
        found["pass"].append(seconds_of_pass(plain, second.tokens[: second.num_prompt_tokens], cached))
        found["step"].append(statistics.median(seconds_to_first(plain, text[:64], greedy(12))[1]))
    return {name: statistics.median(values) for name, values in found.items()} | {"cached": cached, "new": len(second) - 2 - cached}


def seconds_of_pass(llm: LLM, tokens: list[int], cached: int) -> float:
    """A pass over all but the first `cached` tokens, which have keys and values."""
    with llm.exclusive() as engine:
        target, row = engine.target, -1
        target.cache.tables.reserve(row, len(tokens))
        try:
            for start in range(0, cached, 512):
                target.feed([Span(row, start, tokens[start : min(start + 512, cached)], 0, len(tokens))])
            start_time = time.perf_counter()
            target.feed([Span(row, cached, tokens[cached:], 1, len(tokens))])
            return time.perf_counter() - start_time
        finally:
            target.cache.tables.release(row)


def hashing(models: Models, lengths: Lengths) -> Record:
    """Seconds of a lookup that finds nothing, of one that finds all, and of reading."""
    llm = LLM(models.grown, max_num_seqs=1, max_model_len=2048)
    (text,) = source(models.grown, 1, lengths.prompt, is_ragged=False)
    prefixes = llm.engine.scheduler.blocks.prefix_cache
    assert prefixes is not None

    def lookup() -> float:
        (sequence,) = llm.inputs.samples(text, greedy(1), watch_text=False)
        start = time.perf_counter()
        prefixes.adopt(sequence)
        taken = time.perf_counter() - start
        llm.engine.scheduler.abort(sequence)
        return taken

    misses = [lookup() for _ in range(lengths.rounds)]
    reading = seconds_to_first(llm, text, greedy(1))[0]
    hits = [lookup() for _ in range(lengths.rounds)]
    return {"miss": statistics.median(misses), "hit": statistics.median(hits), "reading": reading}


def cold(models: Models, lengths: Lengths) -> Record:
    """Tokens a second, prompts and new ones, one a round."""
    llms = {name: LLM(models.grown, max_num_seqs=8, enable_prefix_caching=name == "with") for name in ("with", "without")}
    texts = iter(source(models.grown, 2 * (lengths.rounds + 1) * lengths.cold_prompts, lengths.cold_prompt, is_ragged=False))
    speeds: dict[str, list[float]] = {name: [] for name in llms}
    for number in range(lengths.rounds + 1):
        for name, llm in llms.items():
            prompts = [[5 + number % 90, 6 + (name == "with"), *next(texts)] for _ in range(lengths.cold_prompts)]
            start = time.perf_counter()
            llm.generate(prompts, greedy(32))
            speeds[name].append(sum(len(p) + 32 for p in prompts) / (time.perf_counter() - start))
    ratios = [a / b for a, b in zip(speeds["with"][1:], speeds["without"][1:], strict=True)]
    return {"ratio": statistics.median(ratios), "ratios": ratios, "hits": llms["with"].get_counters()["num_prefix_hits"]}


def mt_bench(models: Models, drafter: str, lengths: Lengths, file: Path, vllm_python: str | None = None) -> Record:
    """Both turns of every conversation, one at a time; in vLLM too, over the same texts, where its Python is given."""
    config = DRAFTERS[drafter]
    llm = LLM(models.grown, config, models.draft if config else None, max_num_seqs=1, max_model_len=2048)
    questions = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    texts = [q["turns"] for q in questions if len(q["turns"]) > 1][: lengths.conversations]
    seconds: list[list[float]] = [[], []]
    counts = [[0, 0], [0, 0]]  # tokens of prompts, and those found, of first and second turns
    told: list[list[list[int]]] = []  # of every conversation its first prompt, the same with its answer, and its second prompt
    for turns in texts:
        messages: list[dict[str, str]] = []
        for number, text in enumerate(turns[:2]):
            messages.append({"role": "user", "content": text})
            tokens = llm.inputs.encode_chat(messages)
            first, _, sequence = seconds_to_first(llm, tokens, greedy(lengths.answer))
            seconds[number].append(first)
            counts[number][0] += len(tokens)
            counts[number][1] += sequence.num_cached_tokens or 0
            if number == 0:
                told.append([tokens])
            told[-1].append(list(sequence.tokens) if number == 0 else tokens)
            tokenizer = llm.target.tokenizer
            assert tokenizer is not None
            messages.append({"role": "assistant", "content": str(tokenizer.decode(sequence.output_tokens))})
    return {
        "conversations": len(texts),
        "first": [statistics.median(s) for s in seconds],
        "found": [hits / tokens for tokens, hits in counts],
        "tokens": [tokens for tokens, _ in counts],
    } | (beside_vllm(models, told, vllm_python) if vllm_python else {})


def beside_vllm(models: Models, conversations: list[list[list[int]]], python: str) -> Record:
    """The same in vLLM: seconds to the first token of either turn, and the shares of prompts that it finds."""
    plain, tokenizer = load_plain(str(TARGET))
    grown = inflate(plain, plan_growth(plain, models.size.pair_parameters)) if models.size.pair_parameters else plain
    with TemporaryDirectory() as folder:
        grown.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        task = {"model": folder, "conversations": conversations, "num_threads": torch.get_num_threads()}
        value = run_worker(Peer("vllm_prefixes", python), task, 1800.0, ("versions", "seconds", "found"))
    lengths = [sum(len(c[turn]) for c in conversations) for turn in (0, 2)]
    shares = [found / tokens for found, tokens in zip(value["found"], lengths, strict=True)]
    return {"vllm": {"first": [statistics.median(s) for s in value["seconds"]], "found": shares, "versions": value["versions"]}}


def another_key(models: Models, lengths: Lengths) -> Record:
    """Seconds of requests for one token, by what has been asked before."""
    llm = LLM(models.target, max_num_seqs=4, max_num_batched_tokens=512)
    config = ServerConfig(port=0, api_keys=tuple(SecretStr(key) for key in KEYS))
    rng = np.random.default_rng(0)
    texts = iter(rng.integers(5, models.target.vocab_size, (3 * lengths.pairs, 255)).tolist())
    seconds: dict[str, list[float]] = {"other": [], "nobody": [], "same": []}
    with serving_in_thread(create_app(llm, config), config) as (url, _), httpx.Client(base_url=url, timeout=60.0) as client:

        def ask(number: int, prompt: list[int], key: str) -> float:
            body = {"prompt": [5 + number % 90, *prompt], "max_tokens": 1, "temperature": 0}
            start = time.perf_counter()
            client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}).raise_for_status()
            return time.perf_counter() - start

        for number in range(lengths.pairs):
            known, unknown, own = next(texts), next(texts), next(texts)
            ask(number, known, KEYS[0])
            ask(number, own, KEYS[1])
            kinds: list[tuple[str, list[int]]] = [("other", known), ("nobody", unknown), ("same", own)]
            for kind, prompt in kinds if number % 2 else reversed(kinds):
                seconds[kind].append(ask(number, prompt, KEYS[1]))
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    return medians | {
        "p_other": mann_whitney(seconds["other"], seconds["nobody"]),
        "p_same": mann_whitney(seconds["same"], seconds["nobody"]),
    }


def mann_whitney(a: SequenceOf[float], b: SequenceOf[float]) -> float:
    """Chance of ranks that lie so far apart if both were of one distribution (Mann and Whitney 1947, two-sided, by the normal limit)."""
    ranks = np.argsort(np.argsort(np.concatenate([a, b]))) + 1
    u = float(ranks[: len(a)].sum()) - len(a) * (len(a) + 1) / 2
    mean, deviation = len(a) * len(b) / 2, math.sqrt(len(a) * len(b) * (len(a) + len(b) + 1) / 12)
    return math.erfc(abs(u - mean) / deviation / math.sqrt(2))


def as_markdown(records: dict[str, Record]) -> str:
    """A line for each goal."""
    lines: list[tuple[str, ...]] = []
    for name, r in records.items():
        if name.startswith("turn"):
            lines.append((name, f"first token after {r['first'] * 1e3:.0f} ms ({r['cached']} tokens found, {r['new']} new)", ""))
            lines.append(
                (
                    name,
                    f"× a pass over the new ones ({r['pass'] * 1e3:.0f} ms): {r['first'] / r['pass']:.3f}",
                    "≤ 1.05, and a plain step more",
                )
            )
            lines.append((name, f"cold {r['cold'] * 1e3:.0f} ms, plain step {r['step'] * 1e3:.0f} ms", ""))
        elif name == "hashing":
            lines.append(
                (name, f"{r['miss'] * 1e3:.2f} ms, found {r['hit'] * 1e3:.2f} ms: {r['miss'] / r['reading']:.3%} of reading", "≤ 1 %")
            )
        elif name == "cold":
            lines.append((name, f"{r['ratio']:.3f} ({min(r['ratios']):.2f} to {max(r['ratios']):.2f}), {r['hits']} hits", "≥ 0.99"))
        elif name.startswith("mt_bench"):
            shares = f"{r['found'][0]:.0%} and {r['found'][1]:.0%} of {r['tokens'][0]:,} and {r['tokens'][1]:,} prompt tokens found"
            lines.append((name, f"{shares}; first token after {r['first'][0] * 1e3:.0f} and {r['first'][1] * 1e3:.0f} ms", ""))
            if theirs := r.get("vllm"):
                seconds = f"first token after {theirs['first'][0] * 1e3:.0f} and {theirs['first'][1] * 1e3:.0f} ms"
                versions = ", ".join(f"{package} {version}" for package, version in theirs["versions"].items())
                lines.append((f"{name}, vLLM", f"{theirs['found'][0]:.0%} and {theirs['found'][1]:.0%} found; {seconds}", versions))
        else:
            times = ", ".join(f"{kind} {r[kind] * 1e3:.1f} ms" for kind in ("other", "nobody", "same"))
            lines.append((name, f"{times}; p = {r['p_other']:.2f}, of the same key {r['p_same']:.1e}", "p ≥ 0.05"))
    return table(["cell", "measured", "goal"], lines)


def cells(models: Models, lengths: Lengths, questions: Path | None = None, vllm_python: str | None = None) -> list[Cell]:
    """All that is measured; `vllm_python`: a Python that has vLLM's CPU build."""
    found: list[tuple[str, Callable[[], Record]]] = [(f"turn_{d}", partial(turn, models, d, lengths)) for d in DRAFTERS]
    found += [("hashing", partial(hashing, models, lengths)), ("cold", partial(cold, models, lengths))]
    if questions:
        beside = {"plain": vllm_python}
        found += [(f"mt_bench_{d}", partial(mt_bench, models, d, lengths, questions, beside.get(d))) for d in DRAFTERS]
    found += [("another_key", partial(another_key, models, lengths))]
    asks = dict.fromkeys((name for name, _ in found if name.startswith("mt_bench")), other_questions(questions))
    if questions and vllm_python:
        asks["mt_bench_plain"] = asks["mt_bench_plain"] | {"beside": "vLLM"}
    return [Cell(name, measure, inputs=asks.get(name, {})) for name, measure in found]


def main(arguments: list[str] | None = None) -> int:
    """Measure the cells that have no record of this commit; 1 if one fails."""
    more: dict[str, dict[str, Any]] = {
        "--questions": {"type": Path, "metavar": "FILE", "help": "Spec-Bench's question.jsonl"},
        "--vllm-python": {"help": "Python with vLLM's CPU build, which then holds the same conversations"},
    }
    asked = asked_of(__doc__, "prefixes", more, arguments)
    return run_asked(asked, cells(Models(Size()), Lengths(), asked.questions, asked.vllm_python), as_markdown)[1]


if __name__ == "__main__":
    sys.exit(main())
