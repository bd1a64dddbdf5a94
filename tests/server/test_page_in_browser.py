"""The page at `/` in a real browser. Everything is waited for by what is to be seen, nothing by time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import browsers
import pytest
import servers
from servers import MODEL, PROMPTS, Gate, Running

from echelon import SamplingParams

KEY = "a-key-of-thirty-two-characters-x"
HOSTILE = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>&lt;b&gt;"
LONG_WORD = "x" * 300
READABLE = 4.5  # lowest contrast of text, by WCAG 2 (AA)
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsers.chromium() as browser:
        yield browser


@pytest.fixture
def expect() -> Any:
    from playwright.sync_api import expect

    expect.set_options(timeout=60_000)
    return expect


@pytest.fixture(scope="module")
def running(browser: Any) -> Iterator[Running]:  # without a browser no server is needed
    with servers.serving(servers.build("draft_model")) as server:
        yield server


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens the page of a server; no page asks another host for anything, none has a fault, and no text of others has become code."""
    asked: list[str] = []
    faults: list[str] = []
    urls: list[str] = []

    def listening(message: Any) -> None:
        is_expected = "Failed to load resource" in message.text or "TrustedHTML" in message.text  # as the tests want it
        if message.type in ("error", "warning") and not is_expected:
            faults.append(message.text)

    with ExitStack() as contexts:

        def opened(server: Running, **options: Any) -> Any:
            context = contexts.enter_context(browser.new_context(**options))
            context.set_default_timeout(60_000)
            context.on("request", lambda request: asked.append(request.url))
            page = context.new_page()
            page.on("console", listening)
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("dialog", lambda dialog: faults.append(dialog.message))
            urls.append(server.url)
            page.goto(server.url)
            return page

        yield opened
    assert [url for url in asked if not url.startswith((*(f"{u}/" for u in urls), "data:"))] == []
    assert any(url.endswith("/stats") for url in asked)
    assert faults == []


def generate(page: Any, expect: Any, prompt: str, **values: str) -> Any:
    """Run a prompt to its end; the output."""
    page.locator("#prompt").fill(prompt)
    for name, value in values.items():
        page.locator(f"#{name.replace('_', '-')}").fill(value)
    page.locator("#run").click()
    expect(page.locator("#run")).to_be_enabled()
    return page.locator("#output")


def pretend(page: Any, *texts: str) -> None:
    """Whatever is asked for, a model says these tokens; every other one was drafted."""
    tokens = [{"text": text, "is_accepted": bool(i % 2)} for i, text in enumerate(texts)]
    chunk = {"choices": [{"index": 0, "text": "".join(texts), "tokens": tokens, "finish_reason": "stop"}]}
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    page.route("**/v1/completions", lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body))


