"""The script that runs everything that needs a GPU: how parts end, what is kept, its page, its client, its list of wheels."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.client import Answered, Request, load, send, summary
from benchmarks.gpu.page import page
from benchmarks.gpu.parts import PARTS, Part, controller, served_vllm, tuned_vllm
from benchmarks.gpu.place import Ended, LeftOutError, Place, ended, read, state_file, write
from benchmarks.gpu.running import results, run_parts
from benchmarks.gpu.verb import autotune
from benchmarks.gpu.vllm import PYTHON
from benchmarks.gpu.wheels import LIST, fetching, wheels
from benchmarks.kept import code_digest
from runtime.errors import InputError
from tests.unit.command_line import exit_code

ROOT = Path(__file__).parents[2]
NOTHING = Part("fingerprint", "Nothing in so short a time", "fingerprint", 0.05)


def test_every_part_has_its_module_and_a_limit_that_a_call_of_ten_minutes_can_hold() -> None:
    for part in PARTS:
        assert (ROOT / "benchmarks" / "gpu" / "parts" / f"{part.module}.py").exists(), part.name
        assert 0 < part.limit_s < 9.5 * 60
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_what_is_kept_survives_a_line_that_was_cut_off(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "x.jsonl", dry=True)
    place.keep("a", 1)
    place.keep("a", {"again": 2})
    with place.file.open("a") as file:
        file.write('{"name": "b", "fou')
    assert read(place.file) == {"a": {"again": 2}}


@pytest.mark.parametrize("dry", [False, True])
def test_what_another_part_has_found_counts_if_it_ran_likewise(tmp_path: Path, dry: bool) -> None:
    place = Place(tmp_path, tmp_path / "x.jsonl", dry)
    place.keep("rate", 3e12)
    assert place.earlier("x", "rate") is None, "how it ran is not known"
    here = code_digest()
    for likewise, code in ((dry, here), (not dry, here), (dry, "other")):
        write(state_file(tmp_path, "x"), json.dumps(Ended("done", 1.0, dry=likewise, code=code)._asdict()))
        assert place.earlier("x", "rate") == (3e12 if (likewise, code) == (dry, here) else None)
    assert place.earlier("never", "rate") is None


def test_a_part_that_is_begun_again_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever kills the script then: what it had found is gone."""
    write(state_file(tmp_path, NOTHING.name), json.dumps(Ended("done", 3.0)._asdict()))

    def killed(*args: Any, **options: Any) -> None:
        raise SystemExit

    monkeypatch.setattr("benchmarks.gpu.running.subprocess.Popen", killed)
    with pytest.raises(SystemExit):
        run_parts([NOTHING], tmp_path, dry=True, minutes=60, say=lambda text: None)
    assert ended(tmp_path, NOTHING.name) is None


def test_a_part_that_takes_too_long_is_ended_and_the_next_is_begun(tmp_path: Path) -> None:
    said: list[str] = []
    other = NOTHING._replace(name="ceilings", module="ceilings")
    assert run_parts([NOTHING, other], tmp_path, dry=True, minutes=60, say=said.append) == (False, [])
    for part in (NOTHING, other):
        how = ended(tmp_path, part.name)
        assert how is not None and how.state == "out of time" and "longer than 0 s" in how.why and how.dry


def test_what_may_not_end_in_time_is_not_begun(tmp_path: Path) -> None:
    said: list[str] = []
    later = NOTHING._replace(name="served", limit_s=500)
    assert run_parts([NOTHING, later], tmp_path, dry=True, minutes=2, say=said.append) == (False, [later])
    assert "--resume goes on here" in said[-1] and ended(tmp_path, later.name) is None


def test_how_a_part_ended_is_none_where_nothing_can_be_read(tmp_path: Path) -> None:
    assert ended(tmp_path, NOTHING.name) is None
    write(tmp_path / "fingerprint.state.json", "{")
    assert ended(tmp_path, NOTHING.name) is None
    write(tmp_path / "fingerprint.state.json", json.dumps(Ended("done", 3.0)._asdict()))
    assert ended(tmp_path, NOTHING.name) == Ended("done", 3.0)


