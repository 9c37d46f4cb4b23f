"""What a running fleet's gateway says of its load: two looks at /metrics, some seconds apart.

Prometheus' text format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import http.client
import re
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.error import URLError
from urllib.parse import urlsplit

from shared.errors import InvalidField, Unavailable

MAX_PAGE = 16 << 20
TIMEOUT_S = 10.0
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*)\})?\s+([^\s]+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')

Labels = tuple[tuple[str, str], ...]
Samples = dict[tuple[str, Labels], float]


@dataclass(frozen=True, slots=True)
class Observed:
    """Means over what ended between the two looks, or over the gateway's whole life where nothing did (then there is no
    rate). None: not known."""

    requests_per_s: float | None
    prompt: float | None
    output: float | None
    cached: float | None
    """Share of prompt tokens whose KV was there."""
    acceptance: float | None
    """Share of drafts that were accepted."""
    ttft_s: float | None
    tpot_s: float | None
    workers: Mapping[str, int]
    """That are heard, by role."""


NOTHING = Observed(None, None, None, None, None, None, None, {})


def parse(text: str) -> Samples:
    """Values by name and labels. Lines that are none are passed over."""
    found: Samples = {}
    for line in text.splitlines():
        if line.startswith("#") or not (match := _SAMPLE.match(line)):
            continue
        labels = tuple(sorted(_LABEL.findall(match.group(2) or "")))
        try:
            found[match.group(1), labels] = float(match.group(3))
        except ValueError:
            continue
    return found


def observed(before: Samples, after: Samples, seconds: float, model: str | None = None) -> Observed:
    """From two looks, `seconds` apart; of one model, or of all."""

    def rise(name: str, **wanted: str) -> float:
        if model:
            wanted["model"] = model
        total = 0.0
        for key, value in after.items():
            if key[0] == name and wanted.items() <= dict(key[1]).items():
                total += value - since.get(key, 0.0)
        return total

    since = before
    ended = rise("trine_requests_total", outcome="ok")
    rate = ended / seconds if ended > 0 and seconds > 0 else None
    if rate is None:
        since = {}
        ended = rise("trine_requests_total", outcome="ok")
    answers = rise("trine_request_duration_seconds_count") or ended
    prompt, output = rise("trine_prompt_tokens_total"), rise("trine_generation_tokens_total")
    workers = {
        role: int(
            sum(v for (name, labels), v in after.items() if name == "trine_worker_up" and ("role", role) in labels)
        )
        for role in ("prefill", "decode", "drafter")
    }
    return Observed(
        requests_per_s=rate,
        prompt=_share(prompt, answers),
        output=_share(output, answers),
        cached=_share(rise("trine_cached_prompt_tokens_total"), prompt),
        acceptance=_share(rise("trine_accepted_tokens_total"), rise("trine_drafted_tokens_total")),
        ttft_s=_mean(rise, "trine_time_to_first_token_seconds"),
        tpot_s=_mean(rise, "trine_inter_token_latency_seconds"),
        workers=workers,
    )


def _mean(rise: Callable[[str], float], name: str) -> float | None:
    return _share(rise(f"{name}_sum"), rise(f"{name}_count"))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def fetched(url: str) -> Samples:
    """Raises InvalidField for what is no HTTP address, Unavailable for a page that does not come or is none."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise InvalidField("--metrics: http://HOST:PORT/metrics", field="metrics")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            page = answer.read(MAX_PAGE + 1)
    except (URLError, OSError, ValueError, http.client.HTTPException) as error:
        raise Unavailable(f"{url} cannot be read: {getattr(error, 'reason', error)}") from None
    if len(page) > MAX_PAGE:
        raise Unavailable(f"{url} is longer than {MAX_PAGE} bytes")
    samples = parse(page.decode("utf-8", "replace"))
    if not any(name.startswith("trine_") for name, _ in samples):
        raise Unavailable(f"{url} has no metrics of Trine's gateway")
    return samples


def watch(url: str, seconds: float, model: str | None = None) -> Observed:
    before, started = fetched(url), time.monotonic()
    time.sleep(seconds)
    after = fetched(url)
    return observed(before, after, time.monotonic() - started, model)
