"""Encoders of the BERT kind without padding: many token lists in one forward, end to end, each attending to itself alone.

Everything but attention treats tokens one by one, so a batch without padding costs what its tokens cost. Attention is put in
through transformers' attention interface. Lists of equal length that stand side by side attend in one call, so a batch
sorted by length takes few calls.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from runtime.errors import UnsupportedModelError
from runtime.torch_backend import sdpa
from runtime.torch_backend.cpu.linear import pack_linears

NAME = "autotune_segments"
_ROWS = 1024  # tokens of a usual forward: what packed linear layers are laid out for
_TOLERANCE = 1e-3  # of the largest activation: packed against plain, in float32


class _Running(threading.local):
    """What the forward in this thread holds: (lists, length) of each run of lists that are equally long."""

    runs: Sequence[tuple[int, int]] | None = None
    calls = 0


_running = _Running()


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``query``, ``key``, ``value [1, heads, tokens, dim]``; returns ``[1, tokens, heads, dim]``."""
    runs = _running.runs
    if runs is None:
        raise RuntimeError("segment attention was called outside PackedEncoder")
    if position_bias is not None or softcap is not None or sliding_window is not None:
        raise UnsupportedModelError("attention with a position bias, a cap on scores or a window is not supported")
    _, heads, tokens, _ = query.shape
    if tokens != key.shape[2] or key.shape[1] != heads or sum(n * length for n, length in runs) != tokens:
        raise UnsupportedModelError("attention that is not plain self-attention is not supported")
    _running.calls += 1
    out = query.new_empty(tokens, heads, value.shape[-1])
    at = 0
    for count, length in runs:
        rows = slice(at, at + count * length)
        q, k, v = (x[0, :, rows].reshape(heads, count, length, -1).transpose(0, 1) for x in (query, key, value))
        attended = sdpa.attended(q, k, v, scale=scaling)  # [count, heads, length, dim]
        out[rows].view(count, length, heads, -1).copy_(attended.transpose(1, 2))
        at = rows.stop
    return out.unsqueeze(0), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Nothing to hide: no list sees another."""


AttentionInterface.register(NAME, segment_attention)
AttentionMaskInterface.register(NAME, _no_mask)


class PackedEncoder:
    """``model``, a bidirectional transformers encoder, on lists of token ids. Inference only; the model is changed in place,
    unless it is refused.

    Raises ``UnsupportedModelError`` when packed and plain results differ on lists of mixed lengths, which is looked at once, in
    the beginning: position ids that a model makes from its padding, or attention that goes other ways.
    """

    def __init__(self, model: PreTrainedModel, *, pack: bool = True) -> None:
        self.model = model.eval()
        self._offset = 0
        self._vocabulary = _rows(model.get_input_embeddings())
        self._positions = _positions(model)
        lists = [[5 + i % 7 for i in range(length)] for length in (3, 9, 9, 1, 6)]
        plain = [self._plain(ids) for ids in lists]
        before = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        try:
            if not any(self._agrees(lists, plain, offset) for offset in self._offsets(max(map(len, lists)))):
                raise UnsupportedModelError(
                    f"{type(model).__name__} gives other results without padding; it needs padded batches"
                )
        except BaseException:  # whoever gave it may use it otherwise
            model.set_attn_implementation(before)
            raise
        if pack:
            pack_linears(model, rows=_ROWS)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    def _offsets(self, longest: int) -> Sequence[int]:
        """What the first position is called: 0 in BERT, one after the padding's id in RoBERTa and its kin; if ``longest`` tokens
        have positions from there on."""
        padding = getattr(self.model.config, "pad_token_id", None)
        offsets = (0,) if padding is None else (0, padding + 1)
        return [at for at in offsets if self._positions is None or at + longest <= self._positions]

    @torch.inference_mode()
    def _plain(self, ids: Sequence[int]) -> Tensor:
        found: Tensor = self.model(input_ids=torch.tensor([ids], device=self.device)).last_hidden_state[0]
        return found

    def _agrees(self, lists: Sequence[Sequence[int]], plain: Sequence[Tensor], offset: int) -> bool:
        self._offset = offset
        packed = self.encode(lists)
        wanted = torch.cat(list(plain))
        least = _TOLERANCE if wanted.dtype == torch.float32 else 0.05
        return _running.calls > 0 and bool((packed - wanted).abs().max() <= least * wanted.abs().max())

    @torch.inference_mode()
    def encode(self, lists: Sequence[Sequence[int]]) -> Tensor:
        """Last hidden states ``[tokens, hidden]`` of all lists, end to end in the order given. Quickest when sorted by length.

        Raises ``ValueError``, before anything is computed, for an empty list, one that is longer than the model has positions
        for, and token ids that it does not know.
        """
        self._check(lists)
        lengths = [len(ids) for ids in lists]
        ids = torch.tensor([[token for tokens in lists for token in tokens]], device=self.device)
        positions = torch.cat([torch.arange(n) for n in lengths]).add_(self._offset).unsqueeze(0).to(self.device)
        before, _running.calls = _running.runs, 0
        _running.runs = [(len(list(run)), length) for length, run in groupby(lengths)]
        try:
            found: Tensor = self.model(input_ids=ids, position_ids=positions).last_hidden_state[0]
        finally:
            _running.runs = before
        return found

    def _check(self, lists: Sequence[Sequence[int]]) -> None:
        """A look-up outside of a table raises on a CPU, and on a GPU ends this call and all later ones."""
        if not lists or not all(lists):
            raise ValueError(
                f"lists hold {[len(ids) for ids in lists][:8]} tokens; there must be lists, of 1 token or more"
            )
        name, longest = type(self.model).__name__, max(map(len, lists))
        if self._positions is not None and longest > (most := self._positions - self._offset):
            raise ValueError(
                f"lists hold one of {longest} tokens; {name} has positions for {most}, so no list may be longer"
            )
        for unknown in (min(map(min, lists)), max(map(max, lists))):
            if not 0 <= unknown < self._vocabulary:
                raise ValueError(
                    f"lists hold token id {unknown}; {name} has a vocabulary of {self._vocabulary}, so ids are between 0 and"
                    f" {self._vocabulary - 1}"
                )

    @torch.inference_mode()
    def mean(self, lists: Sequence[Sequence[int]], *, normalize: bool = True) -> Tensor:
        """The mean of each list's hidden states ``[lists, hidden]``, of length 1 if ``normalize``: a sentence embedding."""
        hidden = self.encode(lists)
        starts = [0, *accumulate(len(ids) for ids in lists)]
        offsets = torch.tensor(starts, device=hidden.device)
        means = torch.segment_reduce(hidden, "mean", offsets=offsets, axis=0)
        return F.normalize(means, dim=1) if normalize else means


def _positions(model: PreTrainedModel) -> int | None:
    """How many positions ``model`` has a learned vector for; None where it computes them."""
    tables = (table for name, table in model.named_modules() if "position" in name.rpartition(".")[2])
    return min((_rows(table) for table in tables if isinstance(table, nn.Embedding)), default=None)


def _rows(table: Any) -> int:
    return len(table.weight)
