"""What controllers are compared on: the matrix M1 to M14, three that were invented later, noise and gap variants, eight on
step times of real GPUs, twice four that were invented when the controller stood, and four with E2E targets.

A scenario is a machine and phases of traffic. A phase's load is relative to the peak goodput of its requests on that machine (see
:mod:`benchmarks.controller.peaks`), so that 1.0 is as much as fixed settings can serve at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks.controller.hardware import (
    A100,
    B200,
    DENSE,
    H200,
    H200_ADD,
    L4,
    MOE,
    MOE_IMBALANCED,
    TENSOR,
    TILED,
    Hardware,
    measured,
)
from benchmarks.controller.loads import POISSON, Part, Pattern
from benchmarks.gpu_truth import ALL
from benchmarks.sweep.cases import Grid
from runtime.knobs import Knobs
from runtime.slo import SLO

BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
GRID = Grid((16, 32, 64, 128, 256, 512), BUDGETS, (256, 1024))
SMALL_GRID = Grid((8, 16, 32, 64, 128, 256, 512), BUDGETS, (256, 1024))
COLD = Knobs(max_batch_size=1024, max_wait_ms=0, token_budget=8192, chunk_size=8192)
"""vLLM's defaults for a large GPU: where every contender starts."""


class Load(NamedTuple):
    """Requests on a machine: what a peak goodput is of."""

    hardware: str
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return f"{self.hardware} " + " + ".join(
            f"{part.lengths}-{part.slo_name}" + ("" if part.share == 1 else f" {part.share:.0%}") for part in self.parts
        )


@dataclass(frozen=True)
class Phase:
    """``seconds`` of ``parts`` at ``load`` × their peak goodput, while the machine is ``slow`` times as slow as it was."""

    seconds: float
    parts: tuple[Part, ...]
    load: float
    slow: float = 1.0

    @property
    def slo(self) -> SLO:
        """The SLO of requests of no named class."""
        return next(part.slo for part in self.parts if part.request_class == "default")


@dataclass(frozen=True)
class Scenario:
    """``noise``: deviation of each step's time; ``stalls``: share of steps that take ten times as long."""

    name: str
    about: str
    hardware: Hardware
    phases: tuple[Phase, ...]
    pattern: Pattern = POISSON
    grid: Grid = GRID
    noise: float = 0.0
    stalls: float = 0.0
    like: str = ""  # the scenario whose best settings a variant takes over

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def shifts(self) -> bool:
        """Whether lengths, SLOs or the speed of the machine change from one phase to another. A setting is good or bad for these;
        a change of the load alone leaves the best one nearly where it was, and is not counted."""
        return len({(phase.parts, phase.slow) for phase in self.phases}) > 1

    @property
    def starts(self) -> list[float]:
        """When each phase begins."""
        return [sum(phase.seconds for phase in self.phases[:i]) for i in range(len(self.phases))]

    @property
    def classes(self) -> dict[str, SLO]:
        """The SLOs of named classes; those do not change."""
        named = [part for phase in self.phases for part in phase.parts if part.request_class != "default"]
        return {part.request_class: part.slo for part in named}

    def load(self, phase: Phase) -> Load:
        return Load(self.hardware.name, phase.parts)


def one(lengths: str, slo_name: str) -> tuple[Part, ...]:
    return (Part(lengths, slo_name),)


def _steps(seconds: float, parts: tuple[Part, ...], *loads: float) -> tuple[Phase, ...]:
    return tuple(Phase(seconds, parts, load) for load in loads)


def _slowed(seconds: float, parts: tuple[Part, ...], load: float, slow: float = 1.8) -> tuple[Phase, ...]:
    return tuple(Phase(seconds, parts, load, factor) for factor in (1.0, slow, 1.0))


def _long(share: float) -> tuple[Part, ...]:
    return Part("conv", "inter", 1 - share), Part("moon", "long", share, "long")


_CHAT_AND_CODE = Part("conv", "inter", 0.5), Part("code", "mlperf", 0.5, "code")
_TRACE = Pattern("trace")

