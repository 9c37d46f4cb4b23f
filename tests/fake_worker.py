"""`python -m tests.fake_worker ROLE`: a worker as `services.ROLE` starts it, with a fake engine in place of a model.

Configured by TRINE_* variables, as any worker; FAKE_ENGINE has the engine's arguments, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from services.decode.config import DecodeSettings
from services.decode.service import DecodeWorker
from services.prefill.config import PrefillSettings
from services.prefill.service import PrefillWorker
from shared.tokenizer import Tokenizer
from shared.worker import Connect, main
from tests.fake_engine import FakeEngine, FakeTokenizer
from tests.fleet_rig import COMMON
from tests.nats_fleet import ROOT


def engine() -> FakeEngine:
    return FakeEngine(**json.loads(os.environ["FAKE_ENGINE"]))


async def make_decode(settings: DecodeSettings, worker: str, connect: Connect) -> DecodeWorker:
    tokenizer = cast("Tokenizer", FakeTokenizer())
    return DecodeWorker(settings, await connect("control"), await connect("bulk"), worker, engine(), tokenizer)


async def make_prefill(settings: PrefillSettings, worker: str, connect: Connect) -> PrefillWorker:
    return PrefillWorker(settings, await connect("control"), await connect("bulk"), worker, engine())


@contextmanager
def process(
    role: str, url: str, name: str, *, engine: Mapping[str, Any], env: Mapping[str, str] | None = None, **settings: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Such a worker, killed at the end. It may not serve yet."""
    own = {**COMMON, "nats_url": url, "worker": name, **settings}
    variables = {f"TRINE_{key.upper()}": str(value) for key, value in own.items()}
    running = subprocess.Popen(
        [sys.executable, "-m", "tests.fake_worker", role],
        cwd=ROOT,
        env={**os.environ, "FAKE_ENGINE": json.dumps(engine), **variables, **(env or {})},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield running
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait(10)


if __name__ == "__main__":
    if sys.argv[1] == "decode":
        main("decode", DecodeSettings, make_decode)
    main("prefill", PrefillSettings, make_prefill)
