"""Conversations become the text that `transformers` makes of them, in a process whose time and memory are limited."""

from __future__ import annotations

import gc
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import servers
import toys
from transformers import AutoTokenizer

from echelon import LLM, RequestError
from echelon.chat import LONG_TEXT, TEMPLATE_BYTES, encode_text, render_chat
from echelon.demo import TARGET
from echelon.text_process import TEXT_PROCESS, TextProcess, TextProcessError
from echelon.text_worker import give_memory_back, limit_processor_time

MESSAGES = [{"role": "user", "content": "hi"}]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": MESSAGES,
    "three": [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "  What is <b>\"2\" & '3'</b>? </s><|im_end|>\n"},
        {"role": "assistant", "content": "5 ☃ 漢字 🦀 \ud800"},
        {"role": "user", "content": "Sure?"},
    ],
    "more": [
        {"role": "user", "content": "Weather?", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "w", "arguments": {"at": "Rome", "n": 1.5}}}]},
        {"role": "tool", "content": '{"t": 21}', "tool_call_id": "a1"},
        {"role": "assistant", "content": [{"type": "text", "text": "21"}], "reasoning": "as it says"},
        {"role": "user", "content": ""},
    ],
}
# in the style of the families that are named, with what their own ones use of the language
TEMPLATES = {
    "chatml": "{% for m in messages %}"
    "{{'<|im_start|>' + m['role'] + '\n' + (m['content'] or '') | string + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama 2": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}{% for m in loop_messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system %}{% set c = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}"
    "{% else %}{% set c = m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + c.strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + c.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "llama 3": "{{- bos_token }}\n{%- if custom_tools is defined %}\n    {%- set tools = custom_tools %}\n{%- endif %}\n"
    "{%- if not date_string is defined %}\n    {%- set date_string = strftime_now('%C') %}\n{%- endif %}\n"
    "{%- if not tools is defined %}\n    {%- set tools = none %}\n{%- endif %}\n"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + date_string }}\n"
    "{%- for message in messages %}\n    {%- if message.role == 'tool' or message.role == 'ipython' %}\n"
    "        {{- message.content | tojson }}\n    {%- elif 'tool_calls' in message %}\n"
    "        {%- for t in message.tool_calls %}{{- t.function.arguments | tojson(indent=4) }}{%- endfor %}\n"
    "    {%- elif message.content is string %}\n        {{- message['content'] | trim + '<|eot_id|>' }}\n    {%- endif %}\n{%- endfor %}\n"
    "{%- if tools is none %}{{- 'no tools' }}{%- endif %}",
    "gemma": "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}",
    "qwen 3": "{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}{%- for message in messages[::-1] %}"
    "{%- set index = (messages|length - 1) - loop.index0 %}{%- if ns.multi_step_tool and message.role == 'user' %}"
    "{%- set ns.multi_step_tool = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}{{ ns.last }}"
    "{%- for message in messages %}{%- if loop.index0 > 1 %}{%- break %}{%- endif %}"
    "{{ message.reasoning_content }}{{ message.thinking }}{{ dict(a=message.role) | tojson }}{%- endfor %}",
    "smol": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{{ documents }}{{ undefined_thing }}",
    "macros": "{%- macro show(m, deep=false) -%}\n"
    "  {{- m.items() | list | length }}:{{ m.content | default('-', true) | upper }}\n{%- endmacro -%}"
    "{% for m in messages if m.role != 'system' %}{{ show(m) }}{{ ', ' if not loop.last }}{% else %}none{% endfor %}\n"
    "  {# a comment #}\n  {% if unk_token is defined %}{{ unk_token }}{% endif %}\n tail \n",
}
SHORT = 1.0
HOSTILE = {
    "a long list": "{{ [1] * 10**9 }}",
    "a long string": "{{ 'a' * 10**10 }}",
    "a wide column": "{{ '%10000000000d' % 1 }}",
    "a big power": "{{ 9 ** (9 ** 9) }}",
    "a big power of an input": "{{ (messages | length + 8) ** (9 ** 9) }}",
    "a long loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "much text": "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages[0].content * 9999 }}{% endfor %}{% endfor %}",
    "no bottom": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "brackets": "{{" + "(" * 50000 + "1" + ")" * 50000 + "}}",
    "many pieces": "{{ messages[0].content.replace('', 'x' * 9999999).replace('', 'y' * 9999) }}",
}


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of processor time; a busy machine may be long about it."""
    monkeypatch.setattr("echelon.chat.TEMPLATE_SECONDS", SHORT)
    monkeypatch.setattr("echelon.text_process.WALL_SECONDS", 300.0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return servers.build()


@pytest.fixture
def template(llm: LLM) -> Iterator[Any]:
    """Sets the chat template of the model's tokenizer."""
    tokenizer: Any = llm.target.tokenizer
    before = tokenizer.chat_template
    yield lambda text: setattr(tokenizer, "chat_template", text)
    tokenizer.chat_template = before


