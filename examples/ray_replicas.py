"""Two replicas behind one address, and a dataset through engines on Ray: `python examples/ray_replicas.py --model MODEL`.

Needs `pip install 'echelon[ray]' openai`. A cluster starts on loopback for the time of the example; --ray-address takes one that runs.
"""

import socket
import tempfile
from typing import Annotated

import ray
import typer
from openai import OpenAI
from ray import serve

from echelon.demo import TARGET
from echelon.ray import build_app, connect, generate

PROMPTS = ["def main(argv):\n", "class Stack:\n    def __init__(self):\n", "for i in range(10):\n", "import os\nimport sys\n"]
BEGINNING = "class Queue:\n" + "    def push(self, item):\n        self.items.append(item)\n\n" * 8


def ask(base_url: str, model: str, max_tokens: int) -> None:
    """Two requests that begin alike: both meet the same replica, which has read the beginning."""
    client = OpenAI(base_url=base_url, api_key="none is asked for")
    for prompt in (BEGINNING, BEGINNING + "    def pop(self):\n"):
        answer = client.completions.create(model=model, prompt=prompt, max_tokens=max_tokens, temperature=0)
        print(f"--- {answer.usage.prompt_tokens_details.cached_tokens} of {answer.usage.prompt_tokens} tokens were known")
        print(answer.choices[0].text)


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal language model.")] = str(TARGET),
    ray_address: Annotated[str | None, typer.Option(help="HOST:PORT of the head of a Ray cluster.")] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens a prompt.")] = 48,
) -> None:
    """Serve, ask, and run a dataset."""
    connect(ray_address, num_cpus=3)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"port": port})
    serve.run(build_app(model, {"method": "ngram"}, num_replicas=2, server={"served_model_name": "mine"}, max_num_seqs=8))
    ask(f"http://127.0.0.1:{port}/v1", "mine", max_tokens)
    serve.shutdown()

    rows = ray.data.from_items([{"id": f"row {i}", "prompt": prompt} for i, prompt in enumerate(PROMPTS)])
    with tempfile.TemporaryDirectory() as folder:
        found = generate(rows, model, folder, {"temperature": 0.8, "max_tokens": max_tokens}, max_num_seqs=8)
        for row in sorted(found.take_all(), key=lambda row: row["id"]):
            print(f"--- {row['id']}, seed {row['seed']}", row["text"], sep="\n")


if __name__ == "__main__":
    typer.run(main)
