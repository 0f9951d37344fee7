"""What is exported: a setting of a language model's profile, or that of a callable's, with what there is to say of where it was
measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from autotune.engines.model_folder import context_length
from autotune.engines.named import ours
from autotune.profile import Machine, Point, Profile, Software
from autotune.profile.callable import CallablePoint, CallableProfile
from autotune.profile.fingerprint import describe
from autotune.profiling.points import share_interval
from runtime.batching.options import BATCHER_LIMITS
from runtime.knobs import Knobs
from runtime.slo import in_percent, share_met

_AS_THEN = "The settings are those of that measurement: EXACT, unless a note says approximate."
_BUT_OPTIONS = (
    "With all its options of then, the settings are those of that measurement: EXACT, unless a note says approximate."
)


_NO_MATTER = ("load_format", "max_num_", "long_prefill_")
"""How options begin that say nothing of how fast a server is: random weights, and ceilings, which the setting stands for."""


@dataclass(frozen=True, slots=True)
class Source(ABC):
    """A setting of the profile ``profile_name``, exported to ``target``. ``model``: what to serve there, None when it is not
    known."""

    target: str
    profile_name: str
    knobs: Knobs
    model: str | None

    @property
    @abstractmethod
    def purpose(self) -> str:
        """Which of the profile's settings it is."""

    @property
    @abstractmethod
    def measured_on(self) -> str:
        """The engine that was measured, with its version."""

    @property
    def measured_there(self) -> bool:
        """Whether the engine that was measured is the one that it is exported to."""
        return False

    @abstractmethod
    def origin(self, title: str) -> str:
        """On whose engine the figures were measured, and what follows from that for the target with that ``title``."""

    @abstractmethod
    def facts(self) -> Mapping[str, str]:
        """Where the setting comes from, by what each line is about."""

    @abstractmethod
    def warnings(self, title: str, written: Collection[str]) -> Iterator[str]:
        """What to know before relying on it. ``written``: the keys that the file holds."""


