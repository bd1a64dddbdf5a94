"""`make demo`: the main job in under three minutes, on the embedded models and on the same target grown to serving size."""

from __future__ import annotations

import copy
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

from echelon import LLM, SamplingParams
from echelon.bench.inflate import describe, inflate_with_heads
from echelon.bench.plot import bar_chart
from echelon.bench.throughput import DecodingMethod, ThroughputResult, default_methods, environment, measure, plain_outputs
from echelon.bench.workloads import code_prompts
from echelon.demo import DRAFT, EAGLE, TARGET, held_out_files
from echelon.errors import MissingExtraError
from echelon.model.load.loading import LoadedModel, adopt_model, load_model, load_plain

BATCH_SIZE = 8
PROMPT_TOKENS = 192
GROWN_PARAMETERS = 500_000_000
console = Console()


def padded_batch(prompts: list[list[int]], pad: int) -> dict[str, torch.Tensor]:
    """What `transformers` needs: one rectangle, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def transformers_plain(
    model: PreTrainedModel, prompts: list[list[int]], num_tokens: int, truth: list[list[int]], rounds: int
) -> ThroughputResult:
    """`model.generate` of transformers on the padded batch."""
    inputs = padded_batch(prompts, 0)
    speeds, rows = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        out = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        new = out[:, inputs["input_ids"].shape[1] :]
        speeds.append(new.numel() / (time.perf_counter() - start))
        rows = new.tolist()
    num_identical = sum(a == b for a, b in zip(rows, truth, strict=True))
    return ThroughputResult("transformers", len(prompts), speeds, 1.0, 0.0, num_identical, len(truth))


def transformers_refusal(model: PreTrainedModel, draft: PreTrainedModel, prompts: list[list[int]]) -> str:
    """What `transformers` says to a batch with a draft model."""
    try:
        model.generate(**padded_batch(prompts, 0), assistant_model=draft, max_new_tokens=4, do_sample=False, pad_token_id=0)
    except ValueError as error:
        return str(error).splitlines()[0]
    return "accepted (this version of transformers batches assisted generation)"


def table_of(title: str, results: list[ThroughputResult]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAVY)
    for name in ("method", "tokens/s", "tokens_per_step", "acceptance_rate", "identical"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for r in results:
        same = "yes" if r.num_identical == r.num_rows else f"{r.num_identical} of {r.num_rows}"
        rate = f"{r.acceptance_rate:.2f}" if r.acceptance_rate else "–"
        table.add_row(r.method, f"{r.median:,.0f}", f"{r.tokens_per_step:.2f}", rate, same)
    return table


def coloured_sample(llm: LLM, prompt: list[int], params: SamplingParams) -> Text:
    """One continuation: the prompt dim, drafted and accepted tokens green, the target's own tokens yellow."""
    tokenizer = llm.target.tokenizer
    assert tokenizer is not None
    completion = llm.generate([prompt], params)[0].outputs[0]
    text = Text(tokenizer.decode(prompt[-24:]), style="dim")
    for token, accepted in zip(completion.token_ids, completion.is_accepted, strict=True):
        text.append(tokenizer.decode([token]), style="green" if accepted else "bold yellow")
    return text


def run_all(
    target: LoadedModel, draft: LoadedModel, head: str, prompts: list[list[int]], params: SamplingParams, rounds: int, title: str
) -> tuple[list[ThroughputResult], list[list[int]]]:
    """Every method, with a progress bar; `head`: the folder of the target's EAGLE head."""
    methods = [*default_methods(), DecodingMethod("EAGLE", {"method": "eagle", "model": head, "num_speculative_tokens": 4})]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(title, total=len(methods) * rounds + 1)
        truth = plain_outputs(target, prompts, params)
        progress.advance(task)
        results = measure(target, draft, methods, prompts, params, BATCH_SIZE, rounds, truth, lambda _: progress.update(task, advance=1))
    return results, truth


def main(
    out: Annotated[Path, typer.Option(help="Folder for the bar chart.")] = Path("build/demo"),
    max_tokens: Annotated[int, typer.Option(help="New tokens a prompt.")] = 96,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds on the embedded pair.")] = 3,
) -> None:
    """Speculate in a batch, check that nothing changed, and show what it brings."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    target, draft = load_model(str(TARGET), device="cpu"), load_model(str(DRAFT), device="cpu")
    assert target.tokenizer is not None
    prompts = code_prompts(target.tokenizer, held_out_files(), BATCH_SIZE, PROMPT_TOKENS)
    lengths = [PROMPT_TOKENS - 20 * i for i in range(BATCH_SIZE)]
    prompts = [p[-n:] for p, n in zip(prompts, lengths, strict=True)]
    where = environment()
    console.print(f"[bold]echelon[/] on {escape(where['cpu'])}, torch {where['torch']}, transformers {where['transformers']}")
    console.print(
        f"{BATCH_SIZE} prompts of {min(lengths)} to {max(lengths)} tokens of Python source that no model here has seen, "
        f"{max_tokens} new tokens each, greedy, bfloat16. Tokens/s include the prompts; "
        "identical: the same token ids as plain decoding, each row alone.\n"
    )
    small, _ = run_all(target, draft, str(EAGLE), prompts, params, rounds, "embedded models")
    console.print(table_of(f"1. The embedded models: {describe(target.model)}; draft {describe(draft.model)}", small))
    console.print("A step of so small a model costs mostly the calls around it, so a draft model as deep as half the target cannot pay.\n")

    plain_model, tokenizer = load_plain(str(TARGET))
    plain_draft, _ = load_plain(str(DRAFT))
    with tempfile.TemporaryDirectory() as folder:
        grown, heads = inflate_with_heads(plain_model, GROWN_PARAMETERS, {"eagle": str(EAGLE)}, Path(folder))
        big = adopt_model(copy.deepcopy(grown), tokenizer, "embedded target, grown")
        large, truth = run_all(big, draft, heads["eagle"], prompts, params, 1, "grown target")
    with console.status("transformers"):
        large.append(transformers_plain(grown, prompts, max_tokens, truth, rounds=1))
        refusal = transformers_refusal(grown, plain_draft, prompts)
    console.print(table_of(f"2. The same target grown in memory to {describe(grown)}: same function, real cost", large))
    console.print(f"transformers with a draft model and {BATCH_SIZE} prompts: [red]{escape(refusal)}[/]\n")

    _finish(target, draft, prompts[0], params, out, {"embedded models": small, "grown to serving size": large})


def _finish(
    target: LoadedModel,
    draft: LoadedModel,
    prompt: list[int],
    params: SamplingParams,
    out: Path,
    charted: dict[str, list[ThroughputResult]],
) -> None:
    """One continuation in colours, the bar chart, and where to go on."""
    llm = LLM(target, default_methods()[2].config, draft)
    sample = coloured_sample(llm, prompt, params.model_copy(update={"max_tokens": 80}))
    console.print("3. One continuation: [green]drafted and accepted[/], [bold yellow]the target's own[/]")
    console.print(sample)
    console.print()
    out.mkdir(parents=True, exist_ok=True)
    try:
        bar_chart(out / "demo.png", charted)
        console.print(f"Bar chart: {out / 'demo.png'}")
    except MissingExtraError as error:
        console.print(f"No bar chart: {error}")
    console.print(f"Next: echelon generate {TARGET} 'def main(' --speculative-config.method ngram   ·   echelon doctor   ·   README.md")


if __name__ == "__main__":
    typer.run(main)
