"""Which steps vLLM has CUDA graphs for, by its configuration. ``test_vllm_agrees`` asks vLLM's own dispatcher."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.engines.vllm.model import graphs_of
from runtime.step_model import NO_GRAPHS


class Mode(Enum):
    """As vLLM's CUDAGraphMode."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)


def config(
    mode: object = Mode.FULL_AND_PIECEWISE, sizes: object = (1, 2, 4, 8), *, slots: int = 8, **more: Any
) -> SimpleNamespace:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode, cudagraph_capture_sizes=sizes),
        model_config=SimpleNamespace(enforce_eager=more.get("eager", False)),
        device_config=SimpleNamespace(device_type=more.get("device", "cuda")),
        scheduler_config=SimpleNamespace(max_num_seqs=slots, max_num_batched_tokens=more.get("budget", 8)),
    )


@pytest.mark.parametrize("mode", [mode for mode in Mode if mode is not Mode.NONE])
def test_the_sizes_that_vllm_captures(mode: Mode) -> None:
    assert graphs_of(config(mode)).decodes == (1, 2, 4, 8)
    assert graphs_of(config(mode, [8, 2, 2, 1])).decodes == (1, 2, 8), "in ascending order, each once"


@pytest.mark.parametrize(
    ("mode", "slots", "read"),
    [
        (Mode.FULL_AND_PIECEWISE, 6, (1, 2, 4, 8)),  # six decodes run as eight
        (Mode.FULL_AND_PIECEWISE, 4, (1, 2, 4)),  # there are never five
        (Mode.PIECEWISE, 3, (1, 2, 4)),
        (Mode.FULL_DECODE_ONLY, 6, (1, 2, 4)),  # graphs of decodes alone end at max_num_seqs: five run launch by launch
        (Mode.FULL_DECODE_ONLY, 8, (1, 2, 4, 8)),
        (Mode.FULL, 100, (1, 2, 4, 8)),
    ],
)
def test_no_further_than_decodes_go(mode: Mode, slots: int, read: tuple[int, ...]) -> None:
    assert graphs_of(config(mode, slots=slots)).decodes == read


@pytest.mark.parametrize(
    ("mode", "budget", "read"),
    [
        (Mode.FULL_AND_PIECEWISE, 6, (1, 2, 4, 8)),
        (Mode.PIECEWISE, 4, (1, 2, 4)),  # no step holds five tokens
        (Mode.FULL, 100, (1, 2, 4, 8)),
        (Mode.FULL_DECODE_ONLY, 100, ()),
    ],
)
def test_steps_with_prompts_are_padded_to_them_too_unless_decodes_alone_are_captured(
    mode: Mode, budget: int, read: tuple[int, ...]
) -> None:
    found = graphs_of(config(mode, slots=3, budget=budget))
    assert found.prompts == read and found.sequences == (3 if read else 0)


@pytest.mark.parametrize(
    "none",
    [
        config(Mode.NONE),
        config(None),
        config(sizes=[]),
        config(sizes=None),
        config(eager=True),
        config(device="cpu"),
        SimpleNamespace(**{**vars(config()), "compilation_config": SimpleNamespace()}),
        SimpleNamespace(**{name: value for name, value in vars(config()).items() if name != "compilation_config"}),
    ],
)
def test_none_where_nothing_is_captured(none: SimpleNamespace) -> None:
    assert graphs_of(none) == NO_GRAPHS