MATRIX = (
    Scenario("M1", "H200 conv inter 0.9 (control)", H200, _steps(180, one("conv", "inter"), 0.9)),
    Scenario("M2", "H200 Azure's conversations, inter 0.9", H200, _steps(180, one("conv", "inter"), 0.9), _TRACE),
    Scenario("M3", "H200 code strict, mlperf, inter 1.05", H200,
             tuple(Phase(80, one("code", slo), 1.05) for slo in ("strict", "mlperf", "inter"))),
    Scenario("M4", "H200 conv strict 0.5, 1.2, 0.7", H200, _steps(80, one("conv", "strict"), 0.5, 1.2, 0.7)),
    Scenario("M5", "H200 conv inter 0.6, 1.8 × slower in the middle", H200, _slowed(80, one("conv", "inter"), 0.6)),
    Scenario("M6", "H200 chat inter + long prompts, 15%, then 3%", H200,
             (Phase(150, _long(0.15), 0.9), Phase(80, _long(0.03), 0.9))),
    Scenario("M7", "H200 half chat inter, half code mlperf, 0.9, 1.1", H200, _steps(80, _CHAT_AND_CODE, 0.9, 1.1)),
    Scenario("M8", "H200add conv mlperf, code mlperf, moon inter 1.05", H200_ADD,
             (Phase(80, one("conv", "mlperf"), 1.05), Phase(80, one("code", "mlperf"), 1.05),
              Phase(150, one("moon", "inter"), 1.05))),
    Scenario("M9", "MoE conv inter, code inter, code strict 1.05", MOE,
             (Phase(60, one("conv", "inter"), 1.05), Phase(60, one("code", "inter"), 1.05),
              Phase(60, one("code", "strict"), 1.05))),
    Scenario("M10", "MoE code inter 0.6, 1.8 × slower in the middle", MOE, _slowed(80, one("code", "inter"), 0.6),
             grid=SMALL_GRID),
    Scenario("M11", "A100 conv inter 0.5, 1.2, 0.7", A100, _steps(150, one("conv", "inter"), 0.5, 1.2, 0.7)),
    Scenario("M12", "H200add reason inter 0.7, 1.3, 0.9", H200_ADD, _steps(150, one("reason", "inter"), 0.7, 1.3, 0.9)),
    Scenario("M13", "L4 conv mlperf 0.5, 1.2, 0.7", L4, _steps(300, one("conv", "mlperf"), 0.5, 1.2, 0.7)),
    Scenario("M14", "H200 Azure's code completions, inter 0.5", H200, _steps(240, one("code", "inter"), 0.5), _TRACE),
)  # fmt: skip

UNSEEN = (
    Scenario("U1", "70B on four H100, digests whole 0.7, 1.1, then brief whole 0.8", TENSOR,
             (*_steps(100, one("digest", "whole"), 0.7, 1.1), Phase(60, one("brief", "whole"), 0.8))),
    Scenario("U2", "A100tiled brief inter in bursts 0.8, 1.5 × slower from the middle on", TILED,
             (Phase(80, one("brief", "inter"), 0.8), Phase(80, one("brief", "inter"), 0.8, 1.5)), Pattern("gamma", 2.5)),
    Scenario("U3", "MoEpaced conv mlperf 1.1, then inter + digests 0.9", MOE_IMBALANCED,
             (Phase(80, one("conv", "mlperf"), 1.1),
              Phase(80, (Part("conv", "inter", 0.7), Part("digest", "mlperf", 0.3, "digest")), 0.9))),
)  # fmt: skip
"""Invented after the matrix, with step times by formulas that neither a roofline nor our learner contains. No rival is tuned on
them. Some constants of ours were chosen with U2 and U3 in sight, which they name, and on U1 ``ALIKE`` alone."""

