"""``--scheduler-cls tests.integration.vllm_listener.Scheduler``: the self-tuning one, with a listener that raises at once."""

from __future__ import annotations

from typing import Any

from autotune.engines.vllm import serving


class Faulty:
    def on_step(self, record: object) -> None:
        raise SystemExit("of a listener")

    def on_request(self, record: object) -> None:
        pass


class Scheduler:
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = serving.Scheduler(*args, **kwargs)
        made._tunable.subscribe(Faulty())
        return made
