"""Run by the Python of an environment with vLLM: its own scheduler in virtual time, steered, against the simulated engine.

``vllm_agrees.py LOADS SEED [whole]`` makes LOADS random loads under random knobs, serves each by both, and prints a JSON list:
what each load was, and the first step or request that differs ("" if none does). No model is loaded. ``whole``: each prompt is
one chunk, most begin alike, and the pool is small.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from autotune.engines.vllm import scheduler as ours
from autotune.simulate.engine import SimulatedEngine
from autotune.workload import Arrival
from runtime.clock import VirtualClock
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.ordering import ORDERINGS, ordering_of
from runtime.records import FinishReason, RequestRecord, StepRecord
from runtime.request import Request, SamplingParams
from runtime.slo import SLO, RequestClass
from runtime.step_model import StepFeatures
from runtime.tunable import SchedulerView

BLOCK = 16
LIMITS = KnobLimits(max_batch_size=64, max_wait_ms=500, token_budget=1024, chunk_size=1024)
TARGET = SLO(ttft_ms=800, tpot_ms=60)
CLASSES = (RequestClass("default", TARGET), RequestClass("batch", SLO(ttft_ms=4000), weight=0.25))
SLOS = {each.name: each.slo for each in CLASSES}
WEIGHTS = {each.name: each.weight for each in CLASSES}


class Cost:
    """Seconds of a step, by what is in it. Irregular, so that no two events fall on one time by accident."""

    def predict(self, step: StepFeatures) -> float:
        return (
            0.00613 + 0.000171 * step.decodes + 0.000053 * step.prefill_tokens + 1.1e-7 * step.decode_context
            + 2.3e-8 * step.prefill_attention
        )  # fmt: skip


@dataclass(frozen=True)
class Offered:
    """One request."""

    number: int
    arrival: Arrival
    priority: int
    expires: float | None

    def tokens(self) -> list[int]:
        """Its prompt: a segment has the same tokens wherever it is."""
        return [1000 * seed + at for seed, length in self.arrival.segments for at in range(length)]


@dataclass(frozen=True)
class Load:
    """One random load and what it is served under."""

    seed: int
    knobs: Knobs
    blocks: int
    requests: int
    rate: float
    budget: str  # "", or the name of a step policy
    admission: bool
    turns: tuple[tuple[float, Knobs], ...]
    ordering: str
    mixed: bool  # of two classes and priorities, and some have a timeout
    cancels: bool
    prefix_cache: bool

    @property
    def policy(self) -> AdmissionPolicy | None:
        if not self.admission:
            return None
        return AdmissionPolicy(late="relegate" if self.seed % 2 else "reject")

    def arrivals(self) -> list[Offered]:
        draw = random.Random(self.seed)
        now, found = 0.0, []
        for number in range(self.requests):
            now += draw.expovariate(self.rate)
            prompt = min(900, max(1, int(draw.lognormvariate(4.6, 1.0))))
            output = draw.randint(1, 60 if draw.random() < 0.8 else 180)
            segments: tuple[tuple[int, int], ...] = ((number, prompt),)
            if self.prefix_cache and draw.random() < 0.7:
                kind = draw.randrange(4)
                segments = ((1000 + kind, 24 + 100 * kind), (number, min(prompt, 500)))
            name = "batch" if self.mixed and draw.random() < 0.4 else "default"
            arrival = Arrival(now, sum(length for _, length in segments), output, segments, name)
            expires = now + draw.uniform(0.05, 6) if self.mixed and draw.random() < 0.2 else None
            found.append(Offered(number, arrival, draw.randrange(3) if self.mixed else 0, expires))
        return found

    def events(self) -> list[tuple[float, Knobs | Offered | int]]:
        """Arrivals, turns of the knobs, and the numbers of requests that are cancelled, in order of time."""
        offered = self.arrivals()
        found: list[tuple[float, Knobs | Offered | int]] = [(one.arrival.time, one) for one in offered]
        if self.cancels:
            draw = random.Random(self.seed + 1)
            found += [(one.arrival.time + draw.expovariate(1.0), one.number) for one in offered if draw.random() < 0.25]
        return sorted([*found, *self.turns], key=lambda event: event[0])


class Budget:
    """A step policy whose word depends on what it sees, so that a view that differs shows."""

    def budget(self, view: SchedulerView) -> int:
        slack = min(view.decode_slack, 0.5)
        return int(view.decoding + 24 + 400 * max(0.0, slack) + 0.1 * view.prefilling_tokens + view.waiting)


class Heard:
    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.requests: list[RequestRecord] = []
        self.evicted = 0  # cached prefixes, by blocks
        self.shared = 0  # prompts that found blocks which the step in which they began was to compute

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def on_request(self, record: RequestRecord) -> None:
        self.requests.append(record)


def simulated(load: Load) -> Heard:
    engine = SimulatedEngine(
        Cost(), kv_tokens=load.blocks * BLOCK, block_size=BLOCK, limits=LIMITS, knobs=load.knobs, classes=CLASSES,
        ordering=load.ordering, prefix_cache=load.prefix_cache, fast_forward=False,
        kv_allocation="chunk",
    )  # fmt: skip
    heard = Heard()
    engine.subscribe(heard)
    if load.budget:
        engine.set_step_policy(Budget())
    if load.policy is not None:
        engine.set_admission(load.policy)
    offered: dict[int, Any] = {}
    for when, what in load.events():
        if engine.clock.now() < when:
            engine.run_until(when)
        if isinstance(what, Knobs):
            engine.set_knobs(what)
        elif isinstance(what, int):
            if offered[what] is not None:
                engine.end(offered[what], FinishReason.CANCELLED, "")
        else:
            offered[what.number] = engine.offer(
                what.arrival, str(what.number), due=when, shared=load.prefix_cache, priority=what.priority,
                expires=what.expires,
            )  # fmt: skip
    engine.run()
    return heard


class Stock:
    """vLLM's scheduler, without a model: what it needs to be made, made once."""

    def __init__(self, folder: Path) -> None:
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, VllmConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import init_none_hash

        about = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
            "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 64,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32",
        }  # fmt: skip
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(about), encoding="utf-8")
        (folder / "generation_config.json").write_text("{}", encoding="utf-8")
        init_none_hash(sha256)
        self._model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", seed=0)
        self._parts = VllmConfig, CacheConfig, DeviceConfig

    def scheduler(self, blocks: int, prefix_cache: bool, refusing: bool = False, specs: Any = ()) -> Any:
        """``refusing``: as ``vllm serve`` would make it, not tuned in a version that this was not made for. ``specs``: what each
        group of layers caches; one group of full attention unless given."""
        import torch
        from vllm.config import SchedulerConfig
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config_of, cache_of, device_of = self._parts
        cache = cache_of(block_size=BLOCK, enable_prefix_caching=prefix_cache)
        config = config_of(
            scheduler_config=SchedulerConfig.default_factory(
                max_num_seqs=LIMITS.max_batch_size,
                max_num_batched_tokens=LIMITS.token_budget,
                max_model_len=4096,
                async_scheduling=False,
            ),
            model_config=self._model,
            cache_config=cache,
            device_config=device_of(device="cpu"),
        )
        cache.num_gpu_blocks = blocks + 1
        full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec([f"layer {n}"], spec) for n, spec in enumerate(specs or (full,))]
        pool = KVCacheConfig(num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups)
        made = ours.Steered if refusing else ours.steered(ours.picked(config))
        return made(
            vllm_config=config,
            kv_cache_config=pool,
            block_size=math.lcm(*(group.kv_cache_spec.block_size for group in groups)),
            structured_output_manager=StructuredOutputManager(config),
        )


