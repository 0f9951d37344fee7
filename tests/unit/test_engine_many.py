"""Many requests at once: generate, threads, tasks, a full queue; one fault loses no other, and nothing is kept."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from runtime import FinishReason, Knobs, RejectedError, StepFailedError
from runtime.records import LimitedBy, RequestRecord, StepRecord
from runtime.request import Sequence
from runtime.shared.listeners import CompletionInterval
from tests.engines import bench
from tests.fakes import ByteTokenizer, FakeModel
from tests.threads import in_threads


def test_queue_full() -> None:
    with bench(max_queue=2) as b:
        done = b.engine.submit("a", max_tokens=1)
        assert done.result(timeout=30) and b.heard.request()
        b.executor.hold()
        running = b.engine.submit("a", max_tokens=2)
        b.held()
        waiting = [b.engine.submit("b", max_tokens=2) for _ in range(2)]
        with pytest.raises(RejectedError, match="2 requests are waiting and max_queue is 2") as caught:
            b.engine.submit("c", request_class="chat")
        assert caught.value.reason == "queue_full"
        b.executor.go()
        rejected = b.heard.request()
        assert (rejected.reason, rejected.request_class, rejected.cause) == (
            FinishReason.REJECTED,
            "chat",
            "queue_full",
        )
        assert [s.result(timeout=30).text for s in [running, *waiting]] == ["bc", "cd", "cd"]
        assert b.engine.submit("d", max_tokens=1).result(timeout=30).text == "e"
        assert [b.heard.request().reason for _ in range(4)] == [FinishReason.LENGTH] * 4

        b.executor.hold()  # by now it knows how fast requests end
        running = b.engine.submit("a", max_tokens=2)
        b.held()
        kept = [b.engine.submit("b", max_tokens=2) for _ in range(2)]
        with pytest.raises(RejectedError) as caught:
            b.engine.submit("c")
        assert caught.value.retry_after_s is not None and caught.value.retry_after_s >= 0
        assert not any(stream.done for stream in [running, *kept])


def step(start: float, end: float, after_idle: bool = False) -> StepRecord:
    return StepRecord(start, end, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 64, LimitedBy.DEMAND, after_idle=after_idle)


def done(finished: float) -> RequestRecord:
    times = (finished,)
    return RequestRecord(
        "r", finished - 1, finished - 1, finished, times, 1, 1, 0, 0, FinishReason.LENGTH, "default", "", 0, 0, 0
    )


def test_time_without_work_is_none_between_two_completions() -> None:
    """A full queue then says when to come back by how fast requests end while there are any."""
    interval = CompletionInterval()
    for number in range(100):
        interval.on_step(step(0.05 * number, 0.05 * (number + 1), after_idle=not number))
        interval.on_request(done(0.05 * (number + 1)))
    assert interval.seconds == pytest.approx(0.05)
    interval.on_step(step(3605.0, 3605.02, after_idle=True))
    interval.on_step(step(3605.02, 3605.05))
    interval.on_request(done(3605.05))
    assert interval.seconds == pytest.approx(0.05)
    interval.on_step(step(3605.05, 3605.55))
    interval.on_request(done(3605.55))  # a gap with work is one
    assert interval.seconds == pytest.approx(0.095)


def test_ids_are_unique_among_live_requests() -> None:
    with bench() as b:
        b.executor.hold()
        first = b.engine.submit("a", max_tokens=1, request_id="x")
        with pytest.raises(ValueError, match="request_id is 'x', which another live request has"):
            b.engine.submit("b", request_id="x")
        b.executor.go()
        assert first.result(timeout=30).text == "b"
        assert b.engine.submit("b", max_tokens=1, request_id="x").result(timeout=30).text == "c"


def test_generate() -> None:
    with bench(max_queue=3) as b:
        prompts: list[str | Seq[int]] = [chr(97 + i) for i in range(20)] + [[97, 98]]
        done = b.engine.generate(prompts, max_tokens=2)
        assert [c.text for c in done] == [chr(98 + i) + chr(99 + i) for i in range(20)] + ["cd"]
        assert b.engine.generate([]) == []
        with pytest.raises(ValueError, match="prompts is text, 'hello'"):
            b.engine.generate("hello")


def test_generate_waits_for_room_that_others_take() -> None:
    with bench(max_queue=2, knobs=Knobs(max_batch_size=1)) as b:
        b.executor.hold()
        running = b.engine.submit("a", max_tokens=3)
        b.held()
        other = b.engine.submit("b", max_tokens=3)
        result: list[Any] = []
        thread = threading.Thread(target=lambda: result.extend(b.engine.generate(["c", "d", "e"], max_tokens=1)))
        thread.start()
        b.executor.go()
        thread.join(timeout=30)
        assert [c.text for c in result] == ["d", "e", "f"]
        assert running.result(timeout=30) and other.result(timeout=30)


def test_one_fault_does_not_lose_the_others() -> None:
    def sample(sequence: Sequence) -> int:
        if sequence.request.prompt[0] == ord("b"):
            raise RuntimeError("no b")
        return ord("z")

    with bench(sample) as b:
        a, bad, empty, c = b.engine.generate(["a", "b", "", "c"], max_tokens=2, return_exceptions=True)
        assert [getattr(x, "text", None) for x in (a, c)] == ["zz", "zz"]
        assert isinstance(bad, Exception) and isinstance(bad.__cause__, RuntimeError)
        assert isinstance(empty, ValueError)
        with pytest.raises(ValueError, match="empty"):
            b.engine.generate(["a", ""], max_tokens=200)


class Panics(ByteTokenizer):
    """As one in Rust: what it raises is no ``Exception``."""

    def encode(self, text: str) -> list[int]:
        if text == "p":
            raise Panic("encode")
        return super().encode(text)

    def decode(self, ids: list[int]) -> str:
        if ord("c") in ids:
            raise Panic("decode")
        return super().decode(ids)


class Panic(BaseException):
    pass


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_panic_of_a_tokenizer_does_not_lose_the_others(stop: tuple[str, ...]) -> None:
    with bench(model=FakeModel(tokenizer=Panics())) as b:
        prompts = ["b", "p", "x"]  # behind "b" comes a "c"
        bad, none, good = b.engine.generate(prompts, max_tokens=2, stop=stop, return_exceptions=True)
        assert isinstance(bad, Exception) and bad.__cause__ is not None
        assert isinstance(bad.__cause__.__cause__ if stop else bad.__cause__, Panic)
        assert isinstance(none, ValueError) and "encode" in str(none) and isinstance(none.__cause__, Panic)
        assert not isinstance(good, Exception) and good.text == "yz" and not b.engine.closed


def test_the_first_fault_cancels_the_others() -> None:
    def sample(sequence: Sequence) -> int:
        if sequence.request.prompt[0] == ord("b"):
            b.executor.hold()  # the next step stands still
            raise RuntimeError("no b")
        return ord("z")

    with bench(sample) as b:
        with pytest.raises(StepFailedError, match="no b") as caught:
            b.engine.generate(["b", "a", "c"], max_tokens=200)
        assert caught.value.__notes__ == ["this was prompt 0 of 3, counted from 0"]
        b.executor.go()
        reasons = sorted(b.heard.request().reason for _ in range(3))
        assert reasons == [FinishReason.CANCELLED, FinishReason.CANCELLED, FinishReason.ERROR]


def test_nothing_is_kept_of_what_has_ended() -> None:
    with bench() as b:
        streams = [b.engine.submit([i], max_tokens=3, stop=["zz"], timeout_s=100) for i in range(5)]
        buffers = [weakref.ref(stream._buffer) for stream in streams]
        for stream in streams:
            stream.result(timeout=30)
        loop = b.engine._loop
        b.engine.view()  # the step that ended them is over
        assert not (loop._buffers or loop._live or loop._output._texts)
        assert len(b.executor.ended) == 5
        del stream, streams
        gc.collect()
        assert [buffer() for buffer in buffers] == [None] * 5


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with bench() as b:
        done = b.engine.generate(["a", "b"], max_tokens=1, progress=True)
        assert [c.text for c in done] == ["b", "c"]
    captured = capsys.readouterr()
    assert "2/2" in captured.err and captured.out == ""


async def test_async_faces() -> None:
    with bench() as b:
        pieces = [event.text async for event in b.engine.astream("a", max_tokens=3)]
        assert "".join(pieces) == "bcd"
        assert (await b.engine.agenerate("a", max_tokens=3)).text == "bcd"
        assert (await b.engine.submit("a", max_tokens=3)).text == "bcd"
        many = await asyncio.gather(*[b.engine.agenerate([i], max_tokens=5) for i in range(50)])
        assert [c.token_ids[0] for c in many] == [i + 1 for i in range(50)]


async def test_one_call_into_an_event_loop_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    calls = 0
    through = loop.call_soon_threadsafe

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return through(*args, **kwargs)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    with bench() as b:
        b.executor.hold()

        async def read() -> int:
            return len([event async for event in b.engine.astream("a", max_tokens=10)])

        readers = [asyncio.create_task(read()) for _ in range(30)]
        await asyncio.sleep(0)  # let them submit and wait
        b.executor.go()
        assert await asyncio.gather(*readers) == [10] * 30
        for _ in range(30):  # readers are woken before listeners are told of the step
            b.heard.request()
        assert 0 < calls <= len(b.heard.steps)


def test_many_threads() -> None:
    with bench(knobs=Knobs(max_batch_size=7), kv_tokens=256) as b:
        wrong: list[Any] = []

        def client(n: int) -> None:
            for i in range(10):
                start = (n * 10 + i) % 200
                if i % 2:
                    ids = [e.token_id for e in b.engine.stream([start], max_tokens=6)]
                else:
                    ids = list(b.engine.submit([start], max_tokens=6).result(timeout=60).token_ids)
                if ids != list(range(start + 1, start + 7)):
                    wrong.append((start, ids))

        in_threads(client, 20)
        assert not wrong
        assert sum(b.heard.request().completed for _ in range(200)) == 200
