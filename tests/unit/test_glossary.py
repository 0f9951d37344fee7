"""The glossary says what the code does: its examples run, and it leaves nothing out."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from runtime.knobs import KNOBS, Knobs, KnobSpec
from runtime.records import FinishReason, LimitedBy
from runtime.slo import METRICS
from tests.building import request_record

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
TEXT = PAGE.read_text(encoding="utf-8")


def table(first_column: str) -> dict[str, list[str]]:
    """The rows of the table headed ``first_column``, by their first cell without backticks."""
    lines = TEXT.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = {}
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        first, *rest = (cell.strip() for cell in line.strip("|").split("|"))
        rows[first.strip("`")] = rest
    return rows


def run_examples(text: str) -> tuple[doctest.TestResults, str]:
    """Run every ``pycon`` block of ``text`` in one namespace; how many ran and failed, and the report."""
    blocks = re.findall(r"^```pycon\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, str(PAGE), 0)
    runner, report = doctest.DocTestRunner(verbose=False), []
    return runner.run(examples, out=report.append), "".join(report)


def test_the_examples_are_true() -> None:
    results, report = run_examples(TEXT)
    assert results.attempted >= 25
    assert results.failed == 0, report


def test_a_false_example_would_be_found() -> None:
    assert TEXT.count("\n0.25\n>>> record.ttft") == 1
    results, _ = run_examples(TEXT.replace("\n0.25\n>>> record.ttft", "\n0.26\n>>> record.ttft"))
    assert results.failed == 1


def test_every_metric_has_a_formula() -> None:
    words = [word.split(",")[0] for word in table("term")]
    assert words == ["queue time", "TTFT", "ITL", "TPOT", "E2E"]
    assert {word.lower() for word in words} >= set(METRICS)
    for word in words:  # each is a metric of the record, and none there is without a word here
        assert hasattr(request_record([1.0]), word.lower().replace(" ", "_"))


@pytest.mark.parametrize("spec", KNOBS, ids=lambda spec: spec.name)
def test_every_knob_is_described_as_it_is(spec: KnobSpec) -> None:
    unit, bounds, default, meaning = table("knob")[spec.name]
    assert (unit, bounds) == (spec.unit, f"{spec.low:.10g}–{spec.high:.10g}")
    assert float(default) == getattr(Knobs(), spec.name)
    assert meaning == spec.doc


def test_there_is_no_other_knob() -> None:
    assert list(table("knob")) == [spec.name for spec in KNOBS]


def test_every_way_to_end_counts_as_the_page_says() -> None:
    rows = table("reason")
    assert list(rows) == [str(reason) for reason in FinishReason]
    for name, (_, completed, offered) in rows.items():
        record = request_record([1.0], reason=FinishReason(name))
        assert (record.completed, record.offered) == (completed == "yes", offered == "yes")


def test_every_bound_of_a_step_is_explained() -> None:
    assert list(table("value")) == [str(bound) for bound in LimitedBy]


@pytest.mark.parametrize("word", ["attainment", "goodput", "capacity", "peak goodput", "epoch", "SLO", "KV block"])
def test_every_word_of_the_design_is_defined(word: str) -> None:
    assert re.search(rf"^\*\*{word}\*\*", TEXT, re.MULTILINE | re.IGNORECASE)
