"""Servers of the default model on this machine, each started as its own documentation says: Trine and its peers.

All have the same weights in fp32, all of this process's cores, and speak OpenAI's API. What is not installed is left
out, and the reason is told. `tuned` is what its documentation offers for streams that shall not stop while long
prompts come in.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks import machine
from benchmarks.peers_process import READY_S, Missing, answering, asked, beside, last_words, process
from benchmarks.peers_weights import f32_gguf
from shared.bus.embedded import tied
from shared.config import DEFAULT_MODEL
from shared.engine.weights import resolve
from trine.bench_http import Extra, HttpTarget
from trine.supervisor import Fleet

Variant = Literal["default", "tuned"]
_ENDLESS: Extra = lambda most: {"ignore_eos": True}  # noqa: E731
CONTEXT = 4096
TIMEOUT_S = 300.0
SLOTS = 16


@dataclass(frozen=True, slots=True)
class Server:
    """One that answers, of what `settings` says in words; `extra` makes its answers as long as they may be."""

    name: str
    version: str
    settings: str
    url: str
    model: str
    pids: Sequence[int]
    extra: Extra
    said: Callable[[], str]
    """The last of what it wrote."""

    def target(self) -> HttpTarget:
        return HttpTarget(
            self.url, self.model, timeout=TIMEOUT_S, extra=lambda most: {"temperature": 0.0, **self.extra(most)}
        )

    def failed(self, error: Exception) -> str:
        return f"{error}; it said last: {self.said()}"

    @property
    def pss_mb(self) -> float:
        """Memory of its processes and their children; shared pages count by share."""
        return sum(map(machine.pss_mb, machine.family(self.pids)))

    @property
    def cpu_seconds(self) -> float:
        return sum(map(machine.cpu_seconds, machine.family(self.pids)))


# Trine

TRINE: Mapping[Variant, tuple[Mapping[str, int], Mapping[str, str]]] = {
    "default": ({"prefill": 1, "decode": 1}, {}),
    "tuned": (
        {"prefill": 1, "decode": 1},
        {"TRINE_STEP_TOKENS": "36", "TRINE_PREFILL_PATIENCE_S": "60", "TRINE_HOST_CACHE_MB": "0"},
    ),
}
"""Workers, and their settings. Tuned: however many prompts wait, they wait for the prefill worker, on a core of its
own, and what is left of a prompt for the decode worker takes little of a step. Blocks go through NATS alone: the second
copy in shared memory is for more workers than these."""


@contextmanager
def trine(variant: Variant, options: argparse.Namespace) -> Iterator[Server]:
    counts, env = TRINE[variant]
    counts = {**counts, **({"drafter": options.drafters} if options.drafters else {})}
    settings = [*(f"{count} {role}" for role, count in counts.items()), *(f"{k}={v}" for k, v in env.items())]
    own = {"TRINE_MODEL": DEFAULT_MODEL, "TRINE_PORT": "0", **env}
    with Fleet({**counts, "gateway": 1}, env=own) as fleet:
        fleet.wait_ready(READY_S)
        pids = [*fleet.pids().values(), *([fleet.nats.pid] if fleet.nats and fleet.nats.pid else [])]
        yield Server(
            "Trine",
            "this tree",
            ", ".join(settings),
            fleet.gateways[0],
            fleet.model,
            pids,
            lambda most: {"min_tokens": most},
            lambda: " | ".join(fleet.tail("decode-1")[-3:]),
        )


# vLLM

VLLM: Mapping[Variant, Sequence[str]] = {
    "default": (),
    "tuned": ("--max-num-batched-tokens", "128", "--block-size", "32"),
}


@contextmanager
def vllm(variant: Variant, options: argparse.Namespace) -> Iterator[Server]:
    interpreter = options.vllm_python or beside(shutil.which("vllm"))
    if not interpreter:
        raise Missing("not on PATH; name the Python that has it with --vllm-python")
    own_name, version = _installed_vllm(interpreter)
    port, cores = machine.free_port(), sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="trine-peers-") as folder:
        stub = [] if own_name == "vllm" else _named_vllm(Path(folder), version)
        own = {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(stub),
        }
        command = [interpreter, "-m", "vllm.entrypoints.cli.main", "serve", str(resolve(DEFAULT_MODEL))]
        command += ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--served-model-name", DEFAULT_MODEL]
        command += ["--host", "127.0.0.1", "--port", str(port), *VLLM[variant]]
        yield from _served("vLLM", version, command, own, port, VLLM[variant], _ENDLESS)


def _installed_vllm(interpreter: str) -> tuple[str, str]:
    """(name of the package, version). Raises Missing."""
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    packages = json.loads(asked(interpreter, code))
    for name in ("vllm", "vllm-cpu"):
        if name in packages:
            return name, packages[name]
    raise Missing(f"neither vllm nor vllm-cpu is installed for {interpreter}")


def _named_vllm(folder: Path, version: str) -> list[str]:
    """A folder for PYTHONPATH where vLLM, installed under another name, finds its own version.

    `cpu` in it makes it choose that platform.
    """
    known = version if "cpu" in version else f"{version}+cpu"
    info = folder / f"vllm-{known}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {known}\n")
    return [str(folder)]


# llama.cpp

LLAMA: Mapping[Variant, Sequence[str]] = {"default": (), "tuned": ("-b", "128", "-ub", "128")}


@contextmanager
def llama_cpp(variant: Variant, options: argparse.Namespace) -> Iterator[Server]:
    binary = options.llama_server or shutil.which("llama-server")
    if not binary:
        raise Missing("llama-server is not on PATH; name it with --llama-server")
    told = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=60, check=False)
    version = next((line for line in (told.stderr + told.stdout).splitlines() if line.startswith("version")), "unknown")
    port, cores = machine.free_port(), len(os.sched_getaffinity(0))
    command = [binary, "-m", str(f32_gguf()), "-t", str(cores), "-np", str(SLOTS), "-c", str(CONTEXT * SLOTS)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--alias", DEFAULT_MODEL, *LLAMA[variant]]
    yield from _served("llama.cpp", version, command, {}, port, LLAMA[variant], _ENDLESS)


# transformers

TRANSFORMERS: Mapping[Variant, Sequence[str]] = {
    "default": (),
    "tuned": ("--continuous-batching", "--cb-max-memory-percent", "0.1"),
}


@contextmanager
def transformers(variant: Variant, options: argparse.Namespace) -> Iterator[Server]:
    """Its own server. By default it answers one request after another."""
    interpreter = options.transformers_python or sys.executable
    version = asked(interpreter, "import transformers; print(transformers.__version__)")
    port, folder = machine.free_port(), str(resolve(DEFAULT_MODEL))
    code = "from transformers.cli.transformers import main; main()"
    command = [interpreter, "-c", code, "serve", folder, "--dtype", "float32", "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", str(port), *TRANSFORMERS[variant]]
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    endless = json.dumps({"do_sample": False, "eos_token_id": -1, "pad_token_id": 2})
    extra: Extra = lambda most: {"generation_config": endless, "stream_options": None}  # noqa: E731
    yield from _served("transformers", version, command, own, port, TRANSFORMERS[variant], extra, model=folder)


PEERS = {"vllm": vllm, "llama.cpp": llama_cpp, "transformers": transformers}


def add_options(parser: argparse.ArgumentParser, only: str = "--only") -> None:
    parser.add_argument("--vllm-python", metavar="PATH", help="the Python of an environment with vLLM")
    parser.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server")
    parser.add_argument("--transformers-python", metavar="PATH", help="another Python than this one for transformers")
    parser.add_argument(only, nargs="*", choices=sorted(PEERS), help="these peers alone")


@contextmanager
def started(
    variant: Variant, options: argparse.Namespace, without: Mapping[str, str] | None = None
) -> Iterator[tuple[list[Server], dict[str, str]]]:
    """Trine, and the peers that are there; why others are not, by name. All run until the end.

    `without`: peers that are not to be started, and why.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end all servers
    missing = dict(without or {})
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(trine(variant, options))]
        wanted = options.only if options.only is not None else list(PEERS)
        for name in (name for name in wanted if name not in missing):
            _say(f"starting {name} ({variant})")
            try:
                servers.append(stack.enter_context(PEERS[name](variant, options)))
            except (Missing, OSError, subprocess.SubprocessError) as error:
                missing[name] = str(error)
                _say(f"{name} is left out: {error}")
        yield servers, missing


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _served(
    name: str,
    version: str,
    command: Sequence[str],
    own: Mapping[str, str],
    port: int,
    settings: Sequence[str],
    extra: Extra,
    *,
    model: str = DEFAULT_MODEL,
) -> Iterator[Server]:
    inherited = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    with process(tied(list(command)), {**inherited, **own}) as (pid, said):
        url = f"http://127.0.0.1:{port}"
        answering(f"{url}/health", pid, said)
        yield Server(
            name, version, " ".join(settings) or "as it comes", url, model, [pid], extra, lambda: last_words(said)
        )
