"""The byte-level tokenizer of the presets, and the face all tokenizers have here."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import AutoTokenizer

from runtime.errors import InputError
from runtime.llm.output import Detokenizer
from runtime.torch_backend.tokenizer import SMALLEST_VOCABULARY, SPECIALS, Tokenizer, byte_tokenizer
from tests.examples import examples

VOCAB = 1000
TOKENIZER = byte_tokenizer(VOCAB)


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=examples(2))
def test_text_comes_back(text: str) -> None:
    if any(special in text for special in SPECIALS):
        return
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(0 <= i < VOCAB for i in ids)


@given(st.lists(st.integers(SMALLEST_VOCABULARY, VOCAB - 1)))
def test_filler_ids_come_back(ids: list[int]) -> None:
    assert TOKENIZER.encode(TOKENIZER.decode(ids)) == ids


def test_bytes_are_their_own_ids() -> None:
    assert TOKENIZER.encode("Hi\n\x00é€") == list("Hi\n\x00é€".encode())
    assert [TOKENIZER.decode([byte]) for byte in b"aZ 9"] == ["a", "Z", " ", "9"]


def test_every_id_has_a_text_of_its_own() -> None:
    texts = [TOKENIZER.decode([i]) for i in range(SMALLEST_VOCABULARY, VOCAB)]
    assert texts == [f"<{i}>" for i in range(SMALLEST_VOCABULARY, VOCAB)]
    assert len(TOKENIZER) == VOCAB


def test_filler_beyond_the_vocabulary_is_plain_text() -> None:
    for text in ("<1000>", "<0300>", "<12>", "<>", "< 300>", "<99999999999>"):
        assert TOKENIZER.encode(text) == list(text.encode())
    assert TOKENIZER.encode("a<300>b<999>") == [97, 300, 98, 999]


def test_special_tokens_are_typed_as_one_and_not_shown() -> None:
    ids = TOKENIZER.encode("".join(SPECIALS))
    assert ids == list(range(256, SMALLEST_VOCABULARY))
    assert TOKENIZER.decode([104, *ids, 105]) == "hi"
    assert TOKENIZER.eos_token_id == 257


def test_broken_utf8_is_replaced_not_raised() -> None:
    assert TOKENIZER.decode([0xC3]) == "\ufffd"
    assert TOKENIZER.decode([0xC3, 0xA9]) == "é"
    assert "\ufffd" in TOKENIZER.decode([0xFF, 97])


def test_text_grows_token_by_token() -> None:
    text = "naïve 日本語 <300> 👩‍🚀 done"
    grown = Detokenizer(TOKENIZER.decode)
    for token in TOKENIZER.encode(text):
        grown.push(token)
    grown.flush()
    assert "".join(grown.pieces) == text


def test_a_conversation() -> None:
    ids = TOKENIZER.encode_chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}])
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids == TOKENIZER.encode(expected)
    assert ids.count(259) == 3


def test_no_chat_template_and_a_template_that_raises() -> None:
    plain = byte_tokenizer(VOCAB)
    plain.tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        plain.encode_chat([{"role": "user", "content": "hi"}])
    plain.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="roles must alternate"):
        plain.encode_chat([{"role": "user", "content": "hi"}])


class Panic(BaseException):
    """As pyo3's ``PanicException``, which is no ``Exception``."""


@pytest.mark.parametrize("raised", [Panic("at the decoder"), KeyboardInterrupt(), SystemExit(3), KeyError(13)])
def test_a_panic_is_raised_as_an_exception_and_nothing_else_is(
    raised: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*args: object, **options: object) -> None:
        raise raised

    broken = byte_tokenizer(VOCAB)
    for name in ("encode", "decode"):
        monkeypatch.setattr(broken.tokenizer, name, breaks)
    for call in (lambda: broken.encode("a"), lambda: broken.decode([1])):
        with pytest.raises(BaseException) as caught:
            call()
        if isinstance(raised, Panic):
            assert isinstance(caught.value, RuntimeError) and "at the decoder" in str(caught.value)
            assert caught.value.__cause__ is raised
        else:
            assert caught.value is raised
    if isinstance(raised, Panic):
        with pytest.raises(InputError, match="at the decoder"):
            broken.encode_chat([{"role": "user", "content": "hi"}])


def test_a_panic_of_the_library_is_one(capfd: pytest.CaptureFixture[str]) -> None:
    broken = byte_tokenizer(VOCAB)
    broken.tokenizer.backend_tokenizer.decoder = decoders.Strip("B", 0, 5)  # breaks on text of nothing but that
    with pytest.raises(RuntimeError, match="the tokenizer broke"):
        broken.decode([ord("B")])


def test_it_survives_a_save(tmp_path: Path) -> None:
    TOKENIZER.tokenizer.save_pretrained(tmp_path)
    again = Tokenizer(AutoTokenizer.from_pretrained(tmp_path))
    text = "Ünï <300><301>\t<1000>"
    assert again.encode(text) == TOKENIZER.encode(text)
    assert again.decode(again.encode(text)) == text


def test_too_small_a_vocabulary() -> None:
    assert len(byte_tokenizer(SMALLEST_VOCABULARY)) == SMALLEST_VOCABULARY
    with pytest.raises(ValueError, match=f"vocab_size is 260; .* at least {SMALLEST_VOCABULARY}"):
        byte_tokenizer(260)
