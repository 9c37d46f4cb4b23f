"""`python -m benchmarks.soak_model FOLDER` writes a random model of a few thousand weights, with a tokenizer of bytes.

In a process of its own, so that the one which measures does not load torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.tiny_recipe import write_target

if __name__ == "__main__":
    write_target(Path(sys.argv[1]))
