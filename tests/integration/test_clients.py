"""Clients that no one here wrote, each in an environment built for it: they understand us, and they measure what we measure."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.serving.record_log import read_records
from runtime.torch_backend.tokenizer import byte_tokenizer
from tests.integration.live_server import ServerProcess, in_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
UNREACHABLE = re.compile(
    r"(?i)name resolution|connection (refused|reset|aborted)|network is unreachable|ReadTimeout|ConnectTimeout|ProxyError"
    r"|Max retries exceeded|no matching distribution found"
)
REVISION = "0" * 40


def environment_with(config: pytest.Config, requirement: str) -> Path:
    """The Python of an environment with ``requirement``, kept in pytest's cache; skips if the package index is out of reach."""
    assert config.cache is not None
    key = sha256(f"{sys.version} {requirement}".encode()).hexdigest()[:12]
    folder = Path(config.cache.mkdir("clients")) / f"{re.split(r'[^a-z]', requirement)[0]}-{key}"
    python, stamp = folder / "bin" / "python", folder / "installed"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=120)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement]
        try:
            done = subprocess.run(install, capture_output=True, text=True, timeout=600)
        except subprocess.TimeoutExpired:
            pytest.skip(f"{requirement} could not be had within 10 minutes")
        if done.returncode and UNREACHABLE.search(done.stderr):
            pytest.skip(f"{requirement} cannot be had: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
        stamp.touch()
    return python


def run(python: Path, *words: str, folder: Path, **environment: str) -> str:
    """What ``words``, run by ``python``, prints; nothing of our own environment gets in."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "OPENAI", "HF_"))}
    done = subprocess.run(
        [str(python), *words], cwd=folder, env=clean | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    # one thread for the model, and no prefixes shared with whoever asked before: a client on the same two cores needs one
    words = (
        "tiny",
        "--threads",
        "1",
        "--kv-tokens",
        "65536",
        "--slo",
        "ttft=60s,tpot=10s",
        "--records",
        "records.jsonl",
    )
    with in_process(folder, *words) as found:
        yield found
        found.signal()
        assert found.ended() == 0, found.output


OPENAI = """
import json, sys
from openai import BadRequestError, NotFoundError, OpenAI

client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
found = {"models": [model.id for model in client.models.list()]}
ask = {"model": "tiny", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True, "min_p": 0.0, "top_k": 0}}

whole = client.completions.create(prompt="Once upon a time", logprobs=2, **ask)
found["completion"] = whole.choices[0].text
found["completion_usage"] = whole.usage.model_dump()
found["logprobs"] = len(whole.choices[0].logprobs.token_logprobs)
many = client.completions.create(prompt=["Once upon a time", "Two"], **ask)
found["many"] = [choice.text for choice in many.choices]
ids = client.completions.create(prompt=list(b"Once upon a time"), **ask)
found["ids"] = ids.choices[0].text

chunks = list(client.completions.create(prompt="Once upon a time", stream=True, stream_options={"include_usage": True}, **ask))
found["streamed"] = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
found["chunks"] = len(chunks)
found["finish"] = chunks[-2].choices[0].finish_reason
found["streamed_usage"] = chunks[-1].usage.model_dump()

messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
chat = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=3, **ask)
found["chat"] = chat.choices[0].message.content
found["chat_role"] = chat.choices[0].message.role
found["top"] = [len(entry.top_logprobs) for entry in chat.choices[0].logprobs.content]
chunks = list(client.chat.completions.create(messages=messages, stream=True, **ask))
found["chat_streamed"] = "".join(chunk.choices[0].delta.content for chunk in chunks)
found["chat_roles"] = [chunk.choices[0].delta.role for chunk in chunks]
found["chat_finish"] = chunks[-1].choices[0].finish_reason

for name, kind, change in (
    ("echo", BadRequestError, {"echo": True}),
    ("temperature", BadRequestError, {"temperature": 500}),
    ("model", NotFoundError, {"model": "gpt-5"}),
):
    try:
        client.completions.create(**{"prompt": "a", **ask, **change})
    except kind as error:
        found[name] = [error.param, error.status_code]
