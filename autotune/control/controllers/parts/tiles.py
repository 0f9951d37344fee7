"""Steps of whole tiles: what any controller that chooses a number of tokens rounds it to.

The kernels of a GPU compute products by tiles of 64 to 256 rows, and tiles in waves that fill the GPU: one token beyond costs as
much as a whole one. (By the measurements that :mod:`benchmarks.gpu_truth` is made of, Llama-3-8B in fp8 on an H200: 512 tokens
9.7 ms, 576 tokens 16.2 ms; in bfloat16 on an A100 384 tokens 27.6 ms, 448 tokens 36.4 ms.) No model that is learned from a few
hundred steps has these stairs, and no search by step times finds them, but most of them end at round numbers. So do the sizes
for which our engine records steps with prompts: whole tiles leave no dummies where at least half of a step are prompt tokens.

Formula. A number of tokens is rounded down to a multiple of the largest power of two that is at most the ``tile`` of the engine
(512 on a GPU) and half of the prompt tokens. Where steps have no stairs, fewer than half of those wait for the next step; a CPU
has none, and its ``tile`` is 1. A controller goes on from what it wanted, not from what became of it.

Units: tokens. Failure mode: the GPU whose stairs end elsewhere. Source: NVIDIA, "Matrix Multiplication Background User's Guide"
(tile and wave quantization); the rule is ours.
"""

from __future__ import annotations

from runtime.tunable import TILE

_FEW = 64  # prompt tokens, fewer of which are not rounded


def whole_tiles(tokens: int, decodes: int, most: int = TILE) -> int:
    """At most ``tokens`` of a step, ``decodes`` of them decodes, in whole tiles of at most ``most`` tokens."""
    prompt = tokens - decodes
    if prompt < _FEW:
        return tokens
    tile = min(most, 1 << (prompt // 2).bit_length() - 1)
    return tokens // tile * tile
