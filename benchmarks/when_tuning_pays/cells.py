"""The questions: a GPU with a model, whose requests, under which SLO, and what vLLM starts with there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from autotune.engines.defaults import vllm_defaults
from benchmarks.controller.hardware import Hardware, measured
from benchmarks.controller.loads import lengths_of, slo_of
from benchmarks.controller.scenarios import Phase, Scenario, one
from benchmarks.gpu_truth import ALL, LADDER, Flags, Truth, load, names
from runtime.knobs import Knobs
from runtime.slo import SLO

VARIANTS: Final[Mapping[str, Flags]] = {"graphs": Flags(host_s=1e-3, pad=LADDER), "costly": ALL}
"""``graphs``: the kernels, a millisecond of the host a step, decode steps padded to vLLM's captured graphs. ``costly``: steps
that hold prompts cost 4 ms more besides, and decodes attend 1.6 times as long in them; that much is assumed, not measured."""

COSTLY: Final = ("a100-llama3-8b", "h100-llama3-8b", "h100-mixtral-8x7b-tp2", "rtx4090-llama3-8b")
"""Truths that ``costly`` is asked of unless told otherwise."""

WORKLOADS: Final[Mapping[str, str]] = {"chat": "conv", "code": "code"}
"""Requests as in Azure's 2023 traces (the presets ``azure-conv`` and ``azure-code``), arriving by Poisson."""

SLOS: Final[Mapping[str, str]] = {"strict": "inter", "loose": "mlperf"}
"""MLPerf's for an 8B model: interactive (TTFT 500 ms, TPOT 30 ms) and its server's (2 s, 100 ms)."""

NOISE: Final = 0.02
"""Deviation of each step's time."""

_DECODE: Final = (1, 1000)  # one that reads so many tokens
_PROMPT, _CHUNK = 0.95, 2048  # longer than this share of the prompts, and tokens of it in a step
_PART: Final = 0.5  # of a strict target, that either may take alone


class Gpu(NamedTuple):
    """``name``: as people write it; ``gib``: its memory."""

    name: str
    gib: float


GPUS: Final[Mapping[str, Gpu]] = {
    "a100_sxm": Gpu("A100", 80), "h100_sxm": Gpu("H100", 80), "h200_sxm": Gpu("H200", 141),
    "rtxpro6000": Gpu("RTX PRO 6000", 96), "rtx4090": Gpu("RTX 4090", 24),
}  # fmt: skip
"""Those of the truths, by the name in their tables."""

MODELS: Final[Mapping[str, str]] = {
    "llama2-7b": "Llama-2-7B", "llama3-8b": "Llama-3-8B", "mixtral-8x7b": "Mixtral-8x7B", "qwen3-32b": "Qwen3-32B",
}  # fmt: skip


class Cell(NamedTuple):
    """One question, by the names of its variant, truth, requests and SLO."""

    variant: str
    truth: str
    workload: str
    slo_name: str

    def __str__(self) -> str:
        return " ".join(self)

    @property
    def title(self) -> str:
        """GPU and model, as people write them."""
        meta = _truth(self).meta
        count = "" if meta["tp"] == 1 else f"{meta['tp']} × "
        dtype = "" if meta["dtype"] == "bfloat16" else f" {meta['dtype']}"
        return f"{count}{GPUS[meta['gpu']].name}, {MODELS[meta['model']]}{dtype}"

    @property
    def defaults(self) -> Knobs:
        """What ``vllm serve`` starts with there."""
        gpu = GPUS[_truth(self).meta["gpu"]]
        return vllm_defaults(gpu.name, gpu.gib)

    @property
    def factors(self) -> tuple[int, int]:
        """What TTFT and TPOT targets are multiplied by: the least whole numbers with which a long prompt, and a decode, alone on
        the GPU take at most half of the strict ones. They are those of ``graphs`` in every variant."""
        truth, slo = _loaded("graphs", self.truth), slo_of(SLOS["strict"])
        assert slo.ttft_ms is not None and slo.tpot_ms is not None
        prompt = _long_prompt(WORKLOADS[self.workload], truth.kv_tokens)
        chunks = [(start, min(_CHUNK, prompt - start)) for start in range(0, prompt, _CHUNK)]
        prefill_s = sum(truth.step_seconds(0, 0, [chunk]) for chunk in chunks)
        decode_s = truth.step_seconds(*_DECODE)
        return math.ceil(1000 * prefill_s / (_PART * slo.ttft_ms)), math.ceil(1000 * decode_s / (_PART * slo.tpot_ms))

    @property
    def slo_of_part(self) -> str:
        """The SLO by the name that requests go by in :mod:`benchmarks.controller.loads`."""
        ttft, tpot = self.factors
        return f"{SLOS[self.slo_name]}*{ttft},{tpot}"

    @property
    def slo(self) -> SLO:
        return slo_of(self.slo_of_part)

    def scenario(self, rate: float, seconds: float) -> Scenario:
        """``seconds`` of its requests at ``rate`` a second."""
        phases = (Phase(seconds, one(WORKLOADS[self.workload], self.slo_of_part), rate),)
        return Scenario(str(self), self.title, _hardware(self.variant, self.truth), phases, noise=NOISE)


def _truth(cell: Cell) -> Truth:
    return _loaded(cell.variant, cell.truth)


@cache
def _long_prompt(lengths: str, kv_tokens: int) -> int:
    """Tokens of a prompt that is longer than most."""
    evenly = (np.arange(2000) + 0.5) / 2000
    prompts, _ = lengths_of(lengths, kv_tokens, None).draw(evenly, evenly)
    return round(float(np.quantile(prompts, _PROMPT)))


@cache
def _loaded(variant: str, truth: str) -> Truth:
    return load(truth, VARIANTS[variant])


@cache
def _hardware(variant: str, truth: str) -> Hardware:
    return replace(measured(truth, VARIANTS[variant]), name=f"{truth} {variant}")


def cells(
    variants: Iterable[str] = (), truths: Iterable[str] = (), workloads: Iterable[str] = (), slos: Iterable[str] = ()
) -> Iterator[Cell]:
    """All that are asked, or those of the names given. With costly steps only four of the truths are asked."""
    for variant in list(variants) or VARIANTS:
        for truth in list(truths) or (COSTLY if variant == "costly" else names()):
            for workload in list(workloads) or WORKLOADS:
                for slo_name in list(slos) or SLOS:
                    yield Cell(variant, truth, workload, slo_name)
