"""A model that many coroutines ask at once: `python examples/asyncio_service.py --model MODEL`.

Each caller streams its own text; one has a deadline and leaves, and the others do not notice.
"""

import asyncio
from typing import Annotated

import typer

from echelon import AsyncLLM, SamplingParams
from echelon.demo import TARGET

PROMPTS = ["def main(argv):\n", "class Stack:\n    def __init__(self):\n", "for i in range(10):\n"]


async def answer(llm: AsyncLLM, prompt: str, max_tokens: int) -> str:
    """The continuation of a prompt; each output holds the whole text so far."""
    async for output in llm.generate(prompt, SamplingParams(temperature=0.8, seed=1, max_tokens=max_tokens)):
        text = output.outputs[0].text
    return text


async def first_words(llm: AsyncLLM, prompt: str) -> str:
    """What there is of a long text after a few tokens; breaking off takes the request out of the engine."""
    async for output in llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True), request_id="long"):
        if len(output.outputs[0].token_ids) > 8:
            await llm.abort("long")
    return output.outputs[0].text


async def run(model: str, max_tokens: int) -> None:
    async with AsyncLLM(model, speculative_config={"method": "ngram"}, max_num_seqs=8) as llm:
        *texts, begun = await asyncio.gather(*(answer(llm, p, max_tokens) for p in PROMPTS), first_words(llm, "import os\n"))
        assert llm.is_running
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"--- {prompt!r}", text, sep="\n")
    print(f"--- broken off after {begun!r}")


def main(model: str = str(TARGET), max_tokens: Annotated[int, typer.Option(help="New tokens a prompt.")] = 48) -> None:
    """Print what each caller was answered."""
    asyncio.run(run(model, max_tokens))


if __name__ == "__main__":
    typer.run(main)
