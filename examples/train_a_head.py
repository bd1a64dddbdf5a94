"""Train a head on your own text and draft with it: `python examples/train_a_head.py --model MODEL --text DIR --output HEAD`.

The text may be UTF-8 files or a folder of them, such as the documents that the model will be asked about. An interrupted run goes on when
the command is given again.
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from echelon import LLM, SamplingParams
from echelon.demo import TARGET


def main(
    text: Annotated[Path, typer.Option(help="File or folder to learn from.")],
    output: Annotated[Path, typer.Option(help="Folder for the head.")],
    model: Annotated[str, typer.Option(help="The model that it shall draft for.")] = str(TARGET),
    steps: Annotated[int, typer.Option(help="Batches of about 2,000 tokens.")] = 1000,
    continuations: Annotated[int, typer.Option(help="Texts that the model writes, to learn from as well.")] = 4096,
    prompt: Annotated[str, typer.Option(help="Something of the kind that it will draft.")] = "The ",
) -> None:
    """Train a Medusa head, then decode with and without it."""
    options = {"--text": text, "--output": output, "--steps": steps, "--every": max(1, steps // 10), "--num-continuations": continuations}
    command = [sys.executable, "-m", "echelon", "train", model, "--method", "medusa"]
    subprocess.run([*command, *(str(word) for pair in options.items() for word in pair)], check=True)

    params, texts = SamplingParams(temperature=0.0, max_tokens=48), []
    for drafter in (None, {"method": "medusa", "model": str(output), "num_speculative_tokens": 4}):
        with LLM(model, speculative_config=drafter) as llm:
            (answer,) = llm.generate([prompt], params)
        texts.append(answer.outputs[0].text)
        print(f"{'with' if drafter else 'without'} the head: {answer.metrics.tokens_per_step:.2f} tokens a step")
    print("the same text" if texts[0] == texts[1] else "ANOTHER TEXT: please report this")
    print(f"echelon serve {model} --speculative-config.method medusa --speculative-config.model {output}")


if __name__ == "__main__":
    typer.run(main)