MEASURED = (
    Scenario("G1", "Llama-2-7B on A100 conv inter 0.7, 1.1", measured("a100-llama2-7b"),
             _steps(80, one("conv", "inter"), 0.7, 1.1)),
    Scenario("G2", "Llama-3-8B on A100, graphs, conv inter, code inter 0.95", measured("a100-llama3-8b", ALL),
             (Phase(80, one("conv", "inter"), 0.95), Phase(80, one("code", "inter"), 0.95))),
    Scenario("G3", "Llama-2-7B on H100, graphs, brief strict, conv inter 0.95", measured("h100-llama2-7b", ALL),
             (Phase(80, one("brief", "strict"), 0.95), Phase(80, one("conv", "inter"), 0.95))),
    Scenario("G4", "Llama-3-8B on H100 half chat inter, half code mlperf, 0.9, 1.1", measured("h100-llama3-8b"),
             _steps(80, _CHAT_AND_CODE, 0.9, 1.1)),
    Scenario("G5", "Llama-3-8B in fp8 on H200 code inter, mlperf, strict 1.05", measured("h200-llama3-8b-fp8"),
             tuple(Phase(60, one("code", slo), 1.05) for slo in ("inter", "mlperf", "strict"))),
    Scenario("G6", "Mixtral on two H100, graphs, conv mlperf 0.7, 1.5 × slower in the middle",
             measured("h100-mixtral-8x7b-tp2", ALL), _slowed(80, one("conv", "mlperf"), 0.7, 1.5)),
    Scenario("G7", "Qwen3-32B on RTX PRO 6000 conv mlperf, code mlperf 0.95", measured("rtxpro6000-qwen3-32b"),
             (Phase(120, one("conv", "mlperf"), 0.95), Phase(120, one("code", "mlperf"), 0.95))),
    Scenario("G8", "Llama-3-8B on RTX 4090, graphs, conv mlperf 0.6, 1.2, 0.8", measured("rtx4090-llama3-8b", ALL),
             _steps(120, one("conv", "mlperf"), 0.6, 1.2, 0.8)),
)  # fmt: skip
"""Every GPU and model of :mod:`benchmarks.gpu_truth`, half of them with graph padding and slow mixed steps. What was
chosen with them in sight, the constants of the predictive controller say; on G7 ``AS_FAST`` and ``WORTHWHILE``, which only
knobs alone go by."""


FORMER = (
    Scenario("F1", "H200 moon, TTFT 10 s, TPOT 100 ms, 0.7, 1.0", H200, _steps(120, one("moon", "mlperf*5,1"), 0.7, 1.0)),
    Scenario("F2", "A100 story and agent inter by turns 0.9", A100,
             tuple(Phase(45, one(lengths, "inter"), 0.9) for lengths in ("story", "agent") * 2)),
    Scenario("F3", "32B story inter + half agent (TTFT 10 s) in bursts 0.7, 1.1", DENSE,
             _steps(90, (Part("story", "inter*1,2", 0.5), Part("agent", "mlperf*5,1", 0.5, "agent")), 0.7, 1.1),
             Pattern("gamma", 2.0)),
    Scenario("F4", "B200 agent strict 0.9, 1.4 × slower in the middle, times that vary by 5%", B200,
             _slowed(60, one("agent", "strict"), 0.9, 1.4), noise=0.05),
)  # fmt: skip
"""Invented on 29 November 2026, when the predictive controller and the tuned constants of its rivals stood (`803622df`): long
prompts, lengths that alternate, two classes in bursts, a fast GPU that slows down. They were first run at `6282c5f4`. What came
later was chosen on others, but these were run beside them: ``SHORT`` and ``WAITED``, and of knobs alone ``LEAST_BUDGET``,
``FAR``, ``WORSE`` and ``DOUBTED``."""

FROZEN = (
    Scenario("H1", "32B on H200 brief mlperf, lulls and surges of 20 s, 0.4, 1.3", DENSE,
             _steps(20, one("brief", "mlperf"), *(0.4, 1.3) * 4)),
    Scenario("H2", "Mixtral on two H100, graphs, story and digest mlperf by turns 0.95", measured("h100-mixtral-8x7b-tp2", ALL),
             tuple(Phase(45, one(lengths, "mlperf"), 0.95) for lengths in ("story", "digest") * 2)),
    Scenario("H3", "L4 agent, TTFT 10 s, TPOT 100 ms, 0.85, 1.3 × slower in the middle, times that vary by 10%", L4,
             _slowed(100, one("agent", "mlperf*5,1"), 0.85, 1.3), noise=0.1),
    Scenario("H4", "Llama-3-8B on RTX 4090 brief inter, conv whole 0.9, in bursts", measured("rtx4090-llama3-8b"),
             (Phase(80, one("brief", "inter"), 0.9), Phase(80, one("conv", "whole"), 0.9)), Pattern("gamma", 2.0)),
)  # fmt: skip
"""Invented on 30 November 2026, after the last change to the predictive controller (`d8dac70e`) and to the tuned constants of its
rivals. Nothing was tuned on them when they were first run; what knobs alone lost on H4 taught the controller about E2E targets
since, and ``ALIKE`` was chosen on it."""


