"""An answer that another replica may have to begin again: what a client has been sent is not sent twice."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from echelon.errors import UnavailableError
from echelon.server.middleware import Message, ResponseSender
from echelon.server.serializers import DONE, event

DATA, END = b"data: ", b"\n\n"


class ResumableAnswer:
    """Passes the messages of one answer on. Noise is keyed by request, so a second replica gives the same text: of a stream that was cut
    off, the characters that are known are left out, and the others follow under the id of the first; an answer that is not streamed is
    held until it is whole.
    """

    def __init__(self, sender: ResponseSender) -> None:
        self._sender = sender
        self._start: Message = {}
        self._first: dict[str, Any] = {}  # `id` and `created` of the first event
        self._num_sent: Counter[int] = Counter()  # characters, by index of the sample
        self._num_read: Counter[int] = Counter()  # of the replica that answers now
        self._begun: set[int] = set()
        self._ended: set[int | None] = set()  # samples with a finish_reason; `None`: the usage of all
        self._is_again = self._has_lists = self._is_done = False

    def restart(self) -> None:
        """Another replica begins from the first message on.

        Raises
        ------
        UnavailableError  the stream has begun, and its chunks hold lists of tokens, which cannot be cut at a character
        """
        if self._has_lists and self._sender.has_begun:
            raise UnavailableError("the replica that streamed this has ended; ask again, with the same X-Request-ID for the same text")
        self._num_read.clear()
        self._is_again = True

    async def take(self, message: Message) -> None:
        """The next message of the replica that answers now."""
        if message["type"] == "http.response.start":
            if self._sender.has_begun and message["status"] != 200:
                raise UnavailableError(f"the replica that streamed this has ended, and another one answers {message['status']}; ask again")
            self._start = message
            return
        if not self._sender.has_begun:
            await self._sender.send(self._start)
        if self._sender.is_stream and (body := message.get("body", b"")):
            events = [self._event(part) for part in body.split(END) if part]
            message = {**message, "body": b"".join(events)}
            if not message["body"]:
                return
        await self._sender.send(message)

    def _event(self, part: bytes) -> bytes:
        """What a client does not have yet of an event."""
        if part + END == DONE:
            is_known, self._is_done = self._is_done, True
            return b"" if is_known else DONE
        chunk = json.loads(part.removeprefix(DATA))
        self._first = self._first or {key: chunk[key] for key in ("id", "created") if key in chunk}
        choices = chunk.get("choices", [])
        is_new = [self._cut(choice) for choice in choices] or ["error" in chunk or None not in self._ended]
        if "usage" in chunk and not choices:
            self._ended.add(None)
        if not self._is_again:
            return part + END
        return event({**chunk, **self._first}) if any(is_new) else b""

    def _cut(self, choice: dict[str, Any]) -> bool:
        """Take out of a sample's chunk what has been sent; whether something is left."""
        index, delta = choice["index"], choice.get("delta")
        holder, key = (choice, "text") if delta is None else (delta, "content")
        text = holder.get(key) or ""
        self._has_lists |= choice.get("logprobs") is not None or "tokens" in choice
        known = max(0, self._num_sent[index] - self._num_read[index])
        self._num_read[index] += len(text)
        self._num_sent[index] = max(self._num_sent[index], self._num_read[index])
        is_new = index not in self._begun or known < len(text) or (choice["finish_reason"] is not None and index not in self._ended)
        self._begun.add(index)
        if choice["finish_reason"] is not None:
            self._ended.add(index)
        holder[key] = text[known:]
        return is_new
