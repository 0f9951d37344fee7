"""Every constant of the predictive controller, with what it was chosen on.

``benchmarks.controller.ablation`` and ``docs/log.md`` have the experiments. M1 to M14, U1 to U3, G1 to G8, F1 to F4, H1 to H4
and E1 to E4 are the scenarios of :mod:`benchmarks.controller.scenarios`; on E1 to E4 and H1 to H3 nothing here was chosen, on
U1 and H4 ``ALIKE`` alone, and on U2, U3 and G1 to G8 only what says so; ``HOLDS_UP`` was chosen with G4 in sight. F1 to F4 were
run beside others when ``SHORT``, ``WAITED``, ``LEAST_BUDGET``, ``FAR``, ``WORSE`` and ``DOUBTED`` were chosen. ``TILE`` of
:mod:`autotune.control.controllers.parts.tiles` (64 to 512 were tried, and none) was chosen with all scenarios of the time in
sight, M1 to G8, seeds 1 and 2, as were ceilings in whole tiles (seeds 1 to 4).
"""

# Tuned on M1 to M14, or chosen with their results in sight: they fit those scenarios better than they fit yours.

AHEAD = 0.5  # share of what the tightest request is ahead of its schedule that a step may spend
BEHIND = 0.5  # of the step-time target: what a step may take at least, however late decodes are
RATE = 0.02  # by how much of itself one request moves the gain
GAIN = (0.6, 4.0)  # bounds of the gain
MISSED = (0.01, 0.05)  # share of requests that may miss a step-time target under load, at least and at most
BUSY = 0.9  # share of the time that may go into steps with prompts (M9, M10)
LONG = 1.0  # what a second of a step beyond the target counts beside a second of the mean gap (M9, M10)
LONG_BUDGETED = 0.35  # the same with step budgets (M9 and with stalls, M10, M13, U2, U3, G3, G5, G6, G8)
DEMAND_S = 5.0  # memory of the demand (M2, M4, M9, M10, M14)
HOLDS_UP = 0.5  # of the tightest TTFT: a prompt that has time and takes longer is cut (M6, M7, U3, G4 and six more)
COMPUTED = 0.75  # of its TTFT target: time for a long prompt to be computed in (M6)
CEILING = 2.0  # the ceiling above step budgets, in step-time targets (M1, M3 to M5, M7)

# Tuned on the adversaries of the benchmark, and on M1 to M14 with seeds 1 to 3: when the starting knobs come back ---------------
# KEPT alone: on G2, G3, M9 and its variants, M10, U2, U3, seeds 1 to 4 (.7) and 231 to 240 (.6), M14 of 201 to 210 in sight.

STARTS, OURS = 1024, 256  # requests that count
FEW = 16  # requests that say nothing yet
SETTLE_S = 1.0  # after a change: the queue is that of other knobs
LEAST_S = 2.0  # in force: requests of the same moment fare alike
SHORT_S, TRIAL_S = 4.0, 10.0  # of the starting knobs, before they are left for half as good, and for worse
STALE_S = 60.0  # after they were left, what is known of them is out of date
SURE, CERTAIN = 2.0, 3.0  # standard errors: to come back to the starting knobs, and to leave them
GOOD = 0.9  # share of requests in time with which the starting knobs need not be tried
KEPT = 0.6  # and with which they are not left for knobs that served worse, for LONGEST_PAUSE_S
FINE = 0.98  # and with which they are not left again
PAUSE_S, LONGEST_PAUSE_S = 30.0, 480.0
HELPS = 0.25  # how much cheaper larger steps are, from which on smaller ones may cost goodput
DECODING_S = 0.5  # of decoding, of which a few requests soon tell

# Chosen on G1 to G3, G5, M8 to M10, M14, U2 and U3 with seeds 1 and 2 (DOUBTED: 3 to 10), and on the adversaries: when the
# start is tried

BETTER = 0.1  # how much larger a share of requests than was in time must be predicted for them
HOPELESS = 0.05  # attainment below which they are tried, whatever is predicted (M9 with stalls, seeds 208 and 210)
DOUBTED = 0.5  # and this, where the knobs in force are predicted to miss, too (full-cpu-best, seeds 211 to 218)
USUAL_S = 20.0  # memory of the demand that this goes by

# Chosen on made-up machines: noise, stalls, changes of speed, a slow region, a busy host.

