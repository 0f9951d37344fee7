"""From logits to tokens on the device, without a sort and without waiting for it.

The rules are those of :mod:`runtime.torch_backend.sampling`: temperature, top-k, top-p on what top-k left, min-p, one draw
by inverting the cumulative distribution; tokens that tie at an edge are all kept; a row that holds NaN or +∞, or nothing but
−∞, gives −1.

Top-k keeps the logits from the k-th largest on, top-p those above which less than p of the mass lies. Either is the largest
threshold at or above which there is enough (tokens, or mass), so a search over thresholds finds it: logits are compared as
integers in the same order, and each pass over the row tries three thresholds, which leaves a quarter of the range. That is 8
passes for 16-bit logits and 16 for float32, where a sort of the row would take as many and write it each time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.torch_backend.cuda.language import LOG2_E, let_next_begin, tl, triton, wait_for_previous
from runtime.torch_backend.cuda.launch import launch
from runtime.torch_backend.cuda.tiles import next_power_of_2

BLOCK = 4096
"""Most logits taken at a time."""

WARPS = 8
COLDEST = tl.constexpr(1e-7)
"""As in :mod:`runtime.torch_backend.sampling`: below it a temperature would divide by zero."""


@triton.jit
def _ordered(logits):
    """Whole numbers (int32) in the order of ``logits``; 0 and −0 are one."""
    if logits.dtype.primitive_bitwidth == 16:
        bits = logits.to(tl.int16, bitcast=True).to(tl.int32)
        key = tl.where(bits < 0, bits ^ 0x7FFF, bits)
    else:
        bits = logits.to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(key == -1, 0, key)


@triton.jit
def _block(row, start, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    return tl.load(row + at, mask=at < VOCAB, other=float("-inf")), at


@triton.jit
def _best(row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit, where it is first, and whether the row can be sampled from."""
    best = tl.full([1], float("-inf"), tl.float32)
    index = tl.full([1], 0, tl.int32)
    nans = tl.full([1], 0, tl.int32)
    for start in tl.range(0, VOCAB, BLOCK):
        logits, _ = _block(row, start, VOCAB, BLOCK)
        x = logits.to(tl.float32)
        nans += tl.sum((x != x).to(tl.int32), 0)
        top, where = tl.max(x, 0, return_indices=True)
        index = tl.where(top > best, start + where, index)
        best = tl.where(top > best, top, best)
    sound = (nans == 0) & (best < float("inf")) & (best > float("-inf"))
    return best, index, sound


