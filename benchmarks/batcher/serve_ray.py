"""Ray Serve's ``@serve.batch`` in a real replica, behind the thin server, which the replica itself runs.

So Ray is spared its proxy and the calls between processes, several milliseconds of CPU a request on two cores. What the
proxy would do in overload stays: no more than ``max_ongoing_requests`` plus ``max_queued_requests`` are let in, 128 here: four
full calls, for a fifth would end too late. It puts calls together before it is their turn, so with a short wait every item
becomes a call of its own; the wait is the time of a full call. Run by :mod:`benchmarks.batcher.peers` in Ray's environment::

    python -m benchmarks.batcher.serve_ray PORT
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import ray
import uvicorn
from ray import serve

from benchmarks.batcher.service import LARGEST, SLO_S, Refused, application, service_s, uvicorn_settings

WAIT_S = service_s(LARGEST)
MOST = LARGEST * int(SLO_S / service_s(LARGEST))  # waiting or being served


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.5})
class Service:
    def __init__(self, port: int) -> None:
        self._inside = 0
        config = uvicorn.Config(application(self._answer), **uvicorn_settings(port))
        self._server = asyncio.get_running_loop().create_task(uvicorn.Server(config).serve())

    async def __call__(self) -> str:
        return "up"

    async def _answer(self, value: float) -> float:
        if self._inside >= MOST:
            raise Refused
        self._inside += 1
        try:
            return float(await self._batched(value))
        finally:
            self._inside -= 1

    @serve.batch(max_batch_size=LARGEST, batch_wait_timeout_s=WAIT_S)
    async def _batched(self, values: list[float]) -> list[float]:
        await asyncio.sleep(service_s(len(values)))
        return [2 * value for value in values]


def main() -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    root = str(Path(__file__).parents[2])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": root}},
    )
    serve.start(http_options={"location": "NoServer"})
    serve.run(Service.bind(int(sys.argv[1])), name="service", route_prefix=None)  # type: ignore[attr-defined]  # a deployment
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # not at once: Ray ends its processes at exit
    try:
        signal.pause()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
