"""Conversations to text, in a model's own chat template; long texts to token ids. Both in the process for work on text.

Templates are programs from a model's folder that run on what clients send.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

import numpy as np
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from echelon.errors import RequestError
from echelon.inputs import shown
from echelon.text_process import TEXT_PROCESS

TEMPLATE_SECONDS = 5.0  # of processor time that a chat template may take; whole ones are counted
TEMPLATE_BYTES = 2**29  # of memory that it may take
LONG_TEXT = 2**13  # characters that take a few milliseconds to tokenize
ENCODING_SECONDS = 60.0  # of processor time that tokenizing may take
ENCODING_BYTES = 2**28  # of memory that it may take, and
BYTES_PER_CHARACTER = 2**10
RESERVED = {  # names that have a meaning of their own where templates are rendered
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversations",
    "documents",
    "messages",
    "return_assistant_tokens_mask",
    "tools",
}
LOADING_BYTES = 2**32  # of memory that a tokenizer may take, which is no client's


class ChatTokenizer(Protocol):
    """The part of a tokenizer that conversations need."""

    @property
    def special_tokens_map(self) -> Mapping[str, str]:
        """Special tokens by name."""

    def get_chat_template(self) -> str:
        """The template, a Jinja text."""


def render_chat(
    tokenizer: ChatTokenizer, messages: SequenceOf[Mapping[str, Any]], most_characters: int, variables: Mapping[str, Any] | None = None
) -> str:
    """The text that `tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **variables)` gives.

    Raises
    ------
    RequestError      the template refuses the conversation, fails, takes too long or too much memory, or its text is too long
    TextProcessError  there is no process to render it in
    """
    trouble, variables = "the chat template cannot render this conversation", {} if variables is None else variables
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise RequestError(f"chat_template_kwargs is {shown(variables)}; give a mapping such as {{'enable_thinking': False}}")
    if taken := RESERVED & variables.keys():
        raise RequestError(f"chat_template_kwargs cannot set {', '.join(sorted(taken))}; give variables of the model's template")
    try:
        work = {
            "template": tokenizer.get_chat_template(),
            "messages": [{name: value for name, value in dict(m).items() if value is not None} for m in messages],
            "special_tokens": dict(tokenizer.special_tokens_map),
            "variables": dict(variables),
            "most_characters": most_characters,
            "bytes": TEMPLATE_BYTES,
        }
        json.dumps([work["messages"], work["variables"]])
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{trouble}: {error}; send messages and variables as mappings of plain JSON values") from error
    answer = TEXT_PROCESS.ask(work, TEMPLATE_SECONDS)
    if "length" in answer:
        raise RequestError(f"the conversation becomes {answer['length']:,} characters, more than {most_characters:,} can fit; shorten it")
    if "error" in answer:
        raise RequestError(f"{trouble}: {answer['error']}; change the conversation, or the template in the model's folder")
    return str(answer["text"])


def encode_text(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    """`tokenizer.encode(text, add_special_tokens=…)`; of a long text in the other process, where it holds up no step of the engine, and
    whose memory is not this one's. A tokenizer that is more than a file does it here.

    Raises
    ------
    RequestError  a long text takes too long or too much memory
    UnicodeError  the text holds lone surrogates
    """
    is_plain = isinstance(tokenizer, TokenizersBackend) and all(
        getattr(type(tokenizer), name) is getattr(TokenizersBackend, name) for name in ("encode", "_encode_plus")
    )
    if len(text) < LONG_TEXT or not is_plain:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    text.encode()
    work = {
        "encode": text,
        "add_special_tokens": add_special_tokens,
        "split_special_tokens": bool(tokenizer.split_special_tokens),
        "bytes": ENCODING_BYTES + BYTES_PER_CHARACTER * len(text),
    }
    answer = TEXT_PROCESS.ask(
        work,
        ENCODING_SECONDS,
        (weakref.ref(tokenizer), len(tokenizer)),
        lambda: {"tokenizer": tokenizer.backend_tokenizer.to_str(), "bytes": LOADING_BYTES},
    )
    if "ids" not in answer:
        raise RequestError(f"the prompt cannot be tokenized: {answer['error']}; shorten it")
    return np.frombuffer(bytes.fromhex(answer["ids"]), np.int32).tolist()  # type: ignore[no-any-return]
