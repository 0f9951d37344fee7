"""The parts, in the order in which they run: what matters most comes first, since an hour may be cut short."""

from __future__ import annotations

from typing import Final, NamedTuple


class Part(NamedTuple):
    """``limit_s``: after which it is ended. ``argument``: given to the module's ``run``, such as a model. ``kernels``: Triton
    kernels run in it, interpreted where there is no GPU."""

    name: str
    title: str
    module: str
    limit_s: float
    argument: str = ""
    kernels: bool = False


PARTS: Final = (
    Part("fingerprint", "Machine and software", "fingerprint", 60),
    Part("ceilings", "Ceilings: copies, products, launches", "ceilings", 180),
    Part("kernels", "Kernels against float64", "kernels", 480, kernels=True),
    Part("tiles", "Attention by tile size", "tiles", 420, kernels=True),
    Part("products", "Products of few rows by tile", "products", 420, kernels=True),
    Part("graphs", "Graphs against eager steps", "graphs", 240, "qwen3-0.6b"),
    Part("self-tests", "Self-tests of five architectures", "self_tests", 300),
    Part("anatomy", "Anatomy of a step", "anatomy", 540, "llama-3.1-8b"),
    Part("switches", "What early begin and our products earn", "switches", 480, "llama-3.1-8b"),
    Part("switches-small", "The same, a small model", "switches", 240, "qwen3-0.6b"),
    Part("recorded-prompts", "Steps with prompts, recorded", "recorded_prompts", 180, "qwen3-0.6b"),
    Part("recorded-prompts-8b", "The same, a larger model", "recorded_prompts", 180, "qwen3-8b"),
    Part("fp8-kv", "A KV pool of 8 bits", "fp8_kv", 420, "qwen3-0.6b", kernels=True),
    Part("knob-change", "Knobs turned in mid-run", "knob_change", 120, "qwen3-0.6b"),
    Part("fault-memory", "A step that runs out of memory", "fault_memory", 240),
    Part("fault-sticky", "A device that is lost", "fault_sticky", 240),
    Part("served", "A served load, over HTTP", "served", 420, "qwen3-0.6b"),
    Part("served-vllm", "The same load on vLLM", "served_vllm", 540, "qwen3-0.6b"),
    Part("tuned-vllm", "vLLM, profiled and tuned", "tuned_vllm", 560, "qwen3-0.6b"),
    Part("profile-qwen3-0.6b", "autotune profile, Qwen3 0.6B", "profile", 480, "qwen3-0.6b"),
    Part("profile-qwen3-8b", "autotune profile, Qwen3 8B", "profile", 480, "qwen3-8b"),
    Part("profile-llama-3.1-8b", "autotune profile, Llama 3.1 8B", "profile", 480, "llama-3.1-8b"),
    Part("controller", "The controller, live", "controller", 520, "llama-3.1-8b"),
    Part("anatomy-small", "Anatomy of a step, a small model", "anatomy", 420, "qwen3-0.6b"),
    Part("kernel-tests", "The kernels' own tests", "kernel_tests", 540, kernels=True),
)
