"""From logits to tokens: greedy, temperature, top-k, top-p, min-p, repetition penalty, seeds, log-probabilities."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from runtime.errors import StepFailedError
from runtime.llm.plan import Token
from runtime.request import SamplingParams, Sequence
from runtime.torch_backend.transfer import Readback, to_device

_GOLDEN: Final = np.uint32(0x9E3779B9)
_HASH: Final = (
    (np.uint32(16), np.uint32(0x21F0AAAD), np.uint32(1)),
    (np.uint32(15), np.uint32(0x735A2D97), np.uint32(0)),
)  # shift, factor, and whether the second half of the key comes in
_SMALL: Final = 1e-3
_MOST: Final = np.float32(1 - 2.0**-24)
_COLDEST = 1e-7  # below this a temperature would divide by zero in float32; the draw is greedy long before


class Drawn:
    """What was drawn, still on the device.

    ``tensors`` are ids ``[n]``, −1 where a row is unsound, and of the rows that want log-probabilities (``scored``): that of the
    chosen token ``[m]``, ids and log-probabilities of the likeliest ``[m, most]``.
    """

    def __init__(self, sequences: Seq[Sequence], tensors: list[torch.Tensor], scored: Seq[int]) -> None:
        self.sequences = sequences
        self.tensors = tensors
        self.scored = scored

    def tokens(self, here: Seq[torch.Tensor]) -> list[Token | Exception]:
        """One for each sequence, from :attr:`tensors` as they are in the host's memory."""
        sequences = self.sequences
        if not sequences:
            return []
        ids = here[0].tolist()
        if not self.scored:
            return [Token(s, i) if i >= 0 else _nan_error(s) for s, i in zip(sequences, ids, strict=True)]
        chosen, top_ids, top_values = (x.tolist() for x in here[1:])
        scored = {row: at for at, row in enumerate(self.scored)}
        out: list[Token | Exception] = []
        for row, (sequence, token) in enumerate(zip(sequences, ids, strict=True)):
            if token < 0:
                out.append(_nan_error(sequence))
            elif row in scored:
                at, wanted = scored[row], sequence.request.params.logprobs
                top = tuple(zip(top_ids[at][:wanted], top_values[at][:wanted], strict=True))
                out.append(Token(sequence, token, chosen[at], top))
            else:
                out.append(Token(sequence, token))
        return out


