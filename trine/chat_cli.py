"""`trine chat`: questions from the terminal, answers as they come."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared.bus.base import Bus
from shared.errors import TrineError
from trine.asking import Model, Nats, connected
from trine.attended import attended
from trine.chat import Conversation
from trine.completion import Completion
from trine.console import reported
from trine.plain import name, plain
from trine.request_options import with_request_options

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

PROMPT = "> "


@reported
@with_request_options
def chat(
    fields: dict[str, Any],
    system: Annotated[str, typer.Option(help="System message of the chat.")] = "",
    nats: Nats = None,
    model: Model = None,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, Ctrl-D leaves; /help lists commands.

    Without a terminal each line of standard input is a question.
    """
    from anyio.from_thread import start_blocking_portal

    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - lines can be edited, and earlier ones found again
    conversation = Conversation(system)
    # NATS is answered by a thread of its own while this one waits for somebody to type.
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(connected(nats, model)) as (bus, served):
        if terminal:
            _say(f"{name(served)}; /help lists commands, Ctrl-D leaves")
        for line in _lines(terminal):
            if line.startswith("/"):
                if (said := conversation.command(line)) is None:
                    return
                _say(said)
                continue
            _turn(portal, bus, served, conversation, line, fields)


def _turn(portal: BlockingPortal, bus: Bus, model: str, talk: Conversation, question: str, fields: Any) -> None:
    """Raises nothing that ends the conversation."""
    parts: list[str] = []
    show = plain if sys.stdout.isatty() else str

    def heard(text: str) -> None:
        parts.append(text)
        sys.stdout.write(show(text))
        sys.stdout.flush()

    answer = portal.start_task_soon(_answer, bus, model, talk.asked(question), fields, heard)
    done: Completion | None = None
    try:
        done = _awaited(answer)
    except TrineError as error:
        _say(f"\ntrine: {error.message}" if parts else f"trine: {error.message}")
    else:
        print("" if done else " [stopped]")
    talk.answered(question, "".join(parts), done)


def _awaited(answer: Future[Completion]) -> Completion | None:
    """None for one that Ctrl-C stopped; the workers have been told when this returns."""
    try:
        return answer.result()
    except KeyboardInterrupt:
        answer.cancel()
        with contextlib.suppress(CancelledError, TrineError):
            return answer.result()
        return None


async def _answer(bus: Bus, model: str, messages: Any, fields: Any, heard: Callable[[str], None]) -> Completion:
    from trine.client import Client

    async with Client(model=model, bus=bus) as client, client.stream(messages=messages, **fields) as stream:
        async for delta in attended(bus, stream):
            heard(delta.text)
    return stream.completion


def _lines(terminal: bool) -> Iterator[str]:
    """What is typed, without empty lines; Ctrl-C throws away the line that is being typed."""
    while True:
        try:
            line = input(PROMPT if terminal else "").strip()
        except KeyboardInterrupt:
            if not terminal:
                raise
            print()
            continue
        except EOFError:
            if terminal:
                print()
            return
        if line:
            yield line


def _say(text: str) -> None:
    typer.echo(plain(text), err=True)  # there may be names and reasons in it that come from the bus
