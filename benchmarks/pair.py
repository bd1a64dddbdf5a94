"""What the embedded pair is worth to a benchmark: held-out loss, and acceptance on continuations that are greedy or sampled at 0.8.

`python -m benchmarks.pair [--output FILE]`
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.options import parser_of
from echelon import LLM, SamplingParams
from echelon.bench.report import write_json
from echelon.bench.throughput import default_methods, environment
from echelon.bench.workloads import code_prompts, source_texts
from echelon.demo import DRAFT, TARGET, held_out_files
from echelon.model.load.loading import load_model, load_plain

TEMPERATURE = 0.8
PROMPT_TOKENS = 128
WINDOW = 1024


def repeated_share(tokens: SequenceOf[int], length: int = 8) -> float:
    """Share of the n-grams of a text that occurred in it before."""
    grams = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


@torch.inference_mode()
def held_out_loss(folder: Path, num_windows: int = 48) -> float:
    """Mean cross-entropy, nats a token, on evenly spaced windows of the held-out files; every position counts."""
    model, tokenizer = load_plain(str(folder))
    assert tokenizer is not None
    text = [token for source in source_texts(held_out_files()) for token in [0, *tokenizer.encode(source)]]
    losses = []
    for start in torch.linspace(0, len(text) - WINDOW - 1, num_windows).long().tolist():
        ids = torch.tensor(text[start : start + WINDOW + 1])
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
        losses.append(float(F.cross_entropy(logits, ids[1:])))
    return sum(losses) / len(losses)


def evaluate_pair(num_prompts: int, max_tokens: int) -> dict[str, float]:
    """Held-out losses, repetition of sampled continuations, and tokens_per_step of every method on them and on greedy ones."""
    target, draft = load_model(str(TARGET), device="cpu"), load_model(str(DRAFT), device="cpu")
    assert target.tokenizer is not None
    prompts = code_prompts(target.tokenizer, held_out_files(), num_prompts, PROMPT_TOKENS)
    report = {"target held-out loss": held_out_loss(TARGET), "draft held-out loss": held_out_loss(DRAFT)}
    for name, temperature in (("sampled at 0.8", TEMPERATURE), ("greedy", 0.0)):
        params = [SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens, ignore_eos=True) for i in range(num_prompts)]
        for method in default_methods()[1:]:
            llm = LLM(target, method.config, draft, max_num_seqs=64)
            outputs = llm.generate(prompts, params)
            report[f"{name}, {method.name}: tokens_per_step"] = llm.stats.tokens_per_step
            report[f"{name}, {method.name}: acceptance_rate"] = llm.stats.acceptance_rate
        shares = [repeated_share(o.outputs[0].token_ids) for o in outputs]
        report[f"{name}: share of repeated 8-grams"] = sum(shares) / len(shares)
    return report


def main() -> None:
    asked = parser_of(
        __doc__,
        {
            "--num-prompts": {"type": int, "default": 128, "help": "continuations of held-out Python source"},
            "--max-tokens": {"type": int, "default": 128, "help": "tokens of each"},
            "--output": {"type": Path},
        },
    ).parse_args()
    report = evaluate_pair(asked.num_prompts, asked.max_tokens)
    print(*(f"{key}: {value:.3f}" for key, value in report.items()), sep="\n")
    if asked.output is not None:
        write_json(asked.output, {"environment": environment(), "results": report})


if __name__ == "__main__":
    main()
