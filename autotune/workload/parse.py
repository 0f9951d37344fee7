"""The one spelling of workloads: ``NAME``, ``NAME:option=…,option=…``, ``NAME:TRACE,option=…`` or ``TRACE,option=…``; or several
of these as request classes with their shares of the requests, ``chat=azure-conv@0.8+batch=poisson:prompt=900@0.2``.

Names are those of the presets; ``azure-conv``, ``azure-code`` and ``mooncake`` take a trace file and replay it; a file
alone is read as what it looks like. Options after it scale what it gives: ``azure-conv:trace.csv,rate=2,length=1/8``.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from autotune.workload.mix import Mix, Part
from autotune.workload.options import Options, fraction, plain_float
from autotune.workload.presets import FITTED, PRESETS
from autotune.workload.readers import Reader, guess_reader, read_azure, read_mooncake
from autotune.workload.spec import Source, Workload
from autotune.workload.traces import Trace, guess_bin, window
from runtime.errors import InputError

COMMON = ("rate", "time", "length", "cap_prompt", "cap_output", "limit", "seed", "acceptance")
TRACE = ("start", "bin")
READERS: dict[str, Reader] = {**dict.fromkeys(FITTED, read_azure), "mooncake": read_mooncake}
NAMES = (*PRESETS, "mooncake")

_OPTION = re.compile(r"\s*[A-Za-z_]+\s*=")
_CLASS = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*=\s*")
_SHARE = re.compile(r"\s*@([^@+=:,]*)(?:\+|$)")  # behind a part of a mix, with what separates it from the next
_OF_THE_WHOLE = ("rate", "time")
_LEAST_SHARE = 1e-6
_LOOKED_AT = 2000  # requests, for how many are cut


def parse_workload(text: str) -> Workload:
    """Read a workload's spelling (docs/reference/workloads.md). Raises InputError that quotes it and lists the choices.

    The result's ``name`` is the spelling, spaces removed: parsing it again gives the same requests.
    """
    try:
        return _parse(text.strip())
    except ValueError as error:
        raise InputError(f'workload "{text}": {error}') from error


def named_options(text: str) -> set[str]:
    """Which options the spelling of a workload that :func:`parse_workload` takes gives itself: ``rate``, ``length``, …"""
    text = text.strip()
    if _is_mix(text):  # its parts have theirs
        return set()
    head, _, rest = text.partition(":")
    _, parts = _split(rest if head.strip() in NAMES else text)
    return {part.split("=", 1)[0] for part in parts}


def named_rate(workload: Workload) -> float | None:
    """Requests/s of a workload whose spelling says its ``rate`` or ``time``; None where it says neither."""
    return workload.rate if named_options(workload.name) & {*_OF_THE_WHOLE} else None


def brings_lengths(workload: Workload) -> bool:
    """Whether it is at a length scale of its own; of a mix, whether all of its parts are."""
    if workload.length_scale != 1 or "length" in named_options(workload.name):
        return True
    return isinstance(workload.source, Mix) and all(brings_lengths(part.workload) for part in workload.source.parts)


def at_length_scale(workload: Workload, scale: float) -> Workload:
    """``workload`` with its lengths × ``scale``, unless it brings a scale of its own; of a mix, those parts that bring none."""
    if brings_lengths(workload):
        return workload
    mix = workload.source
    if isinstance(mix, Mix) and any(brings_lengths(part.workload) for part in mix.parts):
        parts = tuple(replace(part, workload=at_length_scale(part.workload, scale)) for part in mix.parts)
        return replace(workload, source=replace(mix, parts=parts))
    return workload.scaled(length=scale)


def length_scales(workload: Workload) -> dict[str, float]:
    """By class, what the lengths of a mix's parts were multiplied by, their own scales included; empty of what is no mix."""
    parts = workload.source.parts if isinstance(workload.source, Mix) else ()
    return {part.name: workload.length_scale * part.workload.length_scale for part in parts}


