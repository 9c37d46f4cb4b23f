"""Pure cores, the bus, the cache and the client import where torch and transformers do not exist.

import-linter reads the imports in the source (`make lint`); this runs them, package `__init__` files included.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = (
    "shared.actor",
    "shared.cache.blocks",
    "shared.cache.naming",
    "shared.codec",
    "shared.config",
    "shared.engine.span",
    "shared.errors",
    "shared.job_actor",
    "shared.lifecycle",
    "shared.messages",
    "shared.sampling.stopping",
    "shared.subjects",
    "shared.telemetry",
    "services.decode.scheduler",
    "services.drafter.scheduler",
    "services.prefill.scheduler",
    "trine.client",
)
CONTROLS = ("torch", "torch.nn", "transformers")


def _found(pattern: str) -> set[str]:
    files = (path.relative_to(ROOT).with_suffix("") for path in ROOT.glob(pattern))
    return {".".join(file.parts) for file in files if file.name != "__init__"}


PATTERNS = (
    "shared/bus/*.py",
    "shared/cache/*.py",
    "services/*/config.py",
    "services/*/scheduler.py",
    "services/gateway/[a-z]*.py",
)
PURE = sorted(set(NAMED).union(*map(_found, PATTERNS)))

# Imports each module named in argv behind a finder that refuses torch, and prints {module: what went wrong}.
PROBE = """
import importlib, json, sys

BLOCKED = {"torch", "transformers"}
asked = []

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            asked.append(name)
            raise ImportError(f"blocked: {name}")

sys.meta_path.insert(0, Blocker())
verdicts = {}
for module in sys.argv[1:]:
    asked.clear()
    try:
        importlib.import_module(module)
        verdicts[module] = f"tried to import {asked[0]}" if asked else ""
    except Exception as error:
        verdicts[module] = f"{type(error).__name__}: {error}"
print(json.dumps(verdicts))
"""


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *PURE, *CONTROLS],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("module", PURE)
def test_imports_without_torch(module: str, verdicts: dict[str, str]) -> None:
    assert verdicts[module] == ""


@pytest.mark.parametrize("module", CONTROLS)
def test_the_blocker_blocks(module: str, verdicts: dict[str, str]) -> None:
    assert verdicts[module].startswith("ImportError: blocked: ")
