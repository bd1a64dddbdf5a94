"""Token ids to text, one token at a time, and the search for stop strings in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any, Protocol

from transformers import PreTrainedTokenizerFast

REPLACEMENT = "\ufffd"
CONTEXT_SIZES = (6, 12, 24, 48, 96)  # tokens of the prompt that are tried in turn as what the output continues
MOST_BYTES = 4  # of a character in UTF-8, so also the most tokens that one character can take


class Decoder(Protocol):
    """The part of a tokenizer that this room needs."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> str:
        """Text of token ids."""


class Detokenizer:
    """Text of a growing output, as the continuation of its prompt. `text` never ends inside a character, and is cut before the first
    stop string; `offsets[i]` is the character at which the text of token i begins.

    A window of recent tokens is decoded, and what goes beyond the part that is known already is appended. Pieces of one character are
    held back until it is whole; of pieces that never become whole, the first and the last few are enough to decode what follows, so a
    token costs the same however long the text is.
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
        self.stopped_by: str | None = None
        self.offsets: list[int] = []
        self._include_stop = include_stop
        self._num_held_off = min_tokens  # stop strings count only after so many tokens
        self._decode, self._decode_special = decoding(decoder, skip_special_tokens), decoding(decoder, False)
        self._stop = stop
        self._window, self._known = _context(self._decode, prompt_tokens)  # `_known`: what of the window's text is not to come any more
        self._start = len(self._window)  # where the tokens begin that are held back
        self._full = self._known  # text of the whole window

    def push(self, token: int) -> bool:
        """Append the text of one token; true when a stop string is now complete."""
        self._num_held_off -= 1
        self.offsets.append(len(self.text))
        full = self._decode([*self._window, token])
        if full == self._full and not self._decode([token]) and self._decode_special([token]):
            return False  # a special token that is skipped
        self._window.append(token)
        self._full = full
        if not full.startswith(self._known):
            self._realign()
        if self._full.endswith(REPLACEMENT) or len(self._full) == len(self._known):
            return len(self._window) - self._start > 2 * MOST_BYTES and self._shorten()
        piece = self._full[len(self._known) :]
        self._window = self._window[self._start :]
        self._start = len(self._window)
        self._known = self._full = self._decode(self._window)
        return self._extend(piece)

    def _realign(self) -> None:
        """Go on where the decoder has read tokens anew that were known: they ended inside a character, which is whole now, or bytes
        after them have made a run of bytes invalid that was valid. What has been shown stays.
        """
        bare = self._known.rstrip(REPLACEMENT)
        if bare != self._known and self._full.startswith(bare):
            self._known = bare
            return
        self._window, self._start, self._known = self._window[self._start :], 0, ""
        self._full = self._decode(self._window)

    def _shorten(self) -> bool:
        """Show what is held back, but for the last character, which may yet become whole, and drop tokens from the middle.

        The first tokens tell decoders that take a run of bytes as valid or not as a whole (SentencePiece's byte fallback) that this run is
        not; the last ones hold all bytes of a character that has begun.
        """
        piece = self._full[len(self._known) :].removesuffix(REPLACEMENT)
        del self._window[self._start + MOST_BYTES : -MOST_BYTES]
        self._full = self._decode(self._window)
        self._known = self._full.removesuffix(REPLACEMENT)
        return self._extend(piece)

    def _extend(self, piece: str) -> bool:
        start = len(self.text)
        self.text += piece
        if self._num_held_off >= 0:
            return False
        starts = ((self.text.find(s, max(0, start - len(s) + 1)), len(s), s) for s in self._stop)
        hits = sorted(hit for hit in starts if hit[0] >= 0)
        if hits:
            at, length, self.stopped_by = hits[0]
            self.text = self.text[: at + length if self._include_stop else at]
            self._known = self._full  # what is held back comes after the stop string
        return bool(hits)

    def finish(self) -> str:
        """The text, with whatever was held back."""
        rest, self._known = self._full[len(self._known) :], self._full
        if rest:
            self._extend(rest)
        return self.text


def decoding(decoder: Decoder, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """`decode` without the clean-up of spaces, which would take back what has been shown.

    Where a tokenizer has `transformers`' own methods, the Rust tokenizer behind it is asked at once: same text, a fifth of the time.
    """
    kind: Any = type(decoder)
    own = PreTrainedTokenizerFast
    if isinstance(decoder, own) and (kind.decode, kind._decode) == (own.decode, own._decode):
        return partial(decoder.backend_tokenizer.decode, skip_special_tokens=skip_special_tokens)
    options: dict[str, Any] = {"skip_special_tokens": skip_special_tokens}
    if getattr(decoder, "clean_up_tokenization_spaces", False):
        options["clean_up_tokenization_spaces"] = False
    return partial(decoder.decode, **options)


def _context(decode: Callable[[list[int]], str], prompt_tokens: SequenceOf[int]) -> tuple[list[int], str]:
    """Last tokens of a prompt, and their text: so many that there is some text, and that they do not begin inside a character.

    With no text before it, a decoder would strip the first space of the output.
    """
    context: list[int] = []
    text = ""
    for size in CONTEXT_SIZES:
        if len(context) < len(prompt_tokens):
            context = list(prompt_tokens[-size:])
            text = decode(context)
        if (known := text.rstrip(REPLACEMENT)) and REPLACEMENT not in known:
            break
    return context, text


def decode_output(
    decoder: Decoder, prompt_tokens: SequenceOf[int], output_tokens: SequenceOf[int], skip_special_tokens: bool = True
) -> str:
    """Text of a whole output: what a stream of it shows in the end."""
    detokenizer = Detokenizer(decoder, prompt_tokens, skip_special_tokens=skip_special_tokens)
    for token in output_tokens:
        detokenizer.push(token)
    return detokenizer.finish()


def text_offsets(decoder: Decoder, tokens: SequenceOf[int], text: str) -> list[int]:
    """Character of `text` at which each of the tokens begins that it was encoded as; special tokens that stand before it begin at 0."""
    detokenizer = Detokenizer(decoder, (), skip_special_tokens=False)
    for token in tokens:
        detokenizer.push(token)
    whole = detokenizer.finish()
    start = next((o for o in detokenizer.offsets if whole.startswith(text, o)), max(0, whole.find(text)))
    return [min(max(0, offset - start), len(text)) for offset in detokenizer.offsets]


def pieces_by_token(text: str, offsets: SequenceOf[int], begin: int, end: int) -> Iterator[tuple[int, str]]:
    """Characters `begin … end − 1` of a text, cut where the texts of its tokens begin (`offsets`): index of each token and its piece. A
    token that has no text in there has no piece.
    """
    first = max(0, bisect_right(offsets, begin) - 1)
    for i, token_end in enumerate((*offsets[first + 1 :], len(text)), first):
        until = min(token_end, end)
        if until > begin:
            yield i, text[begin:until]
            begin = until


def num_shown(text: str, stop: SequenceOf[str], is_whole: bool) -> int:
    """Characters of a growing text that are sure to stay: not those at its end that may be the beginning of a stop string, until it is
    whole.
    """
    if is_whole:
        return len(text)
    longest = 0
    for s in stop:
        for length in range(min(len(s) - 1, len(text)), longest, -1):
            if text.endswith(s[:length]):
                longest = length
                break
    return len(text) - longest
