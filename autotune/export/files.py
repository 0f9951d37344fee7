"""The files that targets read: YAML, flat or in sections, and the text format of protocol buffers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from autotune.export.comments import comment, commented
from autotune.export.target import Entry, Value, Written


def in_sections(written: Written) -> dict[str, Any]:
    """``{"a.b": 1, "c": 2}`` as ``{"a": {"b": 1}, "c": 2}``."""
    found: dict[str, Any] = {}
    for key, value in written.items():
        section, _, name = key.rpartition(".")
        (found.setdefault(section, {}) if section else found)[name] = value
    return found


def flat(found: Mapping[Any, Any]) -> dict[str, Any]:
    """The other way round, of what was read."""
    flattened: dict[str, Any] = {}
    for key, value in found.items():
        if isinstance(value, Mapping):
            flattened |= {f"{key}.{name}": held for name, held in value.items()}
        else:
            flattened[str(key)] = value
    return flattened


def yaml_file(head: list[str], entries: list[Entry]) -> str:
    """The header, then every entry with its comment, written or not."""
    return _file(head, entries, lambda written: yaml.safe_dump(in_sections(written), sort_keys=False, width=10**6))


def protobuf_text(head: list[str], entries: list[Entry]) -> str:
    """The same in the text format of protocol buffers."""
    return _file(head, entries, lambda written: "".join(f"{line}\n" for line in _fields(in_sections(written))))


def _fields(message: Mapping[str, Any]) -> Iterator[str]:
    for name, value in message.items():
        if isinstance(value, Mapping):
            yield f"{name} {{"
            yield from (f"  {line}" for line in _fields(value))
            yield "}"
        else:
            yield f"{name}: {json.dumps(value)}"


def _file(head: list[str], entries: list[Entry], dump: Callable[[Written], str]) -> str:
    blocks = [commented(head)]
    for group in _together(entries):
        written: dict[str, Value] = {key: value for entry in group for key, value in entry.written.items()}
        blocks.append("".join(comment(entry) for entry in group) + (dump(written) if written else ""))
    return "\n".join(blocks)


def _together(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Each entry for itself, but those that write into one section together, where the first of them stands."""
    groups: list[list[Entry]] = []
    homes: dict[str, list[Entry]] = {}
    for entry in entries:
        sections = {key.rpartition(".")[0] for key in entry.written} - {""}
        home = next((homes[section] for section in sections if section in homes), None)
        if home is None:
            home = []
            groups.append(home)
        home.append(entry)
        homes |= dict.fromkeys(sections, home)
    return groups
