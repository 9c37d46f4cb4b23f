"""`trine generate`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from shared.bus.base import Bus
from shared.errors import InvalidField
from trine.asking import AsJson, Model, Nats, ask
from trine.attended import attended
from trine.completion import Completion
from trine.console import reported
from trine.plain import plain
from trine.request_options import with_request_options


@reported
@with_request_options
def generate(
    fields: dict[str, Any],
    prompt: Annotated[str, typer.Argument(help="The message of one chat turn; - reads it from standard input.")],
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    nats: Nats = None,
    model: Model = None,
    top_logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities, and those of so many likely tokens.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask a running fleet, and print the answer as it comes."""
    if raw and system is not None:
        raise InvalidField("--system needs a chat; leave out --raw", field="system")
    if top_logprobs is not None:
        if not as_json:
            raise InvalidField("--top-logprobs: they are shown with --json alone", field="top_logprobs")
        fields |= {"logprobs": True, "top_logprobs": top_logprobs}
    text = sys.stdin.read() if prompt == "-" else prompt
    chat = [{"role": "system", "content": system}] if system is not None else []
    asked: dict[str, Any] = {"prompt": text} if raw else {"messages": [*chat, {"role": "user", "content": text}]}
    show = plain if sys.stdout.isatty() else str

    async def answer(bus: Bus, name: str) -> Completion:
        from trine.client import Client

        async with Client(model=name, bus=bus) as client, client.stream(**asked, **fields) as stream:
            async for delta in attended(bus, stream):
                if not as_json:
                    sys.stdout.write(show(delta.text))
                    sys.stdout.flush()
        return stream.completion

    done = ask(nats, model, answer)
    print(json.dumps({**done.as_dict(), **_logprobs(done)}) if as_json else "")


def _logprobs(done: Completion) -> dict[str, Any]:
    if not done.logprobs:
        return {}
    tokens = [
        {
            "token_id": token,
            "logprob": own.logprob,
            "top": [{"token_id": i, "logprob": p} for i, p in zip(own.top_ids, own.top_logprobs, strict=True)],
        }
        for token, own in zip(done.token_ids, done.logprobs, strict=True)
    ]
    return {"logprobs": tokens}
