"""Tiny tokenizers of every kind of the field, each with special tokens, an added token, broken characters and fewer ids than the toys."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>"]
ADDED = "<tool>"
LETTERS = list("abcdehilnorstuw")
BYTES = sorted({*"漢é🦀ü".encode(), 0x20, 0xFF})
SPACED = ["▁the", "▁world", "▁Hello", "▁", "▁▁", "▁I", ".", ",", "'m", "ing", "\n", "n't", "▁a"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}</s>{% endif %}"


def numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}


def finished(tokenizer: Tokenizer, cleans: bool = False) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL])
    tokenizer.add_tokens([AddedToken(ADDED, special=False)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=cleans
    )
    fast.chat_template = TEMPLATE
    return fast


def byte_level() -> PreTrainedTokenizerFast:
    """Every byte of some characters has a token of its own, and some tokens hold the end of one character and the start of the next."""
    shown = dict(zip(sorted(BYTES), byte_characters(), strict=True))
    halves = ["".join(shown[b] for b in piece) for piece in (b"\xa9\xc3", b"\xbc\xa2", "漢".encode(), b"\xa6\x80\xe6")]
    vocab = numbered([*SPECIAL, *LETTERS, *shown.values(), *halves, "Ġthe", "Ġworld", ".", ",", "'m", "Ġ.", "Ċ"])
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return finished(tokenizer)


def byte_characters() -> list[str]:
    """How byte-level vocabularies write BYTES: printable bytes as they are, the others from 256 on in order (GPT-2)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in BYTES]


def byte_fallback() -> PreTrainedTokenizerFast:
    """Like Llama 2's: a space before each word, the first one stripped, unknown characters in bytes."""
    vocab = numbered([*SPECIAL, *(f"<0x{b:02X}>" for b in BYTES), *SPACED, *LETTERS])
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return finished(tokenizer)


def metaspace() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(numbered([*SPECIAL, *SPACED, *LETTERS]), [], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return finished(tokenizer)


def wordpiece(cleans: bool = False) -> PreTrainedTokenizerFast:
    pieces = ["the", "world", "do", "n't", "'m", "I", ".", ",", "!", "##ing", "##s", "##é", "'", "##'"]
    tokenizer = Tokenizer(models.WordPiece(numbered([*SPECIAL, *pieces, *LETTERS]), unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=not cleans)
    return finished(tokenizer, cleans)


def cleaned_wordpiece() -> PreTrainedTokenizerFast:
    """Its `decode` takes spaces back that stood before a full stop or a clitic."""
    return wordpiece(cleans=True)


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    kind.__name__: kind for kind in (byte_level, byte_fallback, metaspace, wordpiece, cleaned_wordpiece)
}
