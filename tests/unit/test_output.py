from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from runtime.llm.output import Decode, Detokenizer, OutputProcessor
from runtime.llm.plan import StepResult, Token
from runtime.records import FinishReason
from runtime.request import Request, SamplingParams, Sequence
from runtime.torch_backend.tokenizer import byte_tokenizer
from tests.fakes import EOS, ByteTokenizer

decode_bytes = ByteTokenizer().decode


def sentencepiece_like() -> Decode:
    """A real tokenizer that marks words with ▁, drops the first space and falls back to bytes, as Llama 2's does."""
    words = ["▁the", "▁", "▁x", "y", "é", "▁日", "本", "\ufffd"]
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return lambda ids: str(tokenizer.decode(ids))


def stream(decode: Decode, ids: list[int], stop: tuple[str, ...] = ()) -> Detokenizer:
    text = Detokenizer(decode, stop)
    for token in ids:
        text.push(token)
    text.flush()
    return text


def sequence(**params: object) -> Sequence:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Sequence(Request("r", (1,), sampling, 100, 0.0))


@given(st.text(max_size=60))
def test_pieces_join_to_the_text(text: str) -> None:
    assert "".join(stream(decode_bytes, list(text.encode())).pieces) == text


@given(st.text(alphabet="aé日😀\u0301\ufffd", min_size=1, max_size=40))
def test_never_half_a_character(text: str) -> None:
    shown = ""
    detokenizer = Detokenizer(decode_bytes)
    for at, byte in enumerate(text.encode(), start=1):
        shown += detokenizer.push(byte)
        assert text.startswith(shown), "what was shown is no longer there"
        complete = text.encode()[:at].decode(errors="ignore")
        assert shown == complete.rstrip("\ufffd"), "a complete character was held back"


@given(st.lists(st.integers(0, 255), max_size=200))
def test_bytes_that_are_not_text(ids: list[int]) -> None:
    """Random weights write such bytes; no more than the whole's U+FFFDs may come of them, in the same places."""
    assert "".join(stream(decode_bytes, ids).pieces) == decode_bytes(ids)


@pytest.mark.parametrize("garbage", [b"\xe6", b"\xe6\x97", b"\xa5", b"\xf0\x9f\x98", b"a\xff"])
def test_text_behind_bytes_that_are_none(garbage: bytes) -> None:
    """However many of them there were: a character whose bytes come one by one is still one."""
    for count in range(130):
        ids = [*garbage * count, *"ab日é😀本".encode()]
        assert "".join(stream(decode_bytes, ids).pieces) == decode_bytes(ids), count


PIECES = [
    b"a",
    b" ",
    "日".encode(),
    b"\xe6",
    b"\x97\xa5",
    b"\xa5\xe6\x97",
    b" \xf0\x9f",
    b"\x98\x80",
    b"\xff",
    b"\xef\xbf\xbd",
    b"",
]


@given(st.lists(st.tuples(st.sampled_from(range(len(PIECES))), st.integers(1, 80)), max_size=12))
def test_tokens_of_several_bytes_and_of_none(runs: list[tuple[int, int]]) -> None:
    """As byte-level BPE has them: their edges need not be those of characters, and a model may repeat one for long."""

    def decode(ids: list[int]) -> str:
        return b"".join([PIECES[i] for i in ids]).decode(errors="replace")

    ids = [token for token, times in runs for _ in range(times)]
    assert "".join(stream(decode, ids).pieces) == decode(ids)


@pytest.mark.parametrize("seed", range(5))
def test_the_tokenizer_of_models_with_random_weights(seed: int) -> None:
    dice, decode = random.Random(seed), byte_tokenizer(400).decode
    for _ in range(30):
        ids: list[int] = []
        for _ in range(dice.randint(1, 30)):
            ids += dice.choice(
                [
                    list(dice.choice("xé😀日 ").encode()),
                    [dice.randrange(400)],
                    [dice.randrange(128, 256)] * dice.randint(1, 80),
                ]
            )
        assert "".join(stream(decode, ids).pieces) == decode(ids)


def test_tokens_that_show_nothing_are_no_context() -> None:
    first, *rest = "日".encode()
    ids = [97, first, *[EOS] * 200, *rest]
    assert stream(decode_bytes, ids).pieces == ["a", *[""] * 202, "日"]


@given(st.lists(st.integers(0, 263), max_size=80))
def test_a_tokenizer_whose_text_depends_on_its_neighbours(ids: list[int]) -> None:
    """Leading spaces vanish only at the very beginning; bytes join across tokens."""
    decode = sentencepiece_like()
    # Byte fallback decodes a run of bytes together: a run that is not text becomes U+FFFD as a whole, even what was text
    # before the run's last byte came. Runs that are text are what a model writes.
    runs: list[int] = []
    for token in ids:
        runs += list("aé日😀"[token % 4].encode()) if token < 256 else [token]
    assert "".join(stream(decode, runs).pieces) == decode(runs)


def test_a_character_that_never_completes_is_not_waited_for_forever() -> None:
    lengths: list[int] = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return decode_bytes(ids)

    text = stream(decode, [0xE6] * 1000)
    assert "".join(text.pieces) == decode_bytes([0xE6] * 1000)
    assert max(lengths) <= 65


def test_decoding_costs_the_same_late_as_early() -> None:
    lengths: list[int] = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return decode_bytes(ids)

    stream(decode, list(b"abcd" * 1000))
    assert max(lengths) <= 17
    assert len(lengths) < 4000 * 1.2


