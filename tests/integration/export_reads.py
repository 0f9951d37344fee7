"""Run by the Python of :mod:`tests.integration.export_environment`: what the targets' own readers make of exported files.

``export_reads.py sglang|triton|ray-serve FILE`` prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

ITEMS = 24  # sent at once


def sglang(path: str) -> dict[str, Any]:
    """What SGLang's command line has after reading the file, by the names of its settings."""
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    words = ConfigArgumentMerger(parser=parser).merge_config_with_args(["--config", path])
    plain = (str, int, float, bool, type(None))
    return {name: value for name, value in vars(parser.parse_args(words)).items() if isinstance(value, plain)}


def triton(path: str) -> dict[str, Any]:
    """The model configuration that Triton's text format holds."""
    from google.protobuf import json_format, text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    read = text_format.Parse(Path(path).read_text(encoding="utf-8"), ModelConfig())
    found: dict[str, Any] = json_format.MessageToDict(read, preserving_proto_field_name=True)
    return found


def ray_serve(path: str) -> dict[str, Any]:
    """The sizes of the batches of a deployment that is given the file's options, and items that came back wrong."""
    import ray
    import yaml
    from ray import serve

    @serve.deployment
    class Doubles:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def reconfigure(self, config: dict[str, Any]) -> None:
            self.double.set_max_batch_size(config["max_batch_size"])
            self.double.set_batch_wait_timeout_s(config["batch_wait_timeout_s"])

        @serve.batch
        async def double(self, items: list[int]) -> list[int]:
            self.sizes.append(len(items))
            await asyncio.sleep(0.05)
            return [2 * item for item in items]

        async def __call__(self, item: int) -> int:
            return await self.double(item)

        async def seen(self) -> list[int]:
            return self.sizes

    options = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False)
    try:
        handle = serve.run(Doubles.options(**options).bind(), route_prefix=None)  # type: ignore[attr-defined]
        answers = [handle.remote(item) for item in range(ITEMS)]
        wrong = sum(answer.result() != 2 * item for item, answer in enumerate(answers))
        return {"sizes": handle.seen.remote().result(), "wrong": wrong}
    finally:
        serve.shutdown()
        ray.shutdown()


READERS = {"sglang": sglang, "triton": triton, "ray-serve": ray_serve}

if __name__ == "__main__":
    print(json.dumps(READERS[sys.argv[1]](sys.argv[2])))
