"""Who may import whom, read from the source. The rules are those of docs/concepts/architecture.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from autotune.engines.named import _ENGINES

ROOT = Path(__file__).parents[2]
TORCH = {"torch", "torchvision", "transformers", "tokenizers", "safetensors", "triton"}
HTTP = {"fastapi", "starlette", "uvicorn", "httpx", "aiohttp", "prometheus_client"}
SEEN_BY_CONTROLLERS = tuple(f"runtime.{name}" for name in ("knobs", "records", "slo", "tunable", "step_model"))
ROOMS = (
    "workload", "engines", "measure", "cost", "profile", "control", "simulate", "profiling", "report", "export", "bench",
    "advise", "cli",
)  # fmt: skip
"""The rooms of ``autotune``: each imports only those before it."""
ENGINES = {
    "runtime.llm.engine", "runtime.llm.loop", "runtime.llm.tuning.TunableEngine", "runtime.batching.batcher",
    "runtime.batching.decorator",
    "runtime.batching.pool", "runtime.Engine", "runtime.Batcher", "runtime.batch",
}  # fmt: skip
"""What is measured and tuned, by name. What simulates a batcher or times its calls takes its parts (core, strategies, calls),
and is no business of this rule."""
SEAM = {"protocol", "named", "defaults", "model_folder"}
"""Modules of ``autotune/engines`` that whoever is above may import, beside the package itself. All others hold an engine each."""
BEHIND_THE_SEAM = {
    f"autotune.engines.{path.stem}"
    for path in (ROOT / "autotune" / "engines").iterdir()
    if path.suffix == ".py" or (path / "__init__.py").exists()
} - {f"autotune.engines.{name}" for name in (*SEAM, "__init__")}
NAMES = {*_ENGINES, *(row.in_facts for row in _ENGINES.values())}
"""What engines are called on the command line, in facts and in profiles."""
LEAVES = {"reading", "writing"}
"""Modules of ``autotune`` that stand in no room: they import nothing of ours but ``runtime.errors``."""
SEEN_BY_LEAVES = ("runtime.errors",)
DEVICES = "runtime.torch_backend"
"""Where ``cpu`` and ``cuda`` hold what only that device does."""
FREE_OF_TORCH = "a module outside runtime/torch_backend imports {0} when it is imported; import it inside the function"


@dataclass(frozen=True)
class Import:
    """One imported module. ``late``: not run when the importing module is (in a function, or for type checkers only)."""

    target: str
    late: bool


def imports_of(module: str, source: str, *, package: bool = False) -> Iterator[Import]:
    """Every import in ``source``, absolute. ``from a import b`` yields a and a.b, for b may be a module."""
    yield from _visit(ast.parse(source), module if package else module.rpartition(".")[0], late=False)


def _visit(node: ast.AST, package: str, late: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, late) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *([base] if base else [])])
        yield Import(base, late)
        yield from (Import(f"{base}.{alias.name}", late) for alias in node.names)
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _visit(child, package, True)
        for child in node.orelse:
            yield from _visit(child, package, late)
    else:
        inside = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from _visit(child, package, inside)


def compared_with(source: str) -> set[str]:
    """The texts that ``source`` compares anything with: by ``==``, ``in`` and the like, or as a case of ``match``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        else:
            continue
        for side in sides:
            for one in side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]:
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    found.add(one.value)
    return found


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def room(module: str) -> str:
    """The room of ``autotune`` that ``module`` is in; empty if it is in none."""
    parts = module.split(".")
    return parts[1] if parts[0] == "autotune" and len(parts) > 1 else ""


