"""``vllm serve MODEL --scheduler-cls autotune.engines.vllm.Scheduler``: a server of vLLM's that tunes itself.

The controller lives in EngineCore's process, beside vLLM's scheduler. What it goes by is in the environment or, which counts
more, in ``--additional-config '{"autotune": {…}}'``:

==================== ================== ==============================================================================
``AUTOTUNE_SLO``         ``slo``             ``ttft=500ms,tpot=50ms@99%``
``AUTOTUNE_PROFILE``     ``profile``         a profile.yaml to start from: knobs, step times, and unless given SLO and classes
``AUTOTUNE_CLASSES``     ``classes``         ``chat:ttft=300ms*2 batch:ttft=5s``; in JSON a list
``AUTOTUNE_CONTROLLER``  ``controller``      ``predictive``, another by name, or ``module:Class``
``AUTOTUNE_LOG``         ``log``             where decisions are appended, for ``autotune explain``
``AUTOTUNE_METRICS``     ``metrics``         where metrics for Prometheus are written every 5 s, for a textfile collector
``AUTOTUNE_REJECT_LATE`` ``reject_late``     1 ends what cannot meet its TTFT any more, and orders by deadline
``AUTOTUNE_RELEGATE_LATE`` ``relegate_late`` 1 does the same, but computes what is late after all that can be met
``AUTOTUNE_BASE``        ``base``            ``module.Class``: the scheduler to steer in place of the one that vLLM would pick
``AUTOTUNE_OFF``         ``off``             1 leaves vLLM alone
``AUTOTUNE_PINNED``      ``pinned``          knobs that stay at a value: ``token_budget=512,max_wait_ms=2``; in JSON an object
==================== ================== ==============================================================================

What cannot be read ends vLLM at its start with a line that names it: a server that silently does not do what it was told is
worse. What cannot be tuned (another version, a feature) is served by vLLM as it is, with a line in its log.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any, Final, Self

from autotune.engines.vllm.scheduler import UNTOUCHED, SteeredScheduler, config_of, log, picked, unfit
from autotune.engines.vllm.tuning import TunableScheduler
from runtime.errors import InputError
from runtime.llm.admission import AdmissionPolicy
from runtime.slo import SLO, RequestClass, first_target, request_classes

SECTION: Final = "autotune"
"""Of vLLM's ``additional_config``."""
_WRITE_S: Final = 5.0  # from one writing of the metrics to the next
_NAP_S: Final = 0.002  # what waits is looked at again after so long: others may have come
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class Options:
    """What a self-tuning server goes by; see the module."""

    slo: str | None = None
    profile: str | None = None
    classes: tuple[str, ...] = ()
    controller: str | None = None
    log: str | None = None
    metrics: str | None = None
    reject_late: bool = False
    relegate_late: bool = False
    base: str | None = None
    off: bool = False
    pinned: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, environment: Mapping[str, str], additional: object) -> Self:
        """From the environment and vLLM's ``additional_config``. Raises :class:`InputError` that names the field."""
        section = additional.get(SECTION, {}) if isinstance(additional, Mapping) else {}
        if not isinstance(section, Mapping):
            raise InputError(f"additional_config.{SECTION} is {section!r}; it must be an object with {_names()}")
        given: dict[str, tuple[str, object]] = {}
        for one in fields(cls):
            variable = f"AUTOTUNE_{one.name.upper()}"
            if environment.get(variable, "").strip():
                given[one.name] = variable, environment[variable].strip()
        for name, value in section.items():
            if name not in {one.name for one in fields(cls)}:
                raise InputError(f"additional_config.{SECTION}.{name} is not known; there are {_names()}")
            if value is not None:
                given[name] = f"additional_config.{SECTION}.{name}", value
        return cls(**{name: _value(name, where, value) for name, (where, value) in given.items()})

    def settled(self) -> Options:
        """With what the profile says where these do not: its SLO, and, if they name no classes either, its request classes.

        Raises :class:`InputError` for a value that cannot be used.
        """
        made = self if self.slo is not None or self.profile is None else self._of_profile(self.profile)
        target, admission = made.target(), made.admission()
        slos = [target, *(one.slo for one in made.request_classes())]
        if (
            admission is not None
            and target is not None
            and all(slo is None or first_target(slo) == inf for slo in slos)
        ):
            late = "relegate_late" if made.relegate_late else "reject_late"
            raise InputError(
                f"autotune: {late} is on, but nothing is late by slo {target}; it must have a TTFT or E2E target, as ttft=500ms"
            )
        return made

    def _of_profile(self, name: str) -> Options:
        import autotune  # its public face

        path: str | Path = name if os.path.exists(name) else autotune.shipped_profiles().get(name, name)
        try:
            found = autotune.load_profile(path)
        except InputError as error:
            raise InputError(f"autotune: {error}") from None
        slo, classes = found.own_slo, self.classes or tuple(map(str, found.classes))
        return replace(self, slo=None if slo is None else str(slo), classes=classes)

    def target(self) -> SLO | None:
        """The SLO of all requests but those of :meth:`request_classes`. Raises :class:`InputError`."""
        try:
            return None if self.slo is None else SLO.parse(self.slo)
        except ValueError as error:
            raise InputError(f"autotune: slo is {self.slo!r}: {error}") from None

    def request_classes(self) -> list[RequestClass]:
        """Raises :class:`InputError`."""
        try:
            return request_classes(self.classes, where="autotune: classes")
        except ValueError as error:
            raise InputError(str(error)) from None

    def admission(self) -> AdmissionPolicy | None:
        """What becomes of requests that come too late. Raises :class:`InputError`."""
        if self.reject_late and self.relegate_late:
            raise InputError("autotune: reject_late and relegate_late are both on; it must be one of them")
        if self.relegate_late:
            return AdmissionPolicy(late="relegate")
        return AdmissionPolicy() if self.reject_late else None

    def base_class(self) -> type[Any] | None:
        """The scheduler to steer; None for vLLM's pick. Raises :class:`InputError`."""
        if self.base is None:
            return None
        module, _, name = self.base.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise InputError(f"autotune: base is {self.base!r}, which cannot be imported: {error}") from None
        if not isinstance(found, type) or not hasattr(found, "schedule"):
            raise InputError(
                f"autotune: base is {self.base!r}; it must be a scheduler class of vLLM's or of another tool"
            )
        if issubclass(found, SteeredScheduler):
            raise InputError(
                f"autotune: base is {self.base!r}, which is steered already; name the class that it steers"
            )
        return found


