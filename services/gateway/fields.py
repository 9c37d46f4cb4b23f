"""Fields of OpenAI's API, and of vLLM's beyond it, that Trine does not act upon.

One that would change the answer is refused by name, unless its value asks for what is done anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.errors import InvalidField

HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
)
"""They change no token of the answer, whatever they say."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""By name: the values that ask for nothing special."""
MAX_NAME = 64


def refuse_unsupported(given: Mapping[str, Any], path: str = "") -> None:
    """Of fields that no request model has. Raises InvalidField for the first that cannot be heeded."""
    for name, value in given.items():
        field = f"{path}{name[:MAX_NAME]}"
        if value is None or name in HARMLESS:
            continue
        if name not in UNSUPPORTED:
            raise InvalidField(f"{field}: there is no such field", field=field)
        if not any(type(value) is type(plain) and value == plain for plain in UNSUPPORTED[name]):
            raise InvalidField(f"{field}: not supported yet", field=field)
