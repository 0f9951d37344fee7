"""The Hugging Face hub, when there is none: found out at once and without noise."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from huggingface_hub import constants

_PATIENCE_S = 5.0


def offline() -> bool:
    """Whether the hub cannot be asked: switched off, or its host cannot be connected to.

    The hub's own client tries for half a minute and logs each attempt. Behind a proxy it is left to find out.
    """
    if constants.is_offline_mode():
        return True
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return False
    address = urlsplit(constants.ENDPOINT)
    try:
        with socket.create_connection((address.hostname or "", address.port or 443), timeout=_PATIENCE_S):
            return False
    except OSError:
        return True