def test_what_other_code_has_done_is_told_and_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.gpu.__main__.PARTS", [NOTHING])
    arguments = ["--resume", "--dry", "--out", str(tmp_path)]
    for code, said in ((code_digest(), "1 parts are done, 0 are left"), ("other", "0 parts are done, 1 are left")):
        write(tmp_path / "fingerprint.state.json", json.dumps(Ended("done", 3.0, dry=True, code=code)._asdict()))
        assert main(arguments) == (1 if code == "other" else 0)
        told = capsys.readouterr().err
        assert said in told and ("of other code, and not counted as done: fingerprint" in told) == (code == "other")
    how = ended(tmp_path, NOTHING.name)
    assert how is not None and how.state == "out of time" and how.code == code_digest()


def test_the_page_says_which_parts_are_not_of_the_same_code(tmp_path: Path) -> None:
    for part, code in zip(PARTS[:3], ("abc", "abc", ""), strict=True):
        write(tmp_path / f"{part.name}.state.json", json.dumps(Ended("done", 1.0, code=code)._asdict()))
    first, second, third = (part.name for part in PARTS[:3])
    said = f"**Not all parts are of the same code: {first}, {second} (abc); {third} (unknown).**"
    assert said in page(results(PARTS, tmp_path)) and "same code" not in page(results(PARTS[:2], tmp_path))


def test_the_page_has_every_part_and_its_answers(tmp_path: Path) -> None:
    first, second = PARTS[0], PARTS[2]
    place = Place(tmp_path, tmp_path / f"{second.name}.jsonl", dry=False)
    for name in ("attention", "norm"):
        place.keep(name, {"error": 0.00123456, "us": 3.0})
    place.keep("alone", [1, "a | b"])
    write(tmp_path / f"{first.name}.state.json", json.dumps(Ended("left out", 1.0, "no GPU")._asdict()))
    write(tmp_path / f"{second.name}.state.json", json.dumps(Ended("failed", 2.0, "it broke")._asdict()))
    text = page(results(PARTS, tmp_path))
    assert (
        f"| {first.name} | left out | 1 | no GPU |" in text
        and f"## {second.title}" in text
        and "**failed**: it broke" in text
    )
    assert "| |error|us|" in text and "| attention | 0.001235 | 3 |" in text and "- **alone**: 1, a \\| b" in text
    assert "dry run" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--part", "all"], "--part is all; it must be one of fingerprint, ceilings, "),
        (["--minutes", "0"], "0; it must be 1 to 1440 minutes"),
        (["--minutes", "soon"], "soon; it must be 1 to 1440 minutes"),
    ],
)
def test_bad_input_is_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, words) == 2 and said in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--out", str(tmp_path / "file" / "x")]) == 2
    assert "error: --out is " in capsys.readouterr().err


# -- the client -------------------------------------------------------------------------------------------------------


