"""Run by the Python of an environment with vLLM: what its own command line makes of the files named as arguments.

Prints one JSON object: file → {"args": parsed arguments, "config": resolved values} or {"refused": its complaint}.
"""

import contextlib
import io
import json
import sys

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

DRAFTS = ("method", "prompt_lookup_min", "prompt_lookup_max", "num_speculative_tokens")


def read(path: str) -> dict[str, object]:
    parser = FlexibleArgumentParser()
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            args = parser.parse_args(["serve", "--config", path])
        command.validate(args)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    except SystemExit:
        return {"refused": complaint.getvalue()}
    except ValueError as error:
        return {"refused": str(error)}
    scheduler, cache, drafts = config.scheduler_config, config.cache_config, config.speculative_config
    return {
        "args": {
            name: value
            for name, value in vars(args).items()
            if isinstance(value, bool | int | float | str) or name == "speculative_config"
        },
        "config": {
            "model": config.model_config.model,
            "max_model_len": config.model_config.max_model_len,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "gpu_memory_utilization": cache.gpu_memory_utilization,
            "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
            "kv_cache_dtype": cache.cache_dtype,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "enable_chunked_prefill": scheduler.enable_chunked_prefill,
            "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
            "speculative_config": drafts and {name: getattr(drafts, name) for name in DRAFTS},
        },
    }


if __name__ == "__main__":
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # vLLM logs to stdout
        found = {path: read(path) for path in sys.argv[1:]}
    json.dump(found, out)
