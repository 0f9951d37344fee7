"""BentoML's batching behind the thin server: ``CorkDispatcher``, the class behind ``@bentoml.api(batchable=True)``.

``max_latency_ms`` is the SLO, as its documentation has it, less what HTTP may take: what cannot be answered in that time is
refused. The function sleeps in a thread, as a synchronous BentoML method does. Run by :mod:`benchmarks.batcher.peers` in
BentoML's environment::

    python -m benchmarks.batcher.serve_bento PORT
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import uvicorn
from bentoml._internal.marshal.dispatcher import CorkDispatcher

from benchmarks.batcher.service import HTTP_S, LARGEST, SLO_S, Refused, application, service_s, uvicorn_settings

_REFUSED = object()


def main() -> None:
    def call(values: Sequence[float]) -> list[float]:
        time.sleep(service_s(len(values)))
        return [2 * value for value in values]

    dispatcher: Any = CorkDispatcher(
        max_latency_in_ms=round((SLO_S - HTTP_S) * 1e3),
        max_batch_size=LARGEST,
        fallback=lambda: _REFUSED,
        get_batch_size=lambda _: 1,
    )
    batched = dispatcher(call)

    async def answer(value: float) -> float:
        found = await batched(value)
        if found is _REFUSED:
            raise Refused
        return float(found)

    uvicorn.run(application(answer), **uvicorn_settings(int(sys.argv[1])))


if __name__ == "__main__":
    main()
