"""`make demo`: the main job in under three minutes, on the embedded models and on the same target grown to serving size."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Annotated

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
from echelon.bench.framework import FrameworkRun
from echelon.bench.inflate import describe, inflate_with_heads
from echelon.bench.plot import bar_chart
from echelon.bench.throughput import DecodingMethod, ThroughputResult, compared, default_methods, environment, measure, plain_outputs
from echelon.bench.verify import generate_padded
from echelon.bench.workloads import code_prompts
from echelon.demo import DRAFT, EAGLE, TARGET, held_out_files
from echelon.errors import MissingExtraError
from echelon.model.load.loading import LoadedModel, adopt_model, load_model, load_plain

BATCH_SIZE = 8
PROMPT_TOKENS = 192
GROWN_PARAMETERS = 500_000_000
console = Console()


def transformers_refusal(model: PreTrainedModel, draft: PreTrainedModel, prompts: list[list[int]]) -> str:
    """What `transformers` says to a batch with a draft model."""
    try:
        generate_padded(model, prompts, 4, assistant_model=draft)
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
        baseline = FrameworkRun("transformers", grown, BATCH_SIZE)
        run = baseline.run(prompts, params)
        large.append(compared(baseline.result(BATCH_SIZE, [run]), run.outputs, truth))
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
    sample = coloured_sample(LLM(target, default_methods()[2].config, draft), prompt, params.model_copy(update={"max_tokens": 80}))
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
