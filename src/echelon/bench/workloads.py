"""Prompts to measure on: held-out source, Spec-Bench's questions, or any file of prompts."""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from echelon import LLM
from echelon.errors import ConfigError
from echelon.requests import read_lines, read_requests

Text = TypeVar("Text", str, list[int])
WORKLOADS = {
    "continue": "go on with held-out Python source",
    "edit": "write held-out source again, one name changed: most of the text is there to copy",
    "questions": "Spec-Bench questions, first turns as they are (--input)",
    "summaries": "Spec-Bench articles in the form of EMS-SD's prompts (--input)",
    "prompts": "any .jsonl or .txt of prompts (--input)",
}
ANSWER_SHARE = 8  # of an edit prompt's tokens, one in so many begins the second copy


def workload(
    name: str, llm: LLM, count: int, num_tokens: int, files: SequenceOf[str] = (), path: Path | None = None, is_ragged: bool = False
) -> list[list[int]]:
    """`count` prompts of a workload as token ids, none longer than `num_tokens`; longer ones keep their last tokens.

    `files` are held-out files of the standard library, `path` the file that a workload reads. Prompts of source have `num_tokens` tokens
    each, or with `is_ragged` between half of that and all, so that there is something to pad.

    Raises
    ------
    ConfigError, RequestError   an unknown workload, a file that does not fit it, or too few prompts
    """
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}; known: {', '.join(WORKLOADS)}")
    if name in ("continue", "edit"):
        if llm.target.tokenizer is None:
            raise ConfigError(f"{llm.target.name!r} has no tokenizer to encode source with; give --input with prompt_token_ids")
        prompts = (code_prompts if name == "continue" else edit_prompts)(llm.target.tokenizer, files, count, num_tokens)
        return [p[i * 7 % (num_tokens // 2) :] for i, p in enumerate(prompts)] if is_ragged and num_tokens > 1 else prompts
    if path is None:
        raise ConfigError(f"workload {name!r} reads its prompts from a file; give --input")
    if name == "prompts":
        found = [r.token_ids(llm) for r in read_requests(path)]
    elif name == "questions":  # as they are, without a chat template, as in Zhang et al. 2025
        found = [llm.inputs.encode(text) for _, text in spec_bench(path)]
    else:  # as EMS-SD prompts for them
        articles = [text.removeprefix("Summarize:") for category, text in spec_bench(path) if category == "summarization"]
        found = [llm.inputs.encode(ems_prompt(article)) for article in articles]
    if len(found) < count:
        raise ConfigError(f"{str(path)!r} gives {len(found)} prompts for the workload {name!r}, {count} were asked for; ask for fewer")
    return [found[i * len(found) // count][-num_tokens:] for i in range(count)]


def code_prompts(tokenizer: PreTrainedTokenizerBase, files: SequenceOf[str], count: int, num_tokens: int) -> list[list[int]]:
    """`count` prompts of `num_tokens` tokens of Python source, to be continued: pieces of standard-library `files`, spread evenly.

    `files` are paths below the standard library's folder; those that are missing or short are passed over.
    """
    return pieces([tokenizer.encode(text) for text in source_texts(files)], count, num_tokens, "tokens")


def code_texts(files: SequenceOf[str], count: int, num_characters: int) -> list[str]:
    """The same in characters, where the tokenizer is unknown."""
    return pieces(source_texts(files), count, num_characters, "characters")


def source_texts(files: SequenceOf[str]) -> list[str]:
    """Those of `files`, paths below the standard library's folder, that are there."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [(root / name).read_text("utf-8") for name in files if (root / name).is_file()]


def pieces(texts: SequenceOf[Text], count: int, length: int, unit: str) -> list[Text]:
    """`count` pieces of this length, spread evenly over all texts; as much as a piece is left out between two of a text."""
    found = [text[i : i + length] for text in texts for i in range(0, len(text) - 2 * length, 2 * length)]
    if len(found) < count:
        raise ConfigError(f"the held-out files give {len(found)} prompts of {length} {unit}, {count} were asked for; ask for fewer")
    return [found[i * len(found) // count] for i in range(count)]


def edit_prompts(tokenizer: PreTrainedTokenizerBase, files: SequenceOf[str], count: int, num_tokens: int) -> list[list[int]]:
    """Edit and repeat: a piece of source, then the beginning of the same piece with one name changed, to be continued.

    A model without instructions is asked in the only way it knows: by an example it can go on copying.
    """
    num_answer = max(1, num_tokens // ANSWER_SHARE)
    prompts = []
    for piece in code_prompts(tokenizer, files, count, max(1, num_tokens - num_answer)):
        text: str = tokenizer.decode(piece)
        changed: list[int] = tokenizer.encode("\n\n" + renamed(text))
        prompts.append([*piece, *changed[:num_answer]])
    return prompts


def renamed(text: str) -> str:
    """`text` with its commonest longer name extended by `_new`."""
    names: list[str] = [n for n in re.findall(r"[A-Za-z_]{4,}", text) if n not in ("self", "import", "return", "from", "None")]
    if not names:
        return text
    commonest = max(dict.fromkeys(names), key=names.count)
    return re.sub(rf"\b{commonest}\b", commonest + "_new", text)


def spec_bench(path: Path) -> list[tuple[str, str]]:
    """(category, first turn) of every line of Spec-Bench's question file: `question_id`, `category`, `turns`."""
    found = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            found.append((str(value["category"]), str(value["turns"][0])))
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise ConfigError(f"{str(path)!r}, line {number}: not a question with `category` and `turns`; give Spec-Bench's file") from None
    return found


def ems_prompt(article: str) -> str:
    """EMS-SD's form: the article, then `TL;DR:`; the caller keeps the last tokens of what is too long."""
    return (article + " TL;DR: ").strip().replace(" n't", "n't")
