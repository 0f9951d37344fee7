"""A ``vllm serve`` that tunes itself, by docs/vllm.md and in bad weather. In an environment with vLLM."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import tomllib
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.control.decision_log import Decision, read_decisions
from autotune.engines.vllm.serving import Options
from autotune.profile import save_profile
from autotune.profile.serving import prefill_rate
from runtime.slo import SLO
from tests.integration.environments import last
from tests.integration.pages import commands_on
from tests.integration.vllm_environment import (
    CPU_BUILD,
    ENVIRONMENT,
    UNUSED,
    VERSION,
    passes_in_vllm,
    tiny_model,
    vllm_python,
    vllm_python_with_tests,
)
from tests.integration.vllm_server import NO_MODEL, ROOT, SMALL, VllmServer, environment, serving
from tests.unit.simulated_profile import profiled

PAGE = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
COMMANDS = commands_on(PAGE)
SCHEDULER = "--scheduler-cls autotune.engines.vllm.Scheduler --middleware autotune.engines.vllm.RejectionStatus"
SPACE = "VLLM_CPU_KVCACHE_SPACE"
INSTALLS = 5
"""Commands of the page that install."""
pytestmark = pytest.mark.slow


def within(seconds: float, true: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def decisions(path: Path) -> list[Decision]:
    return list(read_decisions(path))


def body(prompt: str | list[int], tokens: int, **more: Any) -> bytes:
    return json.dumps(
        {"model": "./my-model", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}
    ).encode()


def test_the_scheduler_brings_its_controller() -> None:
    passes_in_vllm("vllm_tunes")


# -- the page ---------------------------------------------------------------------------------------------------------------


@pytest.mark.beside
def test_the_page_installs_what_there_is() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["vllm"] == ["vllm>=0.32,<0.33"] and f"the command below installs {VERSION[:4]})" in PAGE
    assert COMMANDS[:INSTALLS] == [
        "pip install '.[vllm]'",
        f"pip install ./{CPU_BUILD.relative_to(ROOT)}",
        f"pip uninstall -y {' '.join(UNUSED)}",
        "pip install .",
        f"export {SPACE}=4",
    ]
    first = {command.split()[0] for command in COMMANDS[INSTALLS:]}
    assert first == {"autotune", "AUTOTUNE_SLO=ttft=500ms,tpot=50ms", "curl"} and SPACE in ENVIRONMENT


@pytest.mark.beside
def test_this_project_changes_nothing_of_what_vllm_brings(tmp_path: Path) -> None:
    """As the page installs it beside vLLM's CPU build, whose packages are within its bounds."""
    python, report = vllm_python(), tmp_path / "report.json"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--retries", "0", "--timeout", "20"]
    (builds_with,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]

    def spelled(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    def ran(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*pip, *words], cwd=tmp_path, capture_output=True, text=True, timeout=240)

    index = ran("download", "--quiet", "--no-deps", "--dest", str(tmp_path), builds_with)
    if index.returncode:
        pytest.skip(f"no package index can be reached: {last(index.stderr)}")
    done = ran("install", "--quiet", "--dry-run", "--report", str(report), str(ROOT))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    there = {spelled(one["name"]) for one in json.loads(ran("list", "--format", "json").stdout)}
    added = {spelled(one["metadata"]["name"]) for one in json.loads(report.read_text())["install"]}
    assert {"vllm", "torch"} <= there and "gpu-autotune" in added
    assert not (added - {"gpu-autotune"}) & there, "another version of it than the one that vLLM runs with"


