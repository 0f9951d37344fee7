"""What a server that somebody else runs says of itself at ``/metrics``."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from http.client import HTTPException
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from runtime.errors import InputError

_TIMEOUT_S: Final = 10.0
_MOST_BYTES: Final = 64 << 20


class Scrape(NamedTuple):
    """What was counted by the time ``at``, in seconds on a monotonic clock; each added up over all label sets.

    ``samples`` by their names (``…_total``, ``…_sum``, ``…_count``), ``buckets`` by the name of their histogram: upper bound →
    observations up to there.
    """

    at: float
    samples: Mapping[str, float]
    buckets: Mapping[str, Mapping[float, float]]


def scrape(url: str) -> Scrape:
    """The metrics of the server at ``url``. Raises :class:`InputError`, which names it."""
    place = f"{url.rstrip('/')}/metrics"
    if urlsplit(url).scheme not in ("http", "https"):
        raise InputError(f"URL is {url}; it must begin with http:// or https://, as http://localhost:8000")
    try:
        with urllib.request.urlopen(place, timeout=_TIMEOUT_S) as answer:
            at, text = time.monotonic(), answer.read(_MOST_BYTES).decode("utf-8", "replace")
    except (OSError, HTTPException, ValueError) as error:
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise InputError(f"URL is {url}; {place} cannot be read: {why}") from None
    samples: dict[str, float] = defaultdict(float)
    buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.endswith("_bucket") and "le" in sample.labels:
                    buckets[sample.name.removesuffix("_bucket")][float(sample.labels["le"])] += sample.value
                else:
                    samples[sample.name] += sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise InputError(f"URL is {url}; {place} holds no metrics of Prometheus: {error}") from None
    return Scrape(at, dict(samples), {name: dict(sorted(found.items())) for name, found in buckets.items()})
