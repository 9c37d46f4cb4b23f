#!/bin/sh
# `prefill`, `decode`, `drafter` or `gateway` runs that service; anything else is run as it is (`trine cache ls`).
set -eu
# What this container logs in with, where a file says it (trine/credentials.py): variables, one a line.
if [ -r /run/trine/credentials ]; then
  set -a
  . /run/trine/credentials
  set +a
fi
case "${1:-}" in
  prefill | decode | drafter | gateway)
    role=$1
    shift
    # The gateway tells the texts of tokens by the tokenizer of weights that a worker has converted into a shared volume.
    if [ "$role" = gateway ] && [ -z "${TRINE_TOKENIZER:-}" ]; then
      for folder in "${TRINE_CACHE_DIR:-/var/cache/trine}/models/${TRINE_MODEL:-smollm2-135m-instruct}"-*; do
        [ ! -r "$folder/tokenizer.json" ] || export TRINE_TOKENIZER="$folder"
      done
    fi
    # The container's own name tells replicas apart, in logs, in beats and in the health check.
    TRINE_WORKER="${TRINE_WORKER:-$role-$(hostname)}"
    export TRINE_WORKER
    exec python -m "services.$role" "$@"
    ;;
  *) exec "$@" ;;
esac
