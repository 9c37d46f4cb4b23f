"""`python -m services.gateway`: OpenAI's API over HTTP, for the models that are served on NATS."""

from __future__ import annotations

import sys

import structlog
from pydantic import ValidationError

from services.gateway.config import GatewaySettings
from services.gateway.gateway import Gateway
from services.gateway.server import GatewayServer
from shared import telemetry, tracing
from shared.errors import ConfigError
from shared.heap import keep_what_is_loaded

TRACES_S = 2.0
"""How long the last traces may take to be sent."""
EXIT_CONFIG = 2  # a restart cannot help


def main() -> None:
    """Serve until SIGTERM. Exits with 0 after draining, 2 for a configuration that cannot work, 1 for anything else."""
    log = structlog.get_logger()
    try:
        settings = GatewaySettings()
        telemetry.configure(settings.log_level, settings.log_format, role="gateway")
        gateway = Gateway(settings)
        tracing.configure(settings, "gateway", gateway.name)
    except ValidationError as error:
        telemetry.configure(role="gateway")
        for wrong in error.errors(include_url=False, include_input=False):
            variable = "TRINE_" + ".".join(str(part) for part in wrong["loc"]).upper()
            log.error("cannot start", setting=variable, reason=wrong["msg"])
        sys.exit(EXIT_CONFIG)
    except ConfigError as error:
        log.error("cannot start", reason=error.message)
        sys.exit(EXIT_CONFIG)
    server = GatewayServer(gateway)
    keep_what_is_loaded()
    server.run()
    tracing.tracer().close(TRACES_S)
    sys.exit(EXIT_CONFIG if gateway.failure else 0)


if __name__ == "__main__":
    main()
