"""What ``autotune profile`` finds, and for how much of the machine's time, against other searches; see :mod:`.__main__`."""
