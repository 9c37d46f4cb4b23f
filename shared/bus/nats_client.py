"""nats-py's client: made, and asked what only its inside knows."""

from __future__ import annotations

import asyncio
import random
import re
import ssl
from dataclasses import dataclass
from typing import Any, Protocol

from nats import errors
from nats.aio.client import PING_PROTO, Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from shared.bus.login import Login
from shared.bus.nkey import Signer
from shared.errors import BusDisconnected, ConfigError

PING_INTERVAL = 5
"""Seconds. Two pings without an answer end a connection whose server hangs."""
CONNECT_TIMEOUT = 3
FLUSH_TIMEOUT = 5.0


class NoTls(errors.Error):
    """The server offers no TLS, and we were to use it: it has heard nothing of us."""

    def __str__(self) -> str:
        return "it does not offer TLS"


class NatsClient(Client):
    """Drops a dead connection at once, and what was not sent with it. Its pings overtake nothing. Where TLS is to be
    used, it is.
    """

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # nats-py leaves it to the server, whose first words anybody on the way may have written.
        if initial_connection and self._demands_tls() and not info.get("tls_required"):
            if not info.get("tls_available"):
                raise NoTls
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    def _connect_command(self) -> bytes:
        # TLS stands by now. nats-py puts it under a protocol that does not know of it, so that asyncio would warn, on
        # stderr, of each connection that ends.
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None and writer.get_extra_info("ssl_object") is not None:
            writer._protocol._over_ssl = True
        return super()._connect_command()

    def _demands_tls(self) -> bool:
        server = self._current_server
        return "tls" in self.options or (server is not None and server.uri.scheme == "tls")

    async def _process_op_err(self, e: Exception) -> None:
        # An orderly close would first wait for a server that may never read again.
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        await super()._process_op_err(e)

    def forget_pending(self) -> None:
        """Drop what was not sent yet: its senders have been told that the connection was lost."""
        self._pending.clear()
        self._pending_data_size = 0
        self.forget_pings()

    def forget_pings(self) -> None:
        """No PONG will come: cancel what waits for one."""
        for pong in self._pongs:
            pong.cancel()
        self._pongs = []

    async def ping(self) -> asyncio.Future[bool]:
        """Done when the server has handled all that was sent before. Not to be cancelled: nats-py would stumble."""
        pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        await self._send_ping(pong)
        return pong

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        # nats-py's own goes past what waits to be sent, so its answer would say nothing about that.
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        self._pending.append(PING_PROTO)
        self._pending_data_size += len(PING_PROTO)
        await self._flush_pending()

    def use_key(self, signer: Signer) -> None:
        """Before connecting. nats-py learns a public key only together with its seed."""
        self._auth_configured = True
        self._public_nkey = signer.public

    @property
    def asks_for_credentials(self) -> bool:
        """By the server's first words. What it says later does not know of users that need none."""
        return bool(self._server_info.get("auth_required"))

    async def mute(self, sub: Subscription) -> None:
        """End the server's interest in `sub`, but still take what is on its way."""
        await self._send_unsubscribe(sub._id)


def user_headers(message: Msg) -> dict[str, str]:
    """The headers its sender gave, without those of NATS itself."""
    return {k: v for k, v in (message.headers or {}).items() if not k.startswith("Nats-")}


def status_of(message: Msg) -> int | None:
    """The code of a status message (404, 408, 503 …), None for an ordinary one."""
    code = (message.headers or {}).get("Status")
    return int(code) if code and code.isdigit() and not message.data else None


