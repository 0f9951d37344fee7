"""What decode steps would take on an A100, H100, H200 and L4, from the calls that this tree makes and published figures.

The executor launches each step with the CUDA backend on tensors without content (:mod:`.calls`): every kernel and every operation
is counted, with the bytes it moves and the operations that matrix units do, padding included. Shapes are those of Llama 3.1 8B,
Qwen3 8B and Qwen3 0.6B in bfloat16, greedy, all sequences of a batch with the same context.

- *floor*: the weights and the context's keys and values, read once at the peak bandwidth. Nothing that reads them can be faster.
- *expected*: each call at the share of the peaks that kernels of its kind reach on such a chip, and with what such a kernel takes
  beside its bytes, one after the other as in a CUDA graph. Both are fitted to published measurements of single kernels
  (:mod:`.chips`): NVIDIA's own products, and vLLM's attention in the place of ours.
- *bound*: each call at the peaks themselves, 1.3 µs between two. With these calls no engine can be faster.
- *launches*: kernels and copies of a step that is not recorded, where the host launches each (*eager*: launches × 5 µs of the
  driver alone, hidden while the device takes longer). Then the step is recorded and run as in service, on a device that notes
  what it is given: how many recordings a step replays, what they hold, and what is launched beside them.
- *host*: CPU time of a step that is replayed, and of one that is not, on this machine, model and driver left out (:mod:`.host`).

Not counted: attention of ours that is slower than vLLM's, or tiles that fit a chip badly; what a kernel reads twice because the
cache lost it; sampling other than greedy; clocks that fall under load; gaps between one step and the next where the host is late.

Run ``python -m benchmarks.gpu_projection`` (two minutes; ``--quick``: seconds); the last line is JSON, of Llama 3.1 8B on an H100
with 1,024 tokens of context.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks.command import command, exit_code, say
from runtime.errors import InputError

if TYPE_CHECKING:
    from benchmarks.gpu_projection.calls import Call, Decoder, Shape
    from benchmarks.gpu_projection.chips import Chip

MODELS: Final = ("llama-3.1-8b", "qwen3-8b", "qwen3-0.6b")
CHIP_NAMES: Final = ("A100", "H100", "H200", "L4")
BATCHES: Final = (1, 4, 16, 64, 256)
CONTEXTS: Final = (128, 1024, 8192)
HOST_BATCHES: Final = (1, 64, 256)
MODEL, CHIP, CONTEXT, AIM, HOST_AIM_US = "llama-3.1-8b", "H100", 1024, 1.20, 400
PROMPT: Final = 2048
MEASURED: Final = {"A100": "a100-llama3-8b", "H100": "h100-llama3-8b"}


class Projected(NamedTuple):
    """Of one step: seconds, and launches with and without graphs."""

    batch: int
    context: int
    fits: bool
    floor_s: float
    expected_s: float
    bound_s: float
    launches: int

    @property
    def ratio(self) -> float:
        return self.expected_s / self.floor_s


def projected(shape: Shape, calls: Sequence[Call], chip: Chip, batch: int, context: int) -> Projected:
    """A decode step of ``batch`` sequences with ``context`` tokens each, which makes ``calls``."""
    from benchmarks.gpu_projection.chips import fastest_s, slowest_s

    read = shape.weights + batch * context * shape.kv_bytes_per_token
    held = 2 * shape.parameters + batch * context * shape.kv_bytes_per_token
    return Projected(
        batch, context, held <= 0.95 * chip.memory, read / chip.bandwidth, slowest_s(chip, calls), fastest_s(chip, calls),
        len(calls),
    )  # fmt: skip


def per_layer(decoder: Decoder, multiprocessors: int) -> dict[str, int]:
    """How often each call is made in a layer, by the calls that there are as many of as layers, or a multiple."""
    from benchmarks.gpu_projection.steps import Step

    made = Counter(call.name for call in decoder.calls(Step.decodes(CONTEXT), multiprocessors))
    return {name: count // decoder.shape.layers for name, count in made.items() if count >= decoder.shape.layers}


def _table(decoder: Decoder, chip: Chip, batches: Sequence[int], contexts: Sequence[int]) -> None:
    from benchmarks.gpu_projection.chips import HOST_LAUNCH_S
    from benchmarks.gpu_projection.steps import Step

    print(f"\n{decoder.shape.name} on {chip.name}, ms (slack: {chip.slack_of})")
    print("  batch context    floor  expected  ÷ floor    bound  ÷ floor  launches  eager, host      GB     Gflop")
    for context in contexts:
        for batch in batches:
            calls = decoder.calls(Step.decodes(*[context] * batch), chip.multiprocessors)
            one = projected(decoder.shape, calls, chip, batch, context)
            moved, computed = sum(c.bytes for c in calls) / 1e9, sum(c.flops for c in calls) / 1e9
            print(
                f"  {batch:5} {context:7} {one.floor_s * 1e3:8.2f}  {one.expected_s * 1e3:8.2f}  {one.ratio:7.2f} "
                f"{one.bound_s * 1e3:8.2f}  {one.bound_s / one.floor_s:7.2f}  {one.launches:8} "
                f"{one.launches * HOST_LAUNCH_S * 1e3:12.2f}  {moved:7.2f} {computed:9.1f}"
                f"{'' if one.fits else '  (does not fit)'}",
                flush=True,
            )


def _prompt(decoder: Decoder, chip: Chip) -> None:
    """A prompt of 2,048 tokens alone."""
    from benchmarks.gpu_projection.chips import slowest_s
    from benchmarks.gpu_projection.steps import Step

    calls = decoder.calls(Step((PROMPT,), (PROMPT,)), chip.multiprocessors)
    seconds = slowest_s(chip, calls)
    useful = sum(call.flops for call in calls if call.kind == "product")
    print(
        f"  a prompt of {PROMPT} tokens: {seconds * 1e3:.1f} ms expected, "
        f"{useful / seconds / chip.flops:.0%} of the peak of the matrix units"
    )


def _beside(truth: str, batches: Sequence[int]) -> None:
    """The same steps with vLLM's kernels, put together from single measurements."""
    from benchmarks.gpu_truth import Flags, load

    kernels = load(truth, Flags())
    predicted = ", ".join(f"{kernels.step_seconds(b, b * CONTEXT) * 1e3:.2f} at batch {b}" for b in batches)
    print(
        f"  vLLM's kernels by benchmarks/gpu_truth ({truth}, no host), ms with {CONTEXT} tokens of context: {predicted}"
    )


