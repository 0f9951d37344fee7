"""Names of KV blocks by content, for prompts that have no tokens: equal names where the tokens would be equal.

A live engine names a block by a hash of all tokens up to its end. A simulated prompt is made of segments, (seed, length)
pieces that hold the same tokens wherever they appear, so a block's content is known by the segments up to its end, and its
name is a hash of those. What a request shares with no other, its answer above all, is named by the request's number. Python
hashes whole numbers and tuples of them alike in every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from autotune.workload import Arrival
from runtime.llm.scheduler import Scheduler
from runtime.request import Sequence as RunningSequence


def prompt_names(segments: Sequence[tuple[int, int]], block_size: int, root: int) -> tuple[int, ...]:
    """One name for each full block of a prompt made of ``segments``; different ``root``: nothing in common."""
    names: list[int] = []
    parent, start, boundary = root, 0, block_size
    for seed, length in segments:
        end = start + length
        while boundary <= end:
            names.append(hash((parent, seed, boundary - start)))
            boundary += block_size
        parent = hash((parent, seed, length, end))
        start = end
    return tuple(names)


def own_names(number: int, first: int, end: int) -> list[int]:
    """Names of blocks ``first`` to ``end`` (excluded) of request ``number``, which no other request has."""
    return [hash((number, block)) for block in range(first, end)]


def name_answer(sequence: RunningSequence, block_size: int) -> None:
    """Extend ``sequence.hashes`` over its answer, as :func:`runtime.llm.prefix.token_hasher` does live."""
    known = sequence.hashes
    full = (sequence.request.prompt_len + sequence.generated) // block_size
    known += own_names(sequence.data, len(known), full)


def name_from_now_on(scheduler: Scheduler) -> None:
    """Have ``scheduler`` know blocks by content; those that its sequences hold are named as their own.

    Sequences have their numbers in ``data``, and what they hold must be unlike what others hold.
    """
    size = scheduler.kv.block_size
    scheduler.holdings.hasher = partial(name_answer, block_size=size)
    for held in (scheduler.decodes, scheduler.prefills, scheduler.waiting):
        for sequence in held:
            sequence.hashes = own_names(sequence.data, 0, sequence.request.prompt_len // size)
            scheduler.holdings.publish(sequence, 0)


def shares_prefixes(arrivals: Sequence[Arrival]) -> bool:
    """Whether two of ``arrivals`` may begin alike."""
    return len({arrival.segments[0][0] for arrival in arrivals}) < len(arrivals)