_DENIAL = re.compile(r'permissions violation for (publish|subscription) to "((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Denial:
    """What the server does not let us do. nats-py has put `subject` in lower case."""

    publish: bool
    subject: str


def denial_in(error: Exception) -> Denial | None:
    found = _DENIAL.search(str(error))
    return Denial(found[1] == "publish", found[2]) if found else None


def without_credentials(servers: list[str]) -> str:
    return ", ".join(server.rpartition("@")[2].removeprefix("nats://") for server in servers)


class Events(Protocol):
    """What a client tells its owner."""

    def on_error(self, error: Exception) -> None: ...
    def on_lost(self, client: NatsClient) -> None: ...
    def on_return(self) -> None: ...
    def on_end(self, client: NatsClient) -> None:
        """nats-py has given up on this client."""
        ...


@dataclass(slots=True)
class _Dialling:
    """How it goes. `refused` is done when the server does not take our credentials."""

    refused: asyncio.Future[None]
    no_tls: str = ""
    """Why the last server that was reached could not be spoken to."""

    def note(self, error: Exception) -> None:
        if "authorization" in str(error).lower() and not self.refused.done():
            self.refused.set_result(None)
        if isinstance(error, NoTls | ssl.SSLError):
            self.no_tls = f"; no TLS with it: {error}"


async def dial(servers: list[str], name: str, login: Login, wait: float | None, events: Events) -> NatsClient:
    """A connected client, after up to `wait` seconds (None: for ever). It reconnects by itself, for ever.

    Raises BusDisconnected when no server came, ConfigError when it refuses our credentials or the address is none.
    """
    client = NatsClient()
    loop = asyncio.get_running_loop()
    state = _Dialling(refused := loop.create_future())
    dialling = loop.create_task(_connect(client, servers, name, login, events, state))
    where = without_credentials(servers)
    try:
        async with asyncio.timeout(wait):
            await asyncio.wait({dialling, refused}, return_when=asyncio.FIRST_COMPLETED)
        if not dialling.done():
            raise ConfigError(f"NATS at {where} refuses our credentials")
        dialling.result()
    except TimeoutError:
        raise BusDisconnected(f"no NATS server at {where} within {wait:g} s{state.no_tls}") from None
    except errors.Error as error:
        raise ConfigError(f"cannot use NATS at {where}: {error}") from None
    finally:
        if not dialling.done():
            dialling.cancel()
            await client.close()
    return client


def _by_key(signer: Signer | None) -> dict[str, Any]:
    """nats-py's options for it."""
    if signer is None:
        return {}

    def sign(nonce: object) -> bytes:
        try:
            return signer.signature(nonce).encode()
        except ValueError as error:
            raise errors.Error(str(error)) from None

    return {"signature_cb": sign, "user_jwt_cb": (lambda: bytearray(signer.jwt, "ascii")) if signer.jwt else None}


async def _connect(
    client: NatsClient, servers: list[str], name: str, login: Login, events: Events, state: _Dialling
) -> None:
    async def error_cb(error: Exception) -> None:
        state.note(error)
        events.on_error(error)

    async def disconnected_cb() -> None:
        client.forget_pending()
        events.on_lost(client)

    async def reconnected_cb() -> None:
        events.on_return()

    async def closed_cb() -> None:
        events.on_end(client)

    if login.signer is not None:
        client.use_key(login.signer)
    await client.connect(
        servers=servers,
        **_by_key(login.signer),
        name=name,
        user=login.user,
        password=login.password,
        tls=login.tls,
        error_cb=error_cb,
        disconnected_cb=disconnected_cb,
        reconnected_cb=reconnected_cb,
        closed_cb=closed_cb,
        reconnect_to_server_handler=next_server,
        connect_timeout=CONNECT_TIMEOUT,
        # Differs between processes, so that not all knock at once on a server that comes up.
        reconnect_time_wait=random.uniform(0.1, 0.4),  # type: ignore[arg-type]
        max_reconnect_attempts=-1,
        ping_interval=PING_INTERVAL,
        flush_timeout=FLUSH_TIMEOUT,
    )


def next_server(servers: list[Server], _: dict[str, Any]) -> tuple[Server | None, float]:
    """Which server to try next and after how many seconds: round robin, longer and longer, never in step."""
    attempts = sum(server.reconnects for server in servers)
    delay = min(2.0, 0.05 * 2 ** min(attempts, 8)) * random.uniform(0.5, 1.5)
    return servers[attempts % len(servers)], delay
