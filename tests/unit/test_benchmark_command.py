"""How the benchmarks' commands end."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import embeddings, engine, padding, simulator
from benchmarks.command import exit_code
from benchmarks.overhead import __main__ as overhead
from benchmarks.sweep import __main__ as sweep
from runtime.errors import InputError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_main_that_returns_nothing_is_a_success_and_a_code_of_its_own_stays() -> None:
    @exit_code()
    def main(code: int | None) -> int | None:
        return code

    assert main(None) == 0 and main(3) == 3


def test_bad_input_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    @exit_code()
    def main() -> None:
        raise InputError("--seeds is 0; it must be at least 1")

    assert main() == 2
    assert capsys.readouterr().err == "error: --seeds is 0; it must be at least 1\n"


def test_ctrl_c_says_what_is_left_and_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    @exit_code("interrupted; nothing was written")
    def main() -> None:
        raise KeyboardInterrupt

    assert main() == 130
    assert capsys.readouterr().err == "interrupted; nothing was written\n"


def test_any_other_error_is_a_defect_and_keeps_its_traceback() -> None:
    @exit_code()
    def main() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        main()


@pytest.mark.parametrize(
    ("main", "arguments", "said"),
    [
        (sweep.main, ["--jobs", "0"], "--jobs: 0; it must be a whole number from 1 on"),
        (simulator.main, ["--rounds", "0"], "--rounds: 0; it must be a whole number from 1 on"),
        (overhead.main, ["--rounds", "0"], "--rounds: 0; it must be a whole number from 1 on"),
        (padding.main, ["--items", "0"], "--items: 0; it must be a whole number from 1 on"),
        (embeddings.main, ["--texts", "3"], "--texts: 3; it must be a whole number from 5 on"),
        (engine.main, ["--prompts", "1e999"], "--prompts: 1e999; it must be a whole number from 1 on"),
    ],
)
def test_a_count_that_leaves_nothing_to_measure_is_bad_input(
    main: Callable[[list[str]], int], arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument {said}\n")


def test_every_benchmark_with_options_ends_that_way() -> None:
    mains = [
        (path.relative_to(BENCHMARKS), node)
        for path in sorted(BENCHMARKS.rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and "parse_args(" in ast.unparse(node)
    ]
    assert len(mains) > 15
    others = [path for path, main in mains if not any("exit_code(" in ast.unparse(d) for d in main.decorator_list)]
    assert others == []
