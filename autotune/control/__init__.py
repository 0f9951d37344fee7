"""Control of a live engine: controllers, and what stands between them and the knobs. :func:`autotune.control` attaches one."""