@given(
    st.lists(st.sampled_from("ab"), max_size=40).map("".join),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=40),
)
def test_stop_strings_against_a_search_of_the_whole_text(text: str, stops: list[str], sizes: list[int]) -> None:
    """Whatever the tokens' boundaries: the text ends before the first stop string to be complete."""
    pieces, at = [], 0
    for size in sizes * 40:
        if at < len(text):
            pieces.append(text[at : at + size])
            at += size
    vocabulary = dict(enumerate(pieces))
    detokenizer = Detokenizer(lambda ids: "".join(vocabulary[i] for i in ids), tuple(stops))
    shown = seen = ""
    for token, piece in vocabulary.items():
        shown += detokenizer.push(token)
        seen += piece
        found = [seen.find(stop) for stop in stops if stop in seen]
        assert detokenizer.stopped == bool(found)
        if found:
            assert shown == seen[: min(found)]
            break
        assert seen.startswith(shown)
        held = seen[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops), "held back without need"
    else:
        assert shown + detokenizer.flush() == text
    assert "".join(detokenizer.pieces) == shown if detokenizer.stopped else "".join(detokenizer.pieces) == text


def test_stop_string_with_a_character_split_over_tokens() -> None:
    text = Detokenizer(decode_bytes, ("日本",))
    shown = ""
    for byte in "x日本y".encode():
        shown += text.push(byte)
        if text.stopped:
            break
    assert text.stopped and shown == "x" and byte == "本".encode()[-1]
    assert text.flush() == ""


def test_without_a_tokenizer_there_is_no_text() -> None:
    text = Detokenizer(None)
    assert [text.push(1), text.push(2), text.flush(), text.whole([1, 2])] == ["", "", "", ""]
    assert text.pieces == ["", ""]


@pytest.mark.parametrize(
    ("token", "params", "reason"),
    [
        (EOS, {}, FinishReason.STOP),
        (EOS, {"ignore_eos": True}, None),
        (7, {}, None),
        (7, {"stop_token_ids": (5, 7)}, FinishReason.STOP),
        (7, {"stop_token_ids": (7,), "ignore_eos": True}, FinishReason.STOP),
        (EOS, {"stop_token_ids": (EOS,), "ignore_eos": True}, FinishReason.STOP),
        (ord("a"), {"stop": ("a",)}, FinishReason.STOP),
        (ord("a"), {"stop": ("ab",)}, None),
    ],
)
def test_what_stops_a_sequence(token: int, params: dict[str, object], reason: FinishReason | None) -> None:
    row, other = sequence(**params), sequence()
    output = OutputProcessor([EOS], decode_bytes)
    stopped = output.process(StepResult((1.0,), [Token(other, 7), Token(row, token)]))
    assert stopped == ([] if reason is None else [(row, reason)])
    assert row.output == [token] and other.output == [7]


def test_stop_string_over_several_steps() -> None:
    row = sequence(stop=("END", "xyz"))
    output = OutputProcessor([EOS], decode_bytes)
    stopped = [output.process(StepResult((1.0,), [Token(row, byte)])) for byte in b"an END"]
    assert [bool(s) for s in stopped] == [False] * 5 + [True]
    assert "".join(output.text_of(row).pieces) == "an "
    output.release(row)
    assert output.text_of(row).pieces == []


def test_a_tokenizer_that_raises_is_one_requests_fault() -> None:
    def decode(ids: list[int]) -> str:
        if 13 in ids:
            raise KeyError(13)
        return decode_bytes(ids)

    bad, good = sequence(stop=("x",)), sequence(stop=("x",))
    output = OutputProcessor([EOS], decode)
    stopped = output.process(StepResult((1.0,), [Token(bad, 13), Token(good, ord("x"))]))
    assert stopped == [(bad, FinishReason.ERROR), (good, FinishReason.STOP)]
    assert isinstance(output.failures[bad], KeyError)
    output.release(bad)
    assert not output.failures


class Panic(BaseException):
    """As pyo3's ``PanicException``, which is no ``Exception``."""


def raising(error: BaseException) -> Decode:
    def decode(ids: list[int]) -> str:
        if 13 in ids:
            raise error
        return decode_bytes(ids)

    return decode


@pytest.mark.parametrize("error", [Panic(), SystemExit(3)])
def test_a_tokenizer_that_raises_what_is_no_exception_is_one_requests_fault_too(error: BaseException) -> None:
    bad, good = sequence(stop=("x",)), sequence(stop=("x",))
    output = OutputProcessor([EOS], raising(error))
    stopped = output.process(StepResult((1.0,), [Token(bad, 13), Token(good, ord("x"))]))
    assert stopped == [(bad, FinishReason.ERROR), (good, FinishReason.STOP)] and output.failures == {bad: error}


def test_an_interrupt_within_a_tokenizer_is_for_whoever_waits() -> None:
    with pytest.raises(KeyboardInterrupt):
        OutputProcessor([EOS], raising(KeyboardInterrupt())).process(
            StepResult((1.0,), [Token(sequence(stop=("x",)), 13)])
        )


def test_one_token_vocabulary_of_every_stop_pair() -> None:
    """Two stop strings where one is inside the other: the text ends at the one that begins first."""
    for first, second in product(("b", "abc"), repeat=2):
        text = Detokenizer(decode_bytes, (first, second))
        shown = "".join(text.push(byte) for byte in b"abc")
        expected = "a" if "b" in (first, second) else ""
        assert (shown, text.stopped) == (expected, True)
