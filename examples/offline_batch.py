"""Continue many prompts at once: `python examples/offline_batch.py --model MODEL --head DIR`.

Each prompt gets the text that it would get alone and without a drafter. Without arguments the embedded models run.
"""

from typing import Annotated

import typer

from echelon import LLM, SamplingParams
from echelon.demo import EAGLE, TARGET

PROMPTS = ["def main(argv):\n", "class Stack:\n    def __init__(self):\n", "for i in range(10):\n", "import os\nimport sys\n"]


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal language model.")] = str(TARGET),
    head: Annotated[str, typer.Option(help="Folder of an EAGLE head for it.")] = str(EAGLE),
    max_tokens: Annotated[int, typer.Option(help="New tokens a prompt.")] = 48,
) -> None:
    """Print the continuations, and how many tokens each step brought."""
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=max_tokens)
    with LLM(model, speculative_config={"method": "eagle", "model": head}) as llm:
        outputs = llm.generate(PROMPTS, params)
        metrics = llm.get_counters()
    for output in outputs:
        print(f"--- {output.prompt!r}, {output.metrics.tokens_per_step:.2f} tokens a step")
        print(output.outputs[0].text)
    print(f"{metrics['num_emitted_tokens']} tokens, {metrics['acceptance_rate']:.0%} of the drafted ones accepted")


if __name__ == "__main__":
    typer.run(main)
