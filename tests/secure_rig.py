"""A nats-server with the configuration of deploy/secure, logins of its users, and a fleet whose workers have theirs."""

from __future__ import annotations

import os
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from services.decode.service import DecodeWorker
from services.drafter.service import DrafterWorker
from services.prefill.service import PrefillWorker
from shared.bus.embedded import EmbeddedNats
from shared.bus.login import Login
from shared.bus.nats import NatsBus
from shared.config import DEFAULT_MODEL
from shared.engine.base import StepEngine
from shared.subjects import Subjects
from tests.nats_fleet import WAIT_S, NatsFleet
from trine.access import ROLES, variable
from trine.client import Client

SECURE = Path(__file__).parents[1] / "deploy" / "secure"
TENANTS = ("default", "acme", "globex")
USERS = (*ROLES, *TENANTS)
SUBJECTS = Subjects(DEFAULT_MODEL)
"""Of the model that the shipped users are for."""


class Secure:
    """A running server. `folder` has the certificates."""

    def __init__(self, server: EmbeddedNats, folder: Path) -> None:
        self.server = server
        self.url = server.url
        self.folder = folder
        self.tls = ssl.create_default_context(cafile=folder / "ca.pem")

    def login(self, user: str) -> Login:
        return Login(user, f"pw-of-{user}", self.tls)

    async def connect(self, user: str, name: str = "test") -> NatsBus:
        return await NatsBus.connect(self.url, name=name, login=self.login(user), wait=WAIT_S)

    def client(self, user: str, tenant: str | None = None) -> Client:
        return Client(self.url, DEFAULT_MODEL, tenant=tenant or user, login=self.login(user))

    def env(self, user: str) -> dict[str, str]:
        """Settings of a process that is this user."""
        return {
            "TRINE_NATS_URL": self.url,
            "TRINE_NATS_USER": user,
            "TRINE_NATS_PASSWORD": f"pw-of-{user}",
            "TRINE_NATS_CA": str(self.folder / "ca.pem"),
        }


@contextmanager
def secure_server(folder: Path, tls: str = "", hosts: tuple[str, ...] = ("localhost", "127.0.0.1")) -> Iterator[Secure]:
    """`tls`: what else its TLS block shall say. `hosts`: those that its certificate is for."""
    certificates(folder, *hosts)
    env = {variable(user): f"pw-of-{user}" for user in USERS}
    env |= {"TRINE_NATS_SERVER_CERT": f"{folder}/server.pem", "TRINE_NATS_SERVER_KEY": f"{folder}/server.key"}
    block = (SECURE / "tls.conf").read_text().replace("tls {", f"tls {{ {tls}", 1)
    with mock.patch.dict(os.environ, env):
        server = EmbeddedNats(config=f"{block}\n{(SECURE / 'users.conf').read_text()}")
        with server:
            yield Secure(server, folder)


def certificates(folder: Path, *arguments: str) -> None:
    subprocess.run([SECURE / "certificates.sh", folder, *arguments], check=True, timeout=30)


class SecureFleet(NatsFleet):
    """Workers are named by their roles, and log in as these."""

    def __init__(self, secure: Secure) -> None:
        super().__init__(secure.url)
        self._secure = secure

    async def __aenter__(self) -> SecureFleet:
        await super().__aenter__()
        return self

    async def decode(self, name: str = "decode-1", engine: StepEngine | None = None, **overrides: Any) -> DecodeWorker:
        return await super().decode(name, engine, model_name=DEFAULT_MODEL, **overrides)

    async def prefill(
        self, name: str = "prefill-1", engine: StepEngine | None = None, **overrides: Any
    ) -> PrefillWorker:
        return await super().prefill(name, engine, model_name=DEFAULT_MODEL, **overrides)

    async def drafter(self, name: str = "drafter-1", *args: Any, **overrides: Any) -> DrafterWorker:
        return await super().drafter(name, *args, model_name=DEFAULT_MODEL, **overrides)

    async def _connect(self, name: str, *purposes: str) -> None:
        for purpose in purposes or ("control", "bulk"):
            self._spare.append(await self._secure.connect(name.partition("-")[0], f"{name}/{purpose}"))
