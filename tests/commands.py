"""The command line as a user runs it: a process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIPE = asyncio.subprocess.PIPE


class Run:
    """A command that has ended."""

    def __init__(self, code: int, out: bytes, err: bytes) -> None:
        self.code, self.out, self.err = code, out.decode(), err.decode()
        assert "Traceback" not in self.err + self.out


async def start(
    *arguments: str, terminal: int = PIPE, env: Mapping[str, str] | None = None
) -> asyncio.subprocess.Process:
    """`terminal`: what it reads from and writes to, instead of pipes."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRINE_")}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "trine.cli", *arguments),
        cwd=ROOT,
        env={**clean, "COLUMNS": "200", **(env or {})},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )


async def run(*arguments: str, stdin: str = "", **env: str) -> Run:
    process = await start(*arguments, env=env)
    async with asyncio.timeout(60):
        out, err = await process.communicate(stdin.encode())
    return Run(process.returncode or 0, out, err)
