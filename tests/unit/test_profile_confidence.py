"""How sure a choice is, in words."""

from __future__ import annotations

from autotune.profiling.posterior import confidence


def test_confidence_in_words() -> None:
    sure = confidence(0.87, 0.004, 0.03, 0.05, 6)
    assert (sure.noise, sure.best, sure.regret) == (0.05, 0.87, 0.004)
    assert sure.sentence.startswith(
        "Runs of one setting differ by 3.0%; sampling noise alone would be 5.0%. "
        "Of 6 measured settings, the recommended setting is"
    )
    assert "probability of 87%" in sure.sentence and "0.4% less" in sure.sentence
    alone = confidence(1.0, 0.0, None, 0.05, 1)
    assert alone.noise == 0.05 and "the only one measured: the recommendation rests on simulation" in alone.sentence
    full = confidence(0.4, 0.0, 0.0, 0.018, 3, full=True, near=2)
    assert full.noise == 0.018 and "0.0%" not in full.sentence
    assert full.sentence.startswith(
        "Noise is not visible: in every run all requests met the SLO. The measurements alone do not separate"
    )
    assert (
        "Simulation prefers the recommended setting. By measurements and simulation together, the recommended setting is the "
        "best with a probability of 40%" in full.sentence
    )
    against = confidence(0.6, 0.0, 0.01, 0.018, 3, near=2, simulation_agrees=False)
    assert "do not separate" in against.sentence and "prefers" not in against.sentence
    assert "differ by 6.0%. " in confidence(0.9, 0.0, 0.06, 0.06, 3).sentence, "more than chance"
    some = confidence(0.6, 0.0, 0.01, 0.018, 5, near=1)
    assert "The measurements alone do not separate the recommended one from 1 of 4 others. " in some.sentence
    certain = confidence(0.998, 0.0, 0.0, 0.018, 3, near=2)
    assert "probability above 99%" in certain.sentence and "100%" not in certain.sentence


def test_of_equals_none_is_called_the_best() -> None:
    full = confidence(0.5, 0.002, 0.0, 0.018, 2, unbeaten=0.995, full=True, near=1)
    assert full.best == 0.5 and full.sentence == (
        "Noise is not visible: in every run all requests met the SLO. The measurements alone do not separate the 2 measured "
        "settings. By measurements and simulation together, the recommended setting is as good as any measured with a "
        "probability above 99%, and is expected to serve 0.2% less than the best of the measured settings."
    )
    apart = confidence(0.5, 0.0, 0.01, 0.018, 2, unbeaten=0.97)
    assert "the recommended setting is as good as any measured with a probability of 97%" in apart.sentence


def test_a_difference_of_nothing_is_no_percentage() -> None:
    same = confidence(0.9, 0.0001, 0.0, 0.0004, 3).sentence
    assert "0.0%" not in same and same.startswith(
        "Runs of one setting differ by less than 0.1%; sampling noise alone would be less than 0.1%. Of 3 measured settings"
    )
    assert same.endswith("and is expected to serve as much as the best of the measured settings.")
