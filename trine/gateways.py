"""Where a fleet's gateways listen, and whether they answer. The gateway itself is `services.gateway`."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shared.errors import ConfigError, Unavailable

PACKAGES = ("fastapi", "httptools", "prometheus_client", "uvicorn")
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
POLL_S = 0.1
ASK_S = 5.0
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    @property
    def url(self) -> str:
        """As somebody on this machine reaches it."""
        host = _EVERYWHERE.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        return {"TRINE_HOST": self.host, "TRINE_PORT": str(self.port)}


def addresses(count: int, env: Mapping[str, str]) -> list[Address]:
    """Of `count` gateways: TRINE_PORT and those after it, or any free ones for port 0. Raises ConfigError.

    What `env` says comes before what this process's environment says.
    """
    if not count:
        return []
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        told = f"the gateway needs {', '.join(missing)}: pip install 'trine[gateway]', or --gateway 0 for none"
        raise ConfigError(told, field="gateway")
    given = {**os.environ, **env}
    host, port = given.get("TRINE_HOST", DEFAULT_HOST), given.get("TRINE_PORT", str(DEFAULT_PORT))
    if not (port.isdecimal() and int(port) + count <= 1 << 16):
        raise ConfigError(f"TRINE_PORT: {port!r:.20} is no port with room for {count}", field="port")
    return [_bindable(host, int(port) and int(port) + i) for i in range(count)]


def _bindable(host: str, port: int) -> Address:
    """Raises ConfigError where nobody can listen there now."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return Address(host, int(probe.getsockname()[1]))
    except OSError as error:
        told = f"the gateway cannot listen on {host}:{port} ({error.strerror})"
        raise ConfigError(f"{told}; give another --host or another --port, or --gateway 0", field="port") from None


def await_gateways(urls: list[str], timeout: float, failed: Callable[[], str | None]) -> None:
    """Returns when all would take a request. Raises Unavailable after `timeout` seconds, or when `failed` says why."""
    deadline = time.monotonic() + timeout
    for url in urls:
        while why := _trouble(url):
            if reason := failed():
                raise Unavailable(reason)
            if time.monotonic() > deadline:
                raise Unavailable(f"the gateway at {url} is not ready after {timeout:g} s: {why}")
            time.sleep(POLL_S)


def _trouble(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=ASK_S):
            return ""
    except urllib.error.HTTPError as refused:
        return _reason(refused)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(error)


def _reason(refused: urllib.error.HTTPError) -> str:
    """What the gateway says; the status of somebody else who has the port."""
    try:
        return str(json.load(refused)["reason"])
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        return str(refused)
