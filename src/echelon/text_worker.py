"""The process for work on text: renders chat templates with `transformers`' own Jinja environment, and tokenizes long texts.

`echelon.text_process` starts it. It reads work from the socket that is its standard input, and answers there, until that is closed. It
imports nothing of this package, and no torch: it is to be small.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import socket
import sys
from array import array
from contextlib import suppress
from typing import Any

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

MOST_WORDS = 1000  # characters of an error
NICENESS = 10


def main() -> None:
    """Do all work that comes, each within its own limits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is the parent's, which closes the socket when it ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    worker = Worker()
    with socket.socket(fileno=os.dup(0)) as connection:
        stream = connection.makefile("rwb")
        send(stream, {})
        while head := stream.read(8):
            work = json.loads(stream.read(int.from_bytes(head, "big")))
            limit_processor_time(work["seconds"])
            limit_memory(work["bytes"])
            send(stream, worker.answer(work))
            limit_processor_time(math.inf)  # reading what comes next is not part of this work


class Worker:
    """Keeps one tokenizer."""

    tokenizer: Tokenizer

    def answer(self, work: dict[str, Any]) -> dict[str, Any]:
        """The result of `work`, or the `error`."""
        try:
            if "template" in work:
                return rendered(work)
            if "encode" in work:
                return self._encoded(work)
            self.tokenizer = Tokenizer.from_str(work["tokenizer"])
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            return {}
        except MemoryError:
            return {"error": f"it needs more than {work['bytes'] >> 20} MiB of memory"}
        except Exception as error:
            return {"error": (str(error) or type(error).__name__)[:MOST_WORDS]}

    def _encoded(self, work: dict[str, Any]) -> dict[str, Any]:
        """Token `ids`: int32, in hexadecimal digits."""
        self.tokenizer.encode_special_tokens = work["split_special_tokens"]
        ids = array("i", self.tokenizer.encode(work["encode"], add_special_tokens=work["add_special_tokens"]).ids)
        give_memory_back()
        return {"ids": ids.tobytes().hex()}


def rendered(work: dict[str, Any]) -> dict[str, Any]:
    """The `text` of a conversation, or its `length` where it is too long."""
    (text,), _ = render_jinja_template(
        conversations=[work["messages"]],
        chat_template=work["template"],
        add_generation_prompt=True,
        **(work["special_tokens"] | work["variables"]),
    )
    return {"text": text} if len(text) <= work["most_characters"] else {"length": len(text)}


def send(stream: Any, value: dict[str, Any]) -> None:
    """Write a message to a pipe."""
    message = json.dumps(value).encode()
    stream.write(len(message).to_bytes(8, "big") + message)
    stream.flush()


def give_memory_back() -> None:
    """Return freed memory to the operating system; glibc would keep it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def limit_memory(count: int) -> None:
    """Limit the process to so many bytes more than it has now (`MemoryError` beyond); on Linux, which keeps to such a limit."""
    if sys.platform != "linux":
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + count, resource.getrlimit(resource.RLIMIT_AS)[1]))


def limit_processor_time(seconds: float) -> None:
    """Have the operating system end the process when it has worked for so long from now; whole seconds, rounded up. Infinite: never."""
    usage, most = resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = most if math.isinf(seconds) else math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, most))


if __name__ == "__main__":
    main()
