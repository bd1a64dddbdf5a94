"""Conversations that a memory is planned for: prompts of source, MT-Bench's questions of two turns, and a story of many."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

from benchmarks.questions import read_questions, spread
from benchmarks.workloads import greedy, source
from echelon.bench.throughput import EngineRun
from echelon.errors import ConfigError
from echelon.model.load.loading import LoadedModel

LABELS = {"": "held-out source", "mt_bench": "MT-Bench, two turns", "story": "a story of many turns"}  # of what is said
OPENING = "Once upon a time the keeper of a lighthouse found a letter in a bottle, and this is the story of what was written in it."
ASKED = (
    "What did the keeper do next?",
    "Who had written the letter, and when?",
    "Tell what happened in the night of the storm.",
    "Describe the harbour as it was in the morning.",
    "Why did nobody answer at the door?",
    "Go on with the journey to the island.",
    "What was in the box below the stairs?",
    "Let the two of them talk about the old days.",
)


@dataclass(frozen=True)
class Conversation:
    """What a user says turn by turn, as token ids, and the tokens of every answer."""

    turns: list[list[int]]
    answer: int

    @property
    def length(self) -> int:
        """Tokens of all of it."""
        return sum(map(len, self.turns)) + len(self.turns) * self.answer

    def shortened(self, length: int) -> Conversation:
        """As many of its turns as so many tokens hold."""
        count = max(n for n in range(len(self.turns) + 1) if Conversation(self.turns[:n], self.answer).length <= length)
        return Conversation(self.turns[:count], self.answer)


@dataclass(frozen=True)
class Turn:
    """An answer: tokens of the conversation behind it, those that steps of decoding emitted of it, and their seconds."""

    length: int
    tokens: float
    seconds: float


def of_source(target: LoadedModel, count: int, prompt: int, answer: int) -> list[Conversation]:
    """Held-out source, continued once."""
    return [Conversation([tokens], answer) for tokens in source(target, count, prompt, is_ragged=False)]


def of_mt_bench(target: LoadedModel, questions: Path | None, count: int, answer: int) -> list[Conversation]:
    """So many of MT-Bench's questions, evenly apart.

    Raises
    ------
    ConfigError  no file of Spec-Bench's questions is named, or it has none of MT-Bench's
    """
    asked = [q for q in read_questions(questions) if q.task == "mt_bench" and len(q.turns) == 2]
    if not asked:
        raise ConfigError(f"{questions} holds no questions of two turns; take Spec-Bench's question.jsonl")
    return [Conversation([encoded(target, turn) for turn in question.turns], answer) for question in spread(asked, count)]


def of_story(target: LoadedModel, longest: int, answer: int) -> list[Conversation]:
    """One story, told for as many turns as `longest` tokens hold."""
    turns = [encoded(target, OPENING)]
    while Conversation(turns, answer).length <= longest:
        turns.append(encoded(target, ASKED[(len(turns) - 1) % len(ASKED)]))
    return [Conversation(turns, answer).shortened(longest)]


def encoded(target: LoadedModel, text: str) -> list[int]:
    """A user's words, on a line of their own."""
    assert target.tokenizer is not None
    return list(target.tokenizer.encode(text + "\n", add_special_tokens=False))


def told(run: EngineRun, conversation: Conversation) -> tuple[list[list[int]], list[Turn]]:
    """Greedy answers to all turns, each read behind those before it, and what each took."""
    text: list[int] = []
    answers: list[list[int]] = []
    turns: list[Turn] = []
    for asked in conversation.turns:
        text += asked
        found = run.run([text], greedy(conversation.answer))
        answers.append(found.outputs[0])
        text = text + found.outputs[0]
        turns.append(Turn(len(text), *found.decode))
    return answers, turns


def ms_a_token(turns: SequenceOf[Turn]) -> float:
    """Milliseconds of decoding for each token of these answers."""
    return 1000 * sum(t.seconds for t in turns) / sum(t.tokens for t in turns)
