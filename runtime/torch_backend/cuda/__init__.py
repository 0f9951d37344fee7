"""Kernels of our own for CUDA GPUs, written in Triton: attention over the block pool, rotary embedding, norms, activations,
sampling.

Importing this package, :mod:`.attention_plan` or :mod:`.tiles` needs no Triton; importing a module that holds kernels does,
and raises :class:`runtime.errors.MissingTritonError` where there is none. Nothing outside this package imports Triton.

Each module holds one subject: its kernels, whose names begin with an underscore, and the function that launches them, which
takes plain tensors. Launching never waits for the device, and no grid depends on what a tensor holds, so every launch can be
captured in a CUDA graph. docs/concepts/gpu-kernels.md says what each computes and how far it has been tested.
"""