WRONG = 0.5  # relative error that counts as a wrong prediction
DISTRUST, TRUST = 0.4, 0.1  # share of wrong predictions that ends the trust in the model, and that restores it
RELEARN = 128  # untrusted steps after which what was learned is thrown away: a machine may have changed for good
RESERVE = (1.05, 2.0)  # bounds of the mean ratio of actual to predicted time
DRIFT, ALARM = 0.1, 1.0  # of the logarithm of actual/predicted: what is no change, and how much of more adds up to one
LOUDEST = 0.7  # what a single step may add to that: a stall of ten times is no more than one twice too long
LATEST = 5  # steps whose middle ratio says how much has changed
CHANGED = 0.15  # change of speed that is worth acting on, relative
UNSTEADY = 500  # steps after which a change of speed is forgotten
SLOWER = 0.92  # logarithm of how much longer steps take in a slow region (2.5 times), beyond noise
WIDTH = 8  # decodes that its beginning is looked for by
ENTRIES = 2  # times that one was entered before it counts
AGE = 5000  # steps after which it may have gone
REST_S = 10.0  # in which the gain returns to 1 while demand is the limit, by e
UNRELIABLE = 0.3  # mean relative error of predictions that say nothing of the rate of prompts, hurry and cut nothing

# Chosen on the loads of benchmarks.vllm_live in virtual time, on M9 and M5 with stalls, seeds 1 and 2, and on the busy host.

SCATTER = 0.01  # half of how much the TPOT of requests scatters about the target of their steps, relative

# Chosen on benchmarks.classes, A100 and H200, seeds 1 to 6.

SHORT = 0.5  # of the step-time target: a step whose prompts all have longer than the tightest TTFT
NEARLY = 0.75  # of the prompt tokens a second of whole steps, which such short ones must compute

# Chosen on benchmarks.classes with the step times of profiles/cpu-2core-tiny.yaml, U3, M6, M7 and G4, seeds 1 to 3.

WAITED = 0.25  # of the tightest TTFT: so long has the first prompt waited before those that wait have a say, beside looser ones

# Chosen on G1, G5 and G7 with seeds 1 to 5, looked at on M1 to M10 and the other measured GPUs.

AS_FAST = 0.95  # of the prompt tokens a second of the largest step within the target: enough for knobs alone
WORTHWHILE = 1024  # prompt tokens: smaller steps are not cut for that

# Chosen on benchmarks.controller_live in virtual time, knobs alone, seeds 500 to 505, all scenarios in sight.

LEAST_BUDGET = 32  # tokens of a step: the lowest ceiling of knobs alone
FAR = 0.5  # of the token budget in force: while one as low is wanted, what is served is no witness of the target

# Chosen with the same in sight, and on the adversaries full-cpu, full-cpu-best and stalls-cpu-best, seeds 1 to 4.

WORSE = 0.15  # how much smaller a share than was in time must be predicted for the starting knobs, so that they are not tried

# Chosen on U1 and H4, seeds 201 to 204 and 301 to 306: the only scenarios with an E2E target then.

ALIKE = 0.01  # share of requests: sizes of a step that have nearly as many in time are alike, and the smallest of them is taken

# Chosen on the loads of tests/unit/test_no_less_than_the_start.py, of which made-up ones had shown the fault.

STARVED = 512  # prompt tokens of a step whose targets leave room for none, where prompts are in a hurry
HURRY = 0.5  # of the tightest TTFT: who has less left is

# Not tuned: windows, and bounds on what is said without proof.

FIRST = 256  # prompt tokens of the first step beside decodes, before anything is known of such steps
WINDOW = 256  # requests, and steps, that statistics are of
MEMORY = 0.02  # weight of the newest step in shares and means
SAMPLE = 16  # lengths that stand for all of the latest ones
FLOOR = 64  # prompt tokens that a step with a budget of its own may always hold, and slots that need no proof
NEAR = 1.1  # of what a ceiling should be: one in force that is no higher stays
REACH = 4  # how many times the decodes ever seen together may be admitted on the model's word
BINDS = 0.01  # share of steps from which on a limit binds
GROWTH = 1.19  # from one size of a step to the next when sizes are tried: four for a factor of two
DRAFTED = 50  # drafted tokens below which nothing is known of drafts
WORTH = 1.02  # tokens a second, relative, for which the number of drafts is changed
AGAIN_S = 60.0  # after drafts were given up, one is tried again
GAP_S = 60.0  # a pause counts for no longer than that
LONG_S = 5.0  # between two decisions: longer than that, a clock may have jumped
LEAST_RATIO = 1e-9  # of actual to predicted time, so that it has a logarithm, whatever a record claims
RUNS = 200.0  # busy periods of the queue model beyond which they come to their mean; e to the minus that many is still a number
