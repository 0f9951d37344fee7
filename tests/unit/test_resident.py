"""Decode rows that live on the device: what they are fed, where they write, and what the host has to send."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.knobs import KnobLimits, Knobs
from runtime.llm.plan import DecodeSet, StepPlan
from runtime.records import LimitedBy
from runtime.request import Request, SamplingParams, Sequence
from runtime.torch_backend.cuda import counters
from runtime.torch_backend.cuda.graphs import DecodeGraphs, record_decode
from runtime.torch_backend.inputs import Ints
from runtime.torch_backend.resident import InFlight, ResidentDecode, ResidentRows, batch_ladder
from runtime.torch_backend.sampling import Columns
from runtime.torch_backend.transfer import MARKS, Readback
from tests.examples import examples
from tests.unit.recording import Recorder
from tests.unit.step_operations import DEVICE, Counted

BLOCK, VOCAB, MOST, WIDTH, BLOCKS = 4, 89, 12, 16, 200


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (6, (1, 2, 4, 6)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (100, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)),
    ],
)
def test_the_ladder(most: int, sizes: tuple[int, ...]) -> None:
    assert batch_ladder(most) == sizes


def test_a_long_ladder_has_few_sizes_and_pads_little() -> None:
    """docs/log.md says what padding costs, and which other ladders were weighed."""
    ladder = batch_ladder(1024)
    assert len(ladder) == 39 and ladder[-1] == 1024 and list(ladder) == sorted(set(ladder))
    padded = {rows: next(size for size in ladder if size >= rows) for rows in range(1, 1025)}
    share = {rows: 1 - rows / size for rows, size in padded.items()}
    assert max(share, key=share.__getitem__) == 9 and share[9] == 7 / 16
    assert max(share[rows] for rows in range(65, 1025)) == share[65] == 15 / 80
    assert max(share[rows] for rows in range(129, 1025)) == pytest.approx(0.109, abs=1e-3)
    assert sum(share.values()) / 1024 < 0.05
    assert len(batch_ladder(256)) == 23 and len(batch_ladder(65536)) < 1100
    with pytest.raises(ValueError, match="max_batch_size is 0; it must be at least 1"):
        batch_ladder(0)


def test_graphs_are_recorded_once_and_the_largest_first() -> None:
    recorder, ran = Recorder(), []
    graphs = DecodeGraphs((4, 1, 2), ran.append, recorder)
    assert graphs.sizes == (1, 2, 4)
    assert recorder.recorded == ran == [4, 2, 1]
    graphs.replay(2)
    assert ran == [4, 2, 1, 2] and recorder.recorded == [4, 2, 1] and recorder.replayed == [2]


class FakeCUDA:
    """The few names of ``torch.cuda`` that record a graph, which say when they are used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        log, within = self.log, self._within

        class Stream:
            cuda_stream = 7

            def __init__(self, device: Any = None) -> None:
                self.name = "default" if device is None else "side"

            def wait_stream(self, other: Stream) -> None:
                log.append(f"{self.name} waits for {other.name}")

        class Graph:
            def replay(self) -> None:
                log.append("replayed")

        def graph(made: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Any:
            assert isinstance(made, Graph) and pool == "the pool" and capture_error_mode == "thread_local"
            return within(f"recording on {stream.name}")

        for name, value in {
            "graph_pool_handle": lambda: "the pool", "Stream": Stream, "CUDAGraph": Graph, "graph": graph,
            "current_stream": Stream, "device": lambda device: nullcontext(), "stream": lambda s: within(f"on {s.name}"),
            "get_sync_debug_mode": lambda: 0, "set_sync_debug_mode": lambda mode: log.append(f"waiting: {mode}"),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def _within(self, what: str) -> Iterator[None]:
        self.log.append(what)
        yield
        self.log.append("end")


def test_a_graph_is_recorded_behind_two_calls_that_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCUDA(monkeypatch)
    others = torch.zeros(1)
    monkeypatch.setitem(counters._counters, (torch.device("cuda"), 7), others)
    graphs = record_decode((1, 2), lambda size: cuda.log.append(f"step of {size}"), torch.device("cuda"))
    begin, second = ["side waits for default", "on side", "step of 1"], ["step of 1"]
    end = ["end", "on default", "recording on side", "step of 1", "end", "end", "default waits for side"]
    first = [*begin, "waiting: error", *second, "waiting: 0", *end]
    assert cuda.log == [line.replace("of 1", "of 2") for line in first] + begin + second + end
    assert any(one is others for one in counters._recorded), "earlier recordings keep theirs"
    assert (torch.device("cuda"), 7) not in counters._counters
    cuda.log.clear()
    graphs.replay(2)
    assert cuda.log == ["replayed"]


def following(token: int, position: int, seed: int, drawn: int) -> int:
    """What the model below puts behind ``token``."""
    return (token * 7 + position * 3 + seed + 5 * drawn) % VOCAB


class Arithmetic:
    """A model, its attention and its sampler in one: a row's next token is :func:`following`, and its KV says what wrote it."""

    def __init__(self) -> None:
        self.kv = torch.full(((BLOCKS + 2) * BLOCK,), -1, dtype=torch.int64)
        self.contexts: list[list[int]] = []
        self._inputs: tuple[Tensor, Tensor] | None = None

    def forward(self, ids: Tensor, positions: Tensor, slots: Tensor, state: Any) -> Tensor:
        self.kv[slots] = ids * 1000 + positions
        self._inputs = ids, positions
        return ids.new_zeros(len(ids), VOCAB)

    def fixed(self, table: Tensor, positions: Tensor) -> int:
        return len(table)

    def refresh(self, state: int, context: Ints) -> None:
        assert len(context) <= state
        self.contexts.append(context.tolist())

    def choose_from(self, logits: Tensor, columns: Columns, out: Tensor) -> Tensor:
        assert self._inputs is not None
        ids, positions = self._inputs
        return out.copy_((ids * 7 + positions * 3 + columns.seed + 5 * columns.position) % VOCAB)

    def seed_of(self, sequence: Sequence) -> int:
        return sequence.request.params.seed or 0

    def top_k_of(self, params: SamplingParams) -> int:
        return params.top_k


class Rows:
    """Sequences that decode by :class:`Arithmetic`, some steps on the device and some elsewhere; ``lag``: the host reads the
    tokens of a step when the next one has been launched."""

    def __init__(self, lag: bool) -> None:
        self.model, self.recorder, self.lag = Arithmetic(), Recorder(), lag
        self.resident = ResidentRows(
            MOST,
            WIDTH,
            block_size=BLOCK,
            pad_block=BLOCKS,
            scratch_block=BLOCKS + 1,
            sampler=self.model,
            device=torch.device("cpu"),
        )
        self.decode = ResidentDecode(
            self.resident, self.model.forward, attention=self.model, sampler=self.model,
            record=lambda step: self.recorder.graphs(batch_ladder(MOST), step, torch.device("cpu")),
        )  # fmt: skip
        self.decodes, self.step = DecodeSet(), 0
        self.made = 0
        self.free = list(range(BLOCKS))
        self.expected: dict[Sequence, list[int]] = {}  # every token, those still in flight too
        self.written: dict[int, int] = {}
        self.flight: InFlight | None = None

    def join(self, prompt: int, **params: Any) -> None:
        self.made += 1
        request = Request(f"r{self.made}", tuple(range(prompt)), SamplingParams(seed=self.made, **params), 50, 0.0)
        sequence = Sequence(request)
        sequence.computed, sequence.joined = prompt, self.step
        sequence.blocks = [self.free.pop() for _ in range(-(-prompt // BLOCK))]
        sequence.output = [self.made % VOCAB]
        self.expected[sequence] = list(sequence.output)
        self.decodes.members[sequence] = None
        self.decodes.version += 1

    def leave(self, nth: int) -> None:
        sequence = list(self.decodes.members)[nth % len(self.decodes)]
        del self.decodes.members[sequence]
        self.free += sequence.blocks  # soon somebody else's
        self.decodes.version += 1

    def run(self, here: bool) -> None:
        """One step: on the device, or ``here``, as steps with prompts are computed."""
        members = list(self.decodes.members)
        if not members:
            return
        for sequence in members:
            position = sequence.computed + self.step - sequence.joined
            if position % BLOCK == 0:
                sequence.blocks.append(self.free.pop())
            tokens = self.expected[sequence]
            self.written[sequence.blocks[position // BLOCK] * BLOCK + position % BLOCK] = tokens[-1] * 1000 + position
            tokens.append(following(tokens[-1], position, self.model.seed_of(sequence), len(tokens)))
        plan = StepPlan(
            self.step, len(members), 0, (), self.decodes, self.decodes.version, 1, 9.0, 0, 64, LimitedBy.DEMAND, 0
        )
        fits = self.decode.fits(plan)
        assert fits == (len(members) <= MOST and self.resident.plain)
        if here or not fits:
            ids = torch.tensor([self.expected[s][-1] for s in members])
            for sequence in members:
                position = sequence.computed + self.step - sequence.joined
                slot = sequence.blocks[position // BLOCK] * BLOCK + position % BLOCK
                self.model.kv[slot] = self.written[slot]
            launched = InFlight(members, ids)
        else:
            launched = InFlight(*self.decode.launch(plan, self.flight if self.lag else None))
            self.check_table(launched)
            assert self.model.contexts[-1] == [s.computed + self.step - s.joined + 1 for s in launched.sequences]
        assert sorted(s.request.id for s in launched.sequences) == sorted(s.request.id for s in members)
        if self.lag:
            self.flight, launched = launched, self.flight  # type: ignore[assignment]
        if launched is not None:
            for sequence, token in zip(launched.sequences, launched.tokens.tolist(), strict=True):
                sequence.output.append(token)
        self.step += 1

    def check(self) -> None:
        late = 1 if self.lag and self.flight is not None else 0
        for sequence in self.decodes.members:
            tokens = self.expected[sequence]
            unread = late if self.flight is None or sequence in self.flight.rows else 0
            assert sequence.output == tokens[: len(tokens) - unread]
        found = self.model.kv[: (BLOCKS + 1) * BLOCK]
        wanted = torch.full_like(found, -1)
        for slot, value in self.written.items():
            wanted[slot] = value
        assert torch.equal(found, wanted), "a row wrote where it has no business"

    def check_table(self, launched: InFlight) -> None:
        """Rows list their blocks, and behind them nothing that is somebody's; so do dummies."""
        table = self.resident.table.tolist()
        for row, sequence in enumerate(launched.sequences):
            assert table[row] == [*sequence.blocks, *[BLOCKS] * (WIDTH - len(sequence.blocks))]
        for row in range(len(launched.sequences), len(table)):
            assert table[row] == [BLOCKS + 1, *[BLOCKS] * (WIDTH - 1)]


acts = st.one_of(
    st.tuples(st.just("join"), st.integers(1, 30)),
    st.tuples(st.just("join"), st.integers(1, 30)),
    st.tuples(st.just("leave"), st.integers(0, 20)),
    st.tuples(st.just("run"), st.integers(1, 6)),
    st.tuples(st.just("run"), st.integers(1, 6)),
    st.tuples(st.just("here"), st.integers(1, 2)),
    st.tuples(st.just("forget"), st.just(0)),
)


@pytest.mark.parametrize("lag", [False, True])
@settings(max_examples=examples(0.6))
@given(first=st.lists(st.integers(1, 30), min_size=1, max_size=9), script=st.lists(acts, min_size=10, max_size=30))
def test_rows_are_fed_their_own_tokens_and_write_their_own_slots(
    lag: bool, first: list[int], script: list[tuple[str, int]]
) -> None:
    """Rows come, leave, change places and compute steps elsewhere; a step's tokens may be unread when the next is launched."""
    rows = Rows(lag)
    recorded = list(rows.recorder.recorded)
    for prompt in first:
        rows.join(prompt)
    for what, number in script:
        if what == "join" and len(rows.decodes) < MOST + 2:
            rows.join(number)
        elif what == "leave" and len(rows.decodes):
            rows.leave(number)
        elif what in ("run", "here"):
            for _ in range(number):
                if max((s.computed + rows.step - s.joined for s in rows.decodes), default=0) < WIDTH * BLOCK - 1:
                    rows.run(what == "here")
        elif what == "forget":
            rows.resident.forget()
        rows.check()
    assert rows.recorder.recorded == recorded == sorted(batch_ladder(MOST), reverse=True)


def test_a_size_fits_its_rows_and_dummies_stay_where_they_are() -> None:
    rows = Rows(lag=False)
    for prompt in (5, 9, 3):
        rows.join(prompt)
    for _ in range(3):
        rows.run(here=False)
    assert rows.recorder.replayed == [4, 4, 4]
    assert rows.resident.positions[3:].tolist() == [0] * (len(rows.resident.positions) - 3)
    assert rows.resident.tokens[3:].tolist() == rows.resident.live[3:].tolist() == [0] * (len(rows.resident.tokens) - 3)
    rows.leave(0)
    rows.run(here=False)
    assert rows.recorder.replayed[-1] == 2
    rows.join(4)
    rows.run(here=False)
    rows.check()


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.2}, {"logprobs": 2}])
def test_rows_that_need_more_than_their_token_are_left_to_others(params: dict[str, Any]) -> None:
    rows = Rows(lag=False)
    rows.join(5)
    rows.join(5, **params)
    rows.run(here=False)
    assert not rows.recorder.replayed
    rows.leave(1)
    rows.run(here=False)
    assert rows.recorder.replayed == [1]
    rows.check()


def test_a_replay_that_raises_is_not_built_upon() -> None:
    rows = Rows(lag=False)
    rows.join(5)
    rows.run(here=False)
    graphs: Any = rows.decode._graphs
    replay = graphs._replays[1]

    def broken() -> None:
        replay()
        raise RuntimeError("the device is out of sorts")

    graphs._replays[1] = broken
    plan = StepPlan(rows.step, 1, 0, (), rows.decodes, rows.decodes.version, 1, 9.0, 0, 64, LimitedBy.DEMAND, 0)
    [sequence] = rows.decodes.members
    assert rows.decode.fits(plan)
    with pytest.raises(RuntimeError, match="out of sorts"):
        rows.decode.launch(plan, None)
    graphs._replays[1] = replay
    assert sequence.output == rows.expected[sequence]
    rows.run(here=False)
    rows.check()


def test_rows_that_could_not_be_arranged_are_arranged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(lag=False)
    for prompt in (5, 9):
        rows.join(prompt)
    rows.run(here=False)
    rows.leave(0)
    rows.join(4)
    rows.join(3)
    plan = StepPlan(rows.step, 3, 0, (), rows.decodes, rows.decodes.version, 1, 9.0, 0, 64, LimitedBy.DEMAND, 0)
    whole, newest = rows.model.seed_of, list(rows.decodes.members)[-1]
    with monkeypatch.context() as patched:

        def seed_of(sequence: Sequence) -> int:
            if sequence is newest:
                raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no text")
            return whole(sequence)

        patched.setattr(rows.model, "seed_of", seed_of)
        for _ in range(2):
            with pytest.raises(UnicodeEncodeError):
                rows.decode.fits(plan)
    for _ in range(3):
        rows.run(here=False)
        rows.check()


def test_what_was_forgotten_is_arranged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(lag=False)
    rows.join(5)
    rows.run(here=False)
    looked: list[StepPlan] = []
    decode_rows = StepPlan.decode_rows
    monkeypatch.setattr(StepPlan, "decode_rows", lambda plan: [looked.append(plan), decode_rows(plan)][1])
    rows.run(here=False)
    assert not looked
    rows.resident.forget()
    rows.run(here=False)
    assert len(looked) == 1
    rows.check()


class Idle:
    """Graphs whose replays do nothing."""

    sizes = (1, 2, 4, 8)

    def __init__(self) -> None:
        self.replayed = 0

    def replay(self, size: int) -> None:
        self.replayed += 1


def test_a_step_of_the_same_rows_is_one_call_and_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host asks of a device besides, seen on one whose tensors are shapes."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)  # which takes a driver
    model, idle = Arithmetic(), Idle()
    rows = ResidentRows(
        MOST, WIDTH, block_size=BLOCK, pad_block=BLOCKS, scratch_block=BLOCKS + 1, sampler=model, device=DEVICE
    )
    decode = ResidentDecode(rows, model.forward, attention=model, sampler=model, record=lambda step: idle)
    decodes = DecodeSet()
    for at in range(5):
        sequence = Sequence(Request(f"r{at}", (1, 2, 3), SamplingParams(), 50, 0.0))
        sequence.computed, sequence.joined, sequence.output, sequence.blocks = 4, 0, [7], [at * 9 + b for b in range(9)]
        decodes.members[sequence] = None
    decodes.version = 1
    counts = []
    flight: InFlight | None = None
    for step in range(5):
        plan = StepPlan(step, 5, 0, (), decodes, 1, 1, 9.0, 0, 64, LimitedBy.DEMAND, 0)
        assert decode.fits(plan)
        with Counted() as count:
            flight = InFlight(*decode.launch(plan, flight))
        assert count.waits == [] and count.copies == 0
        counts.append(count.names)
    assert idle.replayed == 5
    assert len(counts[0]) > 3  # the rows are entered
    assert counts[1:4] == [["clone"]] * 3
    assert 1 < len(counts[4]) <= 8  # all enter a new block: one copy, one scatter


class Marked:
    """A mark that says when it is waited for."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        log.append("marked")

    def synchronize(self) -> None:
        self.log.append("waited")


def test_what_a_step_yields_is_copied_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setitem(MARKS, DEVICE.type, lambda device: Marked(log))
    tensors = [torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.zeros(2, 2, device=DEVICE)]
    with Counted() as count:
        readback = Readback(tensors)
    assert count.copies == 1 and log == ["marked"]
    with Counted() as count:
        here = readback.wait()
    assert count.copies == 0 and log == ["marked", "waited"]
    assert [(x.dtype, tuple(x.shape)) for x in here] == [(torch.int64, (3,)), (torch.float32, (2, 2))]


def test_knobs_stay_plain_numbers() -> None:
    """The ladder is that of the start: knobs move below the limit that it covers."""
    limits = KnobLimits(max_batch_size=20)
    assert batch_ladder(limits.max_batch_size)[-1] == 20
    assert limits.clamp(Knobs(max_batch_size=64)).max_batch_size == 20
