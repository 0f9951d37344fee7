"""Text to token ids and back: a thin face over a transformers tokenizer, and a byte-level one made on the spot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from runtime.errors import InputError
from runtime.shared.panics import panics_as_errors

BOS, EOS, PAD, TURN, END_OF_TURN = SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
FIRST_SPECIAL = 256
SMALLEST_VOCABULARY = FIRST_SPECIAL + len(SPECIALS)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Tokenizer:
    """``encode`` and ``decode`` of a transformers tokenizer, with the defaults that serving wants.

    A panic of its Rust code, which is no ``Exception``, is raised as ``RuntimeError``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens (such as BOS) the model was trained with in front."""
        return self._ids(text)

    def _ids(self, text: str, **options: bool) -> list[int]:
        with panics_as_errors("the tokenizer"):
            ids: list[int] = self.tokenizer.encode(text, **options)
        return ids

    def encode_chat(self, messages: Seq[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation (``role`` and ``content`` of each message), open for the assistant's answer.

        Raises :class:`InputError` if the tokenizer has no chat template, or its template rejects the messages.
        """
        if not self.tokenizer.chat_template:
            raise InputError("messages: this model's tokenizer has no chat template; send a plain prompt")
        try:
            text: Any = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template may raise anything: it is code that came with the model
            raise InputError(f"messages: the model's chat template rejects them: {error}") from error
        try:
            return self._ids(text, add_special_tokens=False)  # the template has written them
        except Exception as error:  # such as half of a surrogate pair, which is no text
            raise InputError(f"messages: cannot be tokenised: {error}") from error

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids without special tokens. Bytes that are not valid UTF-8 come out as U+FFFD."""
        with panics_as_errors("the tokenizer"):
            text = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    @property
    def eos_token_id(self) -> int | None:
        found = self.tokenizer.eos_token_id
        return found if isinstance(found, int) else None

    def __len__(self) -> int:
        return len(self.tokenizer)


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer for models with random weights: ids 0–255 are bytes, then five special tokens, then filler.

    Filler id n is the text ``<n>``, and that text is id n again, so every id can be shown and typed: text → ids → text is
    the identity for all text, ids → text → ids for all filler ids. Raises ``ValueError`` if ``vocab_size`` is too small.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(f"vocab_size is {vocab_size}; a byte-level tokenizer needs at least {SMALLEST_VOCABULARY}")
    vocabulary = {symbol: byte for byte, symbol in _byte_symbols().items()}
    for token in SPECIALS:
        vocabulary[token] = len(vocabulary)
    for filler in range(SMALLEST_VOCABULARY, vocab_size):
        vocabulary[f"<{filler}>"] = filler
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    # A piece that is in the vocabulary as a whole becomes one token; "<n>" beyond the vocabulary falls to its bytes.
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"<[0-9]+>"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(list(SPECIALS))
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=fast,
            bos_token=BOS,
            eos_token=EOS,
            pad_token=PAD,
            chat_template=CHAT_TEMPLATE,
            clean_up_tokenization_spaces=False,
        )
    )


def _byte_symbols() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level BPE (Radford et al. 2019, the GPT-2 tokenizer).

    Printable Latin-1 stands for itself; the other bytes take the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return {byte: chr(byte if byte in printable else next(shifted)) for byte in range(256)}