def own_text(tokenizer: Any, messages: list[dict[str, Any]]) -> str | None:
    """What `transformers` makes of a conversation; None where its template refuses."""
    try:
        text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception:
        return None
    return text


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", ["own", "several", *TEMPLATES])
def test_a_conversation_is_the_text_that_transformers_makes_of_it(tokenizer: Any, name: str, conversation: str) -> None:
    messages = CONVERSATIONS[conversation]
    tokenizer.add_special_tokens({"unk_token": "<unk>", "cls_token": "<c>"})
    if name != "own":
        tokenizer.chat_template = {"default": TEMPLATES["chatml"], "tool_use": "no"} if name == "several" else TEMPLATES[name]
    expected = own_text(tokenizer, messages)
    if expected is None:
        with pytest.raises(RequestError, match="cannot render"):
            render_chat(tokenizer, messages, 10**6)
    else:
        assert render_chat(tokenizer, messages, 10**6) == expected


THINKING = "{{ messages[0].content }}{% if enable_thinking is defined and enable_thinking is false %} /no_think{% endif %}{{ bos_token }}"


@pytest.mark.parametrize(
    "variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}, {"bos_token": "B", "levels": [1, {"a": None}]}]
)
def test_variables_of_a_template_are_those_of_transformers(llm: LLM, template: Any, variables: dict[str, Any]) -> None:
    template(THINKING)
    tokenizer = llm.target.tokenizer
    wanted = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False, **variables)
    assert render_chat(tokenizer, MESSAGES, 10**6, variables) == wanted
    (output,) = llm.chat(MESSAGES, {"max_tokens": 1}, use_tqdm=False, chat_template_kwargs=variables)
    assert output.prompt_token_ids == llm.inputs.encode(wanted, add_special_tokens=False)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"tools": [], "messages": []}, "cannot set messages, tools; give variables"),
        ([1], r"is \[1\]; give a mapping"),
        ({1: 2}, "give a mapping"),
        ({"a": object()}, "plain JSON values"),
        ({"messages[0]": "x" * 10, "add_generation_prompt": False}, "cannot set add_generation_prompt"),
    ],
)
def test_what_is_no_variable_of_a_template_is_refused(llm: LLM, variables: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.chat(MESSAGES, {"max_tokens": 1}, use_tqdm=False, chat_template_kwargs=variables)
    assert llm.inputs.encode_chat(MESSAGES)


def test_most_of_the_templates_render(tokenizer: Any) -> None:
    """Else the test above compares nothing."""
    texts = []
    for text in TEMPLATES.values():
        tokenizer.chat_template = text
        texts += [own_text(tokenizer, messages) for messages in CONVERSATIONS.values()]
    assert sum(text is not None for text in texts) >= len(texts) - 4


@pytest.mark.parametrize("name", HOSTILE if toys.PROVE else ["a long list", "a long string", "a big power", "brackets"])
def test_a_hostile_template_has_limits_of_time_and_memory(llm: LLM, template: Any, short: None, name: str) -> None:
    """This process neither works for it nor grows, and the next conversation is rendered."""
    llm.inputs.encode_chat(MESSAGES)
    template(HOSTILE[name])
    start, before = time.process_time(), psutil.Process().memory_info().rss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError, match=r"cannot render|characters"):
        llm.inputs.encode_chat(MESSAGES)
    assert time.process_time() - start < SHORT
    assert psutil.Process().memory_info().rss < before + 2**25
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < max(peak * 1024, before) + 2**25
    template("{{ messages[0].content }}")
    assert llm.target.tokenizer.decode(llm.inputs.encode_chat(MESSAGES)) == "hi"
    assert TEXT_PROCESS.pid is not None and psutil.Process(TEXT_PROCESS.pid).memory_info().rss < 2**27 + TEMPLATE_BYTES


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.secret.deep }}", "no attribute"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% if %}", "Expected an expression"),
        ("{% include 'other' %}", "loader"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 1 s of processor time"),
        ("{{ [1] * 10**9 }}", "more than 512 MiB of memory"),
        ("{{ raise_exception('x' * 10**6) }}", "x" * 900),
        ("{{ 'x' * 1000000 }}", "becomes 1,000,000 characters, more than 131,072 can fit"),
    ],
)
def test_a_chat_template_that_fails_says_why(llm: LLM, template: Any, short: None, text: str, words: str) -> None:
    template(text)
    with pytest.raises(RequestError, match=words) as caught:
        llm.inputs.encode_chat(MESSAGES)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("messages", [[{"role": "user", "content": object()}], [{1: {2}}], [5], [["user", "hi"]], [{"role": b"x"}]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError):
        render_chat(llm.target.tokenizer, messages, 1000)
    assert llm.inputs.encode_chat(MESSAGES)


def test_livez_answers_while_a_template_runs(llm: LLM, template: Any, short: None) -> None:
    template(HOSTILE["a big power of an input"])
    with servers.serving(llm) as running, running.client(timeout=400.0) as client:
        answers: list[int] = []
        asking = threading.Thread(
            target=lambda: answers.append(client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1}).status_code)
        )
        start, num_alive = time.process_time(), 0
        asking.start()
        with running.client() as other:
            while asking.is_alive():
                num_alive += other.get("/livez").status_code == 200
                asking.join(0.02)
        assert answers == [400]
        assert num_alive > 5
        assert time.process_time() - start < 5 * SHORT + 0.02 * num_alive


