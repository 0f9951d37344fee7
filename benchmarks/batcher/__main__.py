"""The Batcher against Ray Serve, LitServe and BentoML over HTTP, and against simple rules in virtual time.

**Over HTTP.** A service that takes 20 + 2·n ms a call (n ≤ 32, one call at a time: 381 items/s at most), behind the same thin
server for everybody (:mod:`benchmarks.batcher.service`); each contender in an environment of its own, which this makes. Open-loop
Poisson load from a process of its own at shares of the capacity, and a burst; the SLO is 400 ms from when a request was due
to when its answer was read. Contenders take turns within a round, in another order each time. Each run's first three seconds
and its last one are left out.

**In virtual time** (:mod:`benchmarks.batcher.cases`). The same service and four harder cases, with others' rules written from
their descriptions (:mod:`benchmarks.batcher.rules`). Exact, and the same on any machine.

Run ``python -m benchmarks.batcher``; ``--quick`` takes one short round; ``--only virtual`` needs no peers. The last line is JSON:

- ``attainment_vs_best_peer_min``: least difference, over the loads, of our attainment and the best peer's;
- ``attainment_at_0.9``: our least attainment at the loads up to 0.9;
- ``overload_vs_ideal_min``: our attainment ÷ (capacity ÷ load), at 1.05 and 1.3, the lesser;
- ``idle_p50_ratio``: our p50 at 0.05 ÷ the bare 22 ms; over HTTP, HTTP included;
- ``burst_recovery_s``: from the end of the burst until p50 is within 10% of what it was before it;
- the same for the virtual service as ``virtual_…``, against the rules, and the least margin in each harder case.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from benchmarks.batcher import cases
from benchmarks.batcher.cases import AFTERWARDS_S, BURST, BURST_S, CALM_S, LOADS, SEEDS, Burst, Case, Cell, recovery
from benchmarks.batcher.load import Account, Load
from benchmarks.batcher.peers import OURS, PEERS, Contender, Unavailable, send, servers
from benchmarks.batcher.service import BARE_S, CAPACITY, SLO_S
from benchmarks.command import command, exit_code, say

WARM_UP_S = 3.0


class Run(NamedTuple):
    """One contender, one load, one round: attainment, p50 and p99 of what was answered (s), and the client's lateness."""

    attainment: float
    p50: float
    p99: float
    late_p99: float


class OverHttp(NamedTuple):
    """What was measured over HTTP: runs by contender and load, bursts by contender, and what HTTP costs by itself (s)."""

    runs: dict[str, dict[float, list[Run]]]
    bursts: dict[str, Burst]
    bare: dict[str, float]

    def attainment(self, name: str, load: float) -> float:
        return statistics.median(run.attainment for run in self.runs[name][load])


