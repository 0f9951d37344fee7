"""From a profile to the settings of another engine: every row of the target's table applied, and every loss said."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.export.comments import MARK, header, note_of, one_line
from autotune.export.files import flat
from autotune.export.source import ProfiledCallable, ProfiledEngine, Source, callable_source
from autotune.export.target import Entry, ExportTarget, Fit, Rows, S, Value, number
from autotune.export.targets import TARGETS
from autotune.profile import RECOMMENDED, ModelFacts, Profile
from autotune.profile.callable import CallableProfile
from autotune.reading import plain_yaml
from autotune.writing import replaceable, writable, write_whole
from runtime.errors import InputError

PUBLISHED: Mapping[str, str | None] = {
    "nano": None,
    "tiny": None,
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "qwen3-8b": "Qwen/Qwen3-8B",
}
"""Preset → hub id of the published model of the same shape; None where nobody has published such weights."""


@dataclass(frozen=True, slots=True)
class Export:
    """An exported setting. ``warnings`` are about the whole; what a row loses stands in its entry."""

    target: ExportTarget
    source: Source
    entries: tuple[Entry, ...]
    warnings: tuple[str, ...]

    @property
    def written(self) -> dict[str, Value]:
        """Their keys and values, in the order of the file."""
        return {key: value for entry in self.entries for key, value in entry.written.items()}

    @property
    def reports(self) -> list[str]:
        """A line for everything a user should know before relying on it: each knob or fact that does not fit exactly."""
        lines = list(self.warnings)
        harmless: dict[str, list[str]] = {}
        for entry in self.entries:
            if entry.lossy and entry.fit is Fit.UNSUPPORTED:
                lines.append(f"{entry.source} is dropped: {entry.note}")
            elif entry.lossy:
                lines.append(f"{entry.source} is approximate: {entry.note}")
            elif entry.fit is Fit.UNSUPPORTED:
                harmless.setdefault(entry.note, []).append(entry.name)
        return lines + [f"{', '.join(names)}: {note}" for note, names in harmless.items()]

    def text(self, path: Path) -> str:
        """The file, with where its figures come from. The same profile and path give the same text."""
        head = header(self.target, self.source, self.warnings, self.command(path))
        return self.target.render(head, list(self.entries))

    def command(self, path: Path) -> str:
        """How to start the engine with it."""
        return self.target.command(self.source.model, str(path))

    def save(self, path: Path) -> None:
        """Write the file whole or not at all. Raises :class:`InputError` rather than overwrite what is not an export."""
        if path.suffix not in self.target.suffixes:
            allowed = " or ".join(self.target.suffixes)
            raise InputError(f"--out: {path} must end in {allowed}, or {self.target.title} does not read it")
        writable("--out", path)
        replaceable("--out", path, _is_export, f"was not {MARK}")
        write_whole(path, self.text(path))

    def changes_to(self, path: Path) -> dict[str, tuple[Any, Value | None]]:
        """By key, what a configuration file of the target says (None: nothing) and what this says instead, where they differ;
        None for a key of a knob or fact that is not written here, and so has to go.

        The model is left out: which one is served is the user's word. So are length and dtype of another than the measured one.
        Raises :class:`InputError` for a file that is none.
        """
        if ".yaml" not in self.target.suffixes:
            allowed = " or ".join(self.target.suffixes)
            raise InputError(
                f"--diff: {path} cannot be compared; {self.target.title} reads {allowed}, and --diff reads YAML"
            )
        try:
            found = plain_yaml(path.read_bytes())
        except OSError as error:
            raise InputError(f"--diff: {path} cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise InputError(f"--diff: {path} is not valid YAML: {error}") from None
        if not isinstance(found, dict):
            raise InputError(f"--diff: {path} is no configuration of {self.target.title}: it holds no names and values")
        theirs = {_spelled(str(key)): value for key, value in (*flat(found).items(), *found.items())}
        written: dict[str, Value | None] = {**dict.fromkeys(self._keys), **self.written}
        left = self._of_model
        return {
            key: (theirs.get(_spelled(key)), value)
            for key, value in written.items()
            if key not in left and not _alike(theirs.get(_spelled(key)), value)
        }

    @property
    def _of_model(self) -> set[str]:
        """Keys that are not ours to say."""
        another = isinstance(self.source, ProfiledEngine) and self.source.another_model
        names = ("model", "max_model_len", "dtype") if another else ("model",)
        return {key for name in names for key in self.target.facts[name].keys}

    @property
    def _keys(self) -> list[str]:
        """All that may be written of such a source."""
        called = isinstance(self.source, ProfiledCallable)
        rows: Rows[Any] = self.target.call_rows() if called else self.target.rows()
        return [key for _, row in rows for key in row.keys]

    def as_dict(self, path: Path) -> dict[str, Any]:
        """For scripts."""
        return {
            "file": str(path),
            "target": self.target.name,
            "model": self.source.model,
            "purpose": self.source.purpose,
            "command": self.command(path),
            "settings": self.written,
            "rows": [_row(entry) for entry in self.entries],
            "reports": self.reports,
            "measured_on": self.source.measured_on,
        }


def export(
    profile: Profile | CallableProfile,
    target: ExportTarget,
    *,
    profile_name: str = "",
    purpose: str = RECOMMENDED,
    model: str | None = None,
    allow_lossy: bool = False,
) -> Export:
    """One setting of ``profile`` in the terms of ``target``.

    ``purpose``: which setting; a callable's profile has one. ``model``: what to serve, None for what was measured (see
    :func:`model_to_serve`); how long its requests may be, and its dtype, are left to another. Raises :class:`InputError` when the
    profile has no such setting, when a value has no counterpart and ``allow_lossy`` is false, and when the target itself would
    refuse the result.
    """
    named = profile_name or profile.name
    if isinstance(profile, CallableProfile):
        if target.calls is None:
            those = " or ".join(name for name, other in TARGETS.items() if other.calls is not None)
            raise InputError(
                f"{named}: is the profile of a callable ({profile.function!r}), not of a language model; it goes to {those}"
            )
        if purpose != RECOMMENDED:
            raise InputError(f"--for is {purpose}; {named} is the profile of a callable, which holds one setting")
        found = callable_source(target.name, profile, named, None if model is None else _named("--model", model))
        return _export(target, found, target.call_rows(), allow_lossy)
    if not any(name == purpose for name in profile.settings):
        raise InputError(f"--for is {purpose}; {named} holds {', '.join(profile.settings)}")
    served = model_to_serve(profile.model, model)
    source = ProfiledEngine(
        target=target.name,
        profile_name=named,
        knobs=next(held.knobs for name, held in profile.settings.items() if name == purpose),
        model=served,
        profile=profile,
        setting=purpose,
        another_model=served is None or served != _published(profile.model),
    )
    return _export(target, source, target.rows(), allow_lossy, target.warning(source))


def _export(target: ExportTarget, source: S, rows: Rows[S], allow_lossy: bool, warning: str = "") -> Export:
    entries = tuple(_apply(source, rows))
    _refuse_losses(target, entries, allow_lossy)
    written = {key for entry in entries for key in entry.written}
    warnings = tuple(one_line(text) for text in (*source.warnings(target.title, written), warning) if text)
    made = Export(target, source, entries, warnings)
    for constraint in target.constraints:
        if complaint := constraint(made.written):
            raise InputError(f"{target.title} would refuse this: {complaint}")
    return made


def model_to_serve(measured: ModelFacts, given: str | None) -> str | None:
    """The name for the other engine: what was ``given``, or else what was measured; the published model for a preset's shape.

    None where a preset was measured that nobody has published: the user names a model when starting the other engine. Raises
    :class:`InputError` where such a preset is ``given``, and for a name no command line can carry.
    """
    if given is not None:
        served = PUBLISHED.get(given, given)
        if served is None:
            raise InputError(
                f"--model: {given} is a shape with random weights that nobody has published; name a directory or hub id"
            )
        return _named("--model", served)
    found = _published(measured)
    return None if found is None else _named("model.name", found)


def _published(measured: ModelFacts) -> str | None:
    """What ``measured`` is called where others find it; None for a preset whose shape nobody has published."""
    preset = measured.random_weights and measured.name in PUBLISHED
    return PUBLISHED[measured.name] if preset else measured.name


def _named(field: str, name: str) -> str:
    if not name.strip() or not name.isprintable() or name.startswith("-"):
        raise InputError(f"{field} is {name!r}; it must be a directory or a hub id")
    return name


def _apply(source: S, rows: Rows[S]) -> Iterator[Entry]:
    for ours, row in rows:
        harmless, refused = row.harmless(source), row.unsupported(source)
        fit = Fit.UNSUPPORTED if refused else Fit.EXACT if row.exact(source) else row.fit
        yield Entry(
            name=ours.name,
            value=ours.value(source),
            source=ours.shown(source),
            doc=ours.doc,
            fit=fit,
            written={} if refused else row.write(source),
            lossy=fit is not Fit.EXACT and not harmless,
            note=note_of(fit, refused or row.differs(source) or row.said, harmless, row.about(source)),
            refused=refused,
        )


def _row(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "value": entry.value,
        "fit": str(entry.fit),
        "settings": dict(entry.written),
        "lossy": entry.lossy,
        "note": entry.note,
    }


def _refuse_losses(target: ExportTarget, entries: tuple[Entry, ...], allow_lossy: bool) -> None:
    lost = [e for e in entries if e.lossy and e.fit is Fit.UNSUPPORTED]
    if lost and not allow_lossy:
        have, drops = ("has", "it") if len(lost) == 1 else ("have", "them")
        values = " and ".join(f"{e.name}={number(e.value)}" for e in lost)
        why = "".join(f": {one_line(e.refused)}" for e in lost if e.refused)
        raise InputError(
            f"{values} {have} no counterpart in {target.title}{why}; allow_lossy=True (--allow-lossy) drops {drops}"
        )


def _alike(theirs: Any, value: Value | None) -> bool:
    """A mapping may also be written as JSON."""
    if isinstance(theirs, Mapping) and isinstance(value, str):
        with suppress(ValueError):
            return bool(theirs == json.loads(value))
    return bool(theirs == value)


def _spelled(key: str) -> str:
    return key.replace("_", "-")


def _is_export(begin: bytes) -> bool:
    return MARK.encode() in begin.partition(b"\n")[0]
