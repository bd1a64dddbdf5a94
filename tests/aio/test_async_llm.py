"""`AsyncLLM`: the same texts as `LLM`, whoever asks when; requests end early, wait for places, fail alone, and leave nothing behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import toys
from servers import Gate

from echelon import LLM, AsyncLLM, ConfigError, RequestError, RequestOutput, SamplingParams
from echelon.aio.engine_thread import EngineThread
from echelon.aio.limits import Limits, RequestObserver
from echelon.aio.request_handle import RequestHandle
from echelon.errors import ClosedError, RankError, UnavailableError
from echelon.model.load.loading import LoadedModel
from echelon.sequence import FinishReason, RowState

PROMPTS = toys.prompts()
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return toys.adopted(toys.llama())


def served(target: LoadedModel, work: Callable[[AsyncLLM], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
    """What `work` gives with an engine of its own; afterwards nothing of it may be left."""

    async def run() -> Any:
        async with AsyncLLM(target, NGRAM, max_num_seqs=4, **settings) as llm:
            found = await asyncio.wait_for(work(llm), 120.0)
            assert not llm._running
            while llm.llm.engine.has_work:
                await asyncio.sleep(0)
            tables = llm.llm.engine.target.cache.tables
            prefixes = llm.llm.engine.scheduler.blocks.prefix_cache
            assert tables.num_free == tables.num_blocks
            assert prefixes is not None
        return found

    return asyncio.run(run())


async def last_of(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    last = None
    async for output in outputs:
        last = output
    assert last is not None
    return last


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8, "seed": 3, "max_tokens": 20, "ignore_eos": True} | changes)


def shown(output: RequestOutput) -> list[tuple[list[int], str | None, Any]]:
    return [(o.token_ids, o.finish_reason, o.logprobs) for o in output.outputs]


def test_many_at_once_have_the_texts_that_they_have_alone(target: LoadedModel) -> None:
    asked = [params(n=1 + i % 2, logprobs=2 if i % 3 else None, max_tokens=5 + i) for i in range(len(PROMPTS))]
    wanted = LLM(target, NGRAM, max_num_seqs=4).generate(PROMPTS, asked)

    async def work(llm: AsyncLLM) -> list[RequestOutput]:
        return await asyncio.gather(*(last_of(llm.generate(p, q)) for p, q in zip(PROMPTS, asked, strict=True)))

    found = served(target, work)
    assert [shown(output) for output in found] == [shown(output) for output in wanted]
    assert all(output.finished for output in found)
    assert len({output.request_id for output in found}) == len(PROMPTS)


def test_outputs_grow_and_what_has_been_shown_stays(target: LoadedModel) -> None:
    async def work(llm: AsyncLLM) -> list[RequestOutput]:
        """Every step waits until the output of the one before has been read."""
        step, turn, outputs = llm.llm.engine.step, threading.Semaphore(1), []

        def in_turn() -> Any:
            assert turn.acquire(timeout=60.0)
            return step()

        llm.llm.engine.step = in_turn  # type: ignore[method-assign]
        async for output in llm.generate({"prompt_token_ids": PROMPTS[0]}, {"temperature": 0.0, "max_tokens": 30}, "mine"):
            outputs.append(output)
            turn.release()
        return outputs

    outputs = served(target, work)
    assert len(outputs) == outputs[-1].metrics.num_steps > 3
    for before, after in pairwise(outputs):
        tokens, more = before.outputs[0].token_ids, after.outputs[0].token_ids
        assert len(tokens) <= len(more) and more[: len(tokens)] == tokens
        assert len(before.outputs[0].is_accepted) == len(tokens)
    assert {output.request_id for output in outputs} == {"mine"}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


@pytest.mark.parametrize("how", ["abort", "break", "cancel"])
def test_a_request_that_ends_early_leaves_the_others_alone(target: LoadedModel, how: str) -> None:
    wanted = LLM(target, NGRAM).generate([PROMPTS[1]], params(max_tokens=40))

    async def early(llm: AsyncLLM, has_begun: asyncio.Event) -> RequestOutput | None:
        output = None
        async with aclosing(llm.generate(PROMPTS[0], params(max_tokens=None), "early")) as stream:  # type: ignore[type-var]
            async for grown in stream:
                output = grown
                has_begun.set()
                if how == "break":
                    break
        return output

    async def work(llm: AsyncLLM) -> RequestOutput:
        has_begun, gate = asyncio.Event(), Gate(llm, 1)
        task = asyncio.create_task(early(llm, has_begun))
        await has_begun.wait()
        other = asyncio.create_task(last_of(llm.generate(PROMPTS[1], params(max_tokens=40))))
        if how == "cancel":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await llm.abort("early")
            ended = await task
            assert ended is not None
            if how == "abort":
                assert ended.outputs[0].finish_reason == "abort"
                assert ended.finished
        gate.open()
        await llm.abort("nobody")
        return await other

    assert shown(served(target, work)) == shown(wanted[0])


@pytest.mark.parametrize("max_queue", [0, 8])
def test_a_request_that_waits_is_aborted_at_once(target: LoadedModel, max_queue: int) -> None:
    """Before it has a place, and before it has a row: its iterator yields one output without tokens."""

    async def work(llm: AsyncLLM) -> RequestOutput:
        gate = Gate(llm, 1)
        running = [llm.generate(PROMPTS[0], params(), f"running {i}") for i in range(4)]
        tasks = [asyncio.create_task(last_of(outputs)) for outputs in running]
        while len(llm._running) < 4:  # none of these is overtaken
            await asyncio.sleep(0)
        waiting = asyncio.create_task(last_of(llm.generate(PROMPTS[1], params(), "waiting")))
        while not gate.reached.is_set() or ("waiting" not in llm._running if max_queue else not llm._places._waiters):
            await asyncio.sleep(0)
        with pytest.raises(RequestError, match="is running"):
            await last_of(llm.generate(PROMPTS[0], params(), "waiting"))
        await llm.abort("waiting")
        ended = await waiting
        gate.open()
        assert all(output.finished for output in await asyncio.gather(*tasks))
        assert llm._places._value == 4 + max_queue and not llm._asked
        return ended

    output = served(target, work, max_queue=max_queue)
    assert output.finished and shown(output)[0][:2] == ([], "abort")
    assert output.prompt_token_ids == list(PROMPTS[1])


def test_a_request_that_has_ended_before_it_is_aborted_yields_its_whole_output(target: LoadedModel) -> None:
    """Its rows have finished while nobody read."""

    async def work(llm: AsyncLLM) -> list[RequestOutput]:
        gate = Gate(llm, 1)
        stream = llm.generate(PROMPTS[0], params(), "one")
        outputs = [await anext(stream)]
        gate.open()
        while not llm._running["one"].is_finished:
            await asyncio.sleep(0)
        await llm.abort("one")
        return outputs + [output async for output in stream]

    outputs = served(target, work)
    assert [output.finished for output in outputs] == [False, True]
    assert (outputs[-1].outputs[0].finish_reason, len(outputs[-1].outputs[0].token_ids)) == ("length", 20)


@pytest.mark.parametrize(("reason", "num_states"), [(FinishReason.LENGTH, 1), (None, 0)])
def test_an_abort_takes_nothing_back_that_has_ended(target: LoadedModel, reason: FinishReason | None, num_states: int) -> None:
    llm = LLM(target)

    async def work() -> list[list[RowState]]:
        handle = RequestHandle.of(llm.inputs.samples(PROMPTS[0], params(), True), 0.0)
        handle.states = [RowState(20, "", reason)]
        handle.abort()
        return [now.states async for now in EngineThread(llm, Limits(), RequestObserver()).updates(handle)]

    assert asyncio.run(work()) == [[RowState(20, "", reason)]] * num_states


def test_a_request_that_is_given_up_while_it_waits_keeps_no_place(target: LoadedModel) -> None:
    async def work(llm: AsyncLLM) -> None:
        gate = Gate(llm, 1)
        tasks = [asyncio.create_task(last_of(llm.generate(PROMPTS[0], params()))) for _ in range(5)]
        while not llm._places._waiters:
            await asyncio.sleep(0)
        tasks.pop().cancel()
        gate.open()
        await asyncio.gather(*tasks)
        assert llm._places._value == 4
        assert (await last_of(llm.generate(PROMPTS[0], params()))).finished

    served(target, work, max_queue=0)


def test_beyond_the_places_requests_wait_for_one(target: LoadedModel) -> None:
    most = 0

    async def counted(llm: AsyncLLM, i: int) -> list[int]:
        nonlocal most
        tokens: list[int] = []
        async for output in llm.generate(PROMPTS[i % 3], params(max_tokens=6, seed=i)):
            most, tokens = max(most, len(llm._running)), output.outputs[0].token_ids
        return tokens

    async def work(llm: AsyncLLM) -> list[list[int]]:
        gate = Gate(llm)
        tasks = [asyncio.create_task(counted(llm, i)) for i in range(24)]
        while len(llm._running) < 6:
            await asyncio.sleep(0)
        gate.open()
        return await asyncio.gather(*tasks)

    found = served(target, work, max_queue=2)
    assert most == 4 + 2
    wanted = LLM(target).generate([PROMPTS[i % 3] for i in range(24)], [params(max_tokens=6, seed=i) for i in range(24)])
    assert found == [output.outputs[0].token_ids for output in wanted]


def test_what_cannot_be_served_is_refused_and_the_rest_goes_on(target: LoadedModel) -> None:
    async def work(llm: AsyncLLM) -> None:
        gate = Gate(llm, 1)
        stream = llm.generate(PROMPTS[0], params(max_tokens=None), "one")
        await anext(stream)
        for prompt, asked, name, message in (
            ([], None, None, "is empty"),
            ([10**6], None, None, "vocabulary"),
            (PROMPTS[0], {"temperature": -1.0}, None, "temperature"),
            (PROMPTS[0], None, "one", "is running"),
            (PROMPTS[0], None, 5, "request_id"),
        ):
            with pytest.raises(RequestError, match=message):
                await last_of(llm.generate(prompt, asked, name))  # type: ignore[arg-type]
        await stream.aclose()  # type: ignore[attr-defined]
        gate.open()
        assert (await last_of(llm.generate(PROMPTS[0], params(), "one"))).finished

    served(target, work)


def test_of_two_with_one_name_at_once_one_runs(target: LoadedModel) -> None:
    async def work(llm: AsyncLLM) -> list[RequestOutput | BaseException]:
        twins = (last_of(llm.generate(PROMPTS[0], params(), "twin")) for _ in range(2))
        return await asyncio.gather(*twins, return_exceptions=True)

    found = served(target, work)
    assert sorted(type(one).__name__ for one in found) == ["RequestError", "RequestOutput"]


def test_a_name_that_is_made_is_nobodys(target: LoadedModel) -> None:
    async def work(llm: AsyncLLM) -> list[RequestOutput]:
        return await asyncio.gather(*(last_of(llm.generate(PROMPTS[0], params(), name)) for name in ("request-0", None, "request-2", None)))

    assert {output.request_id for output in served(target, work)} == {"request-0", "request-1", "request-2", "request-3"}


def test_an_engine_that_has_died_gives_its_memory_back(target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        llm = AsyncLLM(target, max_num_seqs=2)

        def die() -> None:
            raise RankError("a rank has gone")

        monkeypatch.setattr(llm.llm.engine, "step", die)
        ended = await last_of(llm.generate(PROMPTS[0], params()))
        assert ended.outputs[0].finish_reason == "error"
        await asyncio.to_thread(llm._thread._thread.join)
        assert not llm.is_running
        await llm.close()
        with pytest.raises(ClosedError):
            llm.llm.get_counters()

    asyncio.run(run())


def test_a_row_that_fails_ends_alone(target: LoadedModel) -> None:
    def broken(_: list[int], logits: Any) -> Any:
        raise ValueError("no")

    async def work(llm: AsyncLLM) -> list[RequestOutput]:
        asked = (params(logits_processors=[broken]), params())
        return await asyncio.gather(*(last_of(llm.generate(PROMPTS[0], q)) for q in asked))

    failed, good = served(target, work)
    assert (failed.outputs[0].finish_reason, good.outputs[0].finish_reason) == ("error", "length")
    assert "no" in str(failed.outputs[0].error)


def test_rows_that_are_tried_one_by_one_are_taken_for_no_stall(target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long all of them take: each step is progress."""
    now, stalled = [0.0], list[bool]()
    monkeypatch.setattr("echelon.aio.engine_thread.time", SimpleNamespace(monotonic=lambda: now[0]))
    llm = LLM(target, max_num_seqs=4)
    thread, engine, step = EngineThread(llm, Limits(stall_timeout=60.0), RequestObserver()), llm.engine, llm.engine.step
    rows = [llm.inputs.samples(prompt, params(), True)[0] for prompt in PROMPTS[:3]]
    for row in rows:
        engine.add(row)
    while not all(row.num_output_tokens for row in rows):
        thread._tick(engine)

    def slow() -> Any:
        if len(engine.scheduler.running) + len(engine.scheduler.waiting) > 1:
            raise RuntimeError("not together")
        now[0] += 40.0
        stalled.append(thread._is_stalled)
        return step()

    before = [row.num_output_tokens for row in rows]
    monkeypatch.setattr(engine, "step", slow)
    thread._tick(engine)
    assert stalled == [False] * 3
    assert [row.num_output_tokens for row in rows] == [count + 1 for count in before]


