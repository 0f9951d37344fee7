"""Minutes past capacity, with clients that hang up: does anything leak, is anything lost?

An engine with its HTTP server, under control and with late requests rejected, gets 1.5 times the requests a second that it
answers at best. Prompts share prefixes. Of all requests a fifth is hung up on over HTTP in mid-answer, and a tenth is submitted
in this process and cancelled. Memory is looked at every ten seconds; the KV pool is small, so that all of it is touched soon.
When all have ended every KV block must be free, every structure of the scheduler sound, and every request that was sent must have
one record, of whatever reason.

Run ``python -m benchmarks.soak`` (``--minutes 10``; ``--quick``: half a minute on the smallest model); the last line is JSON:
requests by how they ended for the client, ``unaccounted`` (sent, and no record; must be 0), ``failed`` (answered otherwise than
they must be; 0), ``lost_blocks`` (0), and ``growth``: memory at the end over that after a fifth of the time. The engine returns
free pieces of the heap twice a minute, and in between memory rises, so that two moments say little: ``growth_of_lows`` is the
same of the least in 40 s.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import psutil
import uvicorn

from autotune import control
from benchmarks.attached import at_work
from benchmarks.command import command, exit_code, say
from runtime.errors import InputError, RejectedError
from runtime.llm.engine import Engine
from runtime.records import RequestRecord, StepRecord
from runtime.serving.app import Api, create_app
from runtime.serving.run import Server, bind, url_of, warm_up

LOAD: Final = 1.5  # of what is answered at best
HUNG_UP, CANCELLED = 0.2, 0.1  # shares of the requests
PREFIXES, PREFIX, PROMPT, OUTPUT = 20, 64, 128, 32  # how many there are; tokens, the last two on average
SEED: Final = 11
EVERY_S: Final = 10.0
LOW_S: Final = 40.0  # in which memory is returned once at least
KV_TOKENS: Final = 16384


class Ends:
    """Counts requests by how the engine says that they ended."""

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def on_step(self, record: StepRecord) -> None:
        pass

    def on_request(self, record: RequestRecord) -> None:
        self.counts[record.reason] += 1


class Wanted(NamedTuple):
    """A request: its prompt, how many tokens it asks for, and after how many pieces of the answer the client leaves (None: it
    stays). ``here``: it is submitted in this process, and cancelled then."""

    prompt: list[int]
    output: int
    leaves_after: int | None
    here: bool


def requests(vocabulary: int, seed: int) -> Iterator[Wanted]:
    """For ever."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(3, vocabulary) for _ in range(PREFIX)] for _ in range(PREFIXES)]
    while True:
        own = [rng.randrange(3, vocabulary) for _ in range(rng.randint(1, 2 * (PROMPT - PREFIX)))]
        output, kind = rng.randint(2, 2 * OUTPUT), rng.random()
        leaves = rng.randint(1, output) if kind < HUNG_UP + CANCELLED else None
        yield Wanted([*rng.choice(prefixes), *own], output, leaves, HUNG_UP <= kind < HUNG_UP + CANCELLED)


class Client:
    """Sends requests to the server at ``url``, or to ``engine``; ``ended`` counts how they ended for whoever sent them."""

    def __init__(self, url: str, engine: Engine) -> None:
        parts = urlsplit(url)
        self._at, self._engine = (parts.hostname or "127.0.0.1", parts.port or 80), engine
        self.ended = Counter[str]()
        self.wrong: list[str] = []

    async def send(self, wanted: Wanted) -> None:
        try:
            ended = await (self._cancelled(wanted) if wanted.here else self._answered(wanted))
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            ended = f"{type(error).__name__}: {error}"
        if ended not in ("answered", "hung up", "cancelled", "rejected"):
            self.wrong.append(ended)
            ended = "failed"
        self.ended[ended] += 1

    async def _answered(self, wanted: Wanted) -> str:
        body = json.dumps({
            "model": self._engine.model.name, "prompt": wanted.prompt, "max_tokens": wanted.output, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }).encode()  # fmt: skip
        reader, writer = await asyncio.open_connection(*self._at)
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._at[0]}\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            status = int((await reader.readline()).split()[1])
            if status != 200:
                said = (await reader.read()).decode(errors="replace")
                return "rejected" if status == 429 else f"{status}: {said[-200:]}"
            pieces = tokens = 0
            async for line in reader:
                text = line.strip()
                if text.startswith(b"data: {"):
                    event = json.loads(text[6:])
                    if event.get("error"):  # it was given up in the queue, when the answer had begun
                        return "rejected" if "TTFT" in str(event["error"]) else str(event["error"])
                    pieces += bool(event.get("choices"))
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                    if wanted.leaves_after is not None and pieces >= wanted.leaves_after:
                        writer.transport.abort()
                        return "hung up"
            return "answered" if tokens == wanted.output else f"{tokens} of {wanted.output} tokens came"
        finally:
            writer.close()

    async def _cancelled(self, wanted: Wanted) -> str:
        try:
            stream = self._engine.submit(wanted.prompt, max_tokens=wanted.output, ignore_eos=True)
            await asyncio.sleep(0.01 * (wanted.leaves_after or 1))
            stream.cancel()
        except RejectedError:
            return "rejected"
        return "cancelled"


