"""Which requests should meet the same replica, whose prefix cache then has the keys and values of what they share."""

from __future__ import annotations

import hashlib
from typing import Any

from pydantic_core import from_json

from echelon.server.middleware import Scope

SESSION = b"x-session-id"
PREFIX_CHARACTERS, PREFIX_TOKENS = 256, 64


def affinity_of(scope: Scope, body: bytes) -> str:
    """What requests of one session have in common: their X-Session-ID; else API key and beginning, which all turns of a conversation share
    (its messages up to the first of the user; of a prompt 256 characters or 64 tokens). What has no body, such as a page or metrics, is
    one session, so that it shows the same replica every time.
    """
    headers = dict(scope["headers"])
    digest = hashlib.sha256(headers.get(b"authorization", b"") + b"\0")
    digest.update(headers[SESSION] if SESSION in headers else repr(_beginning(body)).encode())
    return digest.hexdigest()


def _beginning(body: bytes) -> Any:
    try:
        asked = from_json(body) if body else {}
        if messages := asked.get("messages"):
            users = (i for i, message in enumerate(messages) if message.get("role") == "user")
            return messages[: next(users, 0) + 1]
        prompt = asked.get("prompt")
        first = prompt[0] if isinstance(prompt, list) and not isinstance(prompt[0], int) else prompt
        return None if first is None else first[: PREFIX_CHARACTERS if isinstance(first, str) else PREFIX_TOKENS]
    except (ValueError, AttributeError, TypeError, LookupError):
        return None  # no request: the replica says what is wrong with it
