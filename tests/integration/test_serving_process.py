"""``autotune serve`` as a process: how it begins, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from autotune.control.decision_log import read_decisions
from autotune.cost.model import fit_cost_model
from autotune.profile import save_profile
from runtime.records import FinishReason
from runtime.serving.record_log import read_records
from runtime.slo import SLO
from tests.integration.live_server import ServerProcess, in_process
from tests.integration.llama_folder import llama_folder
from tests.unit.control_world import h200
from tests.unit.profiles import profile
from tests.unit.test_cost_model import measured

pytestmark = pytest.mark.slow
SMALL = ("tiny", "--kv-tokens", "32768", "--threads", "1")


class Reader:
    """Streams one completion in a thread. ``tokens`` grows; ``ended`` is the last event."""

    def __init__(self, url: str, tokens: int) -> None:
        self.tokens = 0
        self.ended = ""
        self.failure: Exception | None = None
        self._body = {"prompt": "Once", "max_tokens": tokens, "stream": True, "ignore_eos": True}
        self._url = url
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._first.wait(60), "no token came"

    def _read(self) -> None:
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=120) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self.ended, before = line[6:], self.ended
                        if self.ended == "[DONE]" and before.startswith('{"error"'):
                            self.ended = before
                        self.tokens += "choices" in line
                        self._first.set()
        except httpx.HTTPError as error:
            self.failure = error

    def join(self) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive()


@pytest.mark.beside
def test_a_signal_drains(tmp_path: Path) -> None:
    """What runs is finished, what comes is refused, the code is 0 and every record is written."""
    log = ("--records", "records.jsonl", "--decisions", "decisions.jsonl")
    with in_process(tmp_path, *SMALL, "--slo", "ttft=60s", *log) as server:
        assert "SLO ttft=60000ms@99%, controlled" in server.output
        assert "note: requests that can no longer meet their TTFT are served all the same" in server.output
        reader = Reader(server.url, 150)
        server.signal(signal.SIGTERM)
        until = time.monotonic() + 30
        while httpx.get(f"{server.url}/health").status_code == 200 and time.monotonic() < until:
            time.sleep(0.01)
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503 and health.json() == {"status": "draining", "active": 1}
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "late"})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        reader.join()
        assert server.ended() == 0, server.output
    assert (reader.tokens, reader.ended, reader.failure) == (150, "[DONE]", None)
    assert "SIGTERM: draining 1 request for at most" in server.output and "Traceback" not in server.output
    (record,) = read_records(tmp_path / "records.jsonl")
    assert record.reason is FinishReason.LENGTH and record.output_tokens == len(record.token_times) == 150
    actions = [decision.action for decision in read_decisions(tmp_path / "decisions.jsonl")]
    assert actions[0] == "attach" and actions[-1] == "detach"


@pytest.mark.beside
def test_grace_is_not_for_ever(tmp_path: Path) -> None:
    with in_process(tmp_path, *SMALL, "--grace", "0.5") as server:
        reader = Reader(server.url, 8000)
        began = time.monotonic()
        server.signal(signal.SIGINT)
        assert server.ended() == 1, server.output
        assert 0.4 < time.monotonic() - began < 30
        reader.join()
    assert json.loads(reader.ended)["error"]["code"] == "cancelled", "it is told so"
    assert 0 < reader.tokens < 8000
    assert "cutting 1 request after 0.5 s of grace" in server.output


@pytest.mark.beside
def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with in_process(tmp_path, *SMALL) as server:
        reader = Reader(server.url, 8000)
        server.signal(signal.SIGTERM)
        while "draining" not in server.output:
            time.sleep(0.01)
        server.signal(signal.SIGTERM)
        assert server.ended(15) == 128 + signal.SIGTERM
        reader.join()
    assert isinstance(reader.failure, httpx.RemoteProtocolError)


def test_an_idle_server_stops_within_seconds(tmp_path: Path) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    with (
        in_process(tmp_path, *SMALL, "--served-model-name", "mine", "--token-budget", "256") as server,
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as slow,
    ):
        slow.sendall(head)  # and the rest of the body never comes
        assert "serving mine at" in server.output and "token_budget=256" in server.output
        with httpx.Client(base_url=server.url) as client:  # whose connection stays open
            assert client.get("/v1/models").json()["data"][0]["id"] == "mine"
            first = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60)
            assert first.elapsed.total_seconds() < 3, "the first request finds a warm engine"
            assert client.post("/v1/completions", json={"prompt": "a", "model": "tiny"}).status_code == 404
            assert 'autotune_requests_total{reason="length"} 1.0' in client.get("/metrics").text
            server.signal(signal.SIGTERM)
            assert server.ended(30) == 0
            assert b"503 Service Unavailable" in slow.recv(1000)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
    assert isinstance(server, ServerProcess) and "Traceback" not in server.output


@pytest.mark.beside
def test_scripts_read_where_it_serves_as_json(tmp_path: Path) -> None:
    with in_process(tmp_path, *SMALL, "--slo", "ttft=60s", "--json") as server:
        [line] = [line for line in server.output.splitlines() if line.startswith("{")]
        said = json.loads(line)
        assert said["url"] == server.url and said["pid"] == server.process.pid
        assert said["slo"] == "ttft=60000ms@99%" and said["controlled"] and said["knobs"]["chunk_size"] > 0
        assert httpx.get(f"{said['url']}/v1/models", timeout=30).json()["data"][0]["id"] == said["model"]


def test_a_profile_says_how_to_start(tmp_path: Path) -> None:
    made = profile(slo=SLO(ttft_ms=60_000))
    too_fast = fit_cost_model(measured(lambda step: h200(step) / 100)).facts
    made = made.model_copy(update={"cost_model": too_fast.model_copy(update={"graph_sizes": (1, 2)})})
    save_profile(made, tmp_path / "mine.yaml")
    words = (
        "--profile",
        "mine.yaml",
        "--anyway",
        "--chunk-size",
        "77",
        "--dtype",
        "float32",
        "--decisions",
        "log.jsonl",
    )
    with in_process(tmp_path, *words) as server:
        assert "note: profile was measured on A CPU, this machine has " in server.output
        graphs = "measured with CUDA graphs of 2 sizes up to 2 rows, this engine has no CUDA graphs"
        assert server.output.count(f"note: profile was {graphs}") == 1
        knobs = made.settings["balanced"].knobs.with_(chunk_size=77)
        assert f"serving tiny at {server.url} · SLO ttft=60000ms@99%, controlled · {knobs}" in server.output
        told = httpx.get(f"{server.url}/metrics", timeout=30).text
        assert f"autotune_kv_blocks {made.engine.kv_pool.blocks}.0" in told
        body = {"prompt": "a b c d", "max_tokens": 60, "ignore_eos": True}
        for _ in range(40):  # on a busy machine the first steps differ too much among themselves to be judged
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
            if "the profile predicts" in (tmp_path / "log.jsonl").read_text():
                break
        server.signal()
        assert server.ended() == 0
    decisions = list(read_decisions(tmp_path / "log.jsonl"))
    assert any("times as long as the profile predicts" in d.cause for d in decisions), (
        "it compares steps with the profile's"
    )


def test_a_generation_config_is_said_and_holds(tmp_path: Path) -> None:
    model = llama_folder(tmp_path / "model")
    said = {"do_sample": True, "temperature": 1.5, "top_k": 0}
    (model / "generation_config.json").write_text(json.dumps(said))

    def answer(url: str, **options: float) -> str:
        body = {"prompt": [1, 2, 3], "max_tokens": 32, "ignore_eos": True, "logprobs": 1, **options}
        found = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]
        return str(found["logprobs"]["token_logprobs"])

    with in_process(tmp_path, str(model), "--threads", "1") as server:
        drawn = {answer(server.url) for _ in range(3)}
        greedy = {answer(server.url, temperature=0) for _ in range(2)}
        assert (
            "note: requests that do not say get temperature 1.5, top_k 0: the model's generation config"
            in server.output
        )
    assert len(drawn) == 3 and len(greedy) == 1