def length_scale_as_data(workload: Workload) -> dict[str, float | dict[str, float] | None]:
    """For JSON: ``length_scale``, None of a mix whose parts have several, and ``length_scales``, theirs."""
    scales = length_scales(workload)
    every = {*scales.values()} or {workload.length_scale}
    return {"length_scale": every.pop() if len(every) == 1 else None, "length_scales": scales}


def length_scale_in_words(workload: Workload) -> str:
    """What the lengths of ``workload`` were multiplied by: ``lengths × 1/8``, or ``lengths of code × 1/8`` of a mix where another
    part brings a scale of its own, which its spelling says; "" for nothing."""
    if workload.length_scale != 1:
        return f"lengths × {fraction(workload.length_scale)}"
    scaled: dict[float, list[str]] = {}
    for part in workload.source.parts if isinstance(workload.source, Mix) else ():
        if part.workload.length_scale != 1 and "length" not in named_options(part.workload.name):
            scaled.setdefault(part.workload.length_scale, []).append(part.name)
    return ", ".join(f"lengths of {' and '.join(names)} × {fraction(scale)}" for scale, names in scaled.items())


def cuts_in_words(workload: Workload, whole: Workload) -> str:
    """How many of the first requests of ``workload`` its caps make shorter than those of ``whole`` would: ``7.2% of the prompts
    are cut to 768 tokens``; "" for none."""
    uncut = replace(workload, cap_prompt=whole.cap_prompt, cap_output=whole.cap_output)
    if uncut == workload:
        return ""
    pairs = [*zip(workload.arrivals(0, limit=_LOOKED_AT), uncut.arrivals(0, limit=_LOOKED_AT), strict=True)]
    prompts = sum(cut.prompt_tokens < full.prompt_tokens for cut, full in pairs) / len(pairs)
    outputs = sum(cut.output_tokens < full.output_tokens for cut, full in pairs) / len(pairs)
    return " and ".join(
        f"{share:.1%} of the {name} are cut to {cap} tokens"
        for name, share, cap in (("prompts", prompts, workload.cap_prompt), ("outputs", outputs, workload.cap_output))
        if share
    )


def _is_mix(text: str) -> bool:
    named = _CLASS.match(text)
    return named is not None and named[1] not in (*COMMON, *TRACE) and not os.path.isfile(text)


def _mix(text: str) -> Workload:
    parts: list[Part] = []
    spellings: list[str] = []
    at = 0
    while at < len(text):
        named = _CLASS.match(text, at)
        if named is None:
            raise InputError(f"{text[at:]!r} is no class; write CLASS=WORKLOAD@SHARE, as chat=azure-conv@0.8")
        name, ends = named[1], _SHARE.search(text, named.end())
        spelling, said = text[named.end() : ends.start() if ends else len(text)], ends[1] if ends else None
        if said is None and parts:
            raise InputError(f"class {name} has no share; write {name}={spelling}@0.2")
        for option in _OF_THE_WHOLE:
            if option in named_options(spelling):
                raise InputError(f"class {name}: {option} is of all classes together, which --rate sets; drop it here")
        try:
            workload = _parse(spelling.strip())
            workload.at_rate(1.0)  # a trace of one time has no rate, and says so better than the rate of the mix would
        except ValueError as error:
            raise InputError(f"class {name}: {error}") from error
        parts.append(Part(name, 1.0 if said is None else _share(name, said), workload))
        spellings.append(f"{name}={workload.name}" + ("" if said is None else f"@{said.strip()}"))
        at = ends.end() if ends else len(text)
    if text.rstrip().endswith("+"):
        raise InputError("nothing follows the last +")
    return Workload(
        "+".join(spellings), "; ".join(f"{p.name}: {p.workload.description}" for p in parts), Mix.of((*parts,))
    )


