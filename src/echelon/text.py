"""Token ids to text, one token at a time, and the search for stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

REPLACEMENT = "\ufffd"
NUM_CONTEXT_TOKENS = 6  # of the prompt, so that the first piece is decoded as a continuation


class Decoder(Protocol):
    """The part of a tokenizer that this room needs."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> str: ...


class Detokenizer:
    """Text of a growing output. `text` never ends inside a character, and is cut before the first stop string.

    A window of recent tokens is decoded twice, without and with the new token, and the difference is appended: pieces of one
    character are held back until it is whole.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt_tokens: SequenceOf[int],
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.text = ""
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._num_held_off = min_tokens  # stop strings count only after so many tokens
        self._decoder = decoder
        self._stop = stop
        self._window = list(prompt_tokens[-NUM_CONTEXT_TOKENS:])
        self._num_seen = len(self._window)  # tokens of the window whose text is in `text` (or in the prompt)

    def push(self, token: int) -> bool:
        """Append the text of one token; true when a stop string is now complete."""
        self._num_held_off -= 1
        self._window.append(token)
        seen = self._decode(self._window[: self._num_seen])
        full = self._decode(self._window)
        if full.endswith(REPLACEMENT):
            return False
        piece = full[len(seen) :]
        self._window = self._window[self._num_seen :]
        self._num_seen = len(self._window)
        return self._extend(piece)

    def _decode(self, tokens: list[int]) -> str:
        return self._decoder.decode(tokens, skip_special_tokens=self._skip_special_tokens)

    def _extend(self, piece: str) -> bool:
        start = len(self.text)
        self.text += piece
        if self._num_held_off >= 0:
            return False
        places = ((self.text.find(s, max(0, start - len(s) + 1)), len(s)) for s in self._stop)
        hits = sorted((place, length) for place, length in places if place >= 0)
        if hits:
            place, length = hits[0]
            self.text = self.text[: place + length if self._include_stop else place]
        return bool(hits)

    def finish(self) -> str:
        """The text, with whatever was held back."""
        if len(self._window) > self._num_seen:
            self.text += self._decode(self._window)[len(self._decode(self._window[: self._num_seen])) :]
            self._num_seen = len(self._window)
        return self.text


def decode_output(
    decoder: Decoder, prompt_tokens: SequenceOf[int], output_tokens: SequenceOf[int], skip_special_tokens: bool = True
) -> str:
    """Text of a whole output, as a continuation of its prompt."""
    context = list(prompt_tokens[-NUM_CONTEXT_TOKENS:])
    before = decoder.decode(context, skip_special_tokens=skip_special_tokens)
    return decoder.decode(context + list(output_tokens), skip_special_tokens=skip_special_tokens)[len(before) :]


def num_held_back(text: str, stop: SequenceOf[str]) -> int:
    """Characters at the end of a growing text that may be the beginning of a stop string, and so are not shown yet."""
    longest = 0
    for s in stop:
        for length in range(min(len(s) - 1, len(text)), longest, -1):
            if text.endswith(s[:length]):
                longest = length
                break
    return longest
