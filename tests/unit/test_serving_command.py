"""``autotune serve``: its options come from the knobs, and what cannot work ends before a model is loaded."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

import pytest

from autotune.cli.main import run
from autotune.cli.options import request_classes
from autotune.cli.serve import _setting
from autotune.control.decision_log import DecisionLog
from autotune.engines.own import OwnSource
from autotune.profile import save_profile
from runtime.errors import InputError
from runtime.knobs import KNOBS, KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.records import FinishReason
from runtime.serving.record_log import RecordLog, read_records
from runtime.serving.run import bind, url_of
from runtime.slo import SLO
from tests.building import request_record
from tests.tiers import slow_but_for
from tests.unit.profiles import profile


def ended(*words: str) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run(["serve", *words])
    return code, out.getvalue() + err.getvalue()


def test_every_knob_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")
    code, text = ended("--help")
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    for spec in KNOBS:
        assert f"--{spec.name.replace('_', '-')}" in plain and spec.doc[:40] in plain
    for option in (
        "--slo",
        "--host",
        "--port",
        "--profile",
        "--dtype",
        "--max-model-len",
        "--max-queue",
        "--served-model-name",
    ):
        assert option in plain


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "name a model, such as tiny"),
        (("",), "an argument is empty; give it a value, or leave it out"),
        (("tiny", "--anyway"), "--anyway is given without --profile; add the profile that it is to use"),
        (("tiny", "--class", "chat"), "--class is 'chat'; it must be NAME:SLO or NAME:SLO*WEIGHT"),
        (("tiny", "--class", "chat:tpot=30"), '--class chat: "tpot=30" has no unit'),
        (
            ("tiny", "--class", "chat:tpot=30ms*much"),
            '--class chat: weight is "much"; it must be a number above 0, as *0.2',
        ),
        (("tiny", "--class", "chat:tpot=30ms*0"), "--class chat: weight of class chat is 0.0; it must be above 0"),
        (("tiny", "--class", "default:tpot=30ms"), "--class default: its SLO is that of all other requests"),
        (("tiny", "--class", "a:tpot=30ms", "--class", "a:tpot=3ms"), "--class a: it is given twice"),
        (("tiny", "--class", "chat:tpot=30ms"), "--class goes with an SLO for all other requests: add --slo"),
        (("tiny", "--slo", "tpot=50"), '--slo: "tpot=50" has no unit; write tpot=50ms or tpot=0.05s'),
        (("tiny", "--token-budget", "0"), "--token-budget is 0; it must be a whole number between 1 and"),
        (("tiny", "--max-wait-ms", "nan"), "--max-wait-ms is nan; it must be between 0 and 60000 ms"),
        (
            ("tiny", "--profile", "nothing-here.yaml"),
            "nothing-here.yaml: cannot be read (No such file or directory), and is no shipped",
        ),
        (("tiny", "--dtype", "int8"), "--dtype is int8; it must be one of auto, float32, bfloat16, float16"),
        (("tiny", "--host", "no.such.host.invalid"), "--host is no.such.host.invalid"),
        (("tiny", "--port", "66000"), "65535"),
        (("./nothing-here", "--host", "192.0.2.1", "--port", "0"), "--host is 192.0.2.1: 192.0.2.1:0 cannot be bound"),
        (("tiny", "--host", "127.0.0..1", "--port", "0"), "--host is 127.0.0..1: "),
        (
            ("./nothing-here", "--kv-tokens", "0", "--port", "0"),
            "--kv-tokens is 0; it must be a whole number of at least 1",
        ),
        (
            ("./nothing-here", "--kv-tokens", "1", "--port", "0"),
            "--kv-tokens is 1; it must be a whole number from 16 to 2147483648",
        ),
        (
            ("./nothing-here", "--max-queue", "0", "--port", "0"),
            "--max-queue is 0; it must be a whole number of at least 1",
        ),
        (
            ("./nothing-here", "--max-model-len", "0", "--port", "0"),
            "--max-model-len is 0; it must be a whole number of at least 1",
        ),
        (("tiny", "--grace", "nan"), "--grace is nan; it must be a number from 0 to 86400"),
        (("tiny", "--grace", "inf"), "--grace is inf; it must be a number from 0 to 86400"),
        (("tiny", "--ordering", "lifo"), "--ordering is lifo; it must be one of priority, fcfs, "),
        (("tiny", "--threads", "0"), "--threads is 0; it must be a whole number from 1 to 1024"),
        (("tiny", "--threads", "100000"), "--threads is 100000; it must be a whole number from 1 to 1024"),
        (("./nothing-here", "--port", "0"), "nothing-here"),
        (("tiny", "--control"), "--control needs an SLO: add --slo ttft=500ms,tpot=50ms"),
        (("tiny", "--reject-late"), "--reject-late needs to know what is late: add --slo ttft=500ms,tpot=50ms"),
        (("tiny", "--reject-late", "--slo", "tpot=50ms"), "--reject-late needs to know what is late"),
        (("tiny", "--relegate-late"), "--relegate-late needs to know what is late: add --slo ttft=500ms,tpot=50ms"),
        (
            ("tiny", "--relegate-late", "--reject-late", "--slo", "ttft=1s"),
            "--reject-late and --relegate-late do not go",
        ),
        (("tiny", "--slo", "ttft=1s", "--controller", "foo"), "error: --controller is 'foo'; it must be one of aimd, "),
        (("tiny", "--decisions", "d.jsonl"), "--decisions is d.jsonl, but no controller is attached"),
        (("tiny", "--slo", "ttft=1s", "--no-control", "--decisions", "d.jsonl"), "but no controller is attached"),
        (
            ("./nothing-here", "--slo", "ttft=1s", "--decisions", "no/such/d.jsonl"),
            "--decisions: no/such/d.jsonl cannot",
        ),
        (
            ("tiny", "--slo", "ttft=1s", "--decisions", "a.jsonl", "--records", "./a.jsonl"),
            "--records: a.jsonl is where --decisions writes; name another file",
        ),
        (
            ("tiny", "--for", "interactive"),
            "--for is interactive; it chooses among a profile's settings: add --profile",
        ),
        (("tiny", "--records", "no/such/folder/x.jsonl", "--port", "0"), "--records: no/such/folder/x.jsonl cannot"),
    ],
)
def test_bad_input_is_one_line_and_2(words: tuple[str, ...], says: str) -> None:
    code, text = ended(*words)
    lines = [line for line in text.splitlines() if " · loading " not in line]
    assert code == 2
    assert len(lines) == 1 and lines[0].startswith("error: ") and says in lines[0]


def test_a_log_that_another_server_took_while_the_model_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "d.jsonl"
    held = list[DecisionLog]()
    monkeypatch.setattr("runtime.serving.run.warm_up", lambda engine: held.append(DecisionLog(path)))
    code, text = ended("nano", "--slo", "ttft=1s", "--port", "0", "--device", "cpu", "--decisions", str(path))
    held[0].join()
    assert code == 2 and text.endswith(
        f"\nerror: --decisions: a controller that has not been closed writes its decisions to {path}; name another file\n"
    )


def test_without_a_place_for_the_control_socket_it_serves_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (folder := tmp_path / f"autotune-{os.getuid()}").write_text("a file in the way")

    def served(api: object, bound: object, *, ready: Callable[[], None], **options: object) -> int:
        ready()
        return 0

    monkeypatch.setattr("runtime.serving.run.serve_until_stopped", served)
    code, text = ended("nano", "--slo", "tpot=1s", "--port", "0", "--device", "cpu")
    assert code == 0 and "serving nano at http://127.0.0.1:" in text and ", controlled" in text
    assert (
        f"note: steer: {folder} cannot be made: File exists; autotune watch, pause and set will not find this server\n"
        in text
    )


class Source:
    """Ends the command as soon as an engine is to be made."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def with_options(self, **options: Any) -> NoReturn:
        self.options = options
        raise InputError("that is all")