def test_vllms_version_is_known_without_importing_it() -> None:
    """Or every profile would be of another version than what serves it."""
    program = "import vllm; from autotune.engines.named import engine_named as e; print(vllm.__version__, e('vllm').version())"
    done = subprocess.run(
        [str(vllm_python_with_tests()), "-c", program],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    imported, installed = done.stdout.splitlines()[-1].split()
    assert imported == installed


@pytest.mark.beside
def test_the_page_names_every_setting() -> None:
    for name in Options.__dataclass_fields__:
        assert f'| `"{name}"`' in PAGE and f"`AUTOTUNE_{name.upper()}`" in PAGE


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    tiny_model(tmp_path / "my-model")
    serve, *rest = (command for command in COMMANDS if command.startswith(("autotune", "curl")))
    with serving(tmp_path, f"{serve} --port PORT -- {SMALL} --max-model-len 2048") as server:
        assert " vllm serve ./my-model --scheduler-cls" in server.output.splitlines()[0], server.output[:500]
        assert "self-tuning: SLO ttft=500ms,tpot=50ms@99%" in server.output
        for command in rest:
            here = command.replace("http://127.0.0.1:8000", server.url)
            done = subprocess.run(
                here, shell=True, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            if command.startswith("curl"):
                assert '"text_completion"' in done.stdout, command
            elif "set" in command.split():
                assert "budget 256" in done.stdout
            elif "--kill" in command:
                assert "detached" in done.stdout
            else:
                assert done.stdout.strip(), command
        assert server.post("/v1/completions", body("Hello", 4))[0] == 200
        assert within(5, lambda: "vLLM schedules as it would without autotune" in server.output)
        assert server.stop() in (0, -signal.SIGTERM)
        assert within(
            10, lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in server._all)
        )
    assert [one.action for one in decisions(tmp_path / "run.jsonl")][-2:] == ["kill", "detach"]


def test_vllms_own_command_is_the_same(tmp_path: Path) -> None:
    tiny_model(tmp_path / "my-model")
    (line,) = (command for command in COMMANDS if command.startswith("AUTOTUNE_SLO"))
    given = dict(word.split("=", 1) for word in line.partition(" vllm ")[0].split())
    command = "vllm " + line.partition(" vllm ")[2]
    more = f"--host 127.0.0.1 --port PORT {SMALL} --max-model-len 2048 --shutdown-timeout 20"
    with serving(tmp_path, f"{command} {more}", **given) as server:
        short = body("x " * 20, 8)
        assert server.post("/v1/completions", short)[0] == 200
        answers = flood(server, 60, "x " * 900)  # on a slow machine the first of them is late already
        assert set(answers) <= {200, 429} and answers[429], answers
        assert within(30, lambda: server.post("/v1/completions", short)[0] == 200)
        server.stop()
        assert within(10, lambda: decisions(tmp_path / "run.jsonl")[-1].action == "detach")
    assert not list(tmp_path.glob("autotune/*.sock"))


def flood(server: VllmServer, count: int, prompt: str | list[int], **more: Any) -> Counter[int]:
    """Statuses of so many requests at once. Whatever is rejected says so, and nobody gets an answer without text."""

    def one(number: int) -> int:
        own = f"{number} {prompt}" if isinstance(prompt, str) else [number, *prompt]  # nothing is in the prefix cache
        status, text = server.post("/v1/completions", body(own, 8, **more))
        assert_clear(status, text)
        return status

    with ThreadPoolExecutor(count) as pool:
        return Counter(pool.map(one, range(count)))


def assert_clear(status: int, text: str) -> None:
    """An answer with text, or a refusal that says so by its status."""
    if status == 429:
        assert json.loads(text)["error"]["type"] == "rate_limit_error"
    elif status == 503:
        assert "backlog limit" in json.loads(text)["error"]["message"]
    else:
        assert '"abort"' not in text and ("[DONE]" not in text or text.count("data:") > 1), text
        assert '"error": {' not in text, "of a stream"


# -- bad weather ------------------------------------------------------------------------------------------------------------


def fake(folder: Path, words: str = "") -> str:
    """A server without a model."""
    if not (folder / "my-model").exists():
        tiny_model(folder / "my-model")
    return f"vllm serve ./my-model --host 127.0.0.1 --port PORT --max-model-len 2048 {NO_MODEL} {SCHEDULER} {words}"


SET = {"AUTOTUNE_LOG": "run.jsonl", "AUTOTUNE_SLO": "ttft=200ms,tpot=500ms", "TEST_STEP_S": "0.02"}


@pytest.mark.beside
def test_a_client_that_hangs_up_and_a_step_that_raises(tmp_path: Path) -> None:
    with serving(tmp_path, fake(tmp_path), **SET, TEST_FAIL_ON="77", AUTOTUNE_METRICS="a.prom") as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        connection.request(
            "POST", "/v1/completions", body("Hello", 1500, stream=True), {"Content-Type": "application/json"}
        )
        assert connection.getresponse().read(10).startswith(b"data:")
        connection.close()
        assert server.post("/v1/completions", body([5] * 20, 3))[0] == 200
        assert within(
            20, lambda: 'autotune_requests_total{reason="cancelled"} 1.0' in (tmp_path / "a.prom").read_text()
        )
        status, _ = server.post("/v1/completions", body([5] * 77, 3))
        assert status == 500
        assert within(20, lambda: server.health() in (503, 0))
        assert within(20, lambda: decisions(tmp_path / "run.jsonl")[-1].action == "detach")
        assert "of the model" in server.output
        assert within(5, lambda: not list(tmp_path.glob("autotune/*.sock")))
        assert within(5, lambda: "autotune_up 0.0" in (tmp_path / "a.prom").read_text())


@pytest.mark.beside
def test_the_api_process_is_killed(tmp_path: Path) -> None:
    """With minutes of work left, and however long ``autotune serve`` has vLLM drain when it is told to end."""
    with serving(tmp_path, fake(tmp_path, "--shutdown-timeout 600"), **{**SET, "TEST_STEP_S": "0.1"}) as server:
        core = server.engine_core
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        asked = json.loads(body("x", 1900)) | {"stream": True}
        connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        with closing(connection), closing(connection.getresponse()) as answer:
            assert answer.readline().startswith(b"data:"), "it has begun"
            server.process.kill()
        assert within(10, lambda: decisions(tmp_path / "run.jsonl")[-1].action == "detach")
        assert within(30, lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE), server.output[-2000:]
        assert not list(tmp_path.glob("autotune/*.sock"))


@pytest.mark.beside
def test_enginecore_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path, fake(tmp_path), **SET) as server:
        assert list(tmp_path.glob("autotune/*.sock"))
        server.engine_core.kill()
        assert within(20, lambda: server.health() in (503, 0))
        done = subprocess.run(
            ["autotune", "watch", "--once"], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True
        )
        assert done.returncode == 2 and "no process can be controlled" in done.stderr
        assert not list(tmp_path.glob("autotune/*.sock"))


