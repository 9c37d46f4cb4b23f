"""What Python's garbage collector looks at."""

from __future__ import annotations

import gc


def keep_what_is_loaded() -> None:
    """Everything that exists by now stays as long as the process: full collections leave it out from here on.

    torch and a model are 430,000 objects; looking through them takes 0.2 s, in which every stream stands still.
    """
    gc.collect()
    gc.freeze()
