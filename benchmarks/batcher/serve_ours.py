"""Our Batcher behind the thin server: it gets the SLO and the largest call, and nothing else.

The SLO it is given is the clients' less what HTTP may take. Run by :mod:`benchmarks.batcher.peers`::

    python -m benchmarks.batcher.serve_ours PORT
"""

from __future__ import annotations

import sys
import time

import uvicorn

from benchmarks.batcher.service import HTTP_S, LARGEST, SLO_S, Refused, application, service_s, uvicorn_settings
from runtime import Batcher, KnobLimits, RejectedError


def main() -> None:
    def call(values: list[float]) -> list[float]:
        time.sleep(service_s(len(values)))
        return [2 * value for value in values]

    slo = f"e2e={(SLO_S - HTTP_S) * 1e3:.0f}ms@99%"
    with Batcher(call, slo=slo, limits=KnobLimits(max_batch_size=LARGEST)) as batcher:

        async def answer(value: float) -> float:
            try:
                return float(await batcher.submit(value))
            except RejectedError:
                raise Refused from None

        uvicorn.run(application(answer), **uvicorn_settings(int(sys.argv[1])))


if __name__ == "__main__":
    main()
