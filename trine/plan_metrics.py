"""What a running fleet's gateway says of its load: two looks at /metrics, some seconds apart.

Prometheus' text format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import http.client
import math
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
ANSWERS = "trine_request_duration_seconds_count"
"""Complete answers, a request's choices each for itself, as prompt and output tokens are counted too."""
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*)\})?\s+([^\s]+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')

Labels = tuple[tuple[str, str], ...]
Samples = dict[tuple[str, Labels], float]


@dataclass(frozen=True, slots=True)
class Observed:
    """Means over what ended between the two looks, or over the gateway's whole life where nothing did (then there is no
    rate). None: not known."""

    requests_per_s: float | None
    """Complete answers: each choice of a request is one."""
    prompt: float | None
    output: float | None
    cached: float | None
    """Share of prompt tokens whose KV was there."""
    acceptance: float | None
    """Chance that a draft is right if those before it are: those that follow a wrong one say nothing."""
    ttft_s: float | None
    tpot_s: float | None
    workers: Mapping[str, int]
    """That are heard, by role."""


NOTHING = Observed(None, None, None, None, None, None, None, {})


def parse(text: str) -> Samples:
    """Finite values by name and labels. Lines that are none are passed over."""
    found: Samples = {}
    for line in text.splitlines():
        if line.startswith("#") or not (match := _SAMPLE.match(line)):
            continue
        labels = tuple(sorted(_LABEL.findall(match.group(2) or "")))
        try:
            value = float(match.group(3))
        except ValueError:
            continue
        if math.isfinite(value):
            found[match.group(1), labels] = value
    return found


def observed(before: Samples, after: Samples, seconds: float, model: str | None = None) -> Observed:
    """From two looks, `seconds` apart; of one model, or of all. Raises InvalidField for one that has no sample."""
    if model:
        _check_name(after, model)
        before, after = _of(before, model), _of(after, model)
    answers = _rise(before, after, ANSWERS)
    rate = answers / seconds if answers > 0 and seconds > 0 else None

    def rise(name: str) -> float:
        return _rise(before if rate else {}, after, name)

    prompt, output, answers = rise("trine_prompt_tokens_total"), rise("trine_generation_tokens_total"), rise(ANSWERS)
    return Observed(
        requests_per_s=rate,
        prompt=_share(prompt, answers),
        output=_share(output, answers),
        cached=_share(rise("trine_cached_prompt_tokens_total"), prompt),
        acceptance=_acceptance(rise),
        ttft_s=_mean(rise, "trine_time_to_first_token_seconds"),
        tpot_s=_mean(rise, "trine_inter_token_latency_seconds"),
        workers={role: _heard(after, role) for role in ("prefill", "decode", "drafter")},
    )


def _check_name(samples: Samples, model: str) -> None:
    names = sorted({name for _, labels in samples for label, name in labels if label == "model" and name})
    if model not in names:
        known = ", ".join(names) or "none"
        raise InvalidField(
            f"--model-name: no {model!r:.100} is served there; there are {known:.500}", field="model_name"
        )


def _of(samples: Samples, model: str) -> Samples:
    return {key: value for key, value in samples.items() if ("model", model) in key[1]}


def _rise(before: Samples, after: Samples, name: str) -> float:
    """Of a counter, over all its labels. One that fell began anew, with its process."""
    total = 0.0
    for key, value in after.items():
        if key[0] == name:
            old = before.get(key, 0.0)
            total += value - old if value >= old else value
    return total


def _acceptance(rise: Callable[[str], float]) -> float | None:
    accepted, cut = rise("trine_worker_accepted_tokens_total"), rise("trine_worker_cut_drafts_total")
    drafted = rise("trine_worker_drafted_tokens_total")
    if not cut and drafted > accepted:  # workers that do not count cut drafts yet
        return _share(accepted, drafted)
    return _share(accepted, accepted + cut)


def _heard(samples: Samples, role: str) -> int:
    up = [v for (name, labels), v in samples.items() if name == "trine_worker_up" and ("role", role) in labels]
    return int(sum(up))


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
