"""Fitted workloads as small data files: what was fitted, to what, under which licence."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

from autotune.workload.lengths import Conditional, QuantileTable
from autotune.workload.processes import MarkovModulated
from autotune.workload.synthetic import Synthetic

AZURE_2023 = "azure2023.json"


@dataclass(frozen=True)
class Fitted:
    """A preset's models, and where they come from (``provenance``: source, licence, sha256 of the file, rows, seconds)."""

    process: MarkovModulated
    lengths: Conditional
    provenance: dict[str, str | int | float]

    def source(self) -> Synthetic:
        return Synthetic(self.process, self.lengths)


def to_data(fitted: Fitted) -> dict[str, Any]:
    """As JSON data; numbers to 9 digits, far below what an hour of trace can tell."""
    prompt, outputs = fitted.lengths.prompt, fitted.lengths.outputs
    assert isinstance(prompt, QuantileTable)
    tables = [table for table in outputs if isinstance(table, QuantileTable)]
    data = {
        "provenance": fitted.provenance,
        "process": asdict(fitted.process),
        "prompt": {"levels": prompt.levels, "values": prompt.values},
        "output": {"levels": tables[0].levels, "values_by_prompt_band": [table.values for table in tables]},
    }
    return dict(_rounded(data))


def from_data(data: dict[str, Any]) -> Fitted:
    """The inverse of :func:`to_data`."""
    process, prompt, output = data["process"], data["prompt"], data["output"]
    rows = tuple(tuple(p / sum(row) for p in row) for row in process["transition"])
    levels = tuple(output["levels"])
    return Fitted(
        MarkovModulated(tuple(process["means"]), tuple(process["shapes"]), rows),
        Conditional(
            QuantileTable(tuple(prompt["levels"]), tuple(prompt["values"])),
            tuple(QuantileTable(levels, tuple(values)) for values in output["values_by_prompt_band"]),
        ),
        data["provenance"],
    )


@cache
def load_fitted(name: str) -> Fitted:
    """A fitted preset by name (``azure-conv``, ``azure-code``)."""
    text = resources.files("autotune.workload").joinpath(AZURE_2023).read_text(encoding="utf-8")
    return from_data(json.loads(text)[name])


def dumps(presets: dict[str, Fitted]) -> str:
    """The data file's text: one number table a line, so that a refit's diff can be read."""
    lines = []
    for name, fitted in presets.items():
        parts = []
        for section, content in to_data(fitted).items():
            fields = ",\n".join(f"   {json.dumps(key)}: {_table(value)}" for key, value in content.items())
            parts.append(f"  {json.dumps(section)}: {{\n{fields}\n  }}")
        lines.append(f" {json.dumps(name)}: {{\n" + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _table(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in value) + "\n   ]"
    return json.dumps(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(part) for part in value]
    if isinstance(value, float):
        short = float(f"{value:.9g}")
        return int(short) if short.is_integer() else short
    return value
