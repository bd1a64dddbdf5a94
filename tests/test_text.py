"""Text grows by whole characters, and stop strings are cut where plain decoding cuts them."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoTokenizer

from echelon.demo import TARGET
from echelon.text import Detokenizer, decode_output

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
    assert detokenizer.finish() == decode_output(tokenizer, prompt, output)


def test_no_half_characters() -> None:
    detokenizer = Detokenizer(tokenizer, [])
    for token in tokenizer.encode(SAMPLE):
        detokenizer.push(token)
        assert "\ufffd" not in detokenizer.text
        assert SAMPLE.startswith(detokenizer.text)
    assert detokenizer.finish() == SAMPLE


def test_random_tokens_agree_with_the_tokenizer() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        tokens = rng.integers(6, 4096, 40).tolist()
        detokenizer = Detokenizer(tokenizer, tokens[:8])
        push_all(detokenizer, tokens[8:])
        assert detokenizer.finish().rstrip("\ufffd") == decode_output(tokenizer, tokens[:8], tokens[8:]).rstrip("\ufffd")


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