async def at_once(client: Client, wanted: Sequence[Wanted]) -> float:
    """Requests a second where all come at once and nobody leaves."""
    begun = time.perf_counter()
    await asyncio.gather(*(client.send(one._replace(leaves_after=None, here=False)) for one in wanted))
    return len(wanted) / (time.perf_counter() - begun)


async def offer(client: Client, coming: Iterator[Wanted], rate: float, seconds: float, sample: Any) -> int:
    """Send requests by Poisson for so long, and wait for their ends. ``sample`` is called every ten seconds. Returns how many."""
    rng, begun = random.Random(SEED + 1), time.perf_counter()
    due, looked, sent, under_way = 0.0, 0.0, 0, set[asyncio.Task[None]]()
    while (due := due + rng.expovariate(rate)) < seconds:
        if (left := begun + due - time.perf_counter()) > 0:
            await asyncio.sleep(left)
        task = asyncio.create_task(client.send(next(coming)))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
        sent += 1
        if time.perf_counter() - begun >= looked:
            looked += EVERY_S
            sample(time.perf_counter() - begun)
    await asyncio.gather(*under_way)
    sample(time.perf_counter() - begun)
    return sent


@contextmanager
def served(engine: Engine) -> Iterator[str]:
    """The URL of a server of ``engine`` on a thread of its own."""
    bound, ready = bind("127.0.0.1", 0), threading.Event()
    config = uvicorn.Config(create_app(Api(engine)), lifespan="on", log_config=None, access_log=False)
    server = Server(config, ready.set)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])), name="server")
    thread.start()
    try:
        ready.wait(60)
        yield url_of(bound)
    finally:
        server.should_exit = True
        thread.join()
        bound.close()


def settled(engine: Engine, patience_s: float = 30.0) -> bool:
    """Whether nothing runs or waits, at last: who has hung up is noticed a little later."""
    until = time.monotonic() + patience_s
    while (view := engine.view()).running or view.waiting:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def soak(model: str, minutes: float, ttft_ms: float, tpot_ms: float) -> dict[str, Any]:
    process, memory = psutil.Process(), list[tuple[float, float]]()
    with Engine(model, slo=f"ttft={ttft_ms:g}ms,tpot={tpot_ms:g}ms", kv_tokens=KV_TOKENS) as engine:
        warm_up(engine)
        ends = Ends()
        engine.subscribe(ends)
        coming = requests(engine.model.vocab_size, SEED)
        with served(engine) as url:
            client = Client(url, engine)
            first = [next(coming) for _ in range(64)]
            rate = LOAD * asyncio.run(at_once(client, first))
            say(f"{model}: {rate:.1f} requests/s for {minutes:g} min, {LOAD:g} times what it answers at once")
            client.ended.clear()
            settled(engine)
            before = ends.counts.total()

            def sample(seconds: float) -> None:
                memory.append((seconds, process.memory_info().rss / 2**20))
                say(f"{seconds:6.0f} s  {memory[-1][1]:7.1f} MiB  {dict(client.ended)}")

            with at_work(control(engine, admission=True)) as attached:
                sent = asyncio.run(offer(client, coming, rate, 60 * minutes, sample))
                idle = settled(engine)
                regimes = Counter(decision.regime for decision in attached.decisions)
        view = engine.view()
        engine._core.scheduler.check_integrity()  # raises
        records = ends.counts.total() - before
    early = [(seconds, rss) for seconds, rss in memory if seconds >= 12 * minutes]
    at, low = early[0][1], min(rss for seconds, rss in early if seconds < early[0][0] + LOW_S)
    last_low = min(rss for seconds, rss in memory if seconds > memory[-1][0] - LOW_S)
    for wrong, count in Counter(client.wrong).most_common(5):
        say(f"failed {count} times: {wrong}")
    return {
        "sent": sent,
        **{
            name.replace(" ", "_"): client.ended[name]
            for name in ("answered", "hung up", "cancelled", "rejected", "failed")
        },
        "records": dict(ends.counts),
        "unaccounted": sent - records,
        "idle": idle,
        "lost_blocks": view.kv_total_blocks - view.kv_free_blocks,
        "decisions": regimes.total(),
        "rss_mib": [round(at, 1), round(memory[-1][1], 1)],
        "growth": round(memory[-1][1] / at, 3),
        "lows_mib": [round(low, 1), round(last_low, 1)],
        "growth_of_lows": round(last_low / low, 3),
    }


@exit_code()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command("soak", __doc__)
    parser.add_argument("--model", default="tiny", help="a preset or a directory (default: tiny)")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long requests come (default: 10)")
    parser.add_argument("--quick", action="store_true", help="half a minute, on the preset nano")
    args = parser.parse_args(arguments)
    if not 0.1 <= args.minutes <= 600:
        raise InputError(f"--minutes is {args.minutes:g}; it must be 0.1 to 600")
    model, minutes = ("nano", 0.5) if args.quick else (args.model, args.minutes)
    found = soak(model, minutes, ttft_ms=2000, tpot_ms=200)
    print(json.dumps(found))
    return int(bool(found["unaccounted"] or found["failed"] or found["lost_blocks"] or not found["idle"]))


if __name__ == "__main__":
    sys.exit(main())
