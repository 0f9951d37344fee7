"""The public names: each can be imported, and none of them brings torch along before it must."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

import autotune
import runtime

ROOT = Path(__file__).parents[2]


def exported() -> list[tuple[str, str]]:
    """Every (module, name) in an ``__all__`` of ours, found in the source."""
    found = []
    for path in [*(ROOT / "runtime").rglob("*.py"), *(ROOT / "autotune").rglob("*.py")]:
        if "__all__" in path.read_text(encoding="utf-8"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found += [(module, name) for name in getattr(importlib.import_module(module), "__all__")]  # noqa: B009  # mypy knows no __all__
    return sorted(found)


@pytest.mark.parametrize(("module", "name"), exported())
def test_what_is_exported_exists(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is not None


def test_runtime_exports_what_its_users_need() -> None:
    assert set(runtime.__all__) >= {
        "SLO", "Completion", "Engine", "FinishReason", "KnobLimits", "Knobs", "LimitedBy", "RequestClass", "RequestRecord",
        "SamplingParams", "StepRecord", "Stream", "TokenEvent", "Tunable", "load_model", "AutotuneError", "RejectedError",
    }  # fmt: skip


@pytest.mark.parametrize("package", [autotune, runtime], ids=lambda package: package.__name__)
def test_type_checkers_see_the_same_names(package: ModuleType) -> None:
    """The names are loaded when first used, so the ones under TYPE_CHECKING are a second list: it must not drift."""
    tree = ast.parse((ROOT / package.__name__ / "__init__.py").read_text(encoding="utf-8"))
    guard = next(node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    seen = {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in guard.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    seen = {name: home for name, home in seen.items() if name in package.__all__}  # the rest serves annotations
    assert {*seen} == {*package.__all__} - {"__version__"} - defined
    assert list(package.__all__) == sorted(package.__all__) and {*package.__all__} <= {*dir(package)}
    for name, (module, attribute) in seen.items():
        assert getattr(package, name) is getattr(importlib.import_module(module), attribute)


def test_an_unknown_name_is_an_attribute_error() -> None:
    for package in (autotune, runtime):
        with pytest.raises(AttributeError, match="has no attribute 'Motor'"):
            package.Motor  # noqa: B018


def test_the_version_is_that_of_the_package() -> None:
    assert autotune.__version__ == version("gpu-autotune")


def test_naming_an_engine_and_an_slo_loads_no_torch() -> None:
    code = (
        "import sys, autotune, runtime\n"
        "from runtime import SLO, Engine, KnobLimits, Knobs, SamplingParams\n"
        "heavy = {'torch', 'transformers', 'optuna', 'fastapi'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
