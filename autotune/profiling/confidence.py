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
    unbeaten: float | None = None,
    full: bool = False,
    near: int = 0,
    simulation_agrees: bool = True,
) -> Confidence:
    """The figures and the sentence.

    ``repeats``: by how much runs of the same requests differed, None: nothing was repeated; ``noise``: that of a share of so
    many requests, no less. ``unbeaten``: where others count as equals of the recommended setting, the probability that none
    measured is better; equals share that of being the best. ``full``: every run kept everything. ``near``: how many other
    settings have an interval that reaches into the recommended one's. ``simulation_agrees``: no other setting measured is
    better in simulation.
    """
    regret = max(0.0, regret)
    if full:
        told = "noise is not visible: every run kept everything"
    elif repeats is None:
        told = "nothing was measured twice"
    else:
        told = f"runs of one setting differ by {repeats:.1%}"
        if noise > repeats:
            told += f", where chance alone makes {noise:.1%}"
    what, likely = ("the best", best) if unbeaten is None else ("as good as any measured", unbeaten)
    chance = "above 99%" if likely > 0.99 else f"of {likely:.0%}"
    sure = f"{what} with a probability {chance}, and is expected to serve {regret:.1%} less than the best of them"
    if measured < 2:
        told += "; the recommended setting is the only one measured: the recommendation rests on simulation"
    elif not near:
        told += f"; of {measured} settings measured the recommended one is {sure}"
    else:
        which = (
            f"the {measured} settings measured" if near == measured - 1 else f"it from {near} of {measured - 1} others"
        )
        told += f"; the measurements alone do not separate {which}: "
        prefers = simulation_agrees and unbeaten is None  # among equals it may be that none is better
        with_simulation = "with simulation, which prefers it," if prefers else "by them and simulation together"
        told += f"{with_simulation} the recommended one is {sure}"
    return Confidence(noise=round(noise, 5), best=round(best, 4), regret=round(regret, 5), sentence=told)
