"""How far drafted tokens are what the model says.

Each position behind a sequence's last token is sampled as it would be in a step of its own: by the same logits, and with the
random number that belongs to the request and that position. So a drafted token is right if it is what was sampled, which happens
with the probability that the model gives it; and the first sampled token that was not drafted has the model's distribution
without the drafted one. That is rejection sampling (Leviathan et al. 2023) for a proposal without a choice, and the tokens are
the very ones that come without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from runtime.llm.plan import Token


def verified(drafted: Seq[int], sampled: Seq[Token | Exception]) -> int | Exception:
    """How many of the ``drafted`` tokens are right, from the first on. ``sampled``: one more than these, the first behind the
    sequence's last token, each next one behind a drafted token.

    An exception among ``sampled`` (logits that are not finite) ends the count: behind a wrong draft it says nothing of the
    request, and behind a right one it comes again when that token is the last. It is returned if it is the first.
    """
    if len(sampled) != len(drafted) + 1:
        raise ValueError(f"{len(sampled)} tokens were sampled for {len(drafted)} drafted ones; there must be one more")
    if not isinstance(sampled[0], Token):
        return sampled[0]
    right = 0
    for guess, token, behind in zip(drafted, sampled, sampled[1:], strict=False):
        if not (isinstance(token, Token) and token.id == guess and isinstance(behind, Token)):
            break
        right += 1
    return right
