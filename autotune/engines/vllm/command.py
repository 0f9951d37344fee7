"""``autotune serve MODEL --engine vllm``: the ``vllm serve`` that tunes itself, with the right arguments."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, NoReturn

from autotune.engines.named import ToServe
from autotune.engines.vllm.named import argument_value, check_installed, check_model, installed_version
from autotune.engines.vllm.scheduler import unfit_version
from autotune.engines.vllm.serving import Options
from runtime.errors import InputError
from runtime.knobs import KnobLimits

SCHEDULER: Final = "autotune.engines.vllm.Scheduler"
_SECRET: Final = ("--api-key", "--hf-token")
_TO_RAY: Final = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
"""Which variables vLLM hands to actors of Ray. vLLM compiles anew when it changes: we name all of ours, set or not."""
_OURS: Final = {field.name: f"AUTOTUNE_{field.name.upper()}" for field in fields(Options)}
_NOT_OPTIONS: Final = ("metrics", "base")
"""Those of our variables for which ``autotune serve`` has no option: what the shell says of them counts."""
_LEAST_SLOTS: Final = 128
_LEAST_TOKENS, _MOST_TOKENS = 2048, 16384
"""vLLM's default ceilings are no lower on any CPU or GPU, and no higher."""
_OF_THE_SETTING: Final = (
    "max_num_seqs", "max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_active_seqs", "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
)  # fmt: skip
"""Arguments that were ceilings while vLLM was measured: without a controller the setting takes their place."""
_OF_TOKENS: Final = ("max_num_batched_tokens", "max_num_scheduled_tokens")
_CEILINGS: Final = {
    "max_batch_size": ("max_num_seqs", "max_num_active_seqs"), "token_budget": _OF_TOKENS, "chunk_size": _OF_TOKENS,
}  # fmt: skip
"""Which of them no value of a knob may exceed."""
MIDDLEWARE: Final = "autotune.engines.vllm.RejectionStatus"


@dataclass(frozen=True)
class ServeCommand:
    """What ``vllm serve`` is to be given. ``limits``: the ceilings of the knobs; None leaves them to vLLM. ``prefill_rate``:
    prompt tokens a second, where that is known: with ``options.reject_late`` vLLM's API server then answers 503 by itself while
    more prompt tokens wait than can be computed within the TTFT target. ``more``: arguments of vLLM's own, which come last, so
    that they count."""

    model: str
    options: Options
    limits: KnobLimits | None = None
    prefill_rate: float | None = None
    flags: Mapping[str, str | int | None] | None = None
    more: Sequence[str] = ()

    def arguments(self) -> list[str]:
        """Those of ``vllm``. Raises :class:`InputError` for ``options`` that cannot be used."""
        words = ["serve", self.model, "--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE]
        flags: dict[str, str | int | None] = dict(self.flags or {})
        if self.limits is not None:
            flags["--max-num-seqs"] = min(self.limits.max_batch_size, self.limits.token_budget)
            flags["--max-num-batched-tokens"] = self.limits.token_budget
        flags["--max-num-queued-tokens"] = self._queued_tokens()
        for flag, value in flags.items():
            if value is not None and not _is_among(flag, self.more):
                words += [flag, str(value)]
        return [*words, *self.more]

    def environment(self) -> dict[str, str]:
        """``options`` as variables, which engine cores that are actors of Ray get, too. Not in ``--additional-config``: vLLM
        compiles anew for each other one."""
        said = {variable: getattr(self.options, name) for name, variable in _OURS.items()}
        made = {variable: _as_variable(value) for variable, value in said.items() if value not in (None, False, (), {})}
        others = [name.strip() for name in os.environ.get(_TO_RAY, "").split(",") if name.strip()]
        return made | {_TO_RAY: ",".join(dict.fromkeys((*others, *_OURS.values())))}

    def _queued_tokens(self) -> int | None:
        """Prompt tokens that fit into the TTFT target, for each of vLLM's API servers, which count their own. None where nothing
        is rejected, where the rate is not known, since any number would refuse what can be met, and where there are classes:
        tokens of those that may wait for longer would keep out one that goes before them."""
        target = self.options.target()
        if self.options.request_classes() or target is None or target.ttft_ms is None:
            return None
        if not self.options.reject_late or not self.prefill_rate:
            return None
        return max(1, math.ceil(self.prefill_rate * self._engines_each() * target.ttft_ms / 1e3))

    def _engines_each(self) -> float:
        """Engines for each API server. vLLM starts as many of these as there are engines, unless it is told a number."""
        servers = self._given("--api-server-count", "-asc")
        return 1.0 if servers is None else (self._given("--data-parallel-size", "-dp") or 1) / servers

    def _given(self, *names: str) -> int | None:
        """The positive number given last as one of these options; None if there is none."""
        found = None
        for at, word in enumerate(self.more):
            name, equals, value = word.partition("=")
            if name.replace("_", "-") in names:
                value = value if equals else "".join(self.more[at + 1 : at + 2])
                found = int(value) if value.isdigit() and int(value) else None
        return found


def _as_variable(value: object) -> str:
    if isinstance(value, Mapping | tuple):  # in JSON: a class may be written with blanks
        return json.dumps(value, ensure_ascii=False)
    return "1" if value is True else str(value)


def vllm_program() -> list[str]:
    """How to run vLLM's command in this environment. Raises :class:`InputError` if it is not here, or of another version."""
    check_installed()
    if (found := installed_version("vllm")) is not None and (why := unfit_version(found)) is not None:
        raise InputError(f"--engine vllm: {why}")
    script = Path(sys.executable).with_name("vllm")
    return [str(script)] if script.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    """With ``***`` for values that no log should hold."""
    shown, hidden = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if argument.startswith("-"):
            hidden = name.replace("_", "-") in _SECRET
            shown.append(f"{name}=***" if hidden and equals else argument)
        else:
            shown.append("***" if hidden else argument)
    return shown


def run(command: ServeCommand) -> NoReturn:
    """Print the command and become it: signals and the exit code are vLLM's own. Raises :class:`InputError`.

    Of our variables the shell's own count where the command line has no option for them, and are printed too.
    """
    arguments, environment = command.arguments(), command.environment()
    program = vllm_program()
    inherited = dict(os.environ)
    for name, variable in _OURS.items():
        if (value := inherited.pop(variable, "")) and name in _NOT_OPTIONS:
            environment.setdefault(variable, value)
    shown = [*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), "vllm"]
    print(*shown, shlex.join(_without_secrets(arguments)), file=sys.stderr, flush=True)
    os.execve(program[0], [*program, *arguments], {**inherited, **environment})


