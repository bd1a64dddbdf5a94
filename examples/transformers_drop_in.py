"""`generate` of `transformers` with a draft model: `python examples/transformers_drop_in.py --model MODEL --draft DRAFT`.

The batch has several rows, for which `transformers` itself refuses an assistant. Without arguments the embedded models run.
"""

from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

import echelon.hf
from echelon.demo import DRAFT, TARGET

PROMPTS = ["def main(argv):\n", "class Stack:\n    def __init__(self):\n", "for i in range(10):\n"]


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal language model.")] = str(TARGET),
    draft: Annotated[str, typer.Option(help="A small model with the same vocabulary.")] = str(DRAFT),
    max_tokens: Annotated[int, typer.Option(help="New tokens a prompt.")] = 48,
) -> None:
    """Print the texts, which are those of `generate` without an assistant."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    target, assistant = (AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in (model, draft))
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    ids = echelon.hf.generate(target, **batch, assistant_model=assistant, max_new_tokens=max_tokens, do_sample=False)
    same = torch.equal(ids, target.generate(**batch, max_new_tokens=max_tokens, do_sample=False))
    for text in tokenizer.batch_decode(ids, skip_special_tokens=True):
        print("---", text, sep="\n")
    print(f"the same as without the draft model: {same}")


if __name__ == "__main__":
    typer.run(main)