@triton.jit
def _threshold(
    row, low, high, wanted, best, sharpness, BY_MASS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key in ``low … high`` at or above which there are ``wanted`` tokens, or is ``wanted`` of the mass.

    There are that many, or that much, from ``low`` on.
    """
    while tl.max(low, 0) < tl.max(high, 0):
        step = (high - low + 3) >> 2
        one = low + step
        two = tl.minimum(one + step, high)
        three = tl.minimum(two + step, high)
        from_one = tl.zeros([1], tl.float32)
        from_two = tl.zeros([1], tl.float32)
        from_three = tl.zeros([1], tl.float32)
        for start in tl.range(0, VOCAB, BLOCK):
            logits, at = _block(row, start, VOCAB, BLOCK)
            key = _ordered(logits).to(tl.int64)
            if BY_MASS:
                weight = tl.exp2((logits.to(tl.float32) - best) * sharpness)
            else:
                weight = tl.where(at < VOCAB, 1.0, 0.0)
            from_one += tl.sum(tl.where(key >= one, weight, 0.0), 0)
            from_two += tl.sum(tl.where(key >= two, weight, 0.0), 0)
            from_three += tl.sum(tl.where(key >= three, weight, 0.0), 0)
        enough_one = from_one >= wanted
        enough_two = enough_one & (from_two >= wanted)
        enough_three = enough_two & (from_three >= wanted)
        high = tl.where(enough_three, high, tl.where(enough_two, three - 1, tl.where(enough_one, two - 1, one - 1)))
        low = tl.where(enough_three, three, tl.where(enough_two, two, tl.where(enough_one, one, low)))
    return low


@triton.jit
def _greedy(logits, out, stride: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    let_next_begin(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    _, index, sound = _best(logits + row * stride, VOCAB, BLOCK)
    tl.store(out + row + tl.arange(0, 1), tl.where(sound, index, -1).to(out.dtype.element_ty))


@triton.jit
def _sample(
    logits, out, temperatures, top_ks, top_ps, min_ps, seeds, positions,
    stride: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    wait_for_previous(EARLY)
    program = tl.program_id(0).to(tl.int64)
    row = logits + program * stride
    to = out + program + tl.arange(0, 1)
    best, index, sound = _best(row, VOCAB, BLOCK)
    temperature = tl.load(temperatures + program)
    tl.store(to, tl.where(sound, index, -1).to(out.dtype.element_ty))
    if temperature == 0:
        return
    if tl.sum(sound.to(tl.int32), 0) == 0:
        return
    sharpness = 1.0 / tl.maximum(temperature, COLDEST) * LOG2_E
    top_k = tl.load(top_ks + program)
    top_p = tl.load(top_ps + program)
    min_p = tl.load(min_ps + program)

    # every key is at least the one of −∞, and a row's largest is that of its best logit
    high = _ordered(best.to(logits.dtype.element_ty)).to(tl.int64)
    low = _ordered(tl.full([1], float("-inf"), tl.float32).to(logits.dtype.element_ty)).to(tl.int64)
    if (top_k > 0) & (top_k < VOCAB):
        low = _threshold(row, low, high, top_k.to(tl.float32), best, sharpness, False, VOCAB, BLOCK)
    if top_p < 1:
        mass = tl.zeros([1], tl.float32)
        for start in tl.range(0, VOCAB, BLOCK):
            x, _ = _block(row, start, VOCAB, BLOCK)
            weight = tl.exp2((x.to(tl.float32) - best) * sharpness)
            mass += tl.sum(tl.where(_ordered(x).to(tl.int64) >= low, weight, 0.0), 0)
        low = _threshold(row, low, high, top_p * mass, best, sharpness, True, VOCAB, BLOCK)

    mass = tl.zeros([1], tl.float32)
    for start in tl.range(0, VOCAB, BLOCK):
        x, _ = _block(row, start, VOCAB, BLOCK)
        weight = tl.exp2((x.to(tl.float32) - best) * sharpness)
        kept = (_ordered(x).to(tl.int64) >= low) & (weight >= min_p) & (weight > 0.0)
        mass += tl.sum(tl.where(kept, weight, 0.0), 0)
    wanted = tl.rand(tl.load(seeds + program), tl.load(positions + program)) * mass
    before = tl.zeros([1], tl.float32)
    drawn = tl.full([1], -1, tl.int32)
    last = index  # of the tokens kept, in case rounding leaves the draw behind all of them
    for start in tl.range(0, VOCAB, BLOCK):
        x, at = _block(row, start, VOCAB, BLOCK)
        weight = tl.exp2((x.to(tl.float32) - best) * sharpness)
        kept = (_ordered(x).to(tl.int64) >= low) & (weight >= min_p) & (weight > 0.0)
        weight = tl.where(kept, weight, 0.0)
        reached = before + tl.cumsum(weight, 0)
        found = tl.min(tl.where(kept & (reached > wanted), at, VOCAB), 0)
        drawn = tl.where((drawn < 0) & (found < VOCAB), found, drawn)
        last = tl.maximum(last, tl.max(tl.where(kept, at, -1), 0))
        before += tl.sum(weight, 0)
    tl.store(to, tl.where(drawn < 0, last, drawn).to(out.dtype.element_ty))


def greedy(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """The likeliest token of each row, the first of equals; −1 where a row holds NaN or +∞, or nothing but −∞.

    ``logits [rows, vocab]`` float32, bfloat16 or float16; returns ``out [rows]``, by default int64. Raises ``ValueError``
    for others.
    """
    out = _output(logits, out)
    if len(logits):
        launch(_greedy, (len(logits), 1, 1), (logits, out), (), _constants(logits), warps=WARPS)
    return out


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """One token for each row of ``logits [rows, vocab]`` (float32, bfloat16 or float16); −1 where :func:`greedy` gives it.

    Each of the others is ``[rows]``, on the device of ``logits``: ``temperature`` (float32; 0 is greedy), ``top_k`` (int32;
    0 keeps all), ``top_p`` and ``min_p`` (float32), ``seed`` (int64) and ``position`` (int64, how many tokens the request
    has put out). The draw is one number in [0, 1), with 31 bits rounded to float32, from Philox-4x32-10 (Salmon et al. 2011)
    with the seed as its key and the position as its counter: the same whatever shares the batch. Returns ``out [rows]``, by
    default int64. Raises ``ValueError`` for shapes or dtypes that do not fit.
    """
    out = _output(logits, out)
    wanted = {
        "temperature": (temperature, torch.float32), "top_k": (top_k, torch.int32), "top_p": (top_p, torch.float32),
        "min_p": (min_p, torch.float32), "seed": (seed, torch.int64), "position": (position, torch.int64),
    }  # fmt: skip
    for name, (tensor, dtype) in wanted.items():
        if tensor.shape != (len(logits),) or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; it must be {dtype}, a contiguous [{len(logits)}]"
            )
    if len(logits):
        tensors = (logits, out, temperature, top_k, top_p, min_p, seed, position)
        launch(_sample, (len(logits), 1, 1), tensors, (), _constants(logits), warps=WARPS)
    return out


def _constants(logits: Tensor) -> tuple[int, int, int]:
    vocabulary = logits.shape[1]
    return logits.stride(0), vocabulary, min(BLOCK, next_power_of_2(vocabulary))


def _output(logits: Tensor, out: Tensor | None) -> Tensor:
    if logits.dim() != 2 or not logits.shape[1] or (logits.numel() and logits.stride(1) != 1):
        raise ValueError(f"logits have shape {tuple(logits.shape)}; they must be [rows, vocab] with contiguous rows")
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"logits are {logits.dtype}; they must be float32, bfloat16 or float16")
    if out is None:
        return torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if out.shape != (len(logits),) or out.dtype not in (torch.int32, torch.int64) or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} of shape {tuple(out.shape)}; it must be int32 or int64, a contiguous [{len(logits)}]"
        )
    return out
