"""A second simulator, written from the rules alone: naive loops over everything, every step, and nothing of runtime.llm.

It is slow on purpose. Every sequence is looked at in every step, every token has a name of its own, and a block of the KV pool
is an object that knows which tokens it holds. What the engine's scheduler does with counters, heaps and wheels must come out
the same here to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, log2

from runtime.knobs import Knobs
from runtime.step_model import StepFeatures

Token = tuple[int, int]  # (what it is a piece of, where in that)


@dataclass(frozen=True)
class Request:
    """A request. ``segments``: (seed, length) pieces of its prompt."""

    id: str
    arrival: float
    segments: tuple[tuple[int, int], ...]
    output: int
    priority: int = 0
    deadline: float | None = None
    expires: float | None = None
    tenant: str = ""

    @property
    def tokens(self) -> list[Token]:
        return [(seed, at) for seed, length in self.segments for at in range(length)]


@dataclass(eq=False)
class Block:
    """One block of the pool; ``content``: all tokens up to its end, once they are computed and nobody else said so first."""

    content: tuple[Token, ...] | None = None
    holders: int = 0
    said: int = 0  # when that became known


@dataclass(eq=False)
class Live:
    request: Request
    number: int
    known: list[Token]  # prompt, then answer
    computed: int = 0
    blocks: list[Block] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    preemptions: int = 0
    cached: int | None = None
    scheduled: float | None = None
    key: float = 0.0
    queued: int = 0
    pending: int = 0
    end: tuple[str, float] | None = None


@dataclass
class Event:
    """How a request ended."""

    reason: str
    finished: float
    scheduled: float | None
    times: list[float]
    cached: int
    preemptions: int


def place(live: Live) -> tuple[bool, float]:
    """The smallest goes first: preempted ones, then by the ordering."""
    return live.preemptions == 0, live.key


class Reference:
    """Serves requests one naive step at a time."""

    def __init__(
        self,
        seconds: Callable[[StepFeatures], float],
        knobs: Knobs,
        *,
        blocks: int,
        block_size: int,
        ordering: str,
        prefix_cache: bool,
        policy: Callable[[int], int] | None = None,
        first_s: float = 60.0,
        guessable: Callable[[str, int], bool] | None = None,
        most_sampled: int = 1 << 30,
        by_chunk: bool = False,
        worth_waiting: int = 256,
    ) -> None:
        self.worth_waiting = (
            worth_waiting  # tokens in common with a prompt in progress, from which on others wait for those
        )
        self.coming: dict[int, list[tuple[Token, ...]]] = {}  # by request: contents of blocks that it is to fill
        self.by_chunk = by_chunk  # prompts get their blocks chunk by chunk
        self.most_sampled = most_sampled  # rows of logits that a step with guesses may have
        self.guessable = guessable  # whether the token at a place of an answer can be guessed; None: nobody guesses
        self.first_s = first_s  # when the first token of a request without a deadline of its own is due
        self.seconds, self.knobs, self.size, self.ordering = seconds, knobs, block_size, ordering
        self.prefix_cache, self.policy = prefix_cache, policy
        self.now = 0.0
        self.pool = blocks
        self.blank = [Block() for _ in range(blocks)]  # nobody holds them, and what they contain is unknown
        self.idle: list[Block] = []  # nobody holds them, content known, least recently used first
        self.decoding: list[Live] = []
        self.prompting: list[Live] = []
        self.waiting: list[Live] = []
        self.ended: dict[str, Event] = {}
        self.steps: list[tuple[float, float]] = []
        self.virtual = self.share = 0.0  # time by which tenants share, and by how much it grows when more is taken
        self.answers: list[tuple[int, int]] = []  # (prompt, output) of those that ran to their end
        self.prompt_s = self.prompt_tokens = 0.0  # of the steps with prompts so far, old ones for less
        self.tenant_ends: dict[str, float] = {}
        self.count = 0

    # -- the pool

    @property
    def free(self) -> int:
        return len(self.blank) + len(self.idle)

    def take(self) -> Block:
        block = self.blank.pop() if self.blank else self.idle.pop(0)
        block.content, block.holders = None, 1
        return block

    def found(self, live: Live) -> list[Block]:
        """The blocks that hold the beginning of what ``live`` must compute; its last token is always computed anew."""
        blocks: list[Block] = []
        if not self.prefix_cache:
            return blocks
        while (len(blocks) + 1) * self.size <= len(live.known) - 1:
            content = tuple(live.known[: (len(blocks) + 1) * self.size])
            same = [b for b in self.everything() if b.content == content]
            if not same:
                break
            blocks.append(min(same, key=lambda b: b.said))
        return blocks

    def everything(self) -> list[Block]:
        held = [b for live in [*self.decoding, *self.prompting] for b in live.blocks]
        return self.idle + held

    def say(self, live: Live, coming: int = 0) -> None:
        """Its full blocks, of what is computed and so many ``coming`` tokens, are known by their content from now on."""
        if not self.prefix_cache:
            return
        for index in range(min(live.computed + coming, len(live.known)) // self.size):
            content = tuple(live.known[: (index + 1) * self.size])
            if live.blocks[index].content is not None:
                continue
            if self.by_chunk or all(b.content != content for b in self.everything()):
                self.count += 1
                live.blocks[index].content, live.blocks[index].said = content, self.count

    def give_back(self, live: Live) -> None:
        self.say(live)
        for block in reversed(live.blocks):
            block.holders -= 1
            if not block.holders:
                (self.blank if block.content is None else self.idle).append(block)
        live.blocks = []

    # -- requests

    def add(self, request: Request) -> None:
        self.count += 1
        live = Live(request, self.count, request.tokens)
        prompt = len(live.known)
        start = self.tenant_ends.get(request.tenant, 0.0)
        if not any(one.request.tenant == request.tenant and not one.preemptions for one in self.waiting):
            start = max(self.virtual, start)
        due = request.arrival + self.first_s if request.deadline is None else request.deadline
        prompt_s = prompt * (self.prompt_s / self.prompt_tokens) if self.prompt_tokens else 0.0
        live.key = {
            "fcfs": request.arrival,
            "priority": request.arrival - 10.0 * request.priority,
            "shortest": request.arrival + 0.01 * prompt,
            "shortest_expected": request.arrival + 0.01 * (prompt + self.expected(prompt)),
            "ageing": request.arrival + 2.0 * (log2(prompt) - max(-8, min(8, request.priority))),
            "deadline": due,
            "least_slack": due - prompt_s,
            "hybrid": due + 0.008 * prompt,
            "fair": start,
        }[self.ordering]
        if self.ordering == "fair":
            self.tenant_ends[request.tenant] = start + prompt + request.output
        self.queue(live)

    def expected(self, prompt: int) -> float:
        """Output tokens: the mean of the latest answers to prompts with as many binary digits, or of the latest altogether."""
        alike = [output for length, output in self.answers if length.bit_length() == prompt.bit_length()]
        latest = (alike if len(alike) >= 16 else [output for _, output in self.answers])[-256:]
        return sum(latest) / len(latest) if latest else 0.0

    def queue(self, live: Live) -> None:
        self.count += 1
        live.queued = self.count
        found = len(self.found(live))
        live.pending = len(live.known) - found * self.size
        self.waiting.append(live)
        if not self.prefix_cache:
            return
        known, everything = {content for contents in self.coming.values() for content in contents}, len(live.known)
        mine = [tuple(live.known[: (index + 1) * self.size]) for index in range(found, everything // self.size)]
        for content in mine:  # what others are to compute before need not be computed again
            if content not in known or len(content) >= everything:
                break
            live.pending -= self.size
        if len(known) + len(mine) <= self.pool:
            self.coming[live.number] = mine

    def awaits(self, live: Live, chunks: list[tuple[Live, int]]) -> bool:
        """Whether another's chunk in this step, or what is left behind it, holds enough that ``live`` needs and nobody has."""
        if not self.prefix_cache or self.by_chunk:
            return False
        for other, _ in chunks:
            first, tokens = other.computed // self.size * self.size, -(-self.worth_waiting // self.size) * self.size
            content = tuple(live.known[: first + tokens])
            same = len(content) == first + tokens and content == tuple(other.known[: first + tokens])
            if same and len(content) < len(live.known) and all(b.content != content for b in self.everything()):
                return True
        return False

    def finish(self, live: Live, reason: str) -> None:
        self.coming.pop(live.number, None)
        self.give_back(live)
        if self.ordering == "fair" and live in self.waiting and not live.preemptions:
            work = len(live.request.tokens) + live.request.output
            self.tenant_ends[live.request.tenant] -= min(work, max(0.0, live.key + work - self.virtual))
        for group in (self.decoding, self.prompting, self.waiting):
            if live in group:
                group.remove(live)
        if reason == "length":
            self.answers.append((len(live.request.tokens), len(live.times)))
        self.ended[live.request.id] = Event(
            reason, self.now, live.scheduled, live.times, live.cached or 0, live.preemptions
        )

    def preempt(self) -> Live:
        live = (self.prompting or self.decoding).pop()
        self.coming.pop(live.number, None)
        self.give_back(live)
        live.computed = 0
        live.preemptions += 1
        return live

    def next_waiting(self, aside: list[Live]) -> Live | None:
        return min((w for w in self.waiting if w not in aside), key=lambda w: (*place(w), w.queued), default=None)

    # -- a step

    def held_back(self, left: int, slots: int) -> float:
        """Until when new prompts are held back for company."""
        new = [w for w in self.waiting if not w.preemptions]
        if not self.knobs.max_wait_ms or not new or len(self.waiting) >= slots:
            return -inf
        if sum(w.pending for w in self.waiting) >= left:
            return -inf
        return min(w.request.arrival for w in new) + self.knobs.max_wait_ms / 1e3

    def plan(self, allowed: int) -> tuple[list[tuple[Live, int]], float]:
        """(sequence, tokens) of the prompts in the coming step, and until when what is left out is held back."""
        n = len(self.decoding)
        most = min(allowed, self.knobs.token_budget)
        left = max(most, 0 if n else 1) - n
        chunks: list[tuple[Live, int]] = []
        begun = sorted(self.prompting, key=place)
        slots = min(self.knobs.max_batch_size, self.knobs.token_budget) - n - len(self.prompting)
        until: float | None = None
        yielding = closed = False  # begun ones have yielded the step; no further one may begin
        aside: list[Live] = []  # they wait for a prompt in progress
        while True:
            head = None if closed else self.next_waiting(aside)
            if begun and not yielding and (head is None or place(begun[0]) <= place(head)):
                if left <= 0:
                    return chunks, inf
                live = begun.pop(0)
                chunks.append((live, min(len(live.known) - live.computed, self.knobs.chunk_size, left)))
                left -= chunks[-1][1]
                continue
            if head is None:
                passed = False
                for live in (
                    begun
                ):  # by a policy those that yielded to others have what these left, if it holds their whole chunk
                    tokens = min(len(live.known) - live.computed, self.knobs.chunk_size)
                    if self.policy is None or tokens > left:
                        passed = True
                        continue
                    chunks.append((live, tokens))
                    left -= tokens
                return chunks, until if until is not None and until > self.now and not passed else inf
            if until is None:
                until = self.held_back(left, slots)
            if until > self.now and not head.preemptions:
                closed = True
            elif slots > 0 and left > 0 and self.awaits(head, chunks):
                aside.append(head)
            elif slots <= 0 or left <= 0 or not self.admit(head, chunks):
                closed, until = True, -inf
            else:
                yielding = bool(begun)
                slots -= 1
                chunks.append((head, min(len(head.known) - head.computed, self.knobs.chunk_size, left)))
                left -= chunks[-1][1]

    def drafts(self, left: int) -> dict[Live, int]:
        """How many tokens are guessed behind the last one of each decode, of the ``left`` ones that the step has room for."""
        found: dict[Live, int] = {}
        spare = max(0, self.free - self.owed() - len(self.decoding))
        for live in self.decoding if self.guessable and self.knobs.draft_tokens else []:
            free = (len(live.blocks) + spare) * self.size - live.computed - 1
            count = min(self.knobs.draft_tokens, left, live.request.output - len(live.times) - 1, free)
            if count > 0:
                found[live] = count
                left -= count
                while len(live.blocks) * self.size < live.computed + 1 + count:
                    live.blocks.append(self.take())
                    spare -= 1
        return found

    def right(self, live: Live, count: int) -> int:
        """How many of so many guessed tokens are right, up to the first that is not."""
        assert self.guessable is not None
        places = range(len(live.times), len(live.times) + count)
        return next((n for n, at in enumerate(places) if not self.guessable(live.request.id, at)), count)

    def lacks(self, live: Live, tokens: int) -> int:
        """Blocks that it lacks for so many of its tokens."""
        return max(0, -(-tokens // self.size) - len(live.blocks))

    def owed(self) -> int:
        """Blocks that prompts in progress have yet to get."""
        return sum(self.lacks(live, len(live.known)) for live in self.prompting)

    def supply(self, live: Live, count: int) -> None:
        for _ in range(self.lacks(live, live.computed + count)):
            live.blocks.append(self.take())
        if live in self.prompting:
            self.say(live, count)

    def serve(self, begun: list[Live], left: int) -> list[tuple[Live, int]]:
        """Chunk by chunk: decodes, then prompts in progress, one after the other, each with the blocks that it lacks. Where there
        are not enough the newest gives its own back; who has none left but its own ends the step."""
        turns: list[tuple[Live, int]] = []
        gave: list[Live] = []
        for live in [*self.decoding, *begun]:
            decodes = live in self.decoding
            if live in gave or (left <= 0 and not decodes):
                continue
            count = 1 if decodes else min(len(live.known) - live.computed, self.knobs.chunk_size, left)
            while live not in gave and self.lacks(live, live.computed + count) > self.free:
                gave.append(self.preempt())
                left += sum(count for other, count in turns if other is gave[-1])
                turns = [(other, count) for other, count in turns if other is not gave[-1]]
            if live in gave:
                break
            self.supply(live, count)
            if not decodes:
                turns.append((live, count))
                left -= count
        for live in gave:
            self.queue(live)
        return turns

    def admit(self, live: Live, chunks: list[tuple[Live, int]]) -> bool:
        if self.by_chunk:  # what the step takes so far, and names, comes first
            before = [*((other, 1) for other in self.decoding), *chunks]
            if sum(self.lacks(other, other.computed + count) for other, count in before) > self.free:
                return False
            for other, count in before:
                self.supply(other, count)
        found = self.found(live)
        fresh = -(-len(live.known) // self.size) - len(found)
        owed = self.owed() if self.by_chunk else 0
        if fresh + sum(not b.holders for b in found) > self.free - owed - len(self.decoding):
            return False
        if self.by_chunk:
            fresh = 0  # they come with its chunks
        if self.ordering == "fair" and not live.preemptions:
            sharing = {other.request.tenant for other in self.waiting if not other.preemptions}
            self.virtual = max(self.virtual + self.share, live.key)
            self.share = (len(live.request.tokens) + live.request.output) / len(sharing)
        self.waiting.remove(live)
        for block in found:
            if not block.holders:
                self.idle.remove(block)
            block.holders += 1
        live.blocks = found + [self.take() for _ in range(fresh)]
        live.computed = len(found) * self.size
        if live.scheduled is None:
            live.scheduled, live.cached = self.now, live.computed
        self.prompting.append(live)
        return True

    def expire(self) -> None:
        everyone = [*self.decoding, *self.prompting, *self.waiting]
        late = [w for w in everyone if w.request.expires is not None and w.request.expires <= self.now]
        for live in sorted(late, key=lambda w: (w.request.expires, w.number)):
            self.finish(live, "timeout")

    def step(self, until: float) -> None:
        """One step, or time passes up to ``until`` at most."""
        self.expire()
        allowed = self.knobs.token_budget  # the policy is asked before the step is planned
        if self.policy is not None:
            allowed = max(0, self.policy(len(self.decoding)))
        while not self.by_chunk and sum(live.computed % self.size == 0 for live in self.decoding) > self.free:
            self.queue(self.preempt())
        for live in [] if self.by_chunk else self.decoding:
            if live.computed % self.size == 0:
                live.blocks.append(self.take())
        begun = sorted(self.prompting, key=place)
        chunks, held_until = self.plan(allowed)
        most = min(allowed, self.knobs.token_budget)
        if self.by_chunk and all(live in begun for live, _ in chunks):
            chunks = self.serve(begun, max(most, 0 if self.decoding else 1) - len(self.decoding))
        elif self.by_chunk:
            for live, count in chunks:
                self.supply(live, count)
        decoding = self.decoding[:]
        rows = len(decoding) + len(chunks)
        drafts = self.drafts(min(most - len(decoding) - sum(count for _, count in chunks), self.most_sampled - rows))
        if not decoding and not chunks:
            expiries = [w.request.expires for w in self.waiting if w.request.expires is not None]
            self.now = min([until, held_until, *expiries])
            return
        start = self.now
        self.now += self.seconds(
            StepFeatures(
                len(decoding),
                sum(live.computed + 1 + drafts.get(live, 0) for live in decoding),
                sum(count for _, count in chunks),
                sum(live.computed + count for live, count in chunks),
                sum(count * live.computed + count * (count + 1) // 2 for live, count in chunks),
                len(chunks),
                sum(drafts.values()),
            )
        )
        self.steps.append((start, self.now))
        if chunks:
            self.prompt_s = 0.98 * self.prompt_s + (self.now - start)
            self.prompt_tokens = 0.98 * self.prompt_tokens + sum(count for _, count in chunks)
        for live, count in drafts.items():
            right = self.right(live, count)
            for _ in range(right):
                live.computed += 1
                live.known.append((-live.number, len(live.times)))
                live.times.append(self.now)
            while (
                len(live.blocks) - 1
            ) * self.size >= live.computed + 1:  # beyond its last token but one: wrong guesses
                live.blocks[-1].holders -= 1
                self.blank.append(live.blocks.pop())
        for live, count in [*((live, 1) for live in decoding), *chunks]:
            live.computed += count
        for live, _ in chunks:
            self.say(live)
        for live in [*decoding, *(live for live, _ in chunks)]:
            if live.computed == len(live.known):
                live.known.append((-live.number, len(live.times)))
                live.times.append(self.now)
                if live in self.prompting:
                    self.coming.pop(live.number, None)
                    self.prompting.remove(live)
                    self.decoding.append(live)
        for live in [live for live in self.decoding if len(live.times) == live.request.output]:
            self.finish(live, "length")

    def run(self, until: float = inf) -> None:
        while self.now < until and (self.decoding or self.prompting or self.waiting):
            self.step(until)
        if until < inf:
            self.now = max(self.now, until)
