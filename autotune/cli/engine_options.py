"""The options by which a verb is told which engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from autotune.engines import Engine
    from autotune.profile import Profile

ENGINE_HELP: Final = "own: this project's own engine; vllm: vLLM in this process, which then needs --model."
PROFILED_ENGINE_HELP: Final = "own or vllm.  (default: the profile's)"
ARG_HELP: Final = (
    "An argument of vLLM's engine, by its own name: dtype=float32, gpu_memory_utilization=0.8. Repeatable."
)


@contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    """``engine``, closed at the end: what it has accepted is finished, or cancelled where the block raises."""
    try:
        yield engine
    except BaseException:
        engine.close(drain=False)
        raise
    engine.close()


def engine_of(profile: Profile | None, engine: str | None, given: Sequence[str] | None) -> tuple[str, dict[str, str]]:
    """The name of the engine, and its arguments: those of ``profile``, unless others are given. Without a profile: our own."""
    from autotune.engines.named import check_engine, named

    theirs = "own" if profile is None else named(profile.engine.name)
    name = engine or theirs
    arguments = check_engine(name, given or ())
    if profile is not None and name == theirs:
        arguments = {**profile.engine.options, **arguments}
    return name, arguments
