"""EMS-SD's experiment on the real models: OPT-350m … 13b on CNN/DailyMail, LLMA and a draft model, every kind of padding.

`python scripts/opt_cnn_dailymail.py --sizes 350m,1.3b --output build/opt` fetches models and articles from the hub. As there: the first
480 articles of the test set, each followed by `TL;DR:`, at most its last 2048 − 128 − 1 tokens, 128 new tokens, greedy, static batches
in the order of the data, LLMA with a match of 2 in the prompt and 7 copied tokens, OPT-125m drafting 4. Otherwise than there: bfloat16
on the CPU, speeds are all tokens over all seconds, and the tokens of the first step count as little as its seconds.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import transformers

from echelon import LLM, ConfigError, EchelonError, SamplingParams
from echelon.bench.plot import throughput_charts
from echelon.bench.report import throughput_as_markdown, write_json
from echelon.bench.throughput import DecodingMethod, ThroughputResult, as_json, environment, measure
from echelon.bench.workloads import ems_prompt
from echelon.model.load.loading import LoadedModel, load_model

STRATEGIES = ("padded", "padded-inputs", "padded-kv", "unpadded")
DRAFTERS = {
    "LLMA": {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 2, "prompt_lookup_source": "prompt"},
    "draft model": {"method": "draft_model", "num_speculative_tokens": 4},
}
OPTIONS = {
    "--sizes": {"default": "350m,1.3b,2.7b,6.7b,13b", "help": "of OPT, comma-separated"},
    "--model": {"action": "append", "help": "a folder or hub name instead of --sizes; may be repeated"},
    "--draft-model": {"default": "facebook/opt-125m"},
    "--articles": {"type": Path, "help": "JSONL with a key `article`, instead of the data set of the hub"},
    "--num-articles": {"type": int, "default": 480},
    "--batch-sizes": {"default": "1,2,4,8,12,16,20,24"},
    "--max-tokens": {"type": int, "default": 128},
    "--rounds": {"type": int, "default": 3},
    "--dtype": {"default": "bfloat16", "choices": ("bfloat16", "float16", "float32")},
    "--output": {"type": Path, "default": Path("build/opt_cnn_dailymail")},
}
DATASET = ("abisee/cnn_dailymail", "3.0.0")


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, told in OPTIONS.items():
        options.add_argument(name, **told)
    return options


def articles(path: Path | None) -> Iterator[str]:
    """From a file, or the test set of the hub in its order."""
    if path is not None:
        with path.open(encoding="utf-8") as lines:
            yield from (json.loads(line)["article"] for line in lines if line.strip())
        return
    try:
        from datasets import load_dataset
    except ImportError:
        raise ConfigError("the data set is read with `pip install datasets`; or give --articles FILE.jsonl") from None
    yield from (row["article"] for row in load_dataset(*DATASET, split="test"))


def prompts_of(target: LoadedModel, path: Path | None, count: int, max_tokens: int) -> list[list[int]]:
    """Token ids in EMS-SD's form, the last ones of what is too long."""
    if target.tokenizer is None:
        raise ConfigError(f"{target.name!r} has no tokenizer")
    longest = target.max_len - max_tokens - 1
    return [target.tokenizer.encode(ems_prompt(text))[-longest:] for text in islice(articles(path), count)]


def run(model: str, asked: argparse.Namespace, draft: LoadedModel) -> list[ThroughputResult]:
    target = load_model(model, dtype=asked.dtype, device="cpu")
    prompts = prompts_of(target, asked.articles, asked.num_articles, asked.max_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=asked.max_tokens)
    sizes = [int(b) for b in asked.batch_sizes.split(",")]
    methods = [DecodingMethod("plain", None), *(DecodingMethod(name, config, s) for name, config in DRAFTERS.items() for s in STRATEGIES)]
    truth = [o.outputs[0].token_ids for o in LLM(target, max_num_seqs=max(sizes)).generate(prompts, params)]
    results = []
    for size in sizes:
        results += measure(target, draft, methods, prompts, params, size, asked.rounds, truth, said(f"{model}, batch {size}"), refill=False)
    return results


def said(where: str):
    return lambda name: print(f"{where}: {name}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    asked = parser().parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        draft = load_model(asked.draft_model, dtype=asked.dtype, device="cpu")
        for model in asked.model or [f"facebook/opt-{size}" for size in asked.sizes.split(",")]:
            results = run(model, asked, draft)
            folder = asked.output / Path(model).name
            write_json(folder / "throughput.json", as_json(results))
            command = shlex.join(["python", "scripts/opt_cnn_dailymail.py", *(sys.argv[1:] if arguments is None else arguments)])
            text = throughput_as_markdown(results, environment(), command)
            (folder / "throughput.md").write_text(text, "utf-8")
            throughput_charts(folder, results)
            print(f"wrote {folder}")
    except EchelonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