def test_a_request_that_is_aborted_leaves_while_its_reader_is_busy(target: LoadedModel) -> None:
    async def run() -> list[RequestOutput]:
        async with AsyncLLM(target, max_num_seqs=1) as llm:
            stream = llm.generate(PROMPTS[0], params(max_tokens=None), "busy")
            await anext(stream)
            await llm.abort("busy")
            await last_of(llm.generate(PROMPTS[1], params()))  # has the one place next
            return [output async for output in stream]

    assert asyncio.run(run())[-1].outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("is_waiting", [True, False])
def test_closing_ends_what_runs_and_refuses_what_comes(target: LoadedModel, is_waiting: bool) -> None:
    """Whether its reader waits for more or does something else meanwhile."""

    async def run() -> None:
        llm = AsyncLLM(target, max_num_seqs=2)
        gate, stop = Gate(llm, 1), llm._thread.stop

        async def stop_and_open() -> None:
            gate.open()
            await stop()

        llm._thread.stop = stop_and_open  # type: ignore[method-assign]
        stream = llm.generate(PROMPTS[0], params(max_tokens=None))
        await anext(stream)
        rest = asyncio.create_task(last_of(stream)) if is_waiting else last_of(stream)
        await asyncio.sleep(0)
        assert llm.is_running
        await llm.check_health()
        await llm.close()
        await llm.close()
        assert (await rest).outputs[0].finish_reason == "abort"
        assert not llm.is_running
        with pytest.raises(ClosedError):
            await last_of(llm.generate(PROMPTS[0]))
        with pytest.raises(UnavailableError):
            await llm.check_health()

    asyncio.run(run())


def test_a_queue_below_nothing_is_refused(target: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="max_queue"):
        AsyncLLM(target, max_queue=-1)