def _chosen(given: Sequence[str] | None, known: Sequence[str], option: str) -> Sequence[str]:
    for name in given or ():
        if name not in known:
            raise InputError(f"{option} is {name}; it must be one of {', '.join(known)}")
    return given or known


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = (0,)
    if not all(1 <= number <= 131_072 for number in found):
        raise argparse.ArgumentTypeError(f"{text}; it must be whole numbers from 1 to 131072, as in 1,64")
    return found


@exit_code()
def main(argv: Sequence[str] | None = None) -> int:
    parser = command("gpu_projection", __doc__)
    parser.add_argument(
        "--model", action="append", help=f"{', '.join(MODELS)}; may be given several times (default: all)"
    )
    parser.add_argument(
        "--chip", action="append", help=f"{', '.join(CHIP_NAMES)}; may be given several times (default: all)"
    )
    parser.add_argument(
        "--batches", type=_numbers, default=BATCHES, help="sequences of a step (default: 1,4,16,64,256)"
    )
    parser.add_argument("--contexts", type=_numbers, default=CONTEXTS, help="tokens of each (default: 128,1024,8192)")
    parser.add_argument(
        "--calls", action="store_true", help="list the calls of a step of one sequence, and what each moves"
    )
    parser.add_argument("--quick", action="store_true", help="only what the line of JSON says")
    args = parser.parse_args(argv)
    models, chips = _chosen(args.model, MODELS, "--model"), _chosen(args.chip, CHIP_NAMES, "--chip")
    from runtime.errors import MissingTritonError

    try:
        from benchmarks.gpu_projection.calls import Decoder
    except MissingTritonError as error:
        raise InputError(str(error)) from None
    from benchmarks.gpu_projection.chips import CHIPS
    from benchmarks.gpu_projection.host import host_us
    from benchmarks.gpu_projection.steps import Step

    if args.quick:
        models, chips = (MODEL,), (CHIP,)
    batches, contexts = ((1, 64), (CONTEXT,)) if args.quick else (args.batches, args.contexts)
    by_name = {chip.name: chip for chip in CHIPS}
    layer: dict[str, int] = {}
    unknown: set[str] = set()
    for model in models:
        say(f"{model}: building its layers")
        decoder = Decoder(model)
        layer = per_layer(decoder, by_name[CHIP].multiprocessors)
        print(
            f"\n{model}: a layer is {sum(layer.values())} launches: {', '.join(f'{n} {c}' for n, c in layer.items())}"
        )
        if args.calls:
            _list(decoder, by_name[chips[0]])
        for name in chips:
            _table(decoder, by_name[name], batches, contexts)
            _prompt(decoder, by_name[name])
            if model == MODEL and name in MEASURED:
                _beside(MEASURED[name], batches)
        unknown |= {c.name for c in decoder.calls(Step.decodes(CONTEXT), 132) if not c.known}
    if unknown:
        print(
            f"\nNOT KNOWN what these kernels move, so all their tensors are counted once: {', '.join(sorted(unknown))}"
        )
    say("the host's share")
    host_batches = (64,) if args.quick else HOST_BATCHES
    host = {batch: host_us(batch) for batch in host_batches}
    one_by_one = {batch: host_us(batch, recorded=False) for batch in host_batches}
    print("\nhost, µs of CPU a step of so many decodes")
    for words, cost in (("replayed", host), ("launched call by call", one_by_one)):
        print(f"  {words:22}{''.join(f'{us:7.0f} ({batch})' for batch, us in cost.items())}")
    decoder, chip = Decoder(MODEL), by_name[CHIP]
    one, many = (
        projected(decoder.shape, decoder.calls(Step.decodes(*[CONTEXT] * b), chip.multiprocessors), chip, b, CONTEXT)
        for b in (1, 64)
    )
    for batch, found in ((1, one), (64, many)):
        word = "met" if found.ratio <= AIM else "MISSED"
        print(
            f"aim of {AIM:.2f} × floor at batch {batch}: {word} ({found.ratio:.2f}; bound {found.bound_s / found.floor_s:.2f})"
        )
    print(
        f"aim of {HOST_AIM_US} µs for the host at batch 64: {'met' if host[64] <= HOST_AIM_US else 'MISSED'} ({host[64]:.0f})"
    )
    replayed = decoder.replayed(64, CONTEXT, chip.multiprocessors)
    if replayed is None:
        print(f"no step is recorded: the host launches {one.launches} calls a step, and a replay of one is not claimed")
    else:
        print(
            f"a recorded step: {replayed.replays} replay of {len(replayed.inside)} calls; beside it "
            f"{', '.join(call.name for call in replayed.beside)}; where rows enter a block, "
            f"{', '.join(call.name for call in replayed.entering)}"
        )
    shape = {
        "projected_decode_vs_floor_b1": round(one.ratio, 3),
        "projected_decode_vs_floor_b64": round(many.ratio, 3),
        "launches_per_step": one.launches if replayed is None else replayed.replays,
        "host_us_per_step": round(host[64]),
        "host_us_per_step_one_by_one": round(one_by_one[64]),
        "bound_decode_vs_floor_b1": round(one.bound_s / one.floor_s, 3),
        "bound_decode_vs_floor_b64": round(many.bound_s / many.floor_s, 3),
        "calls_per_step": one.launches,
        "calls_in_replay": 0 if replayed is None else len(replayed.inside),
        "calls_beside_replay": one.launches if replayed is None else len(replayed.beside),
        "graphs": replayed is not None,
    }
    print(json.dumps(shape))
    return 0


def _list(decoder: Decoder, chip: Chip) -> None:
    from benchmarks.gpu_projection.steps import Step

    calls = decoder.calls(Step.decodes(CONTEXT), chip.multiprocessors)
    for (name, shapes, moved, flops), count in Counter((c.name, c.shapes, c.bytes, c.flops) for c in calls).items():
        print(
            f"  {count:4} × {name:<16} {moved / 1e6:10.3f} MB {flops / 1e6:10.1f} Mflop  {list(map(list, shapes[:3]))}"
        )


if __name__ == "__main__":
    sys.exit(main())