def judge(account: Account, start: float, stop: float = inf) -> Run:
    """The requests that were due between ``start`` and ``stop``."""
    chosen = [
        (latency, status)
        for due, latency, status in zip(account.due, account.latency, account.status, strict=True)
        if start <= due < stop
    ]
    answered = sorted(latency for latency, status in chosen if status == 200) or [inf]
    attainment = sum(status == 200 and latency <= SLO_S for latency, status in chosen) / max(1, len(chosen))
    return Run(
        attainment,
        answered[len(answered) // 2],
        answered[min(len(answered) - 1, int(0.99 * len(answered)))],
        account.late_p99_s,
    )


def over_http(contenders: Sequence[Contender], seconds: float, rounds: int, loads: Sequence[float] = LOADS) -> OverHttp:
    """All contenders up at once, taking turns."""
    order = random.Random(5)
    with servers(contenders) as running:
        bare = {}
        for server in running:
            quiet = send(Load(server.port, "/bare", [(3.0, 40.0)], seed=1))
            bare[server.contender.name] = statistics.median(quiet.latency)
            send(Load(server.port, "/predict", [(4.0, 0.3 * CAPACITY)], seed=2))  # learns, and warms up
        runs: dict[str, dict[float, list[Run]]] = {c.name: {load: [] for load in loads} for c in contenders}
        burst_accounts: dict[str, list[Account]] = {c.name: [] for c in contenders}
        for number in range(rounds):
            for load in loads:
                for server in order.sample(running, len(running)):
                    phases = [(WARM_UP_S + seconds + AFTERWARDS_S, load * CAPACITY)]
                    account = send(Load(server.port, "/predict", phases, seed=1000 * number + round(100 * load)))
                    runs[server.contender.name][load].append(judge(account, WARM_UP_S, WARM_UP_S + seconds))
                    time.sleep(0.3)
            for server in order.sample(running, len(running)):
                phases = [(s, load * CAPACITY) for s, load in BURST]
                burst_accounts[server.contender.name].append(
                    send(Load(server.port, "/predict", phases, seed=7000 + number))
                )
                time.sleep(0.3)
    return OverHttp(runs, {name: burst_of(accounts) for name, accounts in burst_accounts.items()}, bare)


def burst_of(accounts: Sequence[Account]) -> Burst:
    """Every round of a contender's burst, together."""
    over = CALM_S + BURST_S
    before, after, attainments = [], [], []
    for account in accounts:
        attainments.append(judge(account, CALM_S, over).attainment)
        for due, latency, status in zip(account.due, account.latency, account.status, strict=True):
            if 2.0 <= due < CALM_S:
                before.append(latency)
            elif due >= over:
                after.append((due - over, latency if status == 200 else inf))
    calm = statistics.median(before)
    return Burst(calm, statistics.median(attainments), recovery(calm, after))


def show_http(found: OverHttp, contenders: Sequence[Contender]) -> None:
    print(f"\nOver HTTP: attainment (range), p50 / p99 ms; SLO {SLO_S * 1e3:.0f} ms, capacity {CAPACITY:.0f}/s")
    for contender in contenders:
        print(f"  {contender.name}: {contender.settings}; HTTP alone {found.bare[contender.name] * 1e3:.1f} ms")
    names = list(found.runs)
    print(f"{'load':>6}  " + "".join(f"{name:36}" for name in names))
    for load in next(iter(found.runs.values())):
        row = []
        for name in names:
            runs = found.runs[name][load]
            met = [run.attainment for run in runs]
            p50, p99 = (statistics.median(getattr(run, part) for run in runs) * 1e3 for part in ("p50", "p99"))
            row.append(f"{statistics.median(met):.4f} ({min(met):.3f}–{max(met):.3f}) {p50:.1f} / {p99:.0f}")
        print(f"{load:6}  " + "".join(f"{text:36}" for text in row), flush=True)
    for name, burst in found.bursts.items():
        print(f"  burst, {name}: {tell_burst(burst)}")
    late = max(run.late_p99 for loads in found.runs.values() for runs in loads.values() for run in runs)
    print(f"  the client sent 99% of its requests less than {late * 1e3:.1f} ms late, in its worst run")


def tell_burst(burst: Burst) -> str:
    back = "not back while watched" if burst.recovery_s == inf else f"back within {burst.recovery_s:.1f} s"
    return f"p50 {burst.before * 1e3:.1f} ms before, attainment {burst.attainment:.3f} during it, p50 {back}"


def summary(attainments: dict[str, dict[float, float]], idle_p50: float, bursts: dict[str, Burst]) -> dict[str, float]:
    """The five figures: ours against everybody else in ``attainments``, by contender and load."""
    ours = attainments["ours"]
    others = [name for name in attainments if name != "ours"]
    return {
        "attainment_vs_best_peer_min": min(
            ours[load] - max(attainments[name][load] for name in others) for load in ours
        ),
        "attainment_at_0.9": min(share for load, share in ours.items() if load <= 0.9),
        "overload_vs_ideal_min": min(ours[load] * load for load in ours if load > 1),
        "idle_p50_ratio": idle_p50 / BARE_S,
        "burst_recovery_s": bursts["ours"].recovery_s,
    }


def show_case(case: Case, cells: dict[str, dict[float, Cell]]) -> None:
    print(f"\n{case.name}: {case.about}; capacity {case.capacity:.0f}/s; attainment, p50 / p99 ms, items a call")
    print(f"{'load':>6}  " + "".join(f"{name:28}" for name in cells))
    for load in case.loads:
        row = [
            f"{c.attainment:.4f} {c.p50 * 1e3:.0f} / {c.p99 * 1e3:.0f}, {c.call:.1f}"
            for c in (cells[name][load] for name in cells)
        ]
        print(f"{load:6}  " + "".join(f"{text:28}" for text in row), flush=True)


def play_case(case: Case, seconds: float) -> dict[str, dict[float, Cell]]:
    cells = {
        name: {load: cases.measure(case, make, load, seconds, SEEDS) for load in case.loads}
        for name, make in case.rules.items()
    }
    show_case(case, cells)
    return cells


def virtual(seconds: float, bursts: int) -> dict[str, float]:
    """Every case in virtual time, its table, and its figures."""
    found: dict[str, float] = {}
    plain = cases.base()
    cells = play_case(plain, seconds)
    through = {n: cases.burst(plain, make, range(301, 301 + bursts)) for n, make in plain.rules.items()}
    for name, burst in through.items():
        print(f"  burst, {name}: {tell_burst(burst)}")
    attainments = {name: {load: cell.attainment for load, cell in loads.items()} for name, loads in cells.items()}
    for key, value in summary(attainments, cells["ours"][LOADS[0]].p50, through).items():
        found["virtual_" + key.replace("best_peer", "best_rule")] = value
    for name, case in (("shared", cases.shared()), ("tight", cases.tight()), ("uneven", cases.uneven())):
        cells = play_case(case, seconds)
        others = [rule for rule in cells if rule != "ours"]
        found[f"{name}_vs_best_rule_min"] = min(
            cells["ours"][load].attainment - max(cells[rule][load].attainment for rule in others) for load in case.loads
        )
    found["price_vs_static_max"] = show_price(seconds)
    return found


def show_price(seconds: float) -> float:
    """The table of calls per 1,000 items; returns ours ÷ the cheapest static window of the same attainment, the worst load."""
    print(f"\na price per call: calls per 1,000 items answered (attainment); SLO {SLO_S * 1e3:.0f} ms")
    print(f"{'load':>6}  {'ours':20}{'cheapest window as good':40}{'cheapest window ≥ 99%':40}{'when free + drop':20}")
    worst = 0.0
    for row in cases.priced(seconds, SEEDS):
        windows = [
            "none" if best is None else f"{tell_price(best[1])}  {best[0]}" for best in (row.as_good, row.with_99)
        ]
        print(
            f"{row.load:6}  {tell_price(row.ours):20}"
            + "".join(f"{w:40}" for w in windows)
            + tell_price(row.when_free),
            flush=True,
        )
        if row.as_good is not None:
            worst = max(worst, row.ours.per_item / row.as_good[1].per_item)
    return worst


def tell_price(cell: Cell) -> str:
    return f"{cell.per_item * 1e3:6.1f} ({cell.attainment:.4f})"


def json_line(found: Mapping[str, float]) -> str:
    return json.dumps({name: None if value == inf else round(value, 4) for name, value in found.items()})


@exit_code()
def main(argv: Sequence[str] | None = None) -> int:
    parser = command("batcher", __doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--only", choices=("http", "virtual"), help="one half of it")
    parser.add_argument("--rounds", type=int, default=None, help="over HTTP (3; quick: 1)")
    parser.add_argument("--seconds", type=float, default=None, help="of each run over HTTP that count (15; quick: 5)")
    args = parser.parse_args(argv)
    rounds = args.rounds or (1 if args.quick else 3)
    seconds = args.seconds or (5.0 if args.quick else 15.0)
    found: dict[str, float] = {}
    if args.only != "http":
        found |= virtual(*((20.0, 20) if args.quick else (60.0, 60)))
    if args.only != "virtual":
        contenders = (OURS, *PEERS)
        try:
            http = over_http(contenders, seconds, rounds)
        except Unavailable as error:
            say(f"error: {error}; --only virtual needs no peers")
            print(json_line(found))
            return 1
        show_http(http, contenders)
        attainments = {name: {load: http.attainment(name, load) for load in LOADS} for name in http.runs}
        idle = statistics.median(run.p50 for run in http.runs["ours"][LOADS[0]])
        found = summary(attainments, idle, http.bursts) | found
    print(json_line(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