@dataclass(frozen=True, slots=True)
class ProfiledEngine(Source):
    """One setting of a language model's profile.

    ``another_model``: what will be served is not what was measured. The user has named it; or has yet to, and ``model`` is None,
    because the profile is of a shape that nobody has published.
    """

    profile: Profile
    setting: str
    another_model: bool

    @property
    def purpose(self) -> str:
        return self.setting

    @property
    def measured_on(self) -> str:
        return str(self.profile.engine)

    @property
    def measured_there(self) -> bool:
        return self.profile.engine.name == self.target

    @property
    def max_model_len(self) -> int:
        """Most tokens (prompt + output) of a request that the measured engine accepted: one must fit the KV pool alone."""
        return min(self.profile.model.max_model_len, self.profile.engine.kv_pool.tokens)

    @property
    def longest(self) -> int | None:
        """Most tokens of a request of the model that is served; None where that is another than the measured one and the length
        of its context is not known here."""
        if not self.another_model:
            return self.max_model_len
        return None if self.model is None else context_length(self.model)

    def origin(self, title: str) -> str:
        engine = self.profile.engine
        if self.measured_there:
            as_then = _BUT_OPTIONS if engine.options else _AS_THEN
            return f"The figures below were measured on {title} {engine.version}. {as_then}"
        whose = f"this project's own engine ({engine})" if ours(engine.name) else str(engine)
        return f"The figures below were measured on {whose}, not on {title}. {_a_start(title)}"

    def facts(self) -> Mapping[str, str]:
        p, load = self.profile, self.profile.workload
        setting = next(held for name, held in p.settings.items() if name == self.setting)
        weights = ", random weights" if p.model.random_weights else ""
        used = f" ({p.engine.parallelism} used)" if p.machine.gpu and p.machine.gpu.count > p.engine.parallelism else ""
        return {
            "profile": _made(self.profile_name, p),
            "machine": f"{_of(p.machine, used)}",
            "software": f"{_versions(p.software)}, transformers {p.software.transformers}",
            "engine": f"{p.engine}"
            + (f", started with {', '.join(f'{k}={v}' for k, v in p.engine.options.items())}" if p.engine.options else ""),
            "model": f"{p.model.name} ({p.model.architecture}, {p.model.parameters / 1e6:.0f}M, {p.model.dtypes}{weights})",
            "workload": f"{load.spec}, lengths × {load.length_scale:g}: prompts {load.mean_prompt:.0f}, outputs "
            f"{load.mean_output:.0f} tokens on average, {setting.point.offered_rate:.3g} requests/s",
            "SLO": f"{p.slo} ({p.slo_from})",
            "setting": f"{self.setting}: {setting.why}",
            "measured": _measured(setting.point, None if p.classes else p.slo.attainment),
            "verdict": p.verdict,
        }  # fmt: skip

    def warnings(self, title: str, written: Collection[str]) -> Iterator[str]:
        profile = self.profile
        if profile.machine.kind == "cpu":
            yield _on_a_cpu(profile.machine)
        if self.another_model and self.model is not None:
            yield (
                f"measured with model {profile.model.name}, exported for {self.model}: the step times of {self.model} are "
                "different"
            )
        held = {key.replace("-", "_").removeprefix("no_") for key in written}
        if self.another_model:
            held |= {"dtype", "max_model_len"}  # which are left to the model
        options = {n: v for n, v in profile.engine.options.items() if n not in held and not n.startswith(_NO_MATTER)}
        if self.measured_there and options:
            given = ", ".join(f"{name}={value}" for name, value in options.items())
            yield f"{title} was started with {given} when this was measured, which the file does not hold: give it the same"
        if self.model is None:
            yield (
                f"measured with {profile.model.name}, a shape with random weights that no published model has: replace MODEL by "
                "your model, or export again with --model DIRECTORY or HUB_ID; the step times of your model are different"
            )
        yield from _doubts(profile)


@dataclass(frozen=True, slots=True)
class ProfiledCallable(Source):
    """A fixed setting of a batcher, from the profile of a callable: other batchers have no adaptive strategy. ``point``: what was
    tried with it, None where only the adaptive strategy was."""

    profile: CallableProfile
    point: CallablePoint | None

    @property
    def purpose(self) -> str:
        return "recommended" if self._recommended else "fixed"

    @property
    def measured_on(self) -> str:
        return f"autotune {self.profile.software.autotune}"

    @property
    def _recommended(self) -> bool:
        return self.profile.strategy == "dynamic" and self.knobs == self.profile.knobs

    def origin(self, title: str) -> str:
        how = "measured on" if self.point is None or self.point.source == "measured" else "simulated for"
        return f"The figures below were {how} this project's own batcher ({self.measured_on}), not on {title}. {_a_start(title)}"

    def facts(self) -> Mapping[str, str]:
        p, load = self.profile, self.profile.workload
        return {
            "profile": _made(self.profile_name, p),
            "machine": _of(p.machine),
            "software": _versions(p.software),
            "function": f"{p.function}, called with {p.inputs.items} inputs of {p.inputs.file}",
            "workload": f"{load.spec}, {load.rate:.3g} items/s",
            "SLO": f"{p.slo} ({p.slo_from})",
            "setting": f"{self.purpose}: dynamic {self.knobs}",
            "measured": "not with this strategy" if self.point is None else _tried(self.point, p.slo.attainment),
            "verdict": p.verdict,
        }

    def warnings(self, title: str, written: Collection[str]) -> Iterator[str]:
        profile = self.profile
        if profile.machine.kind == "cpu":
            yield _on_a_cpu(profile.machine)
        if self.point is None:
            yield f"only the adaptive strategy was tried, whose knobs are ceilings; {title} waits as long as it is allowed to"
        elif not self._recommended and self.knobs.max_batch_size == 1:
            yield (
                f"the recommended strategy is adaptive, which {title} does not have, and the only fixed setting that was tried "
                "is a call for each item: profile with --strategy dynamic for another"
            )
        elif not self._recommended:
            yield (
                f"the recommended strategy is adaptive, which {title} does not have: this is the best fixed setting that was "
                f"{self.point.source}"
            )
        yield from _doubts(profile)


