"""The same question put by a client that is not ours: ``vllm bench serve`` against ``vllm serve``, stock and self-tuning.

Both servers run all the time, idle but for the one whose turn it is; each round sends both the same requests. A round before the
first warms both up. Prompts and outputs are random, their lengths spread by half around those of the conversation. The rate is a
share of what the stock server completes of requests sent all at once, and the SLO follows from eight clients at a time: TPOT
2.5 × the median gap between tokens, TTFT 20 × TPOT. Both are found through the same client.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autotune.bench import Estimate
from autotune.engines.vllm.command import MIDDLEWARE, SCHEDULER
from benchmarks.live.loads import TPOT_FACTOR, TTFT_FACTOR
from benchmarks.live.ratios import DRAWS, Ratio
from benchmarks.vllm.starting import LIMITS
from runtime.slo import SLO

ROOT = Path(__file__).parents[2]
_READY_S = 240.0
_VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
_CONCURRENT = 8
_REFUSALS = frozenset(HTTPStatus(code).phrase for code in (429, 503))
"""What vLLM's client keeps of such an answer."""


class Lengths(NamedTuple):
    prompt: int
    output: int


class Run(NamedTuple):
    """What the client said of one run; ``good``: requests within the SLO; ``refused``: those answered with 429 or 503, as are all
    that admission rejects."""

    sent: int
    completed: int
    refused: int
    good: int
    said: dict[str, Any]

    @property
    def lost(self) -> int:
        """Requests that were neither completed nor refused: they broke off, or ended with another error."""
        return self.sent - self.completed - self.refused


class Found(NamedTuple):
    """``attached``: whether the controller was at work in the self-tuning server. No ``ratio`` before a round is complete."""

    slo: SLO
    rate: float
    stock: list[Run]
    ours: list[Run]
    attached: bool

    @property
    def ratio(self) -> Estimate:
        """Our good requests ÷ stock's, with a 95% interval over rounds, of several; infinite where only stock has none."""
        mine, theirs = (np.array([run.good for run in runs], float) for runs in (self.ours, self.stock))
        if not len(mine):
            return Estimate(math.nan, math.nan, math.nan)
        picked = np.random.default_rng(7).integers(0, len(mine), size=(DRAWS, len(mine)))
        with np.errstate(divide="ignore", invalid="ignore"):  # nothing within the SLO on a side: infinite, or unknown
            draws = np.log(mine[picked].sum(axis=1)) - np.log(theirs[picked].sum(axis=1))
            value = mine.sum() / theirs.sum()
        return Ratio(float(value), draws if len(mine) > 1 else np.empty(0)).estimate()


class Server:
    """``vllm serve`` in a process of its own; ``variables`` are added to its environment."""

    def __init__(self, folder: Path, log: Path, arguments: tuple[str, ...] = (), **variables: str) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.url, self.log, self.folder = f"http://127.0.0.1:{port}", log, folder
        command = [
            *_VLLM, "serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy",
            "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--no-enable-prefix-caching",
            "--max-num-seqs", str(LIMITS.max_batch_size), "--max-num-batched-tokens", str(LIMITS.token_budget), *arguments,
        ]  # fmt: skip
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, env=_environment(**variables), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> None:
        """Until it answers. Raises ``RuntimeError``, with the end of its log, if it does not."""
        give_up = time.monotonic() + _READY_S
        while time.monotonic() < give_up and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise RuntimeError(f"vllm serve did not begin to answer:\n{self.log.read_text(errors='replace')[-3000:]}")

    def close(self) -> None:
        """End it and what it started."""
        for number, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(patience)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue
            return