def test_rejections_have_a_status_and_the_switch_goes_over_a_running_server(tmp_path: Path) -> None:
    with serving(tmp_path, fake(tmp_path), **SET, AUTOTUNE_REJECT_LATE="1") as server:
        for stream in (False, True):
            answers = flood(server, 60, [5] * 400, stream=stream)
            assert set(answers) == {200, 429}, answers
        (path,) = tmp_path.glob("autotune/*.sock")
        done = subprocess.run(
            ["autotune", "pause", "--kill"], env=environment(tmp_path), capture_output=True, text=True
        )
        assert done.returncode == 0 and "detached" in done.stdout, done
        assert set(flood(server, 60, [5] * 400)) == {200}
        assert not path.exists() and server.health() == 200


def test_several_prompts_and_answers_of_one_request_are_rejected_as_a_whole(tmp_path: Path) -> None:
    """With Retry-After, and nothing of it goes on: what is late comes with what is not."""
    with serving(tmp_path, fake(tmp_path), **SET, AUTOTUNE_REJECT_LATE="1") as server:
        assert server.post("/v1/completions", body([5] * 400, 8))[0] == 200

        def one(number: int) -> tuple[int, str | None, str]:
            prompts = [[number, k] + [5] * (300 if k == 2 else 10) for k in range(3)]
            more: dict[str, Any] = {"n": 2, "stream": number % 2 == 1}
            asked = {"model": "./my-model", "prompt": prompts, "max_tokens": 300, "ignore_eos": True, **more}
            connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
            with closing(connection):
                connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
                answer = connection.getresponse()
                return answer.status, answer.getheader("Retry-After"), answer.read().decode()

        with ThreadPoolExecutor(24) as pool:
            found = list(pool.map(one, range(24)))
        rejected = [(again, text) for status, again, text in found if status == 429]
        assert {status for status, *_ in found} <= {200, 429} and rejected, [(s, t[:200]) for s, _, t in found]
        assert all(again is not None and json.loads(text)["error"]["code"] == "slo" for again, text in rejected)
        assert within(
            30, lambda: re.search(r"vllm:num_requests_running\{[^}]*\} 0\.0", server.get("/metrics")[1]) is not None
        )
        assert server.post("/v1/completions", body([7] * 20, 8))[0] == 200


