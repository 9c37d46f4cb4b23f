"""What pip installs into an image, from pyproject.toml beside this file: `requirements.py worker|worker-cuda|gateway`.

Nobody but an engine needs ENGINE, and the gateway has none: an image without torch is a tenth of the size.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ENGINE = {
    "torch",
    "transformers",
    "gguf",
    "huggingface_hub",
    "safetensors",
    "numpy",
    "jinja2",
    "filelock",
    "apache-tvm-ffi",
}
APART = {"xgrammar"}
"""Installed by itself on CPUs: it asks for Triton, which is larger than the whole image and which only GPUs need."""
EVERYWHERE = ("otel", "nkeys")
"""What a deployment turns on by a setting: traces, and logging in by key."""
EXTRAS = {"worker": EVERYWHERE, "worker-cuda": ("gpu", *EVERYWHERE), "gateway": ("gateway", *EVERYWHERE)}


def requirements(image: str, pyproject: Path) -> list[str]:
    """Raises KeyError for an image that there is not."""
    project = tomllib.loads(pyproject.read_text())["project"]
    found: list[str] = [*project["dependencies"]]
    for extra in EXTRAS[image]:
        found += project["optional-dependencies"][extra]
    left_out = {"worker": APART, "worker-cuda": set[str](), "gateway": ENGINE | APART}[image]
    return [line for line in found if name_of(line) not in left_out]


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower()


if __name__ == "__main__":
    print(*requirements(sys.argv[1], Path("pyproject.toml")), sep="\n")