def test_the_renderer_is_small_single_and_started_again(llm: LLM) -> None:
    llm.inputs.encode_chat(MESSAGES)
    pid = TEXT_PROCESS.pid
    assert pid is not None
    worker = psutil.Process(pid)
    assert worker.memory_info().rss < 2**27
    assert not any("torch" in mapped.path for mapped in worker.memory_maps())
    llm.inputs.encode_chat(MESSAGES)
    assert TEXT_PROCESS.pid == pid
    os.kill(pid, signal.SIGKILL)
    worker.wait()
    assert llm.inputs.encode_chat(MESSAGES)
    assert TEXT_PROCESS.pid not in (None, pid)


def test_the_renderer_ends_with_whoever_started_it() -> None:
    """However that ends: it reads from a socket that the operating system closes then."""
    renderer = TextProcess()
    answer = renderer.ask(
        {"template": "{{ a }}", "messages": MESSAGES, "special_tokens": {"a": "b"}, "variables": {}, "most_characters": 9, "bytes": 2**28},
        5.0,
    )
    assert answer == {"text": "b"}
    assert renderer.pid is not None and renderer._socket is not None
    worker = psutil.Process(renderer.pid)
    renderer._socket.close()
    worker.wait(60.0)
    renderer.close()
    assert renderer.pid is None


def test_no_text_is_encoded_with_the_tokenizer_of_another_model() -> None:
    """Where the one that is needed cannot be read there."""
    good, work = AutoTokenizer.from_pretrained(str(TARGET)), {"encode": "a", "split_special_tokens": False, "add_special_tokens": False}
    process = TextProcess()

    def ask(needed: str, tokenizer: str) -> dict[str, Any]:
        return process.ask(work | {"bytes": 2**28}, 5.0, needed, lambda: {"tokenizer": tokenizer, "bytes": 2**28})

    encoded = ask("good", good.backend_tokenizer.to_str())
    assert encoded["ids"] and "error" in ask("broken", "{") and "error" in ask("broken", "{")
    assert ask("good", good.backend_tokenizer.to_str()) == encoded
    process.close()