def test_what_autotune_serve_starts_from_a_profile_refuses_a_flood_by_status(tmp_path: Path) -> None:
    """Its scheduler with 429, and vLLM's API server by the profile's prefill rate with 503; the others are answered."""
    slo = SLO(ttft_ms=1000, tpot_ms=1000)
    known = profiled(slo=slo, engine={"name": "vllm", "version": VERSION})
    model = known.model.model_copy(update={"name": "./my-model"})
    save_profile(known.model_copy(update={"model": model}), tmp_path / "p.yaml")
    tiny_model(tmp_path / "my-model")
    words = "--profile p.yaml --anyway --reject-late --decisions run.jsonl --port PORT --max-model-len 2048"
    own = (
        NO_MODEL.partition(" --max-num-seqs")[0]
        + " --distributed-executor-backend"
        + NO_MODEL.rpartition("-backend")[2]
    )
    command = f"autotune serve ./my-model --engine vllm {words} -- {own}"
    with serving(tmp_path, command, TEST_STEP_S="0.1") as server:
        (line,) = (line for line in server.output.splitlines() if " vllm serve ./my-model" in line)
        rate = prefill_rate(known)
        assert rate is not None and f"--max-num-queued-tokens {math.ceil(rate)} " in line
        assert f"AUTOTUNE_SLO={slo}" in line and "AUTOTUNE_REJECT_LATE=1" in line
        found: Counter[int] = Counter()
        for stream in (False, True):
            assert within(20, lambda: flood(server, 1, [7] * 50)[200] == 1), "it has done with what it took"
            answers = flood(server, 150, [5] * 1500, stream=stream)
            assert set(answers) <= {200, 429, 503} and answers.total() == 150 and answers[503], answers
            found += answers
        assert set(found) == {200, 429, 503}, found
        assert within(20, lambda: flood(server, 1, [7] * 50)[200] == 1)
        assert server.stop() in (0, -signal.SIGTERM)
    assert decisions(tmp_path / "run.jsonl")[-1].action == "detach"


def test_it_goes_by_additional_config_alone(tmp_path: Path) -> None:
    section = {"slo": "ttft=200ms,tpot=500ms", "reject_late": True, "log": "run.jsonl", "pinned": {"max_batch_size": 7}}
    words = f"--additional-config {shlex.quote(json.dumps({'autotune': section}))}"
    with serving(tmp_path, fake(tmp_path, words), TEST_STEP_S="0.02") as server:
        assert "self-tuning: SLO ttft=200ms,tpot=500ms@99%, max_batch_size=7 " in server.output, server.output[-3000:]
        answers = flood(server, 60, [5] * 400)
        assert set(answers) == {200, 429}, answers
    assert decisions(tmp_path / "run.jsonl")[0].action == "attach"


def test_of_a_rejected_request_nothing_goes_on(tmp_path: Path) -> None:
    """Whatever id its client gave it: the answer comes at once, and its other prompts are ended."""
    with serving(tmp_path, fake(tmp_path), **SET | {"TEST_STEP_S": "0.1"}, AUTOTUNE_REJECT_LATE="1") as server:
        assert server.post("/v1/completions", body([7] * 400, 8))[0] == 200
        number = iter(range(3, 200))
        assert within(20, lambda: server.post("/v1/completions", body([next(number)] + [5] * 1499, 8))[0] == 429)
        prompts = [[next(number)] * 10, [next(number)] * 10, [next(number)] + [5] * 1499]
        asked = {"model": "./my-model", "prompt": prompts, "max_tokens": 500, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "X-Request-Id": "mine"}
        begun = time.monotonic()
        request = urllib.request.Request(server.url + "/v1/completions", json.dumps(asked).encode(), headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=120).close()
        refused.value.close()
        assert refused.value.code == 429 and time.monotonic() - begun < 20, "500 steps take 50 s"
        running = re.compile(r"vllm:num_requests_running\{[^}]*\} 0\.0")
        assert within(15, lambda: running.search(server.get("/metrics")[1]) is not None)


