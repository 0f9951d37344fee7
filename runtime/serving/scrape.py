"""What a server that somebody else runs says of itself at ``/metrics``."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Collection, Mapping
from http.client import HTTPException
from typing import Final, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from runtime.errors import InputError

_TIMEOUT_S: Final = 10.0
_MOST_BYTES: Final = 64 << 20


class Scrape(NamedTuple):
    """What was counted by the time ``at``, in seconds on a monotonic clock; each added up over all label sets.

    ``samples`` by their names (``…_total``, ``…_sum``, ``…_count``), ``buckets`` by the name of their histogram: upper bound →
    observations up to there. ``labels`` by the names of samples: the label sets that each was added up over.
    """

    at: float
    samples: Mapping[str, float]
    buckets: Mapping[str, Mapping[float, float]]
    labels: Mapping[str, tuple[Mapping[str, str], ...]]


def scrape(url: str, only: Collection[str] = ()) -> Scrape:
    """The metrics of the server at ``url``: all of them, or those with one of these names (of a histogram: without suffix).

    Raises :class:`InputError`, which names it.
    """
    place = f"{url.rstrip('/')}/metrics"
    if url.partition("://")[0].lower() not in ("http", "https"):
        raise InputError(f"URL is {url}; it must begin with http:// or https://, as http://localhost:8000")
    try:
        with urllib.request.urlopen(place, timeout=_TIMEOUT_S) as answer:
            at, text = time.monotonic(), answer.read(_MOST_BYTES).decode("utf-8", "replace")
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise InputError(f"URL is {url}; {place} cannot be read: {why}") from None
    samples: dict[str, float] = defaultdict(float)
    labels: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if only and sample.name not in only and sample.name.rpartition("_")[0] not in only:
                    continue
                if sample.name.endswith("_bucket") and "le" in sample.labels:
                    buckets[sample.name.removesuffix("_bucket")][float(sample.labels["le"])] += sample.value
                else:
                    samples[sample.name] += sample.value
                    labels[sample.name].append(sample.labels)
    except (ValueError, KeyError, IndexError) as error:
        raise InputError(f"URL is {url}; {place} holds no metrics of Prometheus: {error}") from None
    return Scrape(
        at,
        dict(samples),
        {name: dict(sorted(found.items())) for name, found in buckets.items()},
        {name: tuple(found) for name, found in labels.items()},
    )
