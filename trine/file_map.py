"""The page of all source files, printed from their own first sentences: which file does what.

python -m trine.file_map > docs/files.md
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "services/prefill": "The prefill worker: prompts to KV blocks.",
    "services/decode": "The decode worker: requests to tokens.",
    "services/drafter": "The drafter: guesses for decode workers.",
    "services/drafter/sources": "Where a drafter's guesses come from.",
    "services/gateway": "The gateway: OpenAI's API and the page.",
    "shared": "What all services stand on.",
    "shared/messages": "What is said on NATS.",
    "shared/bus": "NATS: control messages, bulk bytes, and a bus in memory for tests.",
    "shared/cache": "KV blocks: names, pool, tiers, who computes what.",
    "shared/engine": "The model: forward passes over paged KV.",
    "shared/engine/codecs": "How keys and values become bytes.",
    "shared/kernels": "The GPU's kernels in Triton, each beside its reference in torch.",
    "shared/sampling": "Logits to tokens, and forms that answers must have.",
    "trine": "The command line, the Python client, `trine up`, and pages written from the code.",
    "examples": "Programs that use a fleet.",
    "deploy": "Inside containers.",
    "benchmarks": "Measurements, each a program.",
    "benchmarks/gpu": "What `benchmarks.gpu_check` runs.",
    "training/drafter": "How the draft head that ships was trained.",
}
INTRODUCTION = """\
# Which file does what

Printed from the files' own first sentences by `python -m trine.file_map`; a test compares. How they work together is in
[architecture](architecture.md).

Tests: `tests/unit` has pure ones, `tests/integration` real workers on a real NATS server, `tests/cases` failures that
users of such systems met elsewhere, `tests/contract` what both buses promise, `tests/gateway` HTTP, `tests/kernels`
kernels against references, `tests/e2e` whole fleets, `tests/compose` containers, `tests/chaos` faults against an
oracle, `tests/fuzz` hostile bytes.
"""


def page(root: Path = ROOT) -> str:
    """Markdown."""
    parts = [INTRODUCTION]
    for folder, meaning in FOLDERS.items():
        rows = [f"| `{path.name}` | {sentence(path)} |" for path in files(root / folder)]
        parts.append("\n".join([f"## {folder}", "", meaning, "", "| file | |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")


def sentence(path: Path) -> str:
    """The first of the file's docstring, as a cell of a table; raises ValueError for a file without."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    if not text:
        raise ValueError(f"{path} does not say what it is for")
    first = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", first)[0].replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