print(json.dumps(found))
"""


def test_the_openai_sdk(server: ServerProcess, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    python = environment_with(pytestconfig, "openai>=2,<4")
    found: dict[str, Any] = json.loads(run(python, "-c", OPENAI, server.url, folder=tmp_path))
    assert found["models"] == ["tiny"]
    text = found["completion"]
    assert text and found["streamed"] == found["ids"] == found["many"][0] == text != found["many"][1]
    assert (found["completion_usage"]["prompt_tokens"], found["completion_usage"]["completion_tokens"]) == (16, 12)
    assert found["streamed_usage"]["completion_tokens"] == 12
    assert (found["chunks"], found["finish"], found["logprobs"]) == (13, "length", 12)
    assert found["chat"] == found["chat_streamed"] and found["chat"] and found["chat_role"] == "assistant"
    assert found["chat_roles"] == ["assistant"] + [None] * 11
    assert (found["chat_finish"], found["top"]) == ("length", [3] * 12)
    assert found["echo"] == ["echo", 400]
    assert found["temperature"] == ["temperature", 400]
    assert found["model"] == ["model", 404]


def hub_cache(home: Path, name: str) -> None:
    """The tokenizer of ``tiny`` as a hub cache holds it: the only place where the load generator looks when offline."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    byte_tokenizer(32000).tokenizer.save_pretrained(repository / "snapshots" / REVISION)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)


def metrics(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line.startswith("autotune_"))
    }


def difference(theirs: list[float], ours: list[float]) -> str | None:
    """What the typical request's figure differs by, unless it is within 5% or 2 ms."""
    off = statistics.median(abs(their - our) for their, our in zip(theirs, ours, strict=True))
    if off <= max(0.05 * statistics.median(ours), 0.002):
        return None
    pairs = ", ".join(f"{their * 1000:.1f}/{our * 1000:.1f}" for their, our in zip(theirs, ours, strict=True))
    return f"{off * 1000:.2f} ms of {pairs}"


def measure_with_aiperf(python: Path, server: ServerProcess, folder: Path, requests: int) -> dict[str, str | None]:
    """One run of it against our records of the same requests; and our records against our histograms."""
    tokens, prompt = 24, 1200
    before = metrics(server.url)
    begun = time.monotonic()  # on the engine's clock: records of requests before it may still be on their way
    run(
        python.with_name("aiperf"), "profile", "--model", "tiny", "--url", server.url, "--endpoint-type", "completions",
        "--streaming", "--tokenizer", "local/tiny", "--use-server-token-count", "--extra-inputs", "ignore_eos:true",
        "--isl", str(prompt), "--isl-stddev", "0", "--osl", str(tokens), "--osl-stddev", "0", "--concurrency", "1",
        "--request-count", str(requests), "--workers-max", "1", "--ui", "none", "--artifact-dir", "out",
        folder=folder, HF_HOME=str(folder / "hf"), HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1",
    )  # fmt: skip
    after = metrics(server.url)
    ours = wait_for_records(server, requests, begun)
    lines = (folder / "out" / "profile_export.jsonl").read_text().splitlines()
    theirs = sorted((json.loads(line) for line in lines), key=lambda entry: int(entry["metadata"]["request_start_ns"]))
    assert len(theirs) == len(ours) == requests
    assert {(r.prompt_tokens, r.output_tokens) for r in ours} == {(prompt, tokens)}

    found = {}
    for field, name, seen_as in (
        ("ttft", "time_to_first_token", "time_to_first_token"),
        ("tpot", "time_per_output_token", "inter_token_latency"),
    ):
        recorded = [float(getattr(record, field)) for record in ours]
        found[field] = difference([entry["metrics"][seen_as]["value"] / 1000 for entry in theirs], recorded)
        counted, total = (
            after[f"autotune_{name}_seconds_{part}"] - before[f"autotune_{name}_seconds_{part}"]
            for part in ("count", "sum")
        )
        assert counted == requests
        assert total == pytest.approx(sum(recorded), rel=1e-6)
    return found


def test_aiperf_measures_what_we_measure(server: ServerProcess, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Up to three runs: a client that has no core to itself sees tokens late, and a bias of ours would be there in each."""
    python = environment_with(pytestconfig, "aiperf==0.13.*")
    seen = []
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        hub_cache(folder / "hf", "local/tiny")
        seen.append(measure_with_aiperf(python, server, folder, requests=10))
        if seen[-1] == {"ttft": None, "tpot": None}:
            return
    raise AssertionError(f"theirs/ours: {seen}")


def wait_for_records(server: ServerProcess, least: int, since: float = -math.inf) -> list[Any]:
    """Those of requests that came since then. The log is written behind the answers."""
    until = time.monotonic() + 30
    while True:
        found = [record for record in read_records(server.folder / "records.jsonl") if record.arrival >= since]
        if len(found) >= least or time.monotonic() >= until:
            return found
        time.sleep(0.1)