def test_answers_in_the_background_are_computed_late_and_not_rejected(tmp_path: Path) -> None:
    fake(tmp_path)
    (tmp_path / "chat.jinja").write_text("{% for one in messages %}{{ one['content'] }}{% endfor %}")
    more = SET | {"AUTOTUNE_REJECT_LATE": "1", "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    with serving(tmp_path, fake(tmp_path, "--chat-template chat.jinja"), **more) as server:
        assert server.post("/v1/completions", body([5] * 400, 8))[0] == 200

        def ask(number: int) -> str:
            asks = {
                "model": "./my-model",
                "input": f"{number} " + "x" * 400,
                "max_output_tokens": 8,
                "background": True,
            }
            status, text = server.post("/v1/responses", json.dumps(asks).encode())
            assert status == 200, text
            return str(json.loads(text)["id"])

        def texts() -> list[str]:
            """Of those that are computed."""
            found = [json.loads(server.get(f"/v1/responses/{name}")[1]) for name in names]
            over = [one for one in found if one["status"] not in ("queued", "in_progress")]
            return ["".join(part["text"] for part in one["output"][0]["content"]) for one in over]

        with ThreadPoolExecutor(60) as pool:
            names = list(pool.map(ask, range(60)))
        assert within(60, lambda: len(texts()) == 60) and all(texts())


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


ENDPOINTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda text: {"messages": chat(text), "max_tokens": 8},
    "/v1/chat/completions/batch": lambda text: {"messages": [chat(text), chat(f"2 {text}")], "max_tokens": 8},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 8},
    "/v1/messages": lambda text: {"messages": chat(text), "max_tokens": 8},
    "/inference/v1/generate": lambda text: {
        "token_ids": [*text.encode()],
        "sampling_params": {"max_tokens": 8, "ignore_eos": True},
    },
    "/invocations": lambda text: {"prompt": text, "max_tokens": 8},
}


def asked(server: VllmServer, path: str, count: int, **more: Any) -> Counter[int]:
    """Statuses of so many requests to the endpoint ``path`` at once, every second one streamed where it can be."""

    def one(number: int) -> int:
        streams = {"stream": True} if number % 2 and not path.endswith("/batch") else {}
        asks = {"model": "./my-model", **ENDPOINTS[path](f"{number} " + "x" * 400), **streams, **more}
        status, text = server.post(path, json.dumps(asks).encode())
        assert_clear(status, text)
        if status in (429, 503) and path == "/v1/messages":
            assert json.loads(text)["type"] == "error", "as its clients know it"
        return status

    with ThreadPoolExecutor(count) as pool:
        return Counter(pool.map(one, range(count)))


def test_each_endpoint_that_generates_rejects_by_status(tmp_path: Path) -> None:
    fake(tmp_path)
    (tmp_path / "chat.jinja").write_text("{% for one in messages %}{{ one['content'] }}{% endfor %}")
    words = "--chat-template chat.jinja --enable-scale-out"
    with serving(tmp_path, fake(tmp_path, words), **SET, AUTOTUNE_REJECT_LATE="1") as server:
        for path in ENDPOINTS:
            assert within(20, lambda path=path: asked(server, path, 1)[200] == 1), path
            answers = asked(server, path, 60)
            assert set(answers) <= {200, 429} and answers[429], (path, answers)
        assert "Traceback" not in server.output
    words += " --max-num-queued-tokens 1000"
    with serving(tmp_path, fake(tmp_path, words), **SET | {"AUTOTUNE_SLO": "ttft=60s", "TEST_STEP_S": "0.1"}) as server:
        for path in ENDPOINTS:
            assert within(20, lambda path=path: asked(server, path, 1)[200] == 1), path
            answers = asked(server, path, 30)
            assert set(answers) == {200, 503}, (path, answers)


