"""The process in which chat templates run, with `transformers`' own Jinja environment. `echelon.chat` starts it; nothing imports it.

It reads conversations from the socket that is its standard input, and answers there, until that is closed. It imports nothing of this
package, and no torch: it is to be small.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import socket
import sys
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

MOST_WORDS = 1000  # characters of an error


def main() -> None:
    """Answer every conversation; argument: bytes of memory that a template may take."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is the parent's, which closes the socket when it ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(int(sys.argv[1]))
    with socket.socket(fileno=os.dup(0)) as connection:
        stream = connection.makefile("rwb")
        send(stream, {})
        while head := stream.read(8):
            asked = json.loads(stream.read(int.from_bytes(head, "big")))
            limit_processor_time(asked["seconds"])
            send(stream, answer(asked))


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """The rendered `text`, or its `length` where it is too long, or the `error`."""
    try:
        (text,), _ = render_jinja_template(
            conversations=[asked["messages"]],
            chat_template=asked["template"],
            add_generation_prompt=True,
            **asked["special_tokens"],
        )
    except MemoryError:
        return {"error": f"it needs more than {int(sys.argv[1]) >> 20} MiB of memory"}
    except Exception as error:
        return {"error": (str(error) or type(error).__name__)[:MOST_WORDS]}
    return {"text": text} if len(text) <= asked["most_characters"] else {"length": len(text)}


def send(stream: Any, value: dict[str, Any]) -> None:
    message = json.dumps(value).encode()
    stream.write(len(message).to_bytes(8, "big") + message)
    stream.flush()


def limit_memory(count: int) -> None:
    """`MemoryError` for whoever takes so many bytes more than the process has now; on Linux, which keeps to such a limit."""
    if sys.platform != "linux":
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + count, size + count))


def limit_processor_time(seconds: float) -> None:
    """The operating system ends the process when it has worked for so long from now; whole seconds, rounded up."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main()
