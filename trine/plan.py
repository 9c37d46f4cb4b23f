"""How to deploy a model for a load: how many workers of which kind, which techniques, and when NATS is not enough.

Pure: numbers in, numbers and sentences out (`trine/plan_advice.py`). Without drafts, more load and earlier first
tokens never mean fewer workers, where the targets can be met.
"""

from __future__ import annotations

from dataclasses import replace

from shared.errors import InvalidField
from trine.plan_cost import Costs
from trine.plan_design import LOCAL_TOKENS, Plan, designed
from trine.plan_hardware import Hardware
from trine.plan_load import Load
from trine.plan_model import CODECS, ModelShape

AUTO = ("none", "int8")
"""Of codecs, those that are chosen without being asked for: `int8` is hard to tell from `none`."""


def plan(model: ModelShape, hardware: Hardware, load: Load, codec: str = "auto") -> Plan:
    """Raises InvalidField for numbers that make no sense, or a codec that is none."""
    load.check()
    if codec != "auto" and codec not in CODECS:
        raise InvalidField(f"--kv-codec: auto, {', '.join(CODECS)}", field="kv_codec")
    names = AUTO if codec == "auto" else (codec,)
    # A codec is worth it when it saves workers, or servers; of equals the first, which changes least.
    return min((_best(Costs(model, hardware, name), load) for name in names), key=lambda one: one.rank)


def by_codec(found: Plan) -> list[Plan]:
    """The best with each codec, for comparison."""
    return [_best(replace(found.costs, codec=codec), found.load) for codec in CODECS]


def by_roles(costs: Costs, load: Load) -> list[Plan]:
    """Without prefill workers, and with them where they would be asked."""
    return [designed(costs, load, apart=apart) for apart in (False, True) if not apart or load.computed > LOCAL_TOKENS]


def _best(costs: Costs, load: Load) -> Plan:
    """Of equals the one without prefill workers, which is simpler."""
    return min(by_roles(costs, load), key=lambda one: one.rank)