class Columns(NamedTuple):
    """Sampling parameters on the device, ``[rows]`` each: ``temperature``, ``top_p`` and ``min_p`` float32, ``top_k`` int32,
    ``seed`` and ``position`` (how many tokens the request has put out) int64."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor


@runtime_checkable
class FixedSampler(Protocol):
    """A sampler that needs nothing of a row but its logits and its :class:`Columns`, so that a step can be recorded."""

    def choose_from(self, logits: torch.Tensor, columns: Columns, out: torch.Tensor) -> torch.Tensor:
        """Write a token id for each row of ``logits [rows, vocab]`` to ``out [rows]`` (int64), −1 where the row is unsound."""
        ...

    def seed_of(self, sequence: Sequence) -> int:
        """The key of all draws of ``sequence``: 64 bits, signed."""
        ...

    def top_k_of(self, params: SamplingParams) -> int:
        """``params.top_k``, or 0 where that keeps all."""
        ...


class Sampler:
    """Chooses the next token of every row.

    A row goes through: repetition penalty, then (unless greedy) temperature, top-k, top-p on what top-k left, min-p, and one
    draw: the largest logit once Gumbel noise is added (Yellott 1977). Tokens that tie at the edge of top-k or top-p are all
    kept.

    The noise of a token is a hash of its id, the request's ``seed`` and how many tokens the request has put out; without a
    ``seed``, of the sampler's seed and the request's id. So a request draws the same tokens whatever shares its batch and
    however often it is preempted. Where a logit is rounded otherwise, this matters only if the two best are as near as that;
    with one random number for the whole distribution, the edge of any token might be.

    ``device`` is where the logits live. Log-probabilities are those of the unmodified distribution (before penalty and
    temperature).
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.seed = seed

    def sample(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> list[Token | Exception]:
        """One :class:`Token` for each row of ``logits`` [n, vocab_size], in the order of ``sequences`` (length n).

        A row that holds NaN or +inf, or nothing but −inf, gives a :class:`StepFailedError` in its place; the others are
        not touched. Raises ``ValueError`` if the shape does not fit.
        """
        drawn = self.draw(logits, sequences)
        return drawn.tokens(Readback(drawn.tensors).wait())

    @torch.inference_mode()
    def draw(
        self,
        logits: torch.Tensor,
        sequences: Seq[Sequence],
        ahead: Container[Sequence] = (),
        behind: Seq[int] | None = None,
    ) -> Drawn:
        """As :meth:`sample`, but what is drawn stays on the device, and the host waits for nothing. ``ahead``: of whom one token
        more has been sampled than the host knows. ``behind``: for each row, how many drafted tokens of its sequence stand in
        front of it; such a sequence has several rows, and no repetition penalty."""
        if logits.shape != (len(sequences), self.vocab_size):
            raise ValueError(f"logits have shape {tuple(logits.shape)}, not ({len(sequences)}, {self.vocab_size})")
        if not sequences:
            return Drawn(sequences, [], [])
        params = [sequence.request.params for sequence in sequences]
        positions = [len(s.output) + (s in ahead) for s in sequences]
        if behind is not None:
            positions = [known + more for known, more in zip(positions, behind, strict=True)]
        ids = self._choose(logits, sequences, params, positions)
        scored = [row for row, p in enumerate(params) if p.logprobs is not None]
        return Drawn(sequences, [ids, *_logprobs(logits, scored, ids, params)], scored)

    def _choose(
        self, logits: torch.Tensor, sequences: Seq[Sequence], params: Seq[SamplingParams], positions: list[int]
    ) -> torch.Tensor:
        """A token id for each row [n], −1 where the row is unsound. ``logits`` stay as they are. ``positions``: how many tokens
        each has put out."""
        ids = _argmax(logits)
        changed = [row for row, p in enumerate(params) if p.temperature or p.repetition_penalty != 1]
        if changed:
            at = row_indices(changed, logits.device)
            rows, places = [sequences[row] for row in changed], [positions[row] for row in changed]
            drawn = self._draw(_rows(logits, changed, at).float(), rows, places)
            ids = ids.index_copy(0, at, torch.where(ids.index_select(0, at) < 0, -1, drawn))
        return ids

    def _draw(self, logits: torch.Tensor, sequences: Seq[Sequence], positions: list[int]) -> torch.Tensor:
        """Token ids for rows [m, vocab] (float32, ours to overwrite) that are penalised, or not greedy, or both."""
        params = [sequence.request.params for sequence in sequences]
        penalise(logits, sequences)
        rows = [row for row, p in enumerate(params) if p.temperature]
        if not rows:
            return _argmax(logits)
        hot = [params[row] for row in rows]
        keys = [self._key(sequences[row], positions[row]) for row in rows]
        if len(rows) == len(params):
            return _race(_filter(logits, hot), keys)
        at = row_indices(rows, logits.device)
        drawn = _race(_filter(_rows(logits, rows, at), hot), keys)
        return _argmax(logits).index_copy(0, at, drawn)

    def _key(self, sequence: Sequence, position: int) -> bytes:
        """Of the draw of this request at this position: 64 bits."""
        seed = sequence.request.params.seed
        name = f"seed {seed}" if seed is not None else f"id {self.seed} {sequence.request.id}"
        return blake2b(f"{name} {position}".encode(), digest_size=8).digest()


def _nan_error(sequence: Sequence) -> StepFailedError:
    at = len(sequence.output)
    return StepFailedError(f"request {sequence.request.id}: NaN logits (or infinite ones) at output token {at}")


def row_indices(rows: list[int], device: torch.device) -> torch.Tensor:
    """``rows`` on ``device``."""
    return to_device([np.array(rows, np.int64)], device)[0]


def _rows(logits: torch.Tensor, rows: list[int], at: torch.Tensor) -> torch.Tensor:
    """A copy of some rows, which ``at`` lists on the device."""
    if len(rows) == len(logits):
        return logits.clone()
    return logits.index_select(0, at)


def _numpy_can(logits: torch.Tensor) -> bool:
    """Whether NumPy can work on ``logits`` where they are."""
    return logits.device.type == "cpu"


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of every row, −1 where the row is unsound. One pass over the logits.

    Both libraries let a NaN win, so looking at the winner's value finds NaN and +inf anywhere in the row. On a CPU NumPy's
    vectorised float32 argmax takes 0.1 ms for 32 × 32,000 with the conversion, torch's 0.6 (and 3.1 in bfloat16).
    """
    if _numpy_can(logits):
        values = logits.float().numpy()
        ids = values.argmax(-1)
        best = values[np.arange(len(ids)), ids]
        if not np.isfinite(best).all():
            ids[~np.isfinite(best)] = -1
        return torch.from_numpy(ids)
    top = logits.argmax(-1)
    sound = logits.gather(-1, top.unsqueeze(-1)).squeeze(-1).isfinite()
    return torch.where(sound, top, -1)


def _sorted(logits: torch.Tensor) -> torch.Tensor:
    """Every row in ascending order. On a CPU NumPy's AVX-512 sort is 30 times as fast as torch's, which carries indices."""
    if _numpy_can(logits):
        return torch.from_numpy(np.sort(logits.numpy(), axis=-1))
    return logits.sort(-1).values


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return to_device([np.array(values, np.float32)], like.device)[0].unsqueeze(-1)


class _Seen:
    """Which tokens stand in a sequence's prompt and output: marked one by one as they come, and kept in ``Sequence.data``."""

    __slots__ = ("_counted", "_marks")

    def __init__(self, prompt: Seq[int], vocab_size: int) -> None:
        self._marks = np.zeros(vocab_size, np.bool_)
        self._marks[np.array(prompt, np.int64)] = True
        self._counted = 0  # tokens of the output that are marked

    @classmethod
    def of(cls, sequence: Sequence, vocab_size: int) -> np.ndarray:
        """Their ids, in order."""
        seen, output = sequence.data, sequence.output
        if not isinstance(seen, cls) or len(seen._marks) != vocab_size or seen._counted > len(output):
            seen = sequence.data = cls(sequence.request.prompt, vocab_size)
        seen._marks[np.array(output[seen._counted :], np.int64)] = True
        seen._counted = len(output)
        return np.flatnonzero(seen._marks)


def penalise(logits: torch.Tensor, sequences: Seq[Sequence]) -> None:
    """Divide the positive and multiply the negative logits of tokens already seen, in place (Keskar et al. 2019)."""
    flat, penalties = [], []
    for row, sequence in enumerate(sequences):
        penalty = sequence.request.params.repetition_penalty
        if penalty != 1:
            seen = _Seen.of(sequence, logits.shape[1])
            flat.append(seen + row * logits.shape[1])
            penalties.append(np.full(len(seen), penalty, dtype=np.float32))
    if flat:
        [at] = to_device([np.concatenate(flat)], logits.device)
        [by] = to_device([np.concatenate(penalties)], logits.device)
        values = logits.view(-1)[at]
        logits.view(-1)[at] = torch.where(values > 0, values / by, values * by)


def _filter(logits: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    """Scale rows [m, vocab] by temperature and set what top-k, top-p or min-p drop to −inf, in place."""
    logits -= logits.amax(-1, keepdim=True)  # the likeliest is 0 from here on, at any temperature
    logits /= _column([max(p.temperature, _COLDEST) for p in params], logits)
    vocab = logits.shape[1]
    cut = [row for row, p in enumerate(params) if 0 < p.top_k < vocab or p.top_p < 1]
    if cut:
        at = row_indices(cut, logits.device)
        lowest = _lowest_kept(_sorted(_rows(logits, cut, at)), [params[row] for row in cut])
        if len(cut) < len(params):
            every = torch.full((len(params), 1), -torch.inf, device=logits.device)
            lowest = every.index_copy_(0, at, lowest)
        logits.masked_fill_(logits < lowest, -torch.inf)
    if any(p.min_p for p in params):
        # the likeliest has logit 0, so p < min_p * p_max is logit < log(min_p)
        logits.masked_fill_(logits < _column([p.min_p for p in params], logits).log(), -torch.inf)
    return logits


def _lowest_kept(ascending: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    """The smallest logit that top-k and then top-p keep, [m, 1], from sorted rows [m, vocab] (overwritten)."""
    vocab = ascending.shape[1]
    first = [vocab - p.top_k if 0 < p.top_k < vocab else 0 for p in params]
    lowest = ascending.gather(-1, row_indices(first, ascending.device).unsqueeze(-1))
    if all(p.top_p == 1 for p in params):
        return lowest
    ascending.masked_fill_(ascending < lowest, -torch.inf)
    tail = ascending.softmax(-1).cumsum(-1)  # tail[i]: mass of the i + 1 least likely
    # drop the longest tail whose mass is at most 1 − p; top_p = 1 drops nothing, whatever the rounding
    allowed = _column([1 - p.top_p if p.top_p < 1 else -1.0 for p in params], ascending)
    first_kept = (tail <= allowed).sum(-1, keepdim=True).clamp_(max=vocab - 1)
    return torch.maximum(lowest, ascending.gather(-1, first_kept))


def _race(logits: torch.Tensor, keys: Seq[bytes]) -> torch.Tensor:
    """Draw one token a row of ``logits [m, vocab]`` with the probabilities of their softmax: the largest after Gumbel noise."""
    vocab = logits.shape[1]
    if _numpy_can(logits):
        drawn = [int((row + gumbel(key, vocab)).argmax()) for row, key in zip(logits.numpy(), keys, strict=True)]
        return torch.tensor(drawn)
    [noise] = to_device([np.stack([gumbel(key, vocab) for key in keys])], logits.device)
    return (logits + noise).argmax(-1)


def gumbel(key: bytes, count: int) -> np.ndarray:
    """``count`` numbers of the standard Gumbel distribution, float32: a hash of the 64 bits of ``key`` and of each place.

    The hash is the 32-bit integer one that C. Wellons found (2018, "Prospecting for hash functions": 16 21f0aaad 15 735a2d97 15),
    with a half of the key before each product.
    """
    first, second = np.frombuffer(key, np.uint32)
    bits = np.arange(count, dtype=np.uint32)
    bits *= _GOLDEN
    bits ^= first
    for shift, factor, more in _HASH:
        bits ^= bits >> shift
        bits *= factor
        bits += second * more
    bits ^= bits >> _HASH[-1][0]
    uniform = bits.astype(np.float32)
    uniform += np.float32(0.5)
    uniform *= np.float32(2.0**-32)
    np.minimum(uniform, _MOST, out=uniform)  # what is rounded to 1 would be noise of −∞
    exponential = -np.log(1 - uniform)
    small = np.flatnonzero(uniform < _SMALL)  # which 1 − u would round
    exponential[small] = uniform[small] * (1 + uniform[small] / 2)
    return -np.log(exponential)


def _logprobs(
    logits: torch.Tensor, rows: list[int], ids: torch.Tensor, params: Seq[SamplingParams]
) -> list[torch.Tensor]:
    """Of ``rows``: log-probability of the chosen id, then ids and log-probabilities of the likeliest, best first. Nothing if
    there are none."""
    if not rows:
        return []
    at = row_indices(rows, logits.device)
    log_p = _rows(logits, rows, at).float().log_softmax(-1)
    picked = ids.index_select(0, at).clamp(min=0).unsqueeze(-1)  # an unsound row's are nobody's
    most = min(max(params[row].logprobs or 0 for row in rows), logits.shape[1])
    top = log_p.topk(most, dim=-1)
    return [log_p.gather(-1, picked).squeeze(-1), top.indices, top.values]
