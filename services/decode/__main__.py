"""`python -m services.decode`: one decode worker, configured by TRINE_* variables."""

from __future__ import annotations

from functools import partial

import anyio

from services.decode.config import DecodeSettings
from services.decode.publics import PublicPrefixes
from services.decode.service import DecodeWorker
from shared.sampling.grammars import Grammars
from shared.tokenizer import Tokenizer
from shared.worker import Connect, in_passing_thread, load_engine, main, model_folder


async def make(settings: DecodeSettings, worker: str, connect: Connect) -> DecodeWorker:
    folder = await anyio.to_thread.run_sync(model_folder, settings.model)
    load = partial(load_engine, settings, folder, slots=settings.max_running, lookahead=settings.draft_depth)
    engine = await in_passing_thread(load)
    tokenizer = await anyio.to_thread.run_sync(Tokenizer.load, folder)
    find = partial(PublicPrefixes.load, settings.public_prefixes, engine.identity, tokenizer, engine.info)
    publics = await anyio.to_thread.run_sync(find)
    grammars = Grammars(tokenizer.table, engine.info.vocab_size, engine.info.eos_ids)
    control, bulk = await connect("control"), await connect("bulk")
    return DecodeWorker(settings, control, bulk, worker, engine, tokenizer, publics, grammars)


if __name__ == "__main__":
    main("decode", DecodeSettings, make)
