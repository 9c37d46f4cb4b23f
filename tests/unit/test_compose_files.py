"""compose.yaml, compose.gpu.yaml and the Containerfile, as far as they can be checked without a container engine."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from deploy.requirements import ENGINE, EXTRAS, name_of, requirements
from services.decode.config import DecodeSettings
from services.drafter.config import DrafterSettings
from services.gateway.config import GatewaySettings
from services.prefill.config import PrefillSettings
from shared.config import MiB
from shared.streams import decode_streams
from shared.subjects import Subjects
from trine.credentials import OWNERS

ROOT = Path(__file__).resolve().parents[2]
WORKERS = ("prefill", "decode", "drafter")
SERVERS = {*WORKERS, "gateway", "nats"}
TOOLS = {"operator"}
SETTINGS = (DecodeSettings, DrafterSettings, GatewaySettings, PrefillSettings)
CONTAINERFILE = (ROOT / "Containerfile").read_text()


def interpolated(text: str) -> str:
    """With no variable set: what stands after `:-`."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def services(*files: str) -> dict[str, dict[str, Any]]:
    """Of these files together, as compose lays one over the other: maps are merged, all else is replaced."""
    whole: dict[str, Any] = {}
    for file in files:
        whole = merged(whole, yaml.safe_load(interpolated((ROOT / file).read_text()))["services"])
    return whole


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {k: merged(below[k], v) for k, v in above.items() if isinstance(v, dict) and isinstance(below.get(k), dict)}
    return {**below, **above, **both}


CPU = services("compose.yaml")
GPU = services("compose.yaml", "compose.gpu.yaml")


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_all_services_are_there() -> None:
    assert set(CPU) == set(GPU) == SERVERS | TOOLS | {"credentials"}
    assert {name for name, service in CPU.items() if service.get("profiles")} == TOOLS
    assert not [name for name, service in CPU.items() if "container_name" in service], (
        "replicas need names of their own"
    )


@pytest.mark.parametrize("name", sorted(SERVERS))
def test_servers_are_watched_bounded_and_end_in_order(name: str) -> None:
    service = CPU[name]
    assert service["healthcheck"]["test"] and service["restart"] == "unless-stopped"
    assert service["deploy"]["resources"]["limits"]["memory"]
    needed = {"credentials": "service_completed_successfully"} if name == "nats" else {"nats": "service_healthy"}
    conditions = {on: how["condition"] for on, how in service["depends_on"].items()}
    assert needed.items() <= conditions.items()
    if name != "nats":
        assert seconds(service["stop_grace_period"]) > float(service["environment"]["TRINE_DRAIN_S"])
    # Who publishes a port has one replica, for this machine alone.
    assert bool(service.get("ports")) == (name in ("nats", "gateway"))
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