def serve(requested: ToServe) -> NoReturn:
    """Become the ``vllm serve`` that ``autotune serve`` was asked for. Raises :class:`InputError`."""
    if requested.controlled and requested.slo is None:
        raise InputError("--engine vllm tunes vLLM to an SLO: add --slo ttft=500ms,tpot=50ms, or a --profile with one")
    if "draft_tokens" in requested.pinned:
        raise InputError(
            f"--draft-tokens is {requested.pinned['draft_tokens']:g}; vLLM has no such knob. An option of its own goes after --, "
            'and with it vLLM is not tuned: -- --speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\''
        )
    check_model(requested.model, field="MODEL", dummy="--load-format dummy after --")
    limits = None if requested.profile is None else requested.limits
    if requested.controlled:
        _check_ceilings(requested)
    else:
        _no_controller(requested)
    arguments = _profiled_arguments(requested)
    run(
        ServeCommand(
            requested.model,
            Options(
                slo=None if requested.slo is None else str(requested.slo),
                profile=None if requested.profile is None else str(requested.profile.resolve()),
                classes=requested.classes,
                controller=requested.controller,
                log=None if requested.decisions is None else str(requested.decisions.resolve()),
                reject_late=requested.reject_late,
                relegate_late=requested.relegate_late,
                off=not requested.controlled,
                pinned=requested.pinned,
            ),
            limits if requested.controlled else None,
            requested.prefill_rate,
            {
                **(_room_for(requested.pinned) if limits is None else {}),
                **({} if requested.controlled else _as_flags(requested)),
                "--host": requested.host,
                "--port": requested.port,
                "--dtype": requested.dtype,
                "--kv-cache-dtype": None if requested.kv_cache_dtype == "auto" else requested.kv_cache_dtype,
                "--max-model-len": requested.max_model_len,
                "--served-model-name": requested.served_model_name,
                "--seed": requested.seed or None,
                "--shutdown-timeout": math.ceil(requested.grace_s),
            },
            (*as_options(arguments), *requested.more),
        )
    )


def _profiled_arguments(requested: ToServe) -> dict[str, str]:
    """The arguments with which vLLM was profiled, as far as the server gets them: it loads the weights of its model, and of the
    arguments of another model it gets the ceilings alone. A note names what is left out."""
    given = dict(requested.arguments)
    if not requested.controlled:
        given = {name: text for name, text in given.items() if name not in _OF_THE_SETTING}
    if requested.another_model:
        ceilings = {name for names in _CEILINGS.values() for name in names}
        lost = [f"{name}={text}" for name, text in given.items() if name not in ceilings]
        if lost:
            why = "as it was measured with another model; what the server is to have of it goes after --"
            print(f"note: {requested.profile}: {', '.join(lost)} is left out, {why}", file=sys.stderr)
        return {name: text for name, text in given.items() if name in ceilings}
    if str(argument_value(given.get("load_format", "null"))).lower() == "dummy":
        del given["load_format"]
        if not _is_among("--load-format", requested.more):
            print(
                f"note: {requested.profile} was measured with random weights; the server loads the model's own. For random ones: "
                "-- --load-format dummy",
                file=sys.stderr,
            )
    return given


