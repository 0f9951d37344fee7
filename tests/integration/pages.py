"""What pages of the documentation tell their readers to type."""

from __future__ import annotations

import re


def commands_on(page: str) -> list[str]:
    """Every command of ``page``, in its order."""
    found = re.findall(r"^```console\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [line[2:].partition("  # ")[0].strip() for block in found for line in block.splitlines()]
