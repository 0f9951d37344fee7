"""A ``vllm serve`` that tunes itself, by docs/vllm.md and in bad weather. In an environment with vLLM."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import time
import tomllib
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
from tests.integration.vllm_environment import ENVIRONMENT, tiny_model, vllm_python_with_tests
from tests.integration.vllm_server import NO_MODEL, ROOT, SMALL, VllmServer, environment, serving
from tests.unit.simulated_profile import profiled

PAGE = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
SCHEDULER = "--scheduler-cls autotune.engines.vllm.Scheduler --middleware autotune.engines.vllm.RejectionStatus"
pytestmark = pytest.mark.slow


def commands() -> list[str]:
    found = re.findall(r"^```console\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [line[2:].partition("  # ")[0].strip() for block in found for line in block.splitlines()]


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
    """In vLLM's engine, in its own process."""
    command = [str(vllm_python_with_tests()), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default"]
    done = subprocess.run(
        [*command, "tests/integration/vllm_tunes.py"],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-5000:] + done.stderr[-1000:]


# -- the page ---------------------------------------------------------------------------------------------------------------


@pytest.mark.beside
def test_the_page_installs_what_there_is() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert commands()[0] == "pip install '.[vllm]'" and extras["vllm"] == ["vllm>=0.32,<0.33"]
    assert {command.split()[0] for command in commands()[1:]} == {
        "autotune",
        "AUTOTUNE_SLO=ttft=500ms,tpot=50ms",
        "curl",
    }


@pytest.mark.beside
def test_the_page_names_every_setting() -> None:
    for name in Options.__dataclass_fields__:
        assert f'| `"{name}"`' in PAGE and f"`AUTOTUNE_{name.upper()}`" in PAGE


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    tiny_model(tmp_path / "my-model")
    serve, *rest = (command for command in commands() if command.startswith(("autotune", "curl")))
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
    (line,) = (command for command in commands() if command.startswith("AUTOTUNE_SLO"))
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
        if status == 429:
            assert json.loads(text)["error"]["type"] == "rate_limit_error"
        else:
            assert '"abort"' not in text and ("[DONE]" not in text or text.count("data:") > 1), text
        return status

    with ThreadPoolExecutor(count) as pool:
        return Counter(pool.map(one, range(count)))


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