ANSWERS = (
    Scenario("E1", "Llama-3-8B on A100 agent whole 0.7, 1.1", measured("a100-llama3-8b"),
             _steps(80, one("agent", "whole"), 0.7, 1.1)),
    Scenario("E2", "H200 story, E2E 30 s, 0.9, 1.3 × slower in the middle", H200, _slowed(60, one("story", "answer"), 0.9, 1.3)),
    Scenario("E3", "32B on H200 code, conv, TTFT 1 s, TPOT 100 ms, E2E 15 s 0.95, in bursts", DENSE,
             tuple(Phase(80, one(lengths, "page"), 0.95) for lengths in ("code", "conv")), Pattern("gamma", 2.0)),
    Scenario("E4", "Mixtral on two H100, graphs, conv inter + digests, E2E 30 s, 0.8, 1.1",
             measured("h100-mixtral-8x7b-tp2", ALL),
             _steps(80, (Part("conv", "inter", 0.7), Part("digest", "answer", 0.3, "digest")), 0.8, 1.1)),
)  # fmt: skip
"""SLOs with an E2E target, which of those above only U1 and H4 have. Invented on 30 November 2026, after the controller had
learned on these two to choose the size of a step by such targets. No constant was chosen on them; that no batch is made smaller
for an E2E, and that the start is tried where classes differ in their TTFT, it learned on E2 and E4."""


def _variant(base: str, suffix: str, about: str, noise: float = 0.0, stalls: float = 0.0) -> Scenario:
    found = next(scenario for scenario in MATRIX if scenario.name == base)
    return replace(found, name=f"{base}{suffix}", about=f"{base} with {about}", noise=noise, stalls=stalls, like=base)


def _gaps(base: str) -> Scenario:
    found = next(scenario for scenario in MATRIX if scenario.name == base)
    phases = tuple(
        replace(phase, parts=tuple(p._replace(slo_name="gap") for p in phase.parts)) for phase in found.phases
    )
    return replace(found, name=f"{base}gap", about=f"{base} with a bound on gaps between tokens", phases=phases)


VARIANTS = (
    *(_variant(base, "~2%", "step times that vary by 2%", noise=0.02) for base in ("M5", "M9")),
    *(_variant(base, "~10%", "step times that vary by 10%", noise=0.1) for base in ("M5", "M9")),
    *(_variant(base, "~stalls", "1% of steps ten times as long", stalls=0.01) for base in ("M5", "M9")),
    _gaps("M1"),
    _gaps("M5"),
)


class Family(NamedTuple):
    """Scenarios that figures are a mean of. ``label``: in pictures; ``about``: in tables; ``key``: in the line of JSON."""

    label: str
    about: str
    key: str
    scenarios: tuple[Scenario, ...]


FAMILIES = (
    Family("M1 to M14", "", "", MATRIX),
    Family(
        "U1 to U3",
        "invented later; U2 and U3 were in sight when constants of ours were chosen, U1 for one",
        "unseen",
        UNSEEN,
    ),
    Family("G1 to G8, measured GPUs", "on measured GPUs", "gpu_truth", MEASURED),
    Family(
        "F1 to F4",
        "invented when most of ours stood; in sight when some of its later constants were chosen",
        "former",
        FORMER,
    ),
    Family(
        "H1 to H4", "invented when all of them stood; on H4 one constant of ours was chosen since", "frozen", FROZEN
    ),
    Family("E1 to E4", "with E2E targets; no constant was chosen on them", "e2e", ANSWERS),
)
SCENARIOS = {s.name: s for s in (*(s for family in FAMILIES for s in family.scenarios), *VARIANTS)}
LOADS = list(dict.fromkeys(scenario.load(phase) for scenario in SCENARIOS.values() for phase in scenario.phases))
HARDWARE = {scenario.hardware.name: scenario.hardware for scenario in SCENARIOS.values()}