def violations(module: str, source: str, *, package: bool = False) -> set[str]:
    """What ``source``, as the text of ``module``, imports against the rules, and the names of engines that it compares with."""
    found = set()
    above_engines = within(module, "autotune") and not within(module, "autotune.engines")
    if above_engines:
        found |= {f'"{name}" is the name of an engine, and compared with' for name in compared_with(source) & NAMES}
    for imported in imports_of(module, source, package=package):
        target, top = imported.target, imported.target.partition(".")[0]
        if within(module, "runtime") and top == "autotune":
            found.add("runtime imports autotune")
        if top in TORCH and not imported.late and not within(module, "runtime.torch_backend"):
            found.add(FREE_OF_TORCH.format(top))
        backend = within(target, "runtime.torch_backend")
        if backend and above_engines:
            found.add("only autotune/engines wires autotune to runtime.torch_backend")
        if above_engines and (target in ENGINES or any(within(target, one) for one in BEHIND_THE_SEAM)):
            found.add(f"{target} is an engine by name, which only autotune/engines knows")
        if backend and within(module, "runtime") and not imported.late and not within(module, "runtime.torch_backend"):
            found.add("runtime.torch_backend is imported where it must be imported late")
        kernels = within(module, f"{DEVICES}.cuda")
        if top == "triton" and not kernels:
            found.add("Triton outside runtime/torch_backend/cuda")
        if within(target, f"{DEVICES}.cuda") and not imported.late and not kernels:
            found.add("runtime.torch_backend.cuda is imported where it must be imported late")
        for mine, others in (("cpu", "cuda"), ("cuda", "cpu")):
            if within(module, f"{DEVICES}.{mine}") and within(target, f"{DEVICES}.{others}"):
                found.add(f"what is of one device, {mine}, imports what is of another, {others}")
        ours = top in ("autotune", "runtime")
        if (
            within(module, "autotune.control.controllers")
            and ours
            and not within(target, "autotune.control.controllers")
        ):
            named = any(within(target, seen) for seen in SEEN_BY_CONTROLLERS)
            if not named and target != "runtime":  # `from runtime import knobs` also yields "runtime" itself
                found.add(f"a controller imports {target}")
        here, there = room(module), room(target)
        if here in ROOMS and there in ROOMS and ROOMS.index(there) > ROOMS.index(here):
            found.add(f"autotune/{here} imports autotune/{there}, which stands above it")
        if (
            within(module, "autotune")
            and here in LEAVES
            and ours
            and not any(within(target, leaf) for leaf in SEEN_BY_LEAVES)
            and target != "runtime"
        ):
            found.add(f"{module}, which stands in no room, imports {target}")
        if top == "optuna" and not within(module, "autotune.profiling"):
            found.add("Optuna outside autotune/profiling")
        if top in HTTP and not within(module, "runtime.serving"):
            found.add("HTTP outside runtime/serving")
        if within(target, "autotune.cli") and not within(module, "autotune.cli") and module != "autotune.__main__":
            found.add("someone imports autotune.cli")
    return found


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("runtime.llm.core", "import autotune.profile", "runtime imports autotune"),
        ("runtime.llm.core", "def f():\n    from autotune import profile", "runtime imports autotune"),
        ("runtime.slo", "import torch.nn as nn", FREE_OF_TORCH.format("torch")),
        (
            "autotune.measure.score",
            "try:\n    from transformers import AutoModel\nexcept ImportError: pass",
            "transformers",
        ),
        ("autotune.measure.score", "class A:\n    import torch", FREE_OF_TORCH.format("torch")),
        ("runtime.llm.engine", "from runtime import torch_backend", "must be imported late"),
        ("runtime.llm.engine", "from ..torch_backend import loading", "must be imported late"),
        ("autotune.measure.evaluate", "def f():\n    import runtime.torch_backend.executor", "only autotune/engines"),
        ("autotune.cli.serve", "def f():\n    from runtime.torch_backend import loading", "only autotune/engines"),
        ("runtime.torch_backend.cpu.linear", "from ..cuda import norm", "imports what is of another, cuda"),
        (
            "runtime.torch_backend.cuda.norm",
            "import runtime.torch_backend.cpu.linear",
            "imports what is of another, cpu",
        ),
        ("autotune.cli.serve", "def f():\n    from runtime.llm.engine import Engine", "an engine by name"),
        ("autotune.profiling.calibrate", "from runtime import Batcher", "an engine by name"),
        ("autotune.cli.serve", "def f():\n    from autotune.engines.own import OwnSource", "an engine by name"),
        ("autotune.cli.serve", "def f():\n    from autotune.engines.vllm.command import run", "an engine by name"),
        ("autotune.cli.target", "def f():\n    from autotune.engines import own", "an engine by name"),
        ("autotune.profiling.callable", "from ..engines.callable import CallableSource", "an engine by name"),
        ("autotune.cli.serve", "def f(on):\n    return 1 if on == 'vllm' else 2", '"vllm" is the name of an engine'),
        ("autotune.cli.target", "def f(on):\n    assert 'own' != on", '"own" is the name of an engine'),
        ("autotune.export.comments", "a = b.name in (c, 'autotune-runtime')", "is the name of an engine"),
        (
            "autotune.cli.serve",
            "def f(on):\n    match on:\n        case 'vllm':\n            pass",
            "name of an engine",
        ),
        (
            "autotune.control.controllers.aimd",
            "from runtime.llm.engine import Engine",
            "a controller imports runtime.llm.engine",
        ),
        ("autotune.control.controllers.aimd", "from runtime import Engine", "a controller imports runtime.Engine"),
        ("autotune.control.controllers.aimd", "from autotune import score", "a controller imports autotune"),
        ("autotune.measure.evaluate", "def f():\n    import optuna", "Optuna outside autotune/profiling"),
        ("autotune.export.vllm", "import httpx", "HTTP outside runtime/serving"),
        ("runtime.llm.engine", "from starlette.responses import Response", "HTTP outside runtime/serving"),
        ("autotune.profile", "from autotune.cli.main import main", "someone imports autotune.cli"),
        ("autotune.profile", "from . import cli", "someone imports autotune.cli"),
        ("runtime.torch_backend.executor", "def f():\n    import triton", "Triton outside runtime/torch_backend/cuda"),
        ("runtime.torch_backend.executor", "from .cuda.norm import rms_norm", "torch_backend.cuda is imported where"),
        ("autotune.measure.score", "from autotune.simulate.engine import SimulatedEngine", "stands above it"),
        ("autotune.control.attach", "def f():\n    from autotune import profiling", "stands above it"),
        ("autotune.writing", "from autotune.profile import Profile", "which stands in no room"),
        ("autotune.writing", "def f():\n    from runtime import knobs", "which stands in no room"),
    ],
)
def test_each_rule_finds_what_breaks_it(module: str, source: str, expected: str) -> None:
    assert any(expected in found for found in violations(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("runtime.torch_backend.executor", "import torch\nfrom transformers import AutoModel"),
        ("runtime.llm.engine", "def f():\n    from runtime.torch_backend import loading\n    import torch"),
        ("runtime.llm.engine", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        (
            "autotune.engines.own",
            "def f():\n    from runtime.torch_backend import loading\n    from runtime import Engine",
        ),
        ("autotune.profiling.callable", "from runtime.batching.core import BatchCore"),
        ("autotune.engines.named", "def f(name):\n    return name == 'own'"),
        (
            "autotune.cli.serve",
            "from autotune.engines.named import engine_named\nfrom autotune.engines import defaults, adapt",
        ),
        ("autotune.export.vllm", "VLLM = Target(name='vllm')\nf = TARGETS['vllm']"),
        ("autotune.cli.main", "from autotune.cli.profile import profile"),
        ("autotune.profiling.study", "import optuna"),
        (
            "autotune.control.controllers.aimd",
            "from runtime.knobs import Knobs\nfrom runtime import slo\nfrom . import guards",
        ),
        ("runtime.torch_backend.executor", "def f():\n    from .cuda.norm import rms_norm"),
        ("runtime.torch_backend.cuda.norm", "import triton\nfrom .tiles import row_warps"),
        ("runtime.serving.app", "from fastapi import FastAPI"),
        ("autotune.profile", "import torchlike, optunas"),
        ("autotune.writing", "from runtime import errors"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert violations(module, source) == set()


def modules() -> Iterator[tuple[str, Path]]:
    for room in ("autotune", "runtime"):
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def test_the_source_keeps_every_rule() -> None:
    checked = dict(modules())
    assert len(checked) > 20
    broken = {
        module: found
        for module, path in checked.items()
        if (found := violations(module, path.read_text(encoding="utf-8"), package=path.name == "__init__.py"))
    }
    assert broken == {}


def test_autotune_has_rooms_and_no_loose_modules() -> None:
    stands = {path.stem for path in (ROOT / "autotune").glob("*.py")} - {"__init__", "__main__"}
    rooms = {path.parent.name for path in (ROOT / "autotune").glob("*/__init__.py")}
    assert stands == LEAVES
    assert rooms == {*ROOMS}


def test_runtime_has_rooms_and_its_vocabulary() -> None:
    """Loose are the words that everything is said in; what the rooms share has a room."""
    stands = {path.stem for path in (ROOT / "runtime").glob("*.py")} - {"__init__"}
    rooms = {path.parent.name for path in (ROOT / "runtime").glob("*/__init__.py")}
    assert stands == {
        "knobs", "slo", "request", "records", "tunable", "clock", "step_model", "errors", "version",
    }  # fmt: skip
    assert rooms == {"ordering", "shared", "llm", "batching", "torch_backend", "serving"}
    for path in (ROOT / "runtime" / "shared").glob("*.py"):
        imported = {one.target for one in imports_of(f"runtime.shared.{path.stem}", path.read_text(encoding="utf-8"))}
        assert not [target for target in imported for room in rooms - {"shared"} if within(target, f"runtime.{room}")]


def test_the_page_has_the_rooms_in_the_order_of_the_rule() -> None:
    """In its table, and in words beside the rule."""
    page = (ROOT / "docs" / "concepts" / "architecture.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `autotune/(\w+)/` ", page, re.MULTILINE)
    named = re.search(r"the table above and of `ROOMS` in the test: ([^.]+)\.", page)
    assert tuple(table) == ROOMS
    assert named is not None and tuple(re.findall(r"`(\w+)`", named[1])) == ROOMS


def test_what_is_imported_is_declared() -> None:
    """What merely comes along with something else may stop doing so. An extra's: late, by serving or by kernels."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    always = {distribution(requirement) for requirement in project["dependencies"]}
    extras = {distribution(requirement) for extra in project["optional-dependencies"].values() for requirement in extra}
    serving = {distribution(requirement) for requirement in project["optional-dependencies"]["serve"]}
    known = packages_distributions()
    undeclared = {}
    for module, path in modules():
        for imported in imports_of(module, path.read_text(encoding="utf-8"), package=path.name == "__init__.py"):
            top = imported.target.partition(".")[0]
            if top in sys.stdlib_module_names or top in ("autotune", "runtime"):
                continue
            allowed = always | (extras if imported.late else serving if within(module, "runtime.serving") else set())
            if within(module, "runtime.torch_backend.cuda"):
                allowed |= {"triton"}
            if not {distribution(name) for name in known.get(top, [top])} & allowed:
                undeclared[module] = top
    assert undeclared == {}


def distribution(requirement: str) -> str:
    """``Typing_Extensions>=4`` → ``typing-extensions``."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def test_nothing_but_the_torch_backend_loads_torch() -> None:
    """Imports every module outside it, in a process of its own, and looks at what came along."""
    names = [name for name, _ in modules() if not within(name, "runtime.torch_backend")]
    assert {"autotune", "runtime"} <= set(names)
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    heavy = {TORCH!r} & set(sys.modules)
    assert not heavy, f"importing {{name}} loads {{heavy}}"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
