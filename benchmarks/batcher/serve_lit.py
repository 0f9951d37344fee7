"""LitServe: its own server and worker process, from which its batching cannot be taken out; uvicorn set as for the others.

``timeout`` is its way to drop what waited for too long: the SLO less what HTTP may take, and the longest call. The wait for a
batch is short, for LitServe counts it from the moment the worker is free and not from the first item. Run by
:mod:`benchmarks.batcher.peers`::

    python -m benchmarks.batcher.serve_lit PORT
"""

import sys
import time

import litserve
from fastapi import Request, Response

from benchmarks.batcher.service import HTTP_S, LARGEST, SLO_S, service_s, uvicorn_settings

WAIT_S = 0.002


class Service(litserve.LitAPI):
    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request: Request) -> float:  # the annotation says how the body is read: here as JSON
        return float(request)  # type: ignore[arg-type]  # what the annotation asked for, not what it names

    def batch(self, inputs: list[float]) -> list[float]:
        return list(inputs)

    def predict(self, x: list[float]) -> list[float]:
        time.sleep(service_s(len(x)))
        return [2 * value for value in x]

    def unbatch(self, output: list[float]) -> list[float]:
        return output

    def encode_response(self, output: float) -> float:
        return output


def main() -> None:
    server = litserve.LitServer(
        Service(max_batch_size=LARGEST, batch_timeout=WAIT_S),
        accelerator="cpu",
        workers_per_device=1,
        timeout=SLO_S - HTTP_S - service_s(LARGEST),
    )

    @server.app.post("/bare")
    async def bare() -> Response:
        return Response("1")

    settings = uvicorn_settings(int(sys.argv[1]))
    host, port, level = settings.pop("host"), settings.pop("port"), settings.pop("log_level")
    server.run(host=host, port=port, log_level=level, generate_client_file=False, **settings)


if __name__ == "__main__":
    main()
