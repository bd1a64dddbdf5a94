"""`echelon chat`: a conversation in the terminal."""

from __future__ import annotations

import io
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from echelon import LLM, ConfigError, EchelonError, RequestError, SamplingParams
from echelon.cli.shared import ENGINE, SAMPLING, Flags, ModelArgument, SpeculativeOption, print_fitting, speculative_mapping, verb
from echelon.config import EngineConfig
from echelon.inputs import conversation
from echelon.sequence import FinishReason, Sequence
from echelon.sizes import mebibytes
from echelon.text import Detokenizer, num_shown, pieces_by_token

COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation; the system prompt stays",
    "/system TEXT": "set the system prompt, or with no text remove it, and forget the conversation",
    "/save FILE": "write the conversation as JSON",
    "/load FILE": "go on with a saved conversation",
    "/stats": "tokens, speed, cache and memory of the last answer and of all",
    "/exit": "leave; so do Ctrl-D, and Ctrl-C twice",
}
DRAFTED = "green"  # tokens that were drafted and kept; the target's own have no style
PLAIN_STOP = "\nUser:"
NO_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}  # a model's text steers no terminal


@dataclass
class AnswerStats:
    """What answers took, one or all together."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    seconds: float = 0.0  # from the first token on
    first_seconds: float = 0.0  # until the first token
    is_cut: bool = False  # by --max-tokens, or the context

    def add(self, other: AnswerStats) -> None:
        """Add those of another answer."""
        for name, value in vars(other).items():
            if name != "is_cut":
                setattr(self, name, getattr(self, name) + value)

    def __str__(self) -> str:
        speed = f"{(self.num_tokens - 1) / self.seconds:.1f} tokens/s, " if self.seconds and self.num_tokens > 1 else ""
        per_step = f"{self.num_tokens / self.num_steps:.2f} tokens a step, " if self.num_steps else ""
        cached = f"{self.num_cached_tokens:,} of {self.num_prompt_tokens:,} prompt tokens cached"
        cut = " (cut off)" if self.is_cut else ""
        return f"{self.num_tokens:,} tokens{cut}, {speed}{per_step}first after {self.first_seconds:.2f} s, {cached}"


@dataclass
class Chat:
    """A conversation with one model. `show` is given each new piece of an answer, and whether it was drafted."""

    llm: LLM
    params: SamplingParams
    show: Callable[[str, bool], None]
    messages: list[dict[str, Any]] = field(default_factory=list)
    last: AnswerStats = field(default_factory=AnswerStats)
    total: AnswerStats = field(default_factory=AnswerStats)

    @property
    def has_template(self) -> bool:
        """Whether the model comes with a chat template."""
        return getattr(self.llm.target.tokenizer, "chat_template", None) is not None

    def reset(self) -> None:
        """Forget all but the system prompt."""
        self.messages = [m for m in self.messages if m["role"] == "system"]

    def set_system(self, text: str) -> None:
        """Begin anew with this system prompt, or with none."""
        self.messages = conversation([{"role": "system", "content": text}], "system") if text else []

    def ask(self, text: str) -> None:
        """Show the answer to the user's next message, as it is made; an interrupt ends it there.

        Raises
        ------
        RequestError  the conversation cannot be served; the message is dropped
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        with interrupts() as was_interrupted:
            tokens = self._encode(messages)
            answer = None if was_interrupted() else self._answered(tokens, was_interrupted)
        if answer is not None:
            self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _answered(self, tokens: list[int], was_interrupted: Callable[[], bool]) -> str | None:
        """The answer, or as much of it as there was before an interrupt; None where that is nothing."""
        params = self.params if self.has_template else self.params.model_copy(update={"stop": (*self.params.stop, PLAIN_STOP)})
        room = max(1, self.llm.inputs.room_after(len(tokens)))
        params = params.model_copy(update={"max_tokens": min(params.most_tokens, room)})
        (sequence,) = self.llm.inputs.samples(tokens, params, watch_text=True, name="the conversation")
        answer = self._stream(sequence, was_interrupted)
        if sequence.error is not None:
            raise RequestError(f"the answer failed: {sequence.error}")
        return answer if sequence.num_output_tokens else None

    def _encode(self, messages: list[dict[str, Any]]) -> list[int]:
        if self.has_template:
            return self.llm.inputs.encode_chat(messages, "the conversation")
        names = {"system": "", "user": "User: ", "assistant": "Assistant:"}  # what an answer begins with is its own
        turns = [names.get(m["role"], f"{m['role']}: ") + m["content"] for m in messages]
        return self.llm.inputs.encode("\n".join([*turns, "Assistant:"]), name="the conversation")

    def _stream(self, sequence: Sequence, was_interrupted: Callable[[], bool]) -> str:
        watcher, shown, start, first = sequence.watcher, 0, time.perf_counter(), 0.0
        assert isinstance(watcher, Detokenizer)
        for _ in self.llm.run([[sequence]]):
            first = first or (time.perf_counter() if sequence.num_output_tokens else 0.0)
            sure = num_shown(watcher.text, sequence.params.stop, sequence.is_finished)
            shown = self._show_new(sequence, watcher, shown, sure)
            if was_interrupted():
                break
        text = watcher.finish() if sequence.finish_reason is not FinishReason.ERROR else watcher.text
        self._show_new(sequence, watcher, shown, len(text))
        end = time.perf_counter()
        self.last = AnswerStats(
            sequence.num_prompt_tokens,
            sequence.num_cached_tokens or 0,
            sequence.num_output_tokens,
            sequence.num_steps,
            end - first if first else 0.0,
            (first or end) - start,
            sequence.finish_reason is FinishReason.LENGTH,
        )
        self.total.add(self.last)
        return text

    def _show_new(self, sequence: Sequence, watcher: Detokenizer, begin: int, end: int) -> int:
        """Show characters [begin, end) of the answer, token by token; returns how many have been shown."""
        for i, piece in pieces_by_token(watcher.text, watcher.offsets, begin, end):
            self.show(piece, sequence.is_accepted[i])
        return max(begin, end)

    def memory(self) -> str:
        """Bytes of keys and values that are kept, of how many, and of the process."""
        metrics, plan = self.llm.get_counters(), self.llm.memory_plan
        kept = metrics["num_cached_kv_blocks"] * plan.block_bytes
        return f"KV kept {mebibytes(kept)} of {mebibytes(plan.kv_bytes)}, process {mebibytes(psutil.Process().memory_info().rss)}"


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C is noted, for the end of a step; another raises `KeyboardInterrupt`."""
    count = 0

    def note(_signal: int, _frame: Any) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, before)


class Commands:
    """Lines that begin with a slash."""

    def __init__(self, chat: Chat, say: Callable[[str], None]) -> None:
        self._chat, self._say = chat, say

    def run(self, line: str) -> bool:
        """Carry out a command; false for one that ends the conversation."""
        name, _, rest = line.strip().partition(" ")
        known = {command.split()[0] for command in COMMANDS}
        if name not in known:
            raise RequestError(f"there is no command {name!r}; /help lists those there are")
        if name == "/exit":
            return False
        getattr(self, "_" + name[1:])(rest.strip())
        return True

    def _help(self, _rest: str) -> None:
        for command, text in COMMANDS.items():
            self._say(f"{command:<14} {text}")

    def _reset(self, _rest: str) -> None:
        self._chat.reset()
        self._say("the conversation is forgotten")

    def _system(self, rest: str) -> None:
        self._chat.set_system(rest)
        self._say("a new conversation, " + ("with that system prompt" if rest else "without a system prompt"))

    def _save(self, rest: str) -> None:
        path = _path(rest, "/save")
        try:
            path.write_text(json.dumps(self._chat.messages, ensure_ascii=False, indent=1) + "\n", "utf-8")
        except OSError as error:
            raise RequestError(f"cannot write {path}: {error.strerror}; give another file") from error
        self._say(f"wrote {len(self._chat.messages)} messages to {path}")

    def _load(self, rest: str) -> None:
        path = _path(rest, "/load")
        try:
            messages = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise RequestError(f"cannot read {path}: {error.strerror}; give a file that /save wrote") from error
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{path} is no JSON; give a file that /save wrote") from error
        self._chat.messages = conversation(messages, str(path)) if messages != [] else []
        self._say(f"{len(self._chat.messages)} messages from {path}")

    def _stats(self, _rest: str) -> None:
        self._say(f"last answer: {self._chat.last}")
        self._say(f"all answers: {self._chat.total}")
        self._say(self._chat.memory())


def _path(text: str, command: str) -> Path:
    if not text:
        raise RequestError(f"{command} needs a file: {command} FILE")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise RequestError(f"{command} {text}: {error}") from error


def _lines_of_terminal() -> Iterator[str]:
    """Lines edited by the user; Ctrl-D ends them, as does Ctrl-C twice."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter

    session: PromptSession[str] = PromptSession(completer=WordCompleter([c.split()[0] for c in COMMANDS], sentence=True))
    was_interrupted = False
    while True:
        try:
            line = session.prompt("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            if was_interrupted:
                return
            was_interrupted = True
            print("(Ctrl-C again leaves)")
            continue
        was_interrupted = False
        yield line


@verb(
    sampling=Flags(SamplingParams, *SAMPLING, max_tokens=1024, temperature=0.7),
    engine=Flags(EngineConfig, *ENGINE),
)
def chat(
    model: ModelArgument,
    *,
    speculative_config: SpeculativeOption = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Talk with MODEL. Tokens that were drafted and kept are green, the model's own are not; /help lists commands.

    Each turn reads only what is new. Piped, it answers a line at a time, without colours or prompts; one that cannot be answered leaves an
    empty line (exit 3).
    """
    params, is_terminal = SamplingParams(**sampling), sys.stdin.isatty() and sys.stdout.isatty()
    out, notes = Console(soft_wrap=True, highlight=False), Console(stderr=not is_terminal, highlight=False, style="dim")

    def show(piece: str, is_drafted: bool) -> None:
        if is_terminal:
            out.print(Text(piece.translate(NO_CONTROL), style=DRAFTED if is_drafted else ""), end="")
        else:
            sys.stdout.write(piece)
            sys.stdout.flush()

    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    llm = LLM(model, speculative_mapping(speculative_config), max_num_seqs=1, **engine)
    print_fitting(llm, ENGINE)
    if llm.target.tokenizer is None:
        raise ConfigError(f"{llm.target.name!r} has no tokenizer, so nobody can talk with it; use `echelon generate` with token ids")
    talk = Chat(llm, params, show)
    if system:
        talk.set_system(system)
    if not talk.has_template:
        notes.print(f"{escape(llm.target.name)} has no chat template: turns are written as 'User: …' and 'Assistant: …'")
    if is_terminal:
        notes.print(f"{escape(llm.target.name)}, {talk.memory()}; /help lists commands, Ctrl-C ends an answer, Ctrl-D the chat")
    commands = Commands(talk, lambda text: (notes if is_terminal else out).print(escape(text)))
    num_failed = 0
    for line in _lines_of_terminal() if is_terminal else (text.rstrip("\n") for text in sys.stdin):
        try:
            if line.startswith("/"):
                if not commands.run(line):
                    break
            elif line.strip():
                talk.ask(line)
                out.print()
                if is_terminal:
                    notes.print(f"[{talk.last}]", markup=False)
        except EchelonError as error:
            notes.print(f"[red]error:[/] {escape(str(error))}")
            if not is_terminal:
                num_failed += 1
                out.print()
    if num_failed:
        raise typer.Exit(3)