@pytest.mark.parametrize(
    ("words", "late", "order", "own"),
    [
        ((), None, None, "priority"),
        (("--ordering", "fair"), None, None, "fair"),
        (("--reject-late",), "by_weight", "deadline", "priority"),
        (("--relegate-late",), "relegate", "deadline", "priority"),
        (("--reject-late", "--ordering", "fair"), "by_weight", "fair", "fair"),
        (("--relegate-late", "--ordering", "priority"), "relegate", "priority", "priority"),
    ],
)
def test_an_ordering_that_is_asked_for_holds_where_late_requests_are_rejected_too(
    words: tuple[str, ...], late: str | None, order: str | None, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source()
    monkeypatch.setattr(OwnSource, "load", lambda name, **loading: source)
    code, text = ended("tiny", "--slo", "ttft=1s", "--port", "0", *words)
    assert code == 2 and "that is all" in text
    given = source.options
    policy = AdmissionPolicy.of(given["admission"])
    assert given.get("ordering", "priority") == own
    assert (policy and policy.late, policy and policy.order) == (late, order)


def test_a_port_in_use_is_found_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = ended("./nothing-here", "--port", str(port))
    assert code == 2 and f"--port is {port}: 127.0.0.1:{port} cannot be bound" in text


def test_a_port_is_held_while_the_model_is_loaded() -> None:
    """Bound, and not listening yet: of two servers that start together, the second is refused."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(InputError, match=rf"^--port is {port}: 127\.0\.0\.1:{port} cannot be bound"):
            bind("127.0.0.1", port).close()


def test_it_binds_to_this_machine_only_unless_told() -> None:
    import inspect

    from autotune.cli.serve import serve

    assert inspect.signature(serve).parameters["host"].default == "127.0.0.1"
    with bind("127.0.0.1", 0) as bound:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url_of(bound))


def test_knobs_above_the_usual_ceilings_raise_them() -> None:
    knobs, limits = _setting(None, "balanced", {"token_budget": 16384})
    assert knobs == Knobs(token_budget=16384) and limits == KnobLimits(token_budget=16384)
    with pytest.raises(InputError, match="--max-batch-size is 70000; it must be"):
        _setting(None, "balanced", {"max_batch_size": 70000})


def test_a_profile_gives_knobs_and_ceilings_and_options_win(tmp_path: Path) -> None:
    found = profile()
    knobs, limits = _setting(found, "balanced", {})
    assert (knobs, limits) == (found.settings["balanced"].knobs, found.engine.limits)
    knobs, _ = _setting(found, "balanced", {"chunk_size": 33})
    assert knobs == found.settings["balanced"].knobs.with_(chunk_size=33)
    save_profile(found, tmp_path / "mine.yaml")
    code, text = ended("--profile", str(tmp_path / "mine.yaml"), "--for", "fun")
    assert code == 2 and f"--for is fun; {tmp_path / 'mine.yaml'} holds {', '.join(found.settings)}" in text


@pytest.mark.parametrize("objective", ["goodput", "mean-e2e"])
def test_a_profile_made_without_an_slo_has_none_to_serve_by(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_profile(profile().model_copy(update={"objective": objective}), tmp_path / "mine.yaml")
    source = Source()
    monkeypatch.setattr(OwnSource, "load", lambda name, **loading: source)
    mine = str(tmp_path / "mine.yaml")
    note = f"note: {mine} was made without an SLO (objective mean-e2e), so no controller is attached; --slo names one\n"
    without = objective == "mean-e2e"
    _, text = ended("--profile", mine, "--anyway", "--port", "0")
    assert (note in text) is without and source.options["slo"] == (None if without else profile().slo)
    _, text = ended("--profile", mine, "--anyway", "--port", "0", "--slo", "ttft=1s")
    assert note not in text and source.options["slo"] == SLO(ttft_ms=1000)
    code, text = ended("--profile", mine, "--anyway", "--port", "0", "--control")
    assert code == 2 and ("--control needs an SLO" in text) is without


@pytest.mark.parametrize(
    "missing", slow_but_for(("uvicorn",), ("fastapi", "uvicorn", "prometheus_client", "starlette"))
)
def test_without_the_extra_it_says_so_in_one_line(missing: str) -> None:
    """In a process of its own, in which the package cannot be imported."""
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from autotune.cli.main import main; main(['serve', 'tiny', '--port', '0'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: autotune serve needs the extra serve: pip install '.[serve]' in a checkout")
    assert missing in done.stderr and done.stderr.count("\n") == 1


def test_records_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    first = request_record([1.0, 1.25], arrival=0.1)
    second = request_record(reason=FinishReason.REJECTED)
    with RecordLog(path) as log:
        log.on_request(first)
        log.flush()
        assert read_records(path) == [first._replace(token_times=[1.0, 1.25])]
        log.on_request(second)
    with RecordLog(path) as log:
        log.on_request(first)
    assert [r.reason for r in read_records(path)] == [first.reason, second.reason, first.reason]
    assert json.loads(path.read_text().splitlines()[1])["reason"] == "rejected"


def test_nothing_is_appended_to_a_file_of_something_else(tmp_path: Path) -> None:
    """A word in the wrong place (--decisions for --records) must not cost what was recorded before."""
    records, notes = tmp_path / "records.jsonl", tmp_path / "notes.txt"
    with RecordLog(records) as log:
        log.on_request(request_record([1.0, 1.25], arrival=0.1))
    notes.write_text("mine\n")
    before = records.read_text()
    code, text = ended("./nothing-here", "--slo", "ttft=1s", "--decisions", str(records), "--port", "0")
    assert code == 2 and f"--decisions: {records} exists and is no decision log; name another file" in text
    code, text = ended("./nothing-here", "--records", str(notes), "--port", "0")
    assert code == 2 and f"--records: {notes} exists and holds no records of requests; name another file" in text
    assert (records.read_text(), notes.read_text()) == (before, "mine\n")


def test_classes_are_spelt_name_slo_weight() -> None:
    chat, batch = request_classes(["chat:ttft=300ms,tpot=30ms@95%*2", "batch:e2e=60s"])
    assert (chat.name, chat.slo, chat.weight) == ("chat", SLO(ttft_ms=300, tpot_ms=30, attainment=0.95), 2.0)
    assert (batch.name, batch.slo.e2e_ms, batch.weight) == ("batch", 60_000, 1.0)
