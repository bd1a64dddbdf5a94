"""Ask an `echelon serve` by the `openai` package: `python examples/openai_client.py --base-url http://127.0.0.1:8000/v1`.

Needs `pip install 'echelon[server]' openai`. Without --base-url a server is started for the time of the example.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Annotated

import httpx
import typer
from openai import OpenAI

from echelon.demo import TARGET


@contextmanager
def server(model: str) -> Iterator[str]:
    """A server in a process of its own, with n-gram drafts, on a free port; its URL as soon as it takes requests."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "echelon", "serve", model, "--port", str(port), "--speculative-config.method", "ngram"]
    with subprocess.Popen(command) as process:
        try:
            while process.poll() is None:
                with suppress(httpx.TransportError):
                    if httpx.get(f"http://127.0.0.1:{port}/readyz").is_success:
                        break
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()


def ask(base_url: str, max_tokens: int) -> None:
    """Print a completion as it streams, and what was accepted."""
    client = OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none is asked for"))
    model = client.models.list().data[0].id
    asked = {"model": model, "prompt": "class Stack:\n    def __init__(self):\n", "max_tokens": max_tokens, "temperature": 0}
    for chunk in client.completions.create(stream=True, **asked):
        print(chunk.choices[0].text if chunk.choices else "", end="", flush=True)
    whole = client.completions.create(**asked)
    print("", whole.usage, whole.model_extra["metrics"]["speculative_decoding"], sep="\n")


def main(base_url: str = "", model: str = str(TARGET), max_tokens: Annotated[int, typer.Option(help="New tokens.")] = 48) -> None:
    """Ask the server at --base-url, or one that serves --model."""
    with nullcontext(base_url) if base_url else server(model) as url:
        ask(url, max_tokens)


if __name__ == "__main__":
    typer.run(main)
