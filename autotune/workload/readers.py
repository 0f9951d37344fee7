"""Readers of trace files: Azure's CSV and Mooncake's jsonl. Every complaint names file, line, field, value and what is allowed.

Azure LLM inference traces: ``TIMESTAMP,ContextTokens,GeneratedTokens``; a timestamp is a date and time, or seconds.
Mooncake (Qin et al., FAST 2025): one JSON object a line with ``timestamp`` (ms), ``input_length``, ``output_length`` and
``hash_ids``, one id for each block of 512 prompt tokens; equal ids mean equal blocks behind equal prefixes.
Both may carry ``request_class`` and ``tenant``; other fields are ignored. Times must not descend.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from autotune.workload.options import plain_float, plain_int
from autotune.workload.spec import MOST_TOKENS
from autotune.workload.traces import TraceRow
from runtime.errors import InputError, shortened

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length")
MOONCAKE_BLOCK = 512  # tokens
_LARGEST = 1e15  # ms: some thirty thousand years
_MOST_ID = 2**64 - 1

Reader = Callable[[str | Path, int | None], list[TraceRow]]
Parse = Callable[[str | Path, Iterable[str]], Iterator[tuple[int, TraceRow]]]


def read_azure(path: str | Path, limit: int | None = None) -> list[TraceRow]:
    """Rows of an Azure CSV, at most ``limit``. Raises InputError."""
    return _checked(path, _azure_rows, limit)


def read_mooncake(path: str | Path, limit: int | None = None) -> list[TraceRow]:
    """Rows of a Mooncake-style jsonl, at most ``limit``. Raises InputError."""
    return _checked(path, _mooncake_rows, limit)


def guess_reader(path: str | Path) -> Reader:
    """The reader for what the first line that is not blank looks like."""
    with _opened(path) as lines:
        first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("{"):
        return read_mooncake
    if not first or set(_columns(first)) & set(AZURE_COLUMNS):
        return read_azure
    raise InputError(
        f"{path}, line 1: {shortened(first, 80)} is no trace; it must be a CSV with columns {', '.join(AZURE_COLUMNS)}, "
        f"or jsonl with fields {', '.join(MOONCAKE_FIELDS)}"
    )


def _columns(header: str) -> list[str]:
    try:
        return [column.strip() for column in next(csv.reader([header]))]
    except csv.Error:
        return []


def _azure_rows(path: str | Path, lines: Iterable[str]) -> Iterator[tuple[int, TraceRow]]:
    reader = csv.reader(lines)
    header: list[str] | None = None
    kind = ""
    try:
        for cells in reader:
            line = reader.line_num
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = [cell.strip() for cell in cells]
                for column in AZURE_COLUMNS:
                    if column not in header:
                        _bad(path, line, f"no column {column}; the header is {shortened(','.join(header), 80)}, it must have "
                                         f"{', '.join(AZURE_COLUMNS)}")  # fmt: skip
                    if header.count(column) > 1:
                        _bad(
                            path, line, f"column {column} is there {header.count(column)} times; it must be there once"
                        )
                continue
            if len(cells) != len(header):
                _bad(path, line, f"{len(cells)} fields; the header has {len(header)}")
            row = dict(zip(header, (cell.strip() for cell in cells), strict=True))
            above, (time, kind) = kind, _timestamp(path, line, row["TIMESTAMP"])
            if above and kind != above:
                _bad(path, line, f"TIMESTAMP is {kind}, and that of the line above {above}; all must be of one kind")
            yield (
                line,
                TraceRow(
                    time=time,
                    prompt_tokens=_count(path, line, "ContextTokens", row["ContextTokens"], 1),
                    output_tokens=_count(path, line, "GeneratedTokens", row["GeneratedTokens"], 0),
                    request_class=row.get("request_class") or "default",
                    tenant=row.get("tenant", ""),
                ),
            )
    except csv.Error as error:
        _bad(path, reader.line_num, f"not CSV: {error}")


def _mooncake_rows(path: str | Path, lines: Iterable[str]) -> Iterator[tuple[int, TraceRow]]:
    for line, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError
            _bad(path, line, f"not JSON: {error}")
        if not isinstance(row, dict):
            _bad(path, line, f"{shortened(text, 80)} is not a JSON object")
        for name in MOONCAKE_FIELDS:
            if name not in row:
                _bad(path, line, f"no field {name}; there must be {', '.join(MOONCAKE_FIELDS)}")
        prompt = _count(path, line, "input_length", row["input_length"], 1)
        yield (
            line,
            TraceRow(
                time=_number(path, line, "timestamp", row["timestamp"], "a number of ms, at least 0") / 1000,
                prompt_tokens=prompt,
                output_tokens=_count(path, line, "output_length", row["output_length"], 0),
                blocks=_blocks(path, line, row.get("hash_ids"), prompt),
                request_class=_text(path, line, "request_class", row.get("request_class")) or "default",
                tenant=_text(path, line, "tenant", row.get("tenant")),
            ),
        )


def _blocks(path: str | Path, line: int, ids: Any, prompt: int) -> tuple[tuple[int, int], ...]:
    """Segments of a prompt: one for each hash id, the last as long as what is left. () without hash ids."""
    if ids is None:
        return ()
    needed = math.ceil(prompt / MOONCAKE_BLOCK)
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i <= _MOST_ID for i in ids):
        _bad(path, line, f"hash_ids is {shortened(ids, 80)}; it must be a list of whole numbers from 0 to {_MOST_ID}")
    if len(ids) != needed:
        _bad(
            path, line, f"hash_ids has {len(ids)} ids; {prompt} prompt tokens need {needed} of {MOONCAKE_BLOCK} tokens"
        )
    last = prompt - (needed - 1) * MOONCAKE_BLOCK
    return (*((i, MOONCAKE_BLOCK) for i in ids[:-1]), (ids[-1], last))


def _checked(path: str | Path, parse: Parse, limit: int | None) -> list[TraceRow]:
    kept: list[TraceRow] = []
    with _opened(path) as lines:
        for line, row in parse(path, lines):
            if kept and row.time < kept[-1].time:
                ago = kept[-1].time - row.time
                _bad(path, line, f"its time is {ago:g} s before the line above; times must not descend")
            kept.append(row)
            if len(kept) == limit:
                break
    if not kept:
        raise InputError(f"{path}: no requests; there must be at least one")
    return kept


@contextmanager
def _opened(path: str | Path) -> Iterator[Iterator[str]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def _timestamp(path: str | Path, line: int, text: str) -> tuple[float, str]:
    """Seconds, and what kind of timestamp it is."""
    try:
        seconds = plain_float(text)
        if math.isfinite(seconds) and seconds >= 0:
            return seconds, "a number of seconds"
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            pass
        else:
            # A time without a zone is not the machine's local time: its clock changes would bend the trace.
            zoned = moment.tzinfo is not None
            since = moment - datetime(1970, 1, 1, tzinfo=UTC if zoned else None)
            return since.total_seconds(), f"a date and time {'with' if zoned else 'without'} a time zone"
    allowed = "a date and time such as 2023-11-16 18:17:03.97, or a number of seconds, at least 0"
    _bad(path, line, f"TIMESTAMP is {shortened(text, 80)}; it must be {allowed}")


def _number(path: str | Path, line: int, name: str, value: Any, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:  # NaN is not
        _bad(path, line, f"{name} is {shortened(value, 80)}; it must be {allowed}")
    return float(value)


def _count(path: str | Path, line: int, name: str, value: Any, low: int) -> int:
    number = value
    if isinstance(value, str):
        try:
            number = plain_int(value)
        except ValueError:
            number = None
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= MOST_TOKENS:
        _bad(
            path,
            line,
            f"{name} is {shortened(value, 80)}; it must be a whole number, at least {low} and at most {MOST_TOKENS}",
        )
    return number


def _text(path: str | Path, line: int, name: str, value: Any) -> str:
    if value is not None and not isinstance(value, str):
        _bad(path, line, f"{name} is {shortened(value, 80)}; it must be text")
    return value or ""


def _bad(path: str | Path, line: int, what: str) -> NoReturn:
    raise InputError(f"{path}, line {line}: {what}")