def has_scrollbar(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


def test_figures_follow_a_request(open_page: Open, running: Running, expect: Any) -> None:
    page = open_page(running)
    expect(page.locator("#model")).to_have_text(MODEL)
    expect(page.locator("#drafter")).to_contain_text("draft_model")
    expect(page.locator("#status")).to_have_text("ready")
    before = running.llm.stats.num_emitted_tokens
    gate = Gate(running, num_steps=4)
    page.locator("#run").click()
    assert gate.reached.wait(60.0)
    expect(page.locator("#running")).to_have_text("1")
    emitted = running.llm.stats.num_emitted_tokens
    assert emitted > before
    expect(page.locator("#speed-total")).to_have_text(f"{emitted:,} tokens since the start")
    expect(page.locator("#per-step-total")).not_to_have_text("– since the start")
    expect(page.locator("#speed-chart + .scale")).to_contain_text("at most ")
    expect(page.locator("#speed-chart + .scale")).not_to_contain_text("at most 0.0")
    expect(page.locator("#output .own")).not_to_have_count(0)
    gate.open()
    expect(page.locator("#run")).to_be_enabled()
    expect(page.locator("#running")).to_have_text("0")
    expect(page.locator("#speed-total")).to_have_text(f"{before + 128:,} tokens since the start")
    expect(page.locator("#positions .bar")).to_have_count(3)
    expect(page.locator("#kv")).to_contain_text("blocks")
    for chart in ("#speed-chart", "#depth-chart"):
        expect(page.locator(f"{chart} .line")).not_to_have_attribute("d", "")


def test_tokens_are_coloured_by_who_proposed_them(open_page: Open, running: Running, expect: Any) -> None:
    page = open_page(running)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    truth = servers.build("draft_model").generate(PROMPTS[2], params, use_tqdm=False)[0].outputs[0]
    output = generate(page, expect, PROMPTS[2], max_tokens="40")
    assert output.evaluate("output => output.textContent") == truth.text
    pieces = output.locator("span").evaluate_all("all => all.map((each) => [each.textContent, each.className])")
    assert [name for _, name in pieces] == ["drafted" if drafted else "own" for drafted in truth.is_accepted]
    colours = {output.locator(f".{kind}").first.evaluate("each => getComputedStyle(each).backgroundColor") for kind in ("drafted", "own")}
    assert len(colours) == 2
    expect(page.locator("#summary")).to_contain_text("40 tokens, ")
    expect(page.locator("#summary")).to_contain_text("ended by length")
    page.locator("#speculate").uncheck()
    plain = generate(page, expect, PROMPTS[2], max_tokens="40")
    assert plain.evaluate("output => output.textContent") == truth.text
    expect(plain.locator(".drafted")).to_have_count(0)
    page.locator("#chat").check()
    said = generate(page, expect, "hello", max_tokens="40")
    answer = servers.build().chat([{"role": "user", "content": "hello"}], params)[0].outputs[0]
    assert said.evaluate("output => output.textContent") == answer.text


def test_a_request_can_be_stopped(open_page: Open, running: Running, expect: Any) -> None:
    page = open_page(running)
    gate = Gate(running, num_steps=2)
    page.locator("#run").click()
    assert gate.reached.wait(60.0)
    before = running.llm.stats.num_emitted_tokens
    page.locator("#stop").click()
    expect(page.locator("#summary")).to_have_text("stopped")
    expect(page.locator("#problem")).to_have_text("")
    with running.client() as client:
        while running.service.engine_thread.num_in_flight:  # the server has yet to see that the client is gone
            client.get("/livez")
    gate.open()
    servers.settle(running)
    assert running.llm.stats.num_emitted_tokens <= before + 4, "it left before another step, but for the one that was held"
    expect(page.locator("#running")).to_have_text("0")
    generate(page, expect, "import", max_tokens="4")
    expect(page.locator("#summary")).to_contain_text("4 tokens, ")


def test_texts_of_others_are_never_code(open_page: Open, expect: Any) -> None:
    """In a prompt, an answer, an error or the name of the model."""
    with servers.serving(servers.build(), served_model_name=HOSTILE) as running:
        page = open_page(running)
        expect(page.locator("#model")).to_have_text(HOSTILE)
        page.locator("nav a").first.click()
        expect(page.locator("#reader h3").first).to_have_text("POST /v1/completions")
        expect(page.locator("#reader dt", has_text="max_tokens").first.locator("+ dd")).to_have_text("integer")
        page.locator("#close").click()
        page.locator("nav a").last.click()
        expect(page.locator("#reader pre")).to_contain_text("generation_tokens")
        page.locator("#close").click()
        pretend(page, HOSTILE, HOSTILE)
        output = generate(page, expect, HOSTILE)
        assert output.evaluate("output => output.textContent") == HOSTILE * 2
        assert output.locator("span > *").count() == 0
        body = json.dumps({"error": {"message": HOSTILE}})
        page.unroute("**/v1/completions")
        page.route("**/v1/completions", lambda route: route.fulfill(status=400, content_type="application/json", body=body))
        generate(page, expect, HOSTILE)
        expect(page.locator("#problem")).to_have_text(HOSTILE)
        assert page.locator("img, body script script, iframe").count() == 0
        assert page.title() == f"{HOSTILE} – echelon"
        made = "() => { try { document.body.innerHTML = '<b>'; } catch (error) { return error.name; } }"
        assert page.evaluate(made) == "TypeError", "the policy forbids markup from text"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_on_a_phone_by_day_and_by_night(open_page: Open, running: Running, expect: Any, scheme: str) -> None:
    page = open_page(running, viewport={"width": 360, "height": 740}, color_scheme=scheme)
    pretend(page, LONG_WORD, LONG_WORD, LONG_WORD + " " + LONG_WORD)
    generate(page, expect, LONG_WORD)
    expect(page.locator("#output .drafted")).to_have_count(1)
    assert not has_scrollbar(page)
    texts = page.evaluate(browsers.CONTRASTS)
    assert len(texts) > 30
    assert [text for text in texts if text[0] < READABLE] == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 128) is (scheme == "dark")
    for link in page.locator("nav a").all():
        link.click()
        expect(page.locator("#reader")).to_be_visible()
        assert not has_scrollbar(page)
        assert page.locator("#reader").evaluate("each => each.scrollWidth <= each.clientWidth")
        assert page.evaluate(browsers.CONTRASTS)[0][0] >= READABLE
        page.locator("#close").click()


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(open_page: Open, expect: Any) -> None:
    with servers.serving(servers.build("ngram"), api_keys=(KEY,)) as running:
        page = open_page(running, viewport={"width": 360, "height": 740})
        expect(page.locator("#lock")).to_be_visible()
        expect(page.locator("#live")).to_be_hidden()
        assert page.locator("#refused").text_content() == ""
        assert not has_scrollbar(page)
        for wrong in ("wrong", KEY + "x", "ключ"):
            page.locator("#key").fill(wrong)
            page.locator("#lock button").click()
            expect(page.locator("#refused")).to_have_text("The server does not know this key.")
            expect(page.locator("#key")).to_have_value("")
        expect(page.locator("#model")).to_have_text("echelon")
        page.locator("#key").fill(KEY)
        page.locator("#key").press("Enter")
        expect(page.locator("#model")).to_have_text(MODEL)
        expect(page.locator("#lock")).to_be_hidden()
        generate(page, expect, "import", max_tokens="4")
        expect(page.locator("#summary")).to_contain_text("4 tokens, ")
        page.locator("nav a").last.click()
        expect(page.locator("#reader pre")).to_contain_text("generation_tokens")
        page.reload()
        expect(page.locator("#model")).to_have_text(MODEL)
        assert page.evaluate("[localStorage.length, document.cookie, location.search + location.hash]") == [0, "", ""]
        other = page.context.new_page()
        other.goto(running.url)
        expect(other.locator("#lock")).to_be_visible()


def test_a_server_that_does_not_answer_is_waited_for(open_page: Open, running: Running, expect: Any) -> None:
    page = open_page(running)
    expect(page.locator("#status")).to_have_text("ready")
    page.route("**/stats", lambda route: route.abort())
    expect(page.locator("#status")).to_have_text("no answer")
    page.unroute("**/stats")
    expect(page.locator("#status")).to_have_text("ready")
