"""The CPU fast path against the code that runs on any device, and executors side by side."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from runtime.clock import VirtualClock
from runtime.knobs import Knobs
from runtime.torch_backend.backends import CPU, PLAIN, Backend
from runtime.torch_backend.executor import TorchExecutor
from tests.unit.executor_harness import prompts, reference, run, tiny

KNOBS = Knobs(max_batch_size=6, token_budget=48, chunk_size=24)


def _work(seed: int, count: int = 14) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 90) for _ in range(count)]
    return [(p, rng.randint(1, 60)) for p in prompts(lengths, seed)]


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3", {}),
        ("mistral", {"sliding_window": 20}),
        ("gemma2", {"sliding_window": 20, "query_pre_attn_scalar": 8}),
    ],
)
def test_fast_and_generic_paths_agree(model_type: str, changes: dict[str, object]) -> None:
    work = _work(3)
    generic = TorchExecutor(tiny(model_type, **changes), kv_blocks=60, block_size=8, backend=PLAIN)
    fast = TorchExecutor(tiny(model_type, **changes), kv_blocks=60, block_size=8)
    outputs, failures, preemptions = run(fast, work, KNOBS)
    assert not failures
    assert preemptions > 0
    assert outputs == run(generic, work, KNOBS)[0]


def test_bfloat16_paths_give_like_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens may part ways by a rounding, so logits of the same steps are compared, not tokens."""
    rows: dict[Backend, list[dict[str, torch.Tensor]]] = {}
    for backend in (CPU, PLAIN):
        executor = TorchExecutor(tiny(dtype=torch.bfloat16), kv_blocks=60, block_size=8, backend=backend)
        taken = rows.setdefault(backend, [])
        draw = executor.sampler.draw

        def recorded(logits, sequences, taken=taken, draw=draw):  # type: ignore[no-untyped-def]
            taken.append({s.request.id: row.float() for s, row in zip(sequences, logits, strict=True)})
            forced = torch.full_like(logits, -1.0)  # the same tokens on both paths
            for at, s in enumerate(sequences):
                forced[at, 3 + (7 * len(s.output) + len(s.request.prompt)) % 100] = 1.0
            return draw(forced, sequences)

        monkeypatch.setattr(executor.sampler, "draw", recorded)
        run(executor, _work(6, 8), KNOBS)
    assert len(rows[CPU]) == len(rows[PLAIN]) > 20
    for a, b in zip(rows[CPU], rows[PLAIN], strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert (a[name] - b[name]).norm() < 0.1 * b[name].norm()


def test_two_executors_take_turns_on_one_model() -> None:
    loaded = tiny()
    work = _work(7, 6)
    expected = [reference(loaded, p, n) for p, n in work]
    first = TorchExecutor(loaded, kv_blocks=60, block_size=8)
    second = TorchExecutor(loaded, kv_blocks=40, block_size=16)
    assert run(first, work, KNOBS)[0] == expected
    assert run(second, work, KNOBS)[0] == expected
    assert run(first, work, KNOBS)[0] == expected  # another scheduler: what was kept of the last one is not used
    assert [reference(loaded, p, n) for p, n in work] == expected  # and the model is its own again


def test_a_row_that_joins_and_leaves_between_two_steps_changes_nothing() -> None:
    """The set's version moves, its members do not: the rows must stay in the cache's order."""
    loaded = tiny()
    work = _work(8, 6)
    expected = [reference(loaded, p, n) for p, n in work]
    executor = TorchExecutor(loaded, kv_blocks=100, block_size=8)
    launch = executor.launch
    counter = itertools.count(1)

    def restless(plan):  # type: ignore[no-untyped-def]
        plan.decodes.version += 1000 * next(counter)
        launch(plan._replace(version=plan.decodes.version))

    executor.launch = restless  # type: ignore[method-assign]
    assert run(executor, work, KNOBS)[0] == expected


def test_tokens_do_not_depend_on_what_else_is_in_the_batch() -> None:
    loaded = tiny()
    work = _work(9, 10)
    together = run(TorchExecutor(loaded, kv_blocks=200, block_size=8), work, KNOBS)[0]
    alone = [run(TorchExecutor(loaded, kv_blocks=200, block_size=8), [w], KNOBS)[0][0] for w in work]
    assert together == alone


def test_the_backend_tidies_behind_a_step_twice_a_minute() -> None:
    clock, tidied = VirtualClock(), list[float]()

    def tidy() -> None:
        tidied.append(clock.now())

    executor = TorchExecutor(tiny(), kv_blocks=8, block_size=8, clock=clock, backend=CPU._replace(tidy=tidy))
    for at in (0.0, 29.0, 31.0, 59.0, 62.0):
        clock.advance_to(at)
        assert run(executor, [(prompts([3])[0], 1)])[1] == {}
    assert tidied == [31.0, 62.0]
