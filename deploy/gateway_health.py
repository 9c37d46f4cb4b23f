"""Exit 0 if this container's gateway would take a request now; else 1, saying why it would not."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request

WAIT_S = 5.0


def main() -> int:
    address = f"http://127.0.0.1:{os.environ.get('TRINE_PORT', '8000')}/ready"
    try:
        with urllib.request.urlopen(address, timeout=WAIT_S):
            return 0
    except urllib.error.HTTPError as refused:
        print(json.load(refused).get("reason", refused), file=sys.stderr)
    except OSError as error:
        print(error, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
