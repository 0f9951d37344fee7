"""How sure the choice is, in figures and in a sentence."""

from __future__ import annotations

from autotune.profile.parts import Confidence


def confidence(
    best: float,
    regret: float,
    repeats: float | None,
    noise: float,
    measured: int,
    *,
    full: bool = False,
    separated: bool = True,
    simulation_agrees: bool = True,
) -> Confidence:
    """The figures and the sentence.

    ``repeats``: by how much runs of the same requests differed, None: nothing was repeated; ``noise``: that of a share of so
    many requests, no less. ``full``: every run kept everything. ``separated``: no interval of another setting reaches
    into the recommended one's. ``simulation_agrees``: no other setting measured is better in simulation.
    """
    regret = max(0.0, regret)
    if full:
        told = "noise is not visible: every run kept everything"
    elif repeats is None:
        told = "nothing was measured twice"
    else:
        told = f"runs of one setting differ by {repeats:.1%}"
    chance = "above 99%" if best > 0.99 else f"of {best:.0%}"
    sure = f"the best with a probability {chance}, and is expected to serve {regret:.1%} less than the best of them"
    if measured < 2:
        told += "; the recommended setting is the only one measured: the recommendation rests on simulation"
    elif separated:
        told += f"; of {measured} settings measured the recommended one is {sure}"
    else:
        told += f"; the measurements alone do not separate the {measured} settings measured: "
        with_simulation = (
            "with simulation, which prefers it," if simulation_agrees else "by them and simulation together"
        )
        told += f"{with_simulation} the recommended one is {sure}"
    return Confidence(noise=round(noise, 5), best=round(best, 4), regret=round(regret, 5), sentence=told)
