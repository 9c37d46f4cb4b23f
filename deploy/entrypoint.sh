#!/bin/sh
# `prefill`, `decode` or `drafter` runs that worker; anything else is run as it is (`trine status`).
set -eu
case "${1:-}" in
  prefill | decode | drafter)
    role=$1
    shift
    # The container's own name tells replicas apart, in logs, in beats and in the health check.
    TRINE_WORKER="${TRINE_WORKER:-$role-$(hostname)}"
    export TRINE_WORKER
    exec python -m "services.$role" "$@"
    ;;
  *) exec "$@" ;;
esac
