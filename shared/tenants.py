"""Whose request it is.

A tenant's name is part of the subjects that its requests, events and cancels use, where the NATS server enforces by its
users' permissions who may publish and read. It is never a field of a message.
"""

from __future__ import annotations

import re

DEFAULT_TENANT = "default"
"""Of subjects that name no tenant."""
TENANT_PATTERN = "^[A-Za-z0-9_-]{1,64}$"
MAX_KEY = 64 + 1 + 128


def is_tenant(name: str) -> bool:
    """1 to 64 of A-Z a-z 0-9 - _: the same text in a subject, a log, a setting and a permission."""
    return re.fullmatch(TENANT_PATTERN, name) is not None


def request_key(tenant: str, request_id: str) -> str:
    """Names one request among those of all tenants: ids are their own. No tenant's name has a `/`."""
    return f"{tenant}/{request_id}"