def _numbers(text: str) -> object:
    """Those of ``name=number,…``; ``text`` itself if it is not of that form."""
    try:
        pairs = [word.split("=") for word in text.split(",")]
        return {name.strip(): _number(number) for name, number in pairs}
    except ValueError:
        return text


def _number(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _unpacked(text: str) -> object:
    """What ``text`` is in JSON, if that is a list or an object; else ``text`` itself."""
    try:
        return json.loads(text) if text.startswith(("[", "{")) else text
    except ValueError:
        return text


def _names() -> str:
    return ", ".join(one.name for one in fields(Options))


def _value(name: str, where: str, value: object) -> Any:
    if name in ("reject_late", "relegate_late", "off"):
        text = str(value).lower()
        if not isinstance(value, bool | str | int) or text not in _YES + _NO:
            raise InputError(f"{where} is {value!r}; it must be one of {', '.join((*_YES, *_NO[:-1]))}")
        return text in _YES
    if name in ("classes", "pinned") and isinstance(value, str):
        value = _unpacked(value)
    if name == "classes":
        made = value.replace(";", " ").split() if isinstance(value, str) else value
        if not isinstance(made, list | tuple) or not all(isinstance(one, str) for one in made):
            raise InputError(f'{where} is {value!r}; it must be a list such as ["chat:ttft=300ms*2"]')
        return tuple(made)
    if name == "pinned":
        if isinstance(value, str):
            value = _numbers(value)
        numbers = isinstance(value, Mapping) and all(
            isinstance(n, int | float) and not isinstance(n, bool) for n in value.values()
        )
        if not numbers:
            raise InputError(f'{where} is {value!r}; it must be an object such as {{"token_budget": 512}}')
        return value
    if not isinstance(value, str):
        raise InputError(f"{where} is {value!r}; it must be text")
    return value


class Scheduler:
    """Give this to vLLM as its scheduler class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        config = config_of(args, kwargs)
        options = Options.read(os.environ, getattr(config, "additional_config", None))
        base = options.base_class() or picked(config)
        why = "it is switched off" if options.off else unfit(config)
        if why is None and (options := options.settled()).slo is None:  # wrong ones are told of now
            why = "there is no SLO; set AUTOTUNE_SLO, such as ttft=500ms,tpot=50ms"
        if why is not None:
            log.warning("not tuned: %s. %s", why, UNTOUCHED)
            return base(*args, **kwargs)
        made = type(f"SelfTuning{base.__name__}", (SelfTuningScheduler, base), {"__module__": __name__})(
            *args, **kwargs
        )
        made.begin(config, options)
        return made


class SelfTuningScheduler(SteeredScheduler):
    """Steered by a controller of its own, once :meth:`begin` has been called. Its vLLM base is unknown to mypy."""

    _tunable: TunableScheduler | None = None
    _control: Any = None
    _metrics: MetricsFile | None = None

    def begin(self, config: Any, options: Options) -> None:
        """Attach the controller. Raises :class:`InputError` for options that cannot be used."""
        if self.steering is None:
            return
        target, classes = options.target(), options.request_classes()
        slos = {one.name: one.slo for one in classes} | ({} if target is None else {"default": target})
        self.steering.slack.slos.update(slos)
        try:
            engine = TunableScheduler(config, self.steering, slos, {one.name: one.weight for one in classes})
        except Exception:
            log.exception("not tuned, for the reason below. %s", UNTOUCHED)
            self.let_go()
            return
        try:
            self._attach(engine, config, options)
        except ValueError as error:
            self.let_go()
            raise InputError(f"autotune: {error}") from None

    def _attach(self, engine: TunableScheduler, config: Any, options: Options) -> None:
        import autotune  # its public face: here is nobody else who could attach a controller

        if options.pinned:
            engine.set_knobs(engine.knobs.with_(**options.pinned))
        self._control = autotune.control(
            engine,
            slo=options.target(),
            profile=options.profile,
            admission=options.admission(),
            pinned=options.pinned,
            log=_of_rank(options.log, config),
            controller=options.controller,
        )
        self._tunable = engine
        engine.catch_up()
        if (metrics := _of_rank(options.metrics, config)) is not None:
            self._metrics = MetricsFile(engine, metrics, self._control)
        try:
            steered_at: object = self._control.steer()
        except InputError as error:  # no place for a socket is no reason not to serve
            log.warning("%s; autotune watch, pause and set will not find this server", error)
            steered_at = "none"
        log.info(
            "self-tuning: SLO %s, %s; process %d, control socket %s",
            engine.slos["default"], engine.knobs, os.getpid(), steered_at,
        )  # fmt: skip

        threading.Thread(
            target=_end_with_parent, args=(self._control, config), name="parent watch", daemon=True
        ).start()

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._catch_up()  # what comes is judged by all that is known
        return super().add_request(request, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self._between_steps()
        except Exception as error:
            self._failed(error, "it stood between two steps")
        return super().schedule(*args, **kwargs)

    def _between_steps(self) -> None:
        if self._tunable is not None:
            self._tunable.between_steps()
            if not self._tunable.controlled:
                self.let_go()
        if self.steering is not None:
            held = self.steering.prepare()
            left = held - self.steering.clock.now() if held > -inf else 0.0
            if left > 0:  # nothing to do before then: the loop that calls this would spin
                time.sleep(min(left, _NAP_S))
                self.steering.prepare()

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        if self._tunable is not None and not self.has_unfinished_requests():
            self._catch_up()  # else the next step does, when these outputs are on their way
        return outputs

    def _catch_up(self) -> None:
        if self._tunable is not None:
            try:
                self._tunable.catch_up()
            except Exception as error:
                self._failed(error, "it told the controller of steps")

    def let_go(self) -> None:
        if self._tunable is not None:
            self._tunable.catch_up()
            self._tunable.release()
            self._tunable = None
            log.warning("no controller is attached any more. %s", UNTOUCHED)
        super().let_go()

    def give_up(self, why: str) -> None:
        tunable, self._tunable = self._tunable, None
        super().give_up(why)
        if tunable is not None:
            self._each(lambda: tunable.fail(ValueError(why), "this cannot be tuned"))

    def _failed(self, error: Exception, doing: str) -> None:
        super()._failed(error, doing)
        tunable, self._tunable = self._tunable, None
        if tunable is not None:
            self._each(lambda: tunable.fail(error, f"autotune failed while {doing}"))

    def shutdown(self) -> None:
        try:
            if self._tunable is not None:
                self._each(self._tunable.stop)
            if self._control is not None:
                self._control.close()
            if self._metrics is not None:
                self._metrics.close()
        finally:
            super().shutdown()


class MetricsFile:
    """Writes the metrics of ``engine`` to ``path`` now and then, in a thread of its own. Raises ``ValueError`` where it
    cannot."""

    def __init__(self, engine: TunableScheduler, path: Path, control: Any) -> None:
        from runtime.serving.metrics import ServingMetrics

        self._metrics = ServingMetrics(engine, regime=lambda: control.regime)
        self._engine, self._path = engine, path
        self._over = threading.Event()
        try:
            self._metrics.write(path)
        except OSError as error:
            raise ValueError(f"metrics is {str(path)!r}, which cannot be written: {error.strerror}") from None
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(_WRITE_S):
            self._write()

    def _write(self) -> None:
        try:
            self._metrics.write(self._path)
        except Exception as error:  # a full disk is no reason not to serve
            log.warning("the metrics cannot be written to %s: %r", self._path, error)

    def close(self) -> None:
        """Write once more: ``autotune_up`` is 0 then."""
        self._over.set()
        self._thread.join(1.0)
        self._engine.release()
        self._write()


def _end_with_parent(control: Any, config: Any) -> None:
    """vLLM's EngineCore outlives an API server that was killed, and keeps the device: have it end as if it had been told to, at
    once, for nobody is there to read what it would finish."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        control.close()
        log.error("the process that started this one has ended: ending, too")
        config.shutdown_timeout = 0
        os.kill(os.getpid(), signal.SIGTERM)


def _of_rank(path: str | None, config: Any) -> Path | None:
    """Independent data-parallel ranks have a file each."""
    if path is None:
        return None
    rank, made = getattr(config.parallel_config, "data_parallel_index", 0), Path(path)
    return made.with_stem(f"{made.stem}-rank{rank}") if rank else made
