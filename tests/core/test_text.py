"""Text grows by whole characters, and stop strings are cut where plain decoding cuts them."""

from __future__ import annotations

import numpy as np
import pytest
import toys
from tokenizer_kinds import KINDS
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from echelon.demo import TARGET
from echelon.text import Detokenizer, decode_output, pieces_by_token, text_offsets

tokenizer = AutoTokenizer.from_pretrained(TARGET)
SAMPLE = "def grüße(name: str) -> None:\n    print(f'héllo {name} ☃ 漢字 🦀')\n    return None\n\n\nclass Ünïcode:\n    pass\n"


def push_all(detokenizer: Detokenizer, tokens: list[int]) -> int:
    """Tokens taken until a stop string was complete."""
    for count, token in enumerate(tokens, 1):
        if detokenizer.push(token):
            return count
    return len(tokens)


@pytest.mark.parametrize("split", [0, 1, 5, 9, 20])
def test_pieces_join_to_the_whole(split: int) -> None:
    tokens = tokenizer.encode(SAMPLE)
    prompt, output = tokens[:split], tokens[split:]
    detokenizer = Detokenizer(tokenizer, prompt)
    push_all(detokenizer, output)
    assert detokenizer.finish() == decode_output(tokenizer, prompt, output) == whole_text(tokenizer, prompt, output, True)


def test_no_half_characters() -> None:
    detokenizer = Detokenizer(tokenizer, [])
    for token in tokenizer.encode(SAMPLE):
        detokenizer.push(token)
        assert "\ufffd" not in detokenizer.text
        assert SAMPLE.startswith(detokenizer.text)
    assert detokenizer.finish() == SAMPLE


def test_a_text_is_cut_where_its_tokens_begin() -> None:
    """Whatever part of it is wanted: tokens without text, and bytes of a character that is not whole, have no piece."""
    detokenizer = Detokenizer(tokenizer, [])
    tokens = tokenizer.encode(SAMPLE)
    push_all(detokenizer, tokens)
    offsets = detokenizer.offsets
    whole = list(pieces_by_token(SAMPLE, offsets, 0, len(SAMPLE)))
    assert "".join(piece for _, piece in whole) == SAMPLE
    assert len(whole) < len(tokens), "the sample has characters of several tokens"
    assert all(piece == tokenizer.decode([tokens[i]]) for i, piece in whole if piece.isascii())
    for begin in range(len(SAMPLE) + 1):
        assert list(pieces_by_token(SAMPLE, offsets, begin, begin)) == []
        for end in range(begin + 1, len(SAMPLE) + 1):
            parts = list(pieces_by_token(SAMPLE, offsets, begin, end))
            assert "".join(piece for _, piece in parts) == SAMPLE[begin:end]
            assert [i for i, _ in parts] == [i for i, piece in whole if offsets[i] < end and offsets[i] + len(piece) > begin]
    assert list(pieces_by_token("", [], 0, 0)) == list(pieces_by_token("", [0, 0], 0, 0)) == []


def test_offsets_of_a_prompt_whose_text_stands_in_a_special_token_too() -> None:
    """Before it, in that which begins every text: there the prompt does not begin."""
    kind = KINDS["byte_level"]()
    begin, letter = kind.convert_tokens_to_ids(["<s>", "s"])
    assert kind.decode([begin, letter]) == "<s>s"
    assert text_offsets(kind, [begin, letter], "s") == [0, 0]


def test_random_tokens_agree_with_the_tokenizer() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        tokens = rng.integers(6, 4096, 40).tolist()
        detokenizer = Detokenizer(tokenizer, tokens[:8])
        push_all(detokenizer, tokens[8:])
        assert detokenizer.finish().rstrip("\ufffd") == whole_text(tokenizer, tokens[:8], tokens[8:], True).rstrip("\ufffd")


def test_stop_strings_cut_at_the_first_character_of_the_first_hit() -> None:
    tokens = tokenizer.encode(SAMPLE)
    rng = np.random.default_rng(1)
    for _ in range(200):
        start = int(rng.integers(0, len(SAMPLE) - 8))
        stop = SAMPLE[start : start + int(rng.integers(1, 8))]
        detokenizer = Detokenizer(tokenizer, [], (stop, "never there"))
        used = push_all(detokenizer, tokens)
        assert detokenizer.text == SAMPLE[: SAMPLE.index(stop)]
        assert stop in tokenizer.decode(tokens[:used])
        assert stop not in tokenizer.decode(tokens[: used - 1]).rstrip("\ufffd")


def whole_text(kind: PreTrainedTokenizerFast, prompt: list[int], output: list[int], skip: bool) -> str:
    """What the tokenizer itself makes of prompt and output together, beyond what it makes of the prompt; spaces are not cleaned up."""
    before, both = (kind.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False) for ids in (prompt, prompt + output))
    assert both.startswith(before)
    return both[len(before) :]


