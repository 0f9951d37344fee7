"""The YAML a profile is written in, and reading it with nothing lost and nothing run.

Read are mappings, lists and the scalars of YAML 1.2's core schema (so ``1e-5`` is a number, and ``12:30`` and ``no`` are text,
which PyYAML's own loaders see otherwise). Refused with the line they stand in are names given twice, which other readers
drop silently, and what a profile has no use for and a hostile file has: anchors, aliases, tags, merges, deep nesting.
Nothing recurses, so no file can exhaust the stack.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runtime.errors import InputError

LARGEST = 4 * 2**20  # bytes; of a profile with thousands of points
DEEPEST = 32

_FIRST = tuple(re.compile(rb'^"?%s"?:' % name, re.MULTILINE) for name in (b"schema_version", b"name"))
_RAW_RUN = re.compile(rb'\s*\{\s*"(kind"\s*:\s*"step"|stage"\s*:)')

_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_WHOLE = re.compile(r"[-+]?[0-9]{1,400}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None} | {
    word: value for value in (True, False) for word in (f"{value}".lower(), f"{value}", f"{value}".upper())
}


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.2 would read as a number, besides what YAML 1.1 would."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"^(?:{_FLOAT.pattern})$"), list("-+.0123456789"))


class _Fault(Exception):
    """What is wrong, beginning with where."""


@dataclass
class _Open:
    """A mapping or list whose end has not come yet. ``lines``: where each name of a mapping stood."""

    where: str
    holder: dict[str, Any] | list[Any]
    lines: dict[str, int]
    name: str | None = None

    def place(self) -> str:
        """The path of what comes next."""
        last = str(len(self.holder)) if isinstance(self.holder, list) else self.name or ""
        return f"{self.where}.{last}" if self.where else last


def dump_yaml(data: object) -> str:
    """As YAML, in the order given."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def read_yaml(path: str | Path) -> object:
    """The data in a file. Raises :class:`InputError`, one line with the file, the line or field, and what is wrong."""
    return parse_yaml(path, read_start(path))


def read_start(path: str | Path) -> bytes:
    """The bytes of a file, at most one more than a profile may have. Raises :class:`InputError` if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(LARGEST + 1)  # a device or a pipe may have no end
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:  # a NUL in the name
        raise InputError(f"{str(path)!r}: cannot be read ({error})") from None


def parse_yaml(path: str | Path, content: bytes) -> object:
    """The data in the ``content`` of the file at ``path``, as :func:`read_start` returns it. Raises as :func:`read_yaml`."""
    if len(content) > LARGEST:
        raise InputError(f"{path}: is larger than {LARGEST // 2**20} MiB; that is no profile")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not a text file in UTF-8") from None
    if "\0" in text:
        raise InputError(f"{path}: is not a text file")
    if (kind := _another_kind(text, Path(path))) is not None:
        raise InputError(f"{path}: is {kind}")
    try:
        return _build(text)
    except _Fault as fault:
        raise InputError(f"{path}: {fault}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be parsed"
        if "nesting depth" in problem:  # libyaml has a limit of its own, and reads ahead
            raise InputError(f"{path}: line {mark.line + 1 if mark else 1}: nested more than {DEEPEST} deep") from None
        raise InputError(f"{path}: not valid YAML: {where}{' '.join(str(problem).split())}") from None


def first_object(text: str) -> dict[str, Any]:
    """The JSON object that is the first line of ``text``, as of a log; empty where there is none (a profile is YAML of many
    lines)."""
    try:
        first = json.loads(text.lstrip().partition("\n")[0])
    except (ValueError, RecursionError):
        return {}
    return first if isinstance(first, dict) else {}


def is_decision(fields: Mapping[str, Any]) -> bool:
    """Whether the object of a line is a controller's decision."""
    return "action" in fields and "cause" in fields