def _share(name: str, text: str) -> float:
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    top, slash, bottom = number.partition("/")
    try:
        share = (plain_float(top) / plain_float(bottom) if slash else plain_float(top)) / (100 if percent else 1)
    except (ValueError, ZeroDivisionError):
        share = 0.0
    if not _LEAST_SHARE <= share <= 1:
        raise InputError(
            f"class {name}: share is {text!r}; it must be a number from {_LEAST_SHARE:g} to 1, such as 0.8, 80% or 4/5"
        )
    return share


def _parse(text: str) -> Workload:
    if _is_mix(text):
        return _mix(text)
    head, colon, rest = text.partition(":")
    if not colon and "," in text and text.split(",")[0].strip() in NAMES:
        raise InputError(f'options follow a colon; write "{text.replace(",", ":", 1)}"')
    named = head.strip() in NAMES
    name = head.strip() if named else ""
    path, parts = _split(rest if named else text)
    if path:
        if named and name not in READERS:
            raise InputError(f"{path!r} is no option=value, and {name} replays no file; its options are "
                             f"{', '.join((*COMMON, *PRESETS[name].options))}")  # fmt: skip
        if not named and not os.path.isfile(path):
            if os.path.exists(path) and not os.path.isdir(path):
                raise InputError(
                    f"{path!r} is a pipe or a device; a trace must be a regular file, unless its format is named, as in "
                    f"azure-conv:{path}"
                )
            raise InputError(
                f"{path!r} is no workload and no file; the workloads are {', '.join(NAMES)}, or a trace file"
            )
        options = Options.parse(parts, (*COMMON, *TRACE))
        source = _trace(path, READERS[name] if named else guess_reader(path), options)
        description = f"replay of {len(source.rows)} requests of {Path(path).name}"
        made: Source = source
    elif not named:
        raise InputError(f"it names nothing; the workloads are {', '.join(NAMES)}, or a trace file")
    elif name not in PRESETS:
        raise InputError(f"{name} replays a file; write {name}:PATH")
    else:
        preset = PRESETS[name]
        if not parts and colon:
            raise InputError(f"nothing follows the colon; the options are {', '.join((*COMMON, *preset.options))}"
                             + (", or a trace file" if name in READERS else ""))  # fmt: skip
        options = Options.parse(parts, (*COMMON, *preset.options))
        made, description = preset.build(options), preset.description
    spelling = ",".join([path, *parts] if path else parts)
    full = spelling if not named else f"{name}:{spelling}" if spelling else name
    return _scaled(Workload(full, description, made), options)


def _split(text: str) -> tuple[str, list[str]]:
    """The path (which may hold commas) and the options behind it."""
    pieces = text.split(",")
    first = next((i for i, piece in enumerate(pieces) if _OPTION.match(piece)), len(pieces))
    return ",".join(pieces[:first]).strip(), ["=".join(s.strip() for s in p.split("=", 1)) for p in pieces[first:]]


def _trace(path: str, reader: Reader, options: Options) -> Trace:
    start = options.number("start", 0.0, least=0)
    limit = options.whole("limit", None)
    rows = reader(path, limit if not start else None)  # a huge trace is read no further than it is played
    rows = window(path, rows, start)[:limit]
    width = options.number("bin", None, least=0)
    return Trace(path, tuple(rows), guess_bin([row.time for row in rows]) if width is None else width)


def _scaled(workload: Workload, options: Options) -> Workload:
    if "rate" in options and "time" in options:
        raise InputError("rate and time are both given; give one")
    rate = options.number("rate", None)
    at_rate = workload if rate is None else workload.at_rate(rate)
    scaled = at_rate.scaled(
        time=options.number("time", 1.0),
        length=options.number("length", 1.0),
        cap_prompt=options.whole("cap_prompt", None),
        cap_output=options.whole("cap_output", None),
    )
    return replace(
        scaled,
        limit=options.whole("limit", None),
        seed=options.whole("seed", 0, low=0, most=2**63 - 1),
        acceptance=options.number("acceptance", 0.0, least=0, most=1),
    )
