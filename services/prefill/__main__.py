"""`python -m services.prefill`: one prefill worker, configured by TRINE_* variables."""

from __future__ import annotations

from functools import partial

import anyio

from services.prefill.config import PrefillSettings
from services.prefill.service import PrefillWorker
from shared.worker import Connect, in_passing_thread, load_engine, main, model_folder


async def make(settings: PrefillSettings, worker: str, connect: Connect) -> PrefillWorker:
    folder = await anyio.to_thread.run_sync(model_folder, settings.model)
    engine = await in_passing_thread(partial(load_engine, settings, folder, slots=settings.max_jobs, generates=False))
    return PrefillWorker(settings, await connect("control"), await connect("bulk"), worker, engine)


if __name__ == "__main__":
    main("prefill", PrefillSettings, make)