class Canned(BaseHTTPRequestHandler):
    """Answers as a server of completions does; a prompt that begins with 13 is refused, and one with 14 is cut short."""

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "m"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        first = body["prompt"][0]
        if first == 13:
            self._send(429, b"too late")
            return
        count = body["max_tokens"] - (first == 14)
        events: list[dict[str, Any]] = [{"choices": [{"text": ""}]} for _ in range(count)]
        events.append({"choices": [], "usage": {"completion_tokens": count}})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._send(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _send(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Canned) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_answers_are_those_of_their_requests(url: str) -> None:
    requests = [Request(0.0, [1, 2], 3), Request(0.0, [13], 3), Request(0.02, [14], 3), Request(0.0, [5], 7)]
    answers, seconds = send(url, requests)
    assert [a.tokens for a in answers] == [3, 0, 2, 7] and seconds >= 0.02
    assert [a.error for a in answers] == ["", "429: too late", "2 of 3 tokens came", ""]
    assert 0 < answers[0].first_s <= answers[0].last_s
    told = summary(answers, 2.0)
    assert told["requests"] == 4 and told["failed"] == 2 and told["tokens_per_s"] == 5.0


def test_latencies_are_of_those_that_were_answered() -> None:
    told = summary([Answered(0.1, 0.5, 5), Answered(0.3, 0.3, 1), Answered(9.0, 9.0, 0, "lost")], 1.0)
    assert told["ttft_ms"] == {"p50": 200.0, "p99": 300.0} and told["tpot_ms"] == {"p50": 100.0, "p99": 100.0}


def test_a_load_is_the_same_for_the_same_seed_and_has_its_rate() -> None:
    drawn = load(400, 10.0, prompt=20, output=8, vocabulary=1000, seed=3)
    assert drawn == load(400, 10.0, prompt=20, output=8, vocabulary=1000, seed=3)
    assert 30 < drawn[-1].at < 50 and {len(a.prompt) for a in drawn} == set(range(10, 31))
    assert {a.output for a in drawn} == set(range(4, 13))
    assert {a.at for a in load(3, None, prompt=4, output=4, vocabulary=400, seed=1)} == {0.0}


# -- vLLM -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dry", "named", "said"),
    [
        (False, sys.executable, "vLLM is not installed"),
        (True, "", "a dry run starts vLLM only by a Python with its CPU build, named in AUTOTUNE_VLLM_PYTHON"),
        (True, "/nowhere/python", "AUTOTUNE_VLLM_PYTHON is /nowhere/python: No such file"),
        (True, sys.executable, "which has no vLLM"),
    ],
)
@pytest.mark.parametrize("part", [served_vllm, tuned_vllm], ids=["served", "tuned"])
def test_a_part_that_needs_vllm_says_why_it_is_left_out(
    part: Any, dry: bool, named: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("this Python has vLLM")
    monkeypatch.setenv(PYTHON, named)
    with pytest.raises(LeftOutError, match=said):
        part.run(Place(tmp_path, tmp_path / "x.jsonl", dry), "qwen3-0.6b")


def test_a_dry_run_serves_the_smallest_model_by_the_vllm_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[Any]()

    def serving(command: list[str], log: Path, **_: Any) -> Any:
        given.extend(command)
        return nullcontext("http://there")

    monkeypatch.setattr(served_vllm, "vllm_python", lambda place: "python-with-vllm")
    monkeypatch.setattr(served_vllm, "serving", serving)
    monkeypatch.setattr(served_vllm, "offered", lambda place, url, rate: given.append((url, rate)))
    served_vllm.run(Place(tmp_path, tmp_path / "x.jsonl", dry=True), "qwen3-0.6b")
    folder = tmp_path / "vllm-nano"
    assert given[0] == "python-with-vllm" and str(folder) in given and (folder / "config.json").exists()
    assert given[given.index("--dtype") + 1] == "float32" and "--enforce-eager" in given
    assert given[-1] == ("http://there", None)


STARTED = "INFO self-tuning: SLO ttft=1s, max_batch_size=8; process 4711, control socket x.sock\n"


@pytest.mark.parametrize(
    ("log", "status", "lost", "action", "said"),
    [
        (STARTED, 429, (0, 0), "kill", ""),
        (STARTED, 503, (0, 0), "kill", ""),
        (
            "not tuned: it is version 1.0",
            429,
            (0, 0),
            "kill",
            "no controller is attached: not tuned: it is version 1.0",
        ),
        (STARTED, 200, (0, 0), "kill", "a request that could not be met was answered with 200"),
        (STARTED, 429, (2, 0), "kill", "2 requests were lost"),
        (STARTED, 429, (0, 3), "kill", "3 requests were lost or refused after the kill"),
        (STARTED, 429, (0, 0), "pause", "the decision log has no kill"),
    ],
)
def test_what_a_tuned_vllm_must_do_is_checked(
    log: str,
    status: int,
    lost: tuple[int, int],
    action: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, decisions, words = tmp_path / "log", tmp_path / "decisions", list[tuple[str, ...]]()
    file.write_text(log)
    decisions.write_text(f'{{"action": "attach"}}\n{{"action": "{action}"}}\n')
    each = iter(lost)
    monkeypatch.setattr(tuned_vllm, "_flood", lambda *_, **__: next(each))
    monkeypatch.setattr(tuned_vllm, "_one", lambda *_: (status, "too late"))
    monkeypatch.setattr(tuned_vllm, "autotune", lambda place, *given, **_: words.append(given))
    place = Place(tmp_path, tmp_path / "x.jsonl", dry=True)
    with pytest.raises(RuntimeError, match=f"^{said}$") if said else nullcontext():
        tuned_vllm._served(place, "python", "http://", "model", file, decisions)
    assert words == ([("pause", "--kill", "4711")] if log == STARTED else [])
    if log == STARTED:
        assert read(place.file)["rejection"] == {"status": status, "answer": "too late"}


def test_of_a_flood_those_count_that_were_neither_answered_nor_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, tmp_path / "x.jsonl", dry=True)
    requests = [Request(0.0, [first], 3) for first in (13, 14, 5, 13)]
    monkeypatch.setattr(tuned_vllm, "load", lambda *_, **__: requests)
    assert tuned_vllm._flood(place, url, "a", seed=2) == 1
    assert tuned_vllm._flood(place, url, "b", seed=2, refused=()) == 3
    assert read(place.file)["a"]["failed"] == 3 and read(place.file)["a"]["rejected"] == 2


# -- verbs of the command ---------------------------------------------------------------------------------------------


def test_a_dry_run_compares_controllers_under_the_same_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[tuple[str, ...]]()

    def autotune(place: Place, *words: str, **_: Any) -> dict[str, Any]:
        said.append(words)
        return {}

    monkeypatch.setattr(controller, "autotune", autotune)
    for dry in (False, True):
        controller.run(Place(tmp_path, tmp_path / "x.jsonl", dry), "llama-3.1-8b")
    differ = [pair for pair in zip(*said, strict=True) if pair[0] != pair[1]]
    assert differ == [("llama-3.1-8b", "nano"), ("--gpu", "--cpu"), ("12s", "1s"), ("4", "1")]
    assert {"--workload", "--slo", "--rate", "--fixed", "--reject-late"} < set(said[1])


@pytest.mark.parametrize(("told", "code"), [('{"status": "stopped"}', 130), ("", 130), ('{"status": "stopped"}', 3)])
def test_a_verb_that_takes_too_long_is_stopped_and_what_it_says_then_is_kept(
    told: str, code: int, tmp_path: Path
) -> None:
    verb = tmp_path / "python"
    verb.write_text(f"#!/bin/sh\ntrap 'echo '\\''{told}'\\''; exit {code}' INT\nwhile :; do sleep 0.05; done\n")
    verb.chmod(0o755)
    place = Place(tmp_path, tmp_path / "x.jsonl", dry=True)
    if told and code == 130:
        assert autotune(place, "bench", python=str(verb), within_s=1.0) == {"status": "stopped"}
    else:
        with pytest.raises(RuntimeError, match=f"autotune bench ended with {code}: "):
            autotune(place, "bench", python=str(verb), within_s=1.0)


# -- wheels -----------------------------------------------------------------------------------------------------------


def test_the_list_of_wheels_can_be_read_and_says_which_are_compiled() -> None:
    found = {wheel.name: wheel for wheel in wheels(LIST.read_text(encoding="utf-8"))}
    assert {"optuna", "fastapi", "pydantic", "pytest"} < found.keys()
    assert {name for name, wheel in found.items() if wheel.compiled} == {
        "pydantic-core",
        "psutil",
        "scipy",
        "hypothesis",
    }
    assert not {"torch", "triton", "transformers", "numpy"} & found.keys()


def test_a_compiled_wheel_is_fetched_for_its_python(tmp_path: Path) -> None:
    pure, compiled = wheels("a==1.0\nb-c==2.1 compiled\n")
    assert "any" in fetching(pure, tmp_path, "3.12") and "py" in fetching(pure, tmp_path, "3.12")
    words = fetching(compiled, tmp_path, "3.12")
    assert words[-1] == "b-c==2.1" and "cp" in words and "3.12" in words and "manylinux2014_x86_64" in words


@pytest.mark.parametrize("line", ["anyio", "anyio==4\nanyio==5", "anyio>=4", "Anyio == 4"])
def test_a_line_that_is_none_is_named(line: str) -> None:
    with pytest.raises(InputError, match=r"wheels.txt, line [12]: .*it must be NAME==VERSION"):
        wheels(line)
