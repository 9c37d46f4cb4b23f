"""One target under atheris: `python -m tests.fuzz.one TARGET [libFuzzer's options] CORPUS`."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["shared"]):
    from tests.fuzz.targets import target

    chosen = target(sys.argv[1])


def main() -> None:
    atheris.Setup([sys.argv[0], *sys.argv[2:]], chosen.check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
