"""What is compared: the engine at a fixed setting, or with a controller attached that starts from one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from autotune.engines.defaults import VLLM_DEFAULTS
from autotune.report.tables import turned
from runtime.errors import EngineClosedError, InputError
from runtime.knobs import KNOBS, KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.slo import SLO

if TYPE_CHECKING:
    from autotune.control.loop import Control
    from autotune.engines import Engine
    from autotune.profile import Profile


@dataclass(frozen=True)
class Contender:
    """``knobs``: the setting it runs at, or from which its controller starts. ``control``: by the ``controller`` of that name
    (None: what :func:`autotune.control` takes by itself), which knows of the machine what ``profile`` says, and else nothing.
    ``rejects``: whether late requests are rejected early, and the queue is in order of deadlines. ``attach`` puts to work what
    is none of these."""

    name: str
    knobs: Knobs
    control: bool = False
    controller: str | None = None
    profile: Profile | None = field(default=None, hash=False)
    rejects: bool = False
    attach: Callable[[Engine, SLO], AbstractContextManager[Control]] | None = None

    def rejecting(self) -> Contender:
        """The same with late requests rejected."""
        return replace(self, name=f"{self.name}, late rejected", rejects=True)

    def at_work(self, engine: Engine, slo: SLO) -> AbstractContextManager[Control | None]:
        """What it does beside the setting, until the end of the block. Raises :class:`InputError` where its controller cannot be
        made."""
        from autotune.control.attach import attach

        if self.attach is not None:
            return self.attach(engine, slo)
        if not self.control:
            return _rejecting(engine) if self.rejects else nullcontext()
        try:
            return attach(
                engine,
                slo=slo,
                profile=self.profile,
                start=self.knobs,
                admission=self.rejects,
                controller=self.controller,
            )
        except ValueError as error:
            raise InputError(f"--controller: {error}") from None


@contextmanager
def _rejecting(engine: Engine) -> Iterator[None]:
    engine.set_admission(AdmissionPolicy())
    try:
        yield
    finally:
        with suppress(EngineClosedError):  # it died, which whoever measures hears of
            engine.set_admission(None)


def defaults(limits: KnobLimits, stock: Knobs = VLLM_DEFAULTS) -> Contender:
    """vLLM's defaults on this engine, clamped to its ceilings; ``stock``: those that vLLM's own engine would start with."""
    return Contender("defaults", limits.clamp(stock))


def controlled(
    limits: KnobLimits,
    start: Knobs | None = None,
    stock: Knobs = VLLM_DEFAULTS,
    controller: str | None = None,
    profile: Profile | None = None,
) -> Contender:
    """A controller that starts cold from the defaults; or from ``start``, a profile's setting, and with what ``profile`` knows of
    the machine. ``controller``: the one of that name."""
    if start is None:
        return Contender("control", limits.clamp(stock), True, controller)
    return Contender("control from profile", limits.clamp(start), True, controller, profile)


def fixed(knobs: Knobs, name: str | None = None) -> Contender:
    return Contender(name or short(knobs), knobs)


def parse_fixed(text: str, limits: KnobLimits, stock: Knobs = VLLM_DEFAULTS) -> Contender:
    """``max_batch_size=64,token_budget=512``: knobs not named are the defaults'; chunks that fill the defaults' budget fill
    that of the setting, too. Raises :class:`InputError`, one line."""
    specs = {spec.name: spec for spec in KNOBS}
    values: dict[str, float] = limits.clamp(stock).as_dict()
    given: set[str] = set()
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if name not in specs:
            raise InputError(f'"{part.strip()}" sets no knob; the knobs are {", ".join(specs)}, as in token_budget=512')
        if name in given:
            raise InputError(f"{name} is given twice")
        given.add(name)
        try:
            values[name] = specs[name].read(number, getattr(limits, name))
        except ValueError as error:
            raise InputError(str(error)) from None
    if "chunk_size" not in given:
        longest = limits.chunk_size if stock.chunk_size >= stock.token_budget else values["chunk_size"]
        values["chunk_size"] = min(longest, values["token_budget"])
    return fixed(Knobs(**values))  # type: ignore[arg-type]  # each checked by its spec


def short(knobs: Knobs) -> str:
    """``64/512``: sequences and tokens of a step; any other knob only where it says more."""
    parts = [f"{knobs.max_batch_size}/{knobs.token_budget}"]
    if knobs.chunk_size < knobs.token_budget:
        parts.append(f"chunk {knobs.chunk_size}")
    if knobs.max_wait_ms:
        parts.append(f"wait {knobs.max_wait_ms:g} ms")
    return " ".join([*parts, *turned(knobs)])