def test_a_listener_that_raises_is_cut_off(tmp_path: Path) -> None:
    """And nothing else changes."""
    command = fake(tmp_path).replace("autotune.engines.vllm.Scheduler", "tests.integration.vllm_listener.Scheduler")
    with serving(tmp_path, command, **SET) as server:
        assert set(flood(server, 20, [5] * 40)) == {200}
        assert server.output.count(" raised and will hear no more\n") == 1, server.output[-3000:]
        done = subprocess.run(
            ["autotune", "watch", "--once"], env=environment(tmp_path), capture_output=True, text=True
        )
        assert done.returncode == 0 and "ttft=200ms" in done.stdout, done
        assert server.health() == 200 and set(flood(server, 5, [5] * 40)) == {200}
    assert not {one.action for one in decisions(tmp_path / "run.jsonl")} & {"kill", "detach"}


def test_health_is_503_once_a_step_has_failed(tmp_path: Path) -> None:
    """By itself vLLM's server ends within milliseconds then; here it is told to stay, as behind a proxy that asks."""
    more = SET | {"TEST_FAIL_ON": "77", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}
    with serving(tmp_path, fake(tmp_path), **more) as server:
        assert server.health() == 200 and server.post("/v1/completions", body([5] * 20, 3))[0] == 200
        status, text = server.post("/v1/completions", body([5] * 77, 3))
        assert status == 500 and "EngineCore encountered an issue" in json.loads(text)["error"]["message"]
        assert [server.health() for _ in range(3)] == [503] * 3
        assert server.post("/v1/completions", body([5] * 20, 3))[0] in (500, 503)
        assert server.health() == 503 and server.process.poll() is None
        assert within(5, lambda: decisions(tmp_path / "run.jsonl")[-1].action == "detach")


@pytest.mark.beside
def test_a_wrong_slo_ends_it_at_its_start(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"InputError: autotune: slo is 'ttft=500': .*"):
        VllmServer(tmp_path, fake(tmp_path), **{**SET, "AUTOTUNE_SLO": "ttft=500"})


@pytest.mark.beside
def test_switched_off_it_is_stock(tmp_path: Path) -> None:
    with serving(tmp_path, fake(tmp_path), **SET, AUTOTUNE_OFF="1") as server:
        assert "not tuned: it is switched off. vLLM schedules as it would without autotune" in server.output
        assert server.post("/v1/completions", body("Hello", 4))[0] == 200
        assert not list(tmp_path.glob("autotune/*.sock")) and not (tmp_path / "run.jsonl").exists()


def test_advice_for_a_server_that_is_up(tmp_path: Path) -> None:
    """Its metrics by their real names: requests, lengths and latencies are those that were sent."""
    tiny_model(tmp_path / "my-model")
    known = profiled()
    save_profile(known, tmp_path / "mine.yaml")
    command = f"vllm serve ./my-model {SMALL} --port PORT"
    with serving(tmp_path, command) as server, ThreadPoolExecutor(4) as pool:
        server.post("/v1/completions", body([5] * 40, 4))
        watching = subprocess.Popen(
            ["autotune", "advise", server.url, "mine.yaml", "--watch", "12s", "--seeds", "1", "--requests", "200", "--json"],
            cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        answers = []
        while watching.poll() is None and len(answers) < 600:
            answers.append(pool.submit(server.post, "/v1/completions", body([len(answers) + 3] * 40, 8)))
            time.sleep(0.35)
        out, error = watching.communicate(timeout=120)
        assert {answer.result()[0] for answer in answers} == {200}
    found = json.loads(out)
    assert watching.returncode in (0, 1), error
    assert 20 <= found["live"]["ended"] <= 36 and found["live"]["rate"] == pytest.approx(1 / 0.35, rel=0.35)
    assert found["live"]["engines"] == 1
    assert re.search(r"prompts 40, outputs 8 tokens", found["live"]["said"][0])
    assert "TTFT within" in found["live"]["said"][1] and "TPOT within" in found["live"]["said"][1]
    assert found["settings"][0]["label"] == "now" and len(found["settings"]) > 1
    assert any(line.startswith("warning: the profile was measured on") for line in found["advice"])