def test_a_renderer_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "broken.py").write_text("raise ImportError('no jinja')")
    monkeypatch.setattr("echelon.text_process.WORKER", tmp_path / "broken.py")
    renderer = TextProcess()
    with pytest.raises(TextProcessError, match="status 1"):
        renderer.ask({}, 5.0)
    renderer.close()


# Long texts


def long_texts(count: int = 2 * LONG_TEXT) -> dict[str, str]:
    words = "".join(f"w{i * i} = [{i}] ☃\n" for i in range(count // 10))
    return {
        "spaces": " " * count,
        "one letter": "a" * count,
        "words": words[:count],
        "special": "</s><s> <|endoftext|>".join(["x"] * (count // 20))[:count],
        "crabs": "🦀" * count,
    }


@pytest.mark.parametrize("name", long_texts())
@pytest.mark.parametrize("special", [True, False])
def test_a_long_text_has_the_ids_that_the_tokenizer_gives_it(llm: LLM, name: str, special: bool) -> None:
    tokenizer: Any = llm.target.tokenizer
    text = tokenizer.bos_token + long_texts()[name] + tokenizer.eos_token if tokenizer.bos_token and special else long_texts()[name]
    assert llm.inputs.encode(text, special) == tokenizer.encode(text, add_special_tokens=special)


def test_a_tokenizer_with_a_class_or_tokens_of_its_own_is_heeded(tokenizer: Any) -> None:
    text = "<new> a" * LONG_TEXT
    before = encode_text(tokenizer, text, True)
    tokenizer.add_tokens(["<new>"])
    after = encode_text(tokenizer, text, True)
    assert before != after == tokenizer.encode(text)
    tokenizer.split_special_tokens = True
    assert encode_text(tokenizer, "</s>" * LONG_TEXT, True) == tokenizer.encode("</s>" * LONG_TEXT)

    class Own(type(tokenizer)):  # type: ignore[misc]
        def encode(self, text: str, **_: Any) -> list[int]:
            return [len(text)]

    tokenizer.__class__ = Own
    assert encode_text(tokenizer, text, True) == [len(text)]


def test_long_texts_cost_this_process_neither_time_nor_memory(llm: LLM) -> None:
    """Eight at once, as long as any that is accepted, in a server that streams meanwhile: others' tokens wait for none of it."""
    bomb = "".join(chr(97 + i * i % 26) + chr(97 + i * 7 % 23) for i in range(32 * llm.max_len))
    own_seconds = time.process_time()
    num_ids = len(llm.target.tokenizer.encode(bomb))  # type: ignore[union-attr]
    own_seconds = time.process_time() - own_seconds
    llm.inputs.encode(bomb)
    gc.collect()
    give_memory_back()
    before, start = psutil.Process().memory_info().rss, time.process_time()
    with ThreadPoolExecutor(8) as threads:
        assert [len(ids) for ids in threads.map(llm.inputs.encode, [bomb] * 8)] == [num_ids] * 8
    assert time.process_time() - start < own_seconds * 8 / 3
    assert psutil.Process().memory_info().rss < before + 2**25  # the ids themselves, eight times
    assert TEXT_PROCESS.pid is not None
    worker = psutil.Process(TEXT_PROCESS.pid)
    assert worker.memory_info().rss < 2**28 and worker.nice() > psutil.Process().nice()


def test_a_text_that_takes_too_much_to_tokenize_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.chat.ENCODING_BYTES", 2**20)
    monkeypatch.setattr("echelon.chat.BYTES_PER_CHARACTER", 0)
    with pytest.raises(RequestError, match="cannot be tokenized"):
        llm.inputs.encode("ab " * (20 * llm.max_len))
    monkeypatch.undo()
    assert llm.inputs.encode("ab " * LONG_TEXT)
    with pytest.raises(RequestError, match="Unicode"):
        llm.inputs.encode("ab \ud800" * LONG_TEXT)


# What a server's clients meet


def test_special_tokens_in_a_text_are_control_tokens_as_in_transformers(llm: LLM) -> None:
    """In chat and in completions, as docs/serving.md says."""
    tokenizer: Any = llm.target.tokenizer
    eos = tokenizer.eos_token
    messages = [{"role": "user", "content": f"a{eos}b"}]
    ids = llm.inputs.encode_chat(messages)
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert (
        ids.count(tokenizer.eos_token_id) == llm.inputs.encode_chat([{"role": "user", "content": "ab"}]).count(tokenizer.eos_token_id) + 1
    )
    assert tokenizer.eos_token_id in llm.inputs.encode(f"a{eos}b", add_special_tokens=False)


@pytest.mark.parametrize("num_blocks", [2, 5, None])
def test_the_default_of_max_tokens_is_what_fits_the_pool(num_blocks: int | None) -> None:
    """A pool smaller than the context refuses nobody who did not ask for more."""
    size = servers.build().memory_plan.block_bytes
    llm = servers.build(max_num_seqs=2, **({} if num_blocks is None else {"kv_cache_memory_bytes": size * num_blocks}))
    prompt = [5] * (llm.engine.scheduler.capacity - 3 if num_blocks else llm.max_len - 3)
    assert llm.inputs.room_after(len(prompt)) == 3
    with servers.serving(llm) as running, running.client() as client:
        if num_blocks is not None:  # else it would be long
            chat = client.post("/v1/chat/completions", json={"messages": MESSAGES, "ignore_eos": True})
            assert chat.status_code == 200
            assert chat.json()["usage"]["total_tokens"] == llm.engine.scheduler.capacity < llm.max_len
        text = client.post("/v1/completions", json={"prompt": prompt, "ignore_eos": True})
        both = client.post("/v1/completions", json={"prompt": [prompt, [5]], "ignore_eos": True})
        asked = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 20})
        full = client.post("/v1/completions", json={"prompt": prompt + [5] * 4})
    assert [a.status_code for a in (text, both)] == [200] * 2
    assert text.json()["usage"]["completion_tokens"] == 3
    assert both.json()["usage"]["completion_tokens"] == 3 + 16
    assert asked.status_code == (200 if num_blocks is None else 400)
    assert full.status_code == 400


@pytest.mark.parametrize(
    ("route", "body", "place", "words"),
    [
        ("completions", {"prompt": ["a"] * 33}, "prompt", "at most 32 items after validation, not 33; send fewer"),
        ("completions", {"prompt": [[1]] * 33}, "prompt", "at most 32 items after validation, not 33; send fewer"),
        ("completions", {"prompt": []}, "prompt", "at least 1 item"),
        ("completions", {"prompt": ["a", 1]}, "prompt.1", "valid string"),
        ("completions", {"prompt": [1, "a"]}, "prompt.1", "valid integer"),
        ("completions", {"prompt": [1, -1]}, "prompt.1", "greater than or equal to 0"),
        ("completions", {"prompt": [[1], [2**31]]}, "prompt.1.0", "less than 2147483648"),
        ("completions", {"prompt": "a", "stop": ["a"] * 17}, "stop", "at most 16 items after validation, not 17; send fewer"),
        ("completions", {"prompt": "a", "stop": ["a", "b" * 257]}, "stop.1", "at most 256 characters; shorten it"),
        ("completions", {"prompt": "a", "stop": ""}, "stop", "at least 1 character"),
        ("chat/completions", {"messages": MESSAGES * 1025}, "messages", "at most 1024 items after validation, not 1025; send fewer"),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "valid string"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "x", "text": ""}]}]},
            "messages.0.content.0.type",
            "'text'",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "required"),
    ],
)
def test_a_field_of_several_forms_is_refused_by_its_own_limit(llm: LLM, route: str, body: dict[str, Any], place: str, words: str) -> None:
    """Not by the form that it does not have."""
    with servers.serving(llm) as running, running.client() as client:
        answer = client.post(f"/v1/{route}", json=body)
    assert answer.status_code == 400
    message: str = answer.json()["error"]["message"]
    assert message.startswith(f"{place}: ") and words in message
    assert answer.json()["error"]["param"] == place.split(".")[0]


def test_what_a_work_may_take_does_not_end_what_comes_after_it() -> None:
    """A soft limit that stayed would end the process while it reads its next work."""
    before = resource.getrlimit(resource.RLIMIT_CPU)
    try:
        limit_processor_time(60.0)
        assert 60 <= resource.getrlimit(resource.RLIMIT_CPU)[0] != before[1]
        limit_processor_time(math.inf)
        assert resource.getrlimit(resource.RLIMIT_CPU) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, before)
