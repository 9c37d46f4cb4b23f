"""What the commands show: errors in one line, workers' logs, progress. All of it on stderr; stdout is for answers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from shared.errors import BusDisconnected, TrineError
from trine.plain import plain
from trine.process import LogSink

P = ParamSpec("P")

COLOURS = {"prefill": "cyan", "decode": "green", "drafter": "magenta", "gateway": "blue", "supervisor": "yellow"}
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """Ends a command that fails with one clear line and exit code 1, one that Ctrl-C ends with 130; no tracebacks."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:
            raise
        except BusDisconnected as error:
            fail(f"{error.message}; start one with `trine up`, or say where it is with --nats")
        except TrineError as error:
            fail(error.message)
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:  # the reader of our output has left
            sys.stdout = None  # so that the interpreter does not flush it again
            raise typer.Exit(EXIT_FAILED) from None
        except OSError as error:
            fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
        except Exception as error:  # a bug, but a user can do nothing with a traceback
            fail(f"unexpected {type(error).__name__}: {error}")

    return run


def fail(message: str) -> None:
    typer.echo(f"trine: {plain(message)}", err=True)  # there may be names in it that others chose
    raise typer.Exit(EXIT_FAILED) from None


def log_printer(console: Console) -> LogSink:
    """Prints workers' lines: coloured and prefixed on a terminal; elsewhere JSON passes as it is."""

    def show(name: str, line: str) -> None:
        if not console.is_terminal:
            console.file.write(f"{line}\n" if line.startswith("{") else f"{name} | {line}\n")
            console.file.flush()
            return
        prefix = Text(f"{name:>10} │ ", style=COLOURS.get(name.rsplit("-", 1)[0], "white"))
        console.print(prefix + Text.from_ansi(line), soft_wrap=True)

    return show


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[str, float], None]]:
    """A callback for (stage, 0 to 1): a bar on a terminal, elsewhere one line per stage."""
    if not console.is_terminal:
        stages: set[str] = set()

        def line(stage: str, done: float) -> None:
            if stage not in stages:
                stages.add(stage)
                console.print(stage, soft_wrap=True)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0, visible=False)
        yield lambda stage, done: bar.update(task, description=stage, completed=done, visible=True)