@contextmanager
def _servers(folder: Path, logs: Path, slo: Callable[[Server], SLO]) -> Iterator[tuple[Server, Server, SLO]]:
    """Stock, self-tuning, and the SLO of the latter, which the former was asked for."""
    stock = Server(folder, logs / "stock.log")
    ours: Server | None = None
    try:
        stock.wait()
        target = slo(stock)
        variables = {
            "AUTOTUNE_SLO": str(target),
            "AUTOTUNE_REJECT_LATE": "1",
            "AUTOTUNE_LOG": str(logs / "decisions.jsonl"),
        }
        ours = Server(
            folder, logs / "ours.log", ("--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE), **variables
        )
        ours.wait()
        yield stock, ours, target
    finally:
        stock.close()
        if ours is not None:
            ours.close()


def contest(
    folder: Path, lengths: Lengths, *, share: float, rounds: int, seconds: float, say: Callable[[str], None],
    stop: Callable[[], bool],
) -> Found:  # fmt: skip
    """Serve ``rounds`` rounds of ``seconds`` of arrivals at ``share`` of what the stock server completes."""
    with tempfile.TemporaryDirectory(prefix="vllm-live-") as kept:
        logs = Path(kept)

        def target(stock: Server) -> SLO:
            send(stock, lengths, logs, count=_CONCURRENT, seed=1)  # warms it up
            said = send(stock, lengths, logs, count=4 * _CONCURRENT, seed=2, concurrency=_CONCURRENT).said
            tpot = float(f"{TPOT_FACTOR * said['median_itl_ms']:.2g}")
            return SLO(ttft_ms=TTFT_FACTOR * tpot, tpot_ms=tpot)

        with _servers(folder, logs, target) as (stock, ours, slo):
            count = max(32, int(6 * seconds))
            full = send(stock, lengths, logs, count=count, seed=3).said
            rate = share * full["completed"] / full["duration"]
            say(f"the stock server completes {rate / share:.1f} requests/s; {rate:.1f} are sent a second, SLO {slo}")
            count = max(1, round(seconds * rate))
            for server in (stock, ours):  # to warm up
                send(server, lengths, logs, count=count, seed=4, rate=rate, slo=slo)
            runs: dict[Server, list[Run]] = {stock: [], ours: []}
            for number in range(rounds):
                pair: dict[Server, Run] = {}
                for server in (stock, ours) if number % 2 else (ours, stock):
                    if stop():
                        break
                    try:
                        run = send(server, lengths, logs, count=count, seed=10 + number, rate=rate, slo=slo)
                    except RuntimeError:
                        if stop():  # Ctrl-C ends the client, too
                            break
                        raise
                    pair[server] = run
                    name = "stock" if server is stock else "ours"
                    p99 = run.said["p99_tpot_ms"]
                    say(
                        f"  round {number} {name:<6} {run.good} of {run.sent} within the SLO, {run.completed} completed; TTFT "
                        f"p50 {run.said['median_ttft_ms']:.0f} ms, TPOT p99 {p99:.1f} ms"
                    )
                if len(pair) == 2:
                    for server, run in pair.items():
                        runs[server].append(run)
            decided = logs / "decisions.jsonl"
            attached = decided.exists() and decided.stat().st_size > 0
            return Found(slo, rate, runs[stock], runs[ours], attached)


def send(
    server: Server, lengths: Lengths, logs: Path, *, count: int, seed: int, rate: float | None = None, slo: SLO | None = None,
    concurrency: int | None = None,
) -> Run:  # fmt: skip
    """One run of the client; ``rate`` None: all requests at once."""
    result = logs / "result.json"
    result.unlink(missing_ok=True)
    command = [
        *_VLLM, "bench", "serve", "--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions",
        "--model", str(server.folder), "--dataset-name", "random", "--random-input-len", str(lengths.prompt),
        "--random-output-len", str(lengths.output), "--random-range-ratio", "0.5", "--ignore-eos", "--num-prompts", str(count),
        "--seed", str(seed), "--request-rate", "inf" if rate is None else f"{rate:.3f}", "--temperature", "0",
        "--disable-tqdm", "--save-result", "--save-detailed", "--result-dir", str(logs), "--result-filename", result.name,
        *(() if concurrency is None else ("--max-concurrency", str(concurrency))),
        *(() if slo is None else ("--goodput", f"ttft:{slo.ttft_ms:g}", f"tpot:{slo.tpot_ms:g}")),
    ]  # fmt: skip
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True)
    if done.returncode or not result.exists():
        raise RuntimeError(f"vllm bench serve failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    said = json.loads(result.read_text())
    good = round((said.get("request_goodput") or 0.0) * said["duration"])
    refused = sum(error in _REFUSALS for error in said["errors"])
    return Run(count, said["completed"], refused, good, said)


def _environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AUTOTUNE_")}
    kept.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # that of a server: EngineCore is a process of its own
    return kept | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"} | more