def text_of(kind: PreTrainedTokenizerFast, prompt: list[int], output: list[int], skip: bool = True) -> str:
    detokenizer = Detokenizer(kind, prompt, skip_special_tokens=skip)
    push_all(detokenizer, output)
    return detokenizer.finish()


def whole_characters(kind: PreTrainedTokenizerFast) -> list[list[int]]:
    """Tokens, or the tokens of one character, that are text by themselves."""
    pieces = kind.convert_ids_to_tokens(list(range(len(kind))))
    single = [[i] for i, piece in enumerate(pieces) if "\ufffd" not in kind.decode([i]) and not piece.startswith("<0x")]
    characters = [kind.encode(c, add_special_tokens=False) for c in "漢é🦀ü"]
    return single + [ids for ids in characters if "\ufffd" not in kind.decode(ids) and kind.unk_token_id not in ids]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_what_the_tokenizer_makes_of_prompt_and_output(kind: str, skip: bool) -> None:
    """Around skipped special tokens, at the beginning of a text, after a prompt of special tokens only, with ids that have no text."""
    tokenizer = KINDS[kind]()
    pieces = [*whole_characters(tokenizer), [1], [2], [2, 2], [len(tokenizer) + 3]]
    rng = np.random.default_rng(0)
    for i in range(2000 if toys.PROVE else 300):
        prompt, output = ([t for n in rng.integers(0, len(pieces), size) for t in pieces[n]] for size in (i % 9, 14))
        prompt = [1, *prompt, *[2] * (i % 3 * 4)]
        assert text_of(tokenizer, prompt, output, skip) == whole_text(tokenizer, prompt, output, skip)


def test_broken_bytes_give_the_text_of_the_tokenizer() -> None:
    """Byte-level: any ids, so also runs that never become characters and are longer than what is kept of them."""
    tokenizer = KINDS["byte_level"]()
    halves = [i for i in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([i])]
    rng = np.random.default_rng(1)
    for i in range(2000 if toys.PROVE else 400):
        output = rng.choice(halves, 40).tolist() if i % 2 else rng.integers(0, len(tokenizer), 40).tolist()
        assert text_of(tokenizer, [1, 4], output) == whole_text(tokenizer, [1, 4], output, True)


def test_runs_of_invalid_bytes_stay_invalid_in_byte_fallback() -> None:
    """A decoder that takes a run of bytes as a whole makes nothing but replacement characters of it, however long it is."""
    tokenizer = KINDS["byte_fallback"]()
    the, bad, *good = tokenizer.convert_tokens_to_ids(["▁the", "<0xFF>", *(f"<0x{b:02X}>" for b in "漢".encode())])
    for length in (1, 3, 4, 5, 8, 9, 10, 40, 300):
        for head in ([bad], good[:2], [good[1]]):
            output = [the, *head, *(good * length)[:length], the, *good]
            expected = " the" + "\ufffd" * (len(head) + length) + " the漢"
            assert text_of(tokenizer, [1, the], output) == expected == whole_text(tokenizer, [1, the], output, True)


def test_a_character_that_was_shown_stays() -> None:
    """Bytes after it that make its run invalid cost only themselves."""
    tokenizer = KINDS["byte_fallback"]()
    the, bad, *good = tokenizer.convert_tokens_to_ids(["▁the", "<0xFF>", *(f"<0x{b:02X}>" for b in "漢".encode())])
    assert text_of(tokenizer, [1, the], [*good, bad, the]) == "漢\ufffd the"
    assert text_of(tokenizer, [1, the], [*good, bad]) == "漢\ufffd"
    assert text_of(tokenizer, [1, the, *good[:2]], [good[2], the]) == "漢 the", "the prompt ended inside a character"


class Counting:
    """A tokenizer that notes how many tokens each call decodes."""

    def __init__(self, inner: PreTrainedTokenizerFast) -> None:
        self.sizes: list[int] = []
        self._decode = inner.backend_tokenizer.decode

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        self.sizes.append(len(token_ids))
        return str(self._decode(token_ids, skip_special_tokens=skip_special_tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_the_detokenizer_decodes_no_more_than_a_window(kind: str) -> None:
    """Whatever repeats for ever: the number of tokens that are decoded for a new one does not grow with the text."""
    inner = KINDS[kind]()
    tokenizer, length = Counting(inner), 2000 if toys.PROVE else 200
    for token in range(len(inner) + 2):
        detokenizer = Detokenizer(tokenizer, [5] * 3)
        push_all(detokenizer, [token] * length)
        assert detokenizer.finish() == detokenizer.finish()
    assert max(tokenizer.sizes) <= 20
    assert len(tokenizer.sizes) <= 5 * length * (len(inner) + 2)


def test_text_held_back_for_ever_is_searched_for_stop_strings() -> None:
    half = next(t for t in range(len(tokenizer)) if tokenizer.decode([t]) == "\ufffd")
    stop = "\ufffd" * 30
    detokenizer = Detokenizer(tokenizer, [], (stop,))
    assert push_all(detokenizer, [half] * 100) == 31, "the last character may yet become whole"
    assert detokenizer.finish() == ""