def _room_for(pinned: Mapping[str, float]) -> dict[str, int | None]:
    """Ceilings for knobs ``pinned`` above what vLLM may have by default; None leaves one to it. None is lowered for a knob that
    is free."""
    slots, budget = int(pinned.get("max_batch_size", 0)), int(pinned.get("token_budget", 0))
    room = max(slots, int(pinned.get("chunk_size", 0)))
    tokens = max(budget, max(room, _MOST_TOKENS) if room > max(budget, _LEAST_TOKENS) else 0)
    return {
        "--max-num-seqs": slots if slots > _LEAST_SLOTS else None,
        "--max-num-batched-tokens": tokens if tokens > _LEAST_TOKENS else None,
    }


def _check_ceilings(requested: ToServe) -> None:
    """Raise :class:`InputError` for a knob given by hand above a ceiling that vLLM gets from the profile."""
    for knob, value in requested.pinned.items():
        for name in _CEILINGS.get(knob, ()):
            option, most = f"--{name.replace('_', '-')}", argument_value(requested.arguments.get(name, "null"))
            if not isinstance(most, int) or value <= most or _is_among(option, requested.more):
                continue
            raise InputError(
                f"--{knob.replace('_', '-')} is {value:g}; it must be at most {most}: the profile was measured with "
                f"{name}={most}. Another ceiling goes after --, as -- {option} {value:g}"
            )


def _is_among(option: str, words: Sequence[str]) -> bool:
    return any(word.partition("=")[0].replace("_", "-") == option for word in words)


def _no_controller(requested: ToServe) -> None:
    """Raise :class:`InputError` for what vLLM by itself does not have, if it was asked for; what a profile has of it is dropped
    with a note."""
    for given, option in (
        (requested.reject_late, "--reject-late"),
        (requested.relegate_late, "--relegate-late"),
        (requested.pinned.get("max_wait_ms"), "--max-wait-ms"),
    ):
        if given:
            raise InputError(
                f"{option}: vLLM has no such thing of its own; it goes with --engine vllm without --no-control"
            )
    knobs = requested.knobs
    values = {"max_wait_ms": knobs.max_wait_ms, "draft_tokens": knobs.draft_tokens}
    lost = [f"{name}={value:g}" for name, value in values.items() if value]
    if requested.profile is not None and lost:
        dropped = f"{' and '.join(lost)} {'is' if len(lost) == 1 else 'are'} dropped"
        print(f"note: {requested.profile}: {dropped}: vLLM has no such thing of its own", file=sys.stderr)


def _as_flags(requested: ToServe) -> dict[str, int | None]:
    """The setting of a profile, and what was given by hand, for a vLLM that nobody steers."""
    knobs = requested.knobs
    given = knobs.as_dict() if requested.profile is not None else requested.pinned  # the others are vLLM's own
    flags: dict[str, int | None] = {}
    if "max_batch_size" in given:  # vLLM takes no more sequences than tokens
        most = knobs.token_budget if "token_budget" in given else knobs.max_batch_size
        flags["--max-num-seqs"] = min(knobs.max_batch_size, most)
    if "token_budget" in given:
        flags["--max-num-batched-tokens"] = knobs.token_budget
    cuts = "token_budget" not in given or knobs.chunk_size < knobs.token_budget
    if "chunk_size" in given and cuts and knobs.chunk_size < _longest(requested):  # or vLLM does not start
        flags["--long-prefill-token-threshold"] = knobs.chunk_size
    return flags


def _longest(requested: ToServe) -> float:
    """Tokens of the longest request that vLLM will take, as far as that is known."""
    profiled = None if requested.another_model else requested.arguments.get("max_model_len")
    known = (requested.max_model_len, requested.longest, profiled)
    return min((int(one) for one in known if one is not None and str(one).isdigit()), default=math.inf)


def as_options(arguments: Mapping[str, str]) -> list[str]:
    """``arguments`` of vLLM's engine, as ``--engine-arg`` has them, as words of its command: each with the value that vLLM was
    measured with."""
    words: list[str] = []
    for name, text in arguments.items():
        option, value = name.replace("_", "-"), argument_value(text)
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            words += [f"--{option}", *map(_word, value if isinstance(value, list) else [value])]
    return words


def _word(value: Any) -> str:
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else json.dumps(value)