def _another_kind(text: str, path: Path) -> str | None:
    """What a file plainly is instead of a profile, and what reads it; None for one that may be a profile."""
    line = text.lstrip().partition("\n")[0]
    if line.lower().startswith(("<!doctype html", "<html")):
        return "a page, perhaps a report already; name the profile it was made from"
    first = first_object(text)
    if not first:
        return None
    file = shlex.quote(str(path))
    if is_decision(first):
        return f"a decision log, not a profile; `autotune explain {file}` prints it, `autotune report {file}` draws it"
    if "token_times" in first and "arrival" in first:
        return (
            f"a log of requests, not a profile; `autotune report LOG --records {file}` draws it beside a decision log"
        )
    if first.get("kind") == "step" or ("stage" in first and ("score" in first or "failed" in first)):
        name = path.name.removesuffix(".points.jsonl") + ".yaml"
        return f"the raw runs of a profile; name the profile itself, {path.with_name(name)}"
    if "sum" in first:  # as each line of a study's journal begins
        return "the study of a profiling run, not a profile; `autotune profile` goes on with it and writes the profile"
    return None if {"schema_version", "kind"} & first.keys() else "not a profile; `autotune profile` makes one"


def is_profile(begin: bytes) -> bool:
    """Whether a file that begins so is a profile, of an engine or of a callable, in any version.

    Told by what comes first: the command that follows may be longer than any beginning.
    """
    return all(field.search(begin) for field in _FIRST)


def is_sidecar(begin: bytes) -> bool:
    """Whether a file that begins so holds the raw runs of a profile."""
    return _RAW_RUN.match(begin) is not None


def _build(text: str) -> object:
    root: list[Any] = []
    stack = [_Open("", root, {})]
    for event in yaml.parse(text, Loader=_Parser):
        top = stack[-1]
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.DocumentStartEvent) and root:
            raise _Fault(f"line {line}: a second document begins; a profile is one")
        if isinstance(event, yaml.AliasEvent):
            raise _Fault(f"line {line}: *{event.anchor} is an alias; a profile has none, write the value out")
        if isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            stack.pop()
        if not isinstance(event, yaml.NodeEvent):
            continue
        if event.anchor is not None:
            raise _Fault(f"line {line}: &{event.anchor} is an anchor; a profile has none")
        if (tag := getattr(event, "tag", None)) is not None:
            raise _Fault(f"line {line}: {tag} is a tag; a profile has none")
        if isinstance(top.holder, dict) and top.name is None:
            top.name = _name(top, event, line)
            continue
        if isinstance(event, yaml.ScalarEvent):
            _put(top, _scalar(event, top, line))
            continue
        if len(stack) > DEEPEST:
            raise _Fault(f"line {line}: nested more than {DEEPEST} deep")
        place = "" if top.holder is root else top.place()
        holder: dict[str, Any] | list[Any] = {} if isinstance(event, yaml.MappingStartEvent) else []
        _put(top, holder)
        stack.append(_Open(place, holder, {}))
    return root[0] if root else None


def _name(top: _Open, event: Any, line: int) -> str:
    assert isinstance(top.holder, dict)
    beneath = f"{top.where}." if top.where else ""
    if not isinstance(event, yaml.ScalarEvent) or not event.value.isprintable() or not event.value:
        raise _Fault(f"line {line}: {beneath}… has a name that is no word")
    if event.value in top.holder:
        twice = f"in lines {top.lines[event.value]} and {line}"
        raise _Fault(f"{beneath}{event.value} is given twice, {twice}")
    top.lines[event.value] = line
    return str(event.value)


def _put(top: _Open, value: Any) -> None:
    if isinstance(top.holder, list):
        top.holder.append(value)
    else:
        assert top.name is not None
        top.holder[top.name], top.name = value, None


def _scalar(event: Any, top: _Open, line: int) -> object:
    text: str = event.value
    try:
        text.encode()
    except UnicodeEncodeError:  # from an escape
        raise _Fault(f"line {line}: {top.place()} is {text!r}, which is no text") from None
    if event.style not in (None, ""):  # quoted, or a block
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _WHOLE.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text.replace(".", "", 1) if text.lower().lstrip("-+") in (".inf", ".nan") else text)
    return text
