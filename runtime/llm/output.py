"""From token ids to what a client reads, and the word that says a sequence is done.

:class:`Detokenizer` turns the ids of one request into text, one piece for each token; :class:`OutputProcessor` stands
between the executor and the scheduler and stops sequences at an end-of-sequence token, a stop id or a stop string.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from runtime.llm.plan import StepResult
from runtime.records import FinishReason
from runtime.request import Sequence
from runtime.shared.panics import panics_as_errors

log = logging.getLogger(__name__)

Decode = Callable[[list[int]], str]
"""Text of token ids. Bytes that are not (yet) UTF-8 come out as U+FFFD, as every Hugging Face tokenizer does."""

_UNFINISHED = "\ufffd"
_REBASE = 16  # tokens decoded together, at most, while characters are complete ...
_CONTEXT = range(4, 8)  # ... and how many then stay as context; a character of up to 4 bytes begins at one of these
_GIVE_UP = 64  # tokens decoded together, at most: what is not a character by then never will be, but for the last one


class Detokenizer:
    """The text of one request, as it grows.

    ``push`` returns what a token adds to it, which may be nothing: a character whose bytes have not all come is held back,
    and so is text that may be the beginning of a stop string. When a stop string is complete the text ends before it, and
    ``stopped`` is True. ``pieces`` keeps what each token added. Each token costs one decode of at most a few tokens, however
    long the text. One thread at a time.
    """

    __slots__ = ("_decode", "_held", "_longest", "_shown", "_stop", "_text", "_window", "pieces", "stopped")

    def __init__(self, decode: Decode | None, stop: Seq[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._window: list[int] = []  # the last tokens, decoded together
        self._text = ""  # theirs
        self._shown = 0  # characters of the window's text that were let through
        self._held = ""  # let through, but may begin a stop string
        self.stopped = False
        self.pieces: list[str] = []

    def push(self, token: int) -> str:
        """What ``token`` adds to the text."""
        if self._decode is None:
            self.pieces.append("")
            return ""
        window = self._window
        window.append(token)
        text = self._decode(window)
        if text and text == self._text and not self._decode([token]):  # it shows nothing, and is no context either
            window.pop()
            self.pieces.append("")
            return ""
        # What can still change is a run of U+FFFD at the end: bytes that may become a character (one U+FFFD for all of
        # them in byte-level tokenizers, one for each in those that fall back to bytes).
        stable = len(text.rstrip(_UNFINISHED))
        if len(window) > _GIVE_UP:
            stable = max(stable, len(text) - 1)
        complete = stable == len(text)
        piece = text[self._shown : stable]
        self._shown = stable if complete else max(stable, self._shown)
        self._text = text
        if len(window) > (_REBASE if complete else _GIVE_UP):
            self._rebase(text)
        if self._stop:
            piece = self._until_stop(piece)
        self.pieces.append(piece)
        return piece

    def skip(self) -> str:
        """A token that shows no text, such as the one that ended the request."""
        self.pieces.append("")
        return ""

    def flush(self) -> str:
        """What was held back, now that nothing more will come; it is added to the last piece."""
        if self._decode is None or self.stopped:
            return ""
        rest = self._held + self._decode(self._window)[self._shown :]
        self._held, self._text, self._window, self._shown = "", "", [], 0
        if self.pieces:
            self.pieces[-1] += rest
        return rest

    def _rebase(self, text: str) -> None:
        """Keep only the last few tokens as context: what a token's text is depends on those just before it."""
        window, hidden = self._window, max(0, len(text) - self._shown)
        for keep in _CONTEXT:
            tail = self._decode(window[-keep:]) if self._decode is not None else ""
            known = tail.lstrip(_UNFINISHED)  # without what is left of a character that the cut goes through
            if known and text.endswith(known):
                break  # the context ends in the same text as it did in the whole
        else:
            if len(window) <= _GIVE_UP:
                return
        del window[:-keep]
        self._text = tail
        self._shown = max(0, len(tail) - hidden)

    def whole(self, tokens: list[int]) -> str:
        """The text of ``tokens`` by themselves, in one go; nothing is remembered."""
        return "" if self._decode is None or not tokens else self._decode(tokens)

    def _until_stop(self, piece: str) -> str:
        if self.stopped:
            return ""
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = min(self._longest - 1, len(text))
        while keep and not any(stop.startswith(text[-keep:]) for stop in self._stop):
            keep -= 1
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]


def guarded(decode: Decode) -> Decode:
    """``decode``, whose panics (of a tokenizer in Rust, say), which are no ``Exception``, become ``RuntimeError``."""

    def decoded(ids: list[int]) -> str:
        with panics_as_errors("the tokenizer"):
            return decode(ids)

    return decoded


class OutputProcessor:
    """Appends sampled ids to ``sequence.output`` and says which sequences stop with them.

    Text is made here only for requests with stop strings, which cannot do without; everybody else's is made where it is
    read, off the step's path. ``decode`` None: the model has no tokenizer, and requests have no stop strings.
    """

    __slots__ = ("_decode", "_eos", "_texts", "failures")

    def __init__(self, eos_token_ids: Iterable[int] = (), decode: Decode | None = None) -> None:
        self._eos = frozenset(eos_token_ids)
        self._decode = decode
        self._texts: dict[Sequence, Detokenizer] = {}
        self.failures: dict[Sequence, BaseException] = {}
        """Why a tokenizer raised on a sequence's tokens, until it is released; such a sequence stops with ERROR."""

    def process(self, result: StepResult) -> list[tuple[Sequence, FinishReason]]:
        """Take in one step's tokens; returns the sequences that stop now, with the reason. Of a sequence that got several at
        once, those behind the one it stops with are not taken in."""
        stops: list[tuple[Sequence, FinishReason]] = []
        eos = self._eos
        ended: set[Sequence] = set()  # of those that stop, only where there may be tokens behind
        for token in result.tokens:
            sequence, token_id = token.sequence, token.id
            if ended and sequence in ended:
                continue
            sequence.output.append(token_id)
            params = sequence.request.params
            if (token_id in eos and not params.ignore_eos) or token_id in params.stop_token_ids:
                stops.append((sequence, FinishReason.STOP))
            elif params.stop:
                try:
                    text = self.text_of(sequence)
                    text.push(token_id)
                except BaseException as error:  # someone's tokenizer: one request's fault, not the engine's
                    if isinstance(error, KeyboardInterrupt):  # of whoever waits in this thread
                        raise
                    log.warning("the tokenizer failed on request %s", sequence.request.id, exc_info=True)
                    self.failures[sequence] = error
                    stops.append((sequence, FinishReason.ERROR))
                else:
                    if text.stopped:
                        stops.append((sequence, FinishReason.STOP))
            if result.accepted and stops and stops[-1][0] is sequence:
                ended.add(sequence)
        return stops

    def text_of(self, sequence: Sequence) -> Detokenizer:
        """The text of a sequence with stop strings. A stream reads its ``pieces``."""
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = Detokenizer(self._decode, sequence.request.params.stop)
        return text

    def attach(self, sequence: Sequence, text: Detokenizer) -> None:
        """Let ``text``, which someone else reads, be the text of ``sequence``."""
        self._texts[sequence] = text

    def release(self, sequence: Sequence) -> None:
        """Forget ``sequence``: it has ended."""
        self._texts.pop(sequence, None)
        self.failures.pop(sequence, None)