def callable_source(target: str, profile: CallableProfile, profile_name: str, model: str | None) -> ProfiledCallable:
    """The recommended setting where it is a fixed one; else the best fixed one that was tried, measured before simulated.

    A call for each item is always tried, to be compared with: it is the best only where there is no other. Of those within one
    item of the best, one whose budget of cost cuts nothing comes first: others lose it.
    """
    point = profile.points[0]
    if profile.strategy != "dynamic":
        fixed = [p for p in profile.points if p.strategy == "dynamic"]
        if not fixed:
            return ProfiledCallable(target, profile_name, profile.knobs, model, profile, None)
        first = max((p.knobs.max_batch_size > 1, p.source == "measured") for p in fixed)
        fixed = [p for p in fixed if (p.knobs.max_batch_size > 1, p.source == "measured") == first]
        best = max(fixed, key=lambda p: p.goodput)
        equal = [p for p in fixed if p.goodput >= best.goodput * (1 - 1 / max(1, best.met))]
        point = max(equal, key=lambda p: (bool(without_bound(profile, p.knobs)), p.goodput))
    return ProfiledCallable(target, profile_name, point.knobs, model, profile, point)


def without_bound(profile: CallableProfile, knobs: Knobs) -> str:
    """Why the budget of ``knobs`` never bounds the cost of a call, or ""."""
    if knobs.token_budget >= BATCHER_LIMITS.token_budget:
        return "it is at its ceiling, so it cuts nothing"
    if profile.inputs.cost is None and knobs.token_budget >= knobs.max_batch_size:
        return "every input costs 1, so it cuts nothing"
    return ""


def _a_start(title: str) -> str:
    return f"Use the settings as a starting point, and measure on {title} what they give."


def _made(name: str, profile: Profile | CallableProfile) -> str:
    stopped = "" if profile.status == "complete" else "; that run was stopped before its end"
    return f"{name}, made by `{profile.command}` on {profile.created}{stopped}"


def _of(machine: Machine, used: str = "") -> str:
    return f"{describe(machine)}{used} · {machine.cpu} · {machine.os}"


def _versions(software: Software) -> str:
    return f"autotune {software.autotune}, torch {software.torch}"


def _measured(point: Point, target: float | None) -> str:
    times = {"TTFT": point.ttft_p99_ms, "TPOT": point.tpot_p99_ms}
    interval = share_interval(point.attainment_low, point.attainment_high)
    return (
        f"{in_percent(share_met(point), target=target)} of {point.offered} requests met the SLO (95% interval {interval}%), "
        f"{point.goodput.mean:.3g} requests/s met it{_tails(times)}"
    )


def _tried(point: CallablePoint, target: float) -> str:
    interval = share_interval(point.attainment_low, point.attainment_high)
    return (
        f"{in_percent(share_met(point), target=target)} of {point.offered} items met the SLO (95% interval {interval}%), "
        f"{point.goodput:.3g} items/s met it{_tails({'E2E': point.e2e_p99_ms})}"
    )


def _tails(times: Mapping[str, float | None]) -> str:
    return "".join(f", {name} p99 {ms:.0f} ms" for name, ms in times.items() if ms is not None)


def _on_a_cpu(machine: Machine) -> str:
    return f"measured on a CPU ({machine.cpu}): these settings are for that CPU; for a GPU, profile on the GPU"


def _doubts(profile: Profile | CallableProfile) -> Iterator[str]:
    if profile.status == "stopped":
        yield "the profiling run was stopped before its end"
    if not profile.slo_met:
        yield f"the SLO {profile.slo} was not met when this was measured"
