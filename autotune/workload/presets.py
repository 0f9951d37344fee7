"""Workloads by name: fitted presets, conversations, and synthetic requests from a few numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autotune.workload.conversation import Conversations
from autotune.workload.fitted import load_fitted
from autotune.workload.lengths import Constant, Independent, LengthModel, Lognormal, Marginal, Uniform
from autotune.workload.options import Options, plain_float, plain_int
from autotune.workload.processes import ArrivalProcess, Fixed, Gamma, poisson
from autotune.workload.spec import MOST_TOKENS, Source
from autotune.workload.synthetic import Synthetic
from runtime.errors import InputError

FITTED = ("azure-conv", "azure-code")
_LEAST_CV, _MOST_CV = 0.001, 100
_MOST_TENANTS = 10_000


@dataclass(frozen=True)
class Preset:
    """A name users can type, what it is in a line, the options of its own, and how to make it from them."""

    name: str
    description: str
    options: tuple[str, ...]
    build: Callable[[Options], Source]


def _fitted(name: str) -> Callable[[Options], Source]:
    return lambda options: load_fitted(name).source()


def _conversations(options: Options) -> Source:
    given = Conversations()
    tenants = options.whole("tenants", len(given.system_prompts), most=_MOST_TENANTS)
    system = options.whole("system", None)
    prompts = given.system_prompts if system is None else (system,)
    turns = options.number("turns", given.turns)
    return Conversations(
        system_prompts=tuple(prompts[i % len(prompts)] for i in range(tenants)),
        turns=turns,
        max_turns=max(given.max_turns, math.ceil(3 * turns)),
        think_s=options.number("think", given.think_s),
        user=Lognormal(options.number("user", given.user.median), given.user.sigma),
        answer=Lognormal(options.number("answer", given.answer.median), given.answer.sigma),
    )


def _renewal(process: Callable[[Options], ArrivalProcess]) -> Callable[[Options], Source]:
    return lambda options: Synthetic(process(options), _lengths(options))


def _lengths(options: Options) -> LengthModel:
    name = options.text("lengths", None)
    if name is None:
        return Independent(_marginal(options, "prompt", "512"), _marginal(options, "output", "128"))
    if name not in FITTED:
        raise InputError(f"lengths is {name!r}; it must be one of {', '.join(FITTED)}")
    for other in ("prompt", "output"):
        if options.text(other, None) is not None:
            raise InputError(f"{other} and lengths are both given; give one")
    return load_fitted(name).lengths


def _marginal(options: Options, name: str, default: str) -> Marginal:
    """``512``: always; ``128-1024``: uniform; ``512~1.5``: lognormal with mean 512 and coefficient of variation 1.5."""
    text = options.text(name, default) or default
    try:
        if "~" in text:
            mean, cv = (plain_float(part) for part in text.split("~"))
            if mean <= MOST_TOKENS and cv <= _MOST_CV:
                return Lognormal.of_mean_cv(mean, cv)
        elif "-" in text:
            low, high = (plain_int(part) for part in text.split("-"))
            if high <= MOST_TOKENS:
                return Uniform(low, high)
        elif (tokens := plain_int(text)) <= MOST_TOKENS:
            return Constant(tokens)
    except ValueError:
        pass
    raise InputError(
        f"{name} is {text!r}; it must be tokens: 512 (always), 128-1024 (uniform), "
        f"or 512~1.5 (lognormal: mean~coefficient of variation, at most {_MOST_CV}); at most {MOST_TOKENS} tokens"
    )


_SHAPE = ("prompt", "output", "lengths")

PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("azure-conv", "chat traffic, fitted to the Azure 2023 conversation trace", (), _fitted("azure-conv")),
        Preset(
            "azure-code", "code completion in bursts, fitted to the Azure 2023 code trace", (), _fitted("azure-code")
        ),
        Preset(
            "shared-prefix",
            "multi-turn conversations behind common system prompts",
            ("tenants", "system", "turns", "think", "user", "answer"),
            _conversations,
        ),
        Preset("poisson", "independent users, exponential gaps", _SHAPE, _renewal(lambda options: poisson(1.0))),
        Preset(
            "gamma",
            "independent gamma gaps with coefficient of variation cv",
            ("cv", *_SHAPE),
            _renewal(lambda options: Gamma(1.0, options.number("cv", 2.0, least=_LEAST_CV, most=_MOST_CV))),
        ),
        Preset("fixed", "one request every 1/rate seconds", _SHAPE, _renewal(lambda options: Fixed(1.0))),
    )
}