class Steered:
    """A steered scheduler of vLLM's in virtual time: what a loop and a model would do beside it."""

    def __init__(self, scheduler: Any, load: Load) -> None:
        self.scheduler, self.clock, self.cost = scheduler, VirtualClock(), Cost()
        self.steering = scheduler.steer(
            self.clock,
            knobs=load.knobs,
            limits=LIMITS,
            slos=SLOS,
            ordering=ordering_of(load.ordering, SLOS),
            contained=False,
        )
        self.heard = Heard()
        self._named: set[int] = set()  # blocks whose content became known as the step was planned
        pool = scheduler.kv_cache_manager.block_pool
        evict, name_blocks = pool._maybe_evict_cached_block, pool.cache_full_blocks

        def counted(block: Any) -> bool:
            evicted: bool = evict(block)
            self.heard.evicted += evicted
            return evicted

        def named(
            request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *rest: Any, **more: Any
        ) -> Any:
            self._named.update(block.block_id for block in blocks[num_cached_blocks:num_full_blocks])
            return name_blocks(request, blocks, num_cached_blocks, num_full_blocks, *rest, **more)

        pool._maybe_evict_cached_block = counted
        pool.cache_full_blocks = named
        self.relegated = 0
        self._sampled = 10**7  # no token is sampled twice, so that no answer is found in the prefix cache

        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher

        self._hasher = get_request_block_hasher(BLOCK, sha256) if load.prefix_cache else None

    def tell(self) -> None:
        for record in self.steering.take_steps():
            self.heard.on_step(record)
        ended = self.steering.take_ended()
        self.heard.requests += [record for _, record in ended]
        self.relegated += sum(sequence.relegated is not None for sequence, _ in ended)

    def offer(self, offered: Offered, due: float) -> None:
        from vllm.sampling_params import SamplingParams as Theirs
        from vllm.v1.request import Request as TheirRequest

        name, arrival = str(offered.number), offered.arrival
        self.steering.coming = Request(
            name, (), SamplingParams(), arrival.output_tokens, due, offered.priority, "", arrival.request_class,
            expires=offered.expires, prompt_len=arrival.prompt_tokens,
        )  # fmt: skip
        params = Theirs(max_tokens=arrival.output_tokens, ignore_eos=True)
        self.scheduler.add_request(
            TheirRequest(name, offered.tokens(), params, None, arrival_time=due, block_hasher=self._hasher)
        )
        self.tell()

    def cancel(self, number: int) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(str(number), RequestStatus.FINISHED_ABORTED)
        self.tell()

    def run(self, until: float = inf) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        clock, scheduler, steering = self.clock, self.scheduler, self.steering
        while clock.now() < until and scheduler.has_requests():
            now = clock.now()
            held = steering.prepare()
            self._named.clear()
            output = None if held > now else scheduler.schedule()
            if output is not None:
                names = list(output.num_scheduled_tokens)
                if names:
                    self.heard.shared += sum(map(self._shared, output.scheduled_new_reqs))
                    clock.advance(self.cost.predict(StepFeatures.of(steering.planned_last)))
                sampled = [[self._next()] if self._samples(name) else [] for name in names]
                made = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
                scheduler.update_from_output(output, made)
                self.tell()
                if names:
                    continue
            if steering.has_work:
                clock.advance_to(min(until, held if held > now else inf, steering.next_expiry))
        if until < inf:
            clock.advance_to(until)

    def _shared(self, new: Any) -> bool:
        """Whether a request that begins found blocks in the prefix cache that the same step is to compute."""
        return not self._named.isdisjoint(new.block_ids[0][: new.num_computed_tokens // BLOCK])

    def _next(self) -> int:
        self._sampled += 1
        return self._sampled

    def _samples(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        return bool(request.num_computed_tokens >= request.num_tokens)


def first_difference(ours: Heard, theirs: Heard) -> str:
    """What differs first; empty if nothing does."""
    for number, (a, b) in enumerate(zip(ours.steps, theirs.steps, strict=False)):
        if a != b:
            fields = [name for name in StepRecord._fields if getattr(a, name) != getattr(b, name)]
            told = ", ".join(f"{name} {getattr(a, name)} and {getattr(b, name)}" for name in fields)
            return f"step {number} of {len(ours.steps)} at {a.start:.4f} s: {told}"
    if len(ours.steps) != len(theirs.steps):
        return f"{len(ours.steps)} and {len(theirs.steps)} steps"
    by_name = {record.id: record for record in theirs.requests}
    for one in ours.requests:
        other = by_name.pop(one.id, None)
        if other is None or _plain(one) != _plain(other):
            return f"request {one.id}: {one} and {other}"
    return f"{len(by_name)} more requests" if by_name else ""


def _plain(record: RequestRecord) -> RequestRecord:
    return record._replace(token_times=tuple(record.token_times))


def loads(count: int, seed: int, whole: bool = False) -> list[Load]:
    draw = random.Random(seed)

    def knobs() -> Knobs:
        return Knobs(
            token_budget=1024 if whole else draw.choice([16, 33, 64, 128, 256, 1024]),
            max_batch_size=draw.choice([1, 3, 8, 20, 64]),
            max_wait_ms=draw.choice([0, 0, 0, 7, 90]),
            chunk_size=1024 if whole else draw.choice([5, 16, 64, 300, 1024]),
        )

    return [
        Load(
            seed=draw.randrange(10**6),
            knobs=knobs(),
            blocks=draw.choice([300, 70] if whole else [4000, 4000, 300, 70]),
            requests=120,
            rate=draw.choice([4.0, 15.0, 60.0]),
            budget="" if whole else draw.choice(["", "", "by view"]),
            admission=draw.random() < 0.35,
            turns=tuple((draw.uniform(0, 8), knobs()) for _ in range(draw.choice([0, 0, 3]))),
            ordering=draw.choice(["priority", *ORDERINGS]),
            mixed=draw.random() < 0.5,
            cancels=draw.random() < 0.3,
            prefix_cache=draw.random() < (1 if whole else 0.3),
        )
        for _ in range(count)
    ]


def compare(load: Load, stock: Stock) -> dict[str, Any]:
    """Serve ``load`` by both."""
    ours = simulated(load)
    world = Steered(stock.scheduler(load.blocks, load.prefix_cache), load)
    steering = world.steering
    if load.budget:
        steering.settings.set_policy(Budget())
    if load.policy is not None:
        steering.set_admission(load.policy, weights=WEIGHTS)
    for when, what in load.events():
        if world.clock.now() < when:
            world.run(when)
        if isinstance(what, Knobs):
            steering.settings.set_knobs(what)
        elif isinstance(what, int):
            world.cancel(what)
        else:
            world.offer(what, due=when)
    world.run()
    left = steering.kv.total_blocks - steering.free_blocks()
    return {
        "load": f"{load.knobs} blocks={load.blocks} rate={load.rate} budget={load.budget!r} "
        f"late={load.policy and load.policy.late} "
        f"turns={len(load.turns)} ordering={load.ordering} mixed={load.mixed} cancels={load.cancels} "
        f"prefix_cache={load.prefix_cache} seed={load.seed}",
        "differs": first_difference(ours, world.heard),
        "steps": len(ours.steps),
        "requests": len(world.heard.requests),
        "full": any(step.preemptions for step in ours.steps),
        "evicted": world.heard.evicted,
        "shared": world.heard.shared,
        "preempted": sum(step.preemptions for step in world.heard.steps),
        "rejected": sum(record.reason is FinishReason.REJECTED for record in ours.requests),
        "relegated": world.relegated,
        "blocks_left": left,
        "reasons": Counter(str(record.reason) for record in ours.requests),
    }


def main() -> None:
    count, seed, whole = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["whole"]
    out = sys.stdout
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):  # vLLM logs to stdout
        stock = Stock(Path(folder) / "model")
        found = [compare(load, stock) for load in loads(count, seed, whole)]
    json.dump(found, out)


if __name__ == "__main__":
    main()