@pytest.mark.parametrize("name", sorted({*SERVERS, *TOOLS, "credentials"}))
def test_containers_are_hardened(name: str) -> None:
    service = CPU[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    root = name == "credentials"
    assert (service.get("user") == "0:0") == root == (service.get("network_mode") == "none")
    if name == "nats":
        assert service["user"] == f"{OWNERS['nats']}:{OWNERS['nats']}"


def mounts(name: str) -> dict[str, str]:
    return {source: rest for source, _, rest in (v.partition(":") for v in CPU[name].get("volumes", ()))}


def test_each_service_mounts_its_own_credentials_alone() -> None:
    for name in SERVERS | {"operator"}:
        credentials = {volume: where for volume, where in mounts(name).items() if volume.endswith("-credentials")}
        assert credentials == {f"{name}-credentials": "/run/trine:ro"}
    assert {name for name in CPU if "secrets" in mounts(name)} == {"credentials"}
    made = {volume: where for volume, where in mounts("credentials").items() if volume.endswith("-credentials")}
    assert made == {f"{reader}-credentials": f"/credentials/{reader}" for reader in OWNERS}


@pytest.mark.parametrize("fleet", [CPU, GPU], ids=["cpu", "gpu"])
def test_settings_are_known_and_valid(fleet: dict[str, dict[str, Any]]) -> None:
    known = {f"TRINE_{field.upper()}" for kind in SETTINGS for field in kind.model_fields}
    for name, service in fleet.items():
        told = service.get("environment", {}).items()
        given = {n: "" if v is None else str(v) for n, v in told if n.startswith("TRINE_")}
        assert set(given) <= known | {"TRINE_TENANTS", "TRINE_NATS_SERVER_CERT", "TRINE_NATS_SERVER_KEY"}, name
        for kind in SETTINGS:
            fields: dict[str, Any] = {n.removeprefix("TRINE_").lower(): v for n, v in given.items()}
            kind(**{field: value for field, value in fields.items() if field in kind.model_fields})


@pytest.mark.parametrize("file", ["compose.yaml", "compose.gpu.yaml"])
def test_settings_are_text(file: str) -> None:
    """podman-compose does not lay a text over a number: with a second file it would refuse both."""
    for name, service in yaml.safe_load((ROOT / file).read_text())["services"].items():
        numbers = {k: v for k, v in service.get("environment", {}).items() if not isinstance(v, str)}
        assert not numbers, f"{name}: in quotes, please"


def test_a_full_nats_server_stays_below_its_limits() -> None:
    """The rule of docs/operations.md, by what the streams in memory may hold."""
    streams = decode_streams(Subjects("m"), DecodeSettings())
    beside = sum(stream.max_bytes for stream in streams if stream.storage == "memory")
    rule = f"GOMEMLIMIT = 1.27 × (TRINE_CACHE_BYTES + {beside // MiB} MiB) + 64 MiB"
    assert rule in (ROOT / "docs" / "operations.md").read_text("utf-8")
    nats = CPU["nats"]
    aimed = int(nats["environment"]["GOMEMLIMIT"].removesuffix("MiB"))
    most = int(nats["deploy"]["resources"]["limits"]["memory"].removesuffix("g")) * 1024
    cache = int(CPU["decode"]["environment"]["TRINE_CACHE_BYTES"])
    assert 1.27 * (cache + beside) / MiB + 64 <= aimed < most


def test_gpus_are_asked_for() -> None:
    for name in WORKERS:
        (device,) = GPU[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
        assert GPU[name]["image"] == "trine-cuda:0.1.0" and GPU[name]["volumes"] == CPU[name]["volumes"]
    assert GPU["decode"]["build"]["target"] == "worker-cuda"
    assert GPU["gateway"] == CPU["gateway"] and GPU["nats"] == CPU["nats"]


def stages() -> Iterator[tuple[str, str, str]]:
    """(name, what it starts from, its lines) of each stage of the Containerfile."""
    for text in re.split(r"^(?=FROM )", CONTAINERFILE, flags=re.M)[1:]:
        head, _, body = text.partition("\n")
        _, base, _, name = head.split()
        yield name, base, body


def test_targets_are_images_without_what_built_them() -> None:
    found = {name: (base, body) for name, base, body in stages()}
    images = {f"trine{suffix}:0.1.0": target for suffix, target in (("", "worker"), ("-cuda", "worker-cuda"))}
    images["trine-gateway:0.1.0"] = "gateway"
    built = {s["image"]: s["build"]["target"] for fleet in (CPU, GPU) for s in fleet.values() if "build" in s}
    assert built == images
    used = {s["image"] for fleet in (CPU, GPU) for s in fleet.values()}
    assert {image for image in used if image.startswith("trine")} == set(images)
    for target in images.values():
        base, body = found[target]
        assert base == "runtime" and f"USER {OWNERS['decode']}:{OWNERS['decode']}" in body
        assert ("gcc" in body) == (target == "worker-cuda") and "pip" not in body
        assert f"COPY --from=build-{target} /venv /venv" in body
    assert "pip" not in found["runtime"][1]
    assert list(found)[-1] == "worker", "what a build without a target makes"
    assert set(EXTRAS) == set(images.values())


def test_what_is_copied_is_sent_to_the_engine() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINERFILE, re.M):
        assert set(sources.split()) <= kept | {"."}
    assert all((ROOT / path).exists() for path in kept)


def test_the_gateways_packages_lead_to_no_torch() -> None:
    """Also not through what they need themselves, as it is installed here."""
    seen: set[str] = set()
    todo = [(Requirement(line), {""}) for line in requirements("gateway", ROOT / "pyproject.toml")]
    while todo:
        one, extras = todo.pop()
        if one.marker and not any(one.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if (name := one.name.lower().replace("_", "-")) not in seen:
            seen.add(name)
            todo += [(Requirement(line), one.extras or {""}) for line in importlib.metadata.requires(name) or ()]
    assert {"nats-py", "fastapi", "uvicorn", "tokenizers"} <= seen
    assert not seen & {"torch", "transformers", "triton", "numpy"}
    assert {name_of(line) for line in requirements("worker", ROOT / "pyproject.toml")} >= ENGINE


@pytest.mark.parametrize("image", sorted(EXTRAS))
def test_traces_and_keys_need_nothing_that_an_image_lacks(image: str) -> None:
    there = {name_of(line) for line in requirements(image, ROOT / "pyproject.toml")}
    assert {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http", "nkeys"} <= there


def test_the_gateway_and_the_operators_commands_need_no_other_packages() -> None:
    blocked = f"""
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {ENGINE | {"triton"}!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import services.gateway.__main__, trine.credentials, trine.cli, trine.cache, trine.dead, trine.client
"""
    done = subprocess.run([sys.executable, "-c", blocked], check=False, capture_output=True, text=True, cwd=ROOT)
    assert not done.returncode, done.stderr
