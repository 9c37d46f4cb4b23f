"""deploy/kubernetes: it renders, fits Kubernetes' schemas and KEDA's documentation, and its names are the code's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml

from services.decode.config import DecodeSettings
from services.drafter.config import DrafterSettings
from services.gateway.config import GatewaySettings
from services.gateway.gateway import Gateway
from services.prefill.config import PrefillSettings
from shared.bus.embedded import find_server
from shared.config import DEFAULT_MODEL, MiB, Settings
from shared.streams import decode_streams
from shared.subjects import Subjects
from trine.access import variable
from trine.credentials import OWNERS

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
OVERLAYS = ("cpu", "gpu", "autoscaled")
KUBERNETES = "1.37"
SUBJECTS = Subjects(DEFAULT_MODEL)
SETTINGS: dict[str, type[Settings]] = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "drafter": DrafterSettings,
    "gateway": GatewaySettings,
}
# What KEDA's documentation of each scaler names; True where it must be given.
SCALERS = {
    "nats-jetstream": {
        "natsServerMonitoringEndpoint": True,
        "account": True,
        "stream": True,
        "consumer": True,
        "lagThreshold": False,
        "activationLagThreshold": False,
        "useHttps": False,
    },
    "prometheus": {
        "serverAddress": True,
        "query": True,
        "threshold": True,
        "activationThreshold": False,
        "namespace": False,
        "ignoreNullValues": False,
        "timeout": False,
    },
}
SCALED = {
    "scaleTargetRef",
    "pollingInterval",
    "cooldownPeriod",
    "minReplicaCount",
    "maxReplicaCount",
    "advanced",
    "triggers",
}


@cache
def rendered(overlay: str) -> tuple[dict[str, Any], ...]:
    kubectl = Path(sysconfig.get_path("scripts")) / "kubectl"
    command = [str(kubectl), "kustomize", str(DEPLOY / "kubernetes" / "overlays" / overlay)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert not done.returncode, done.stderr
    assert not done.stderr  # deprecated fields
    return tuple(yaml.safe_load_all(done.stdout))


def of(kind: str, overlay: str = "autoscaled") -> dict[str, dict[str, Any]]:
    return {doc["metadata"]["name"]: doc for doc in rendered(overlay) if doc["kind"] == kind}


def workloads(overlay: str = "autoscaled") -> dict[str, dict[str, Any]]:
    return of("Deployment", overlay) | of("StatefulSet", overlay)


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod(workload)["containers"]
    assert isinstance(found, dict)
    return found


def config(name: str) -> dict[str, str]:
    """Of the ConfigMap whose name, but for the hash of what it holds, is this."""
    (found,) = [doc["data"] for full, doc in of("ConfigMap").items() if full.rpartition("-")[0] == name]
    return dict(found)


def env(workload: dict[str, Any]) -> dict[str, Any]:
    given = [(entry["name"], entry.get("value", entry.get("valueFrom"))) for entry in container(workload)["env"]]
    assert len({name for name, _ in given}) == len(given)
    return dict(given)


def test_it_fits_the_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    # It would read megabytes of definitions again for each resource.
    monkeypatch.setattr("kubernetes_validate.utils.schema_contents", cache(kubernetes_validate.utils.schema_contents))
    different = {json.dumps(doc, sort_keys=True): doc for overlay in OVERLAYS for doc in rendered(overlay)}
    for doc in different.values():
        if not doc["apiVersion"].startswith("keda.sh/"):
            kubernetes_validate.validate(doc, KUBERNETES, strict=True)
        assert doc["kind"] != "Secret", "secrets are referred to, never here"
        assert doc["kind"] == "Namespace" or doc["metadata"]["namespace"] == "trine"


def test_what_does_not_fit_is_found() -> None:
    (broken,) = (dict(doc) for name, doc in of("Deployment").items() if name == "decode")
    broken["spec"] = {**broken["spec"], "replica": 2}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_containers_are_hardened_probed_and_bounded(overlay: str) -> None:
    found = workloads(overlay)
    assert set(found) == {*SETTINGS, "nats"}
    for name, workload in found.items():
        spec, one = pod(workload), container(workload)
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == OWNERS[name]
        assert spec["automountServiceAccountToken"] is False
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(one)
        assert one["resources"]["limits"]["memory"] == one["resources"]["requests"]["memory"]
        assert re.search(r":\d[\w.-]*$", one["image"]), "a version, not what is newest"
        writable = {"data"} if name == "nats" else {"tmp", "weights"}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert {n for n, v in volumes.items() if "emptyDir" in v or "persistentVolumeClaim" in v} <= writable
        if name != "nats":
            assert spec["terminationGracePeriodSeconds"] > int(config("trine-settings")["TRINE_DRAIN_S"])
            (ca,) = (v["secret"] for v in volumes.values() if v.get("secret", {}).get("secretName") == "trine-nats-tls")
            assert [item["key"] for item in ca["items"]] == ["ca.crt"], "the server's key is for the server alone"


def test_each_role_has_its_own_password_and_no_other() -> None:
    for name, workload in of("Deployment").items():
        secret = {"secretKeyRef": {"name": "trine-nats-passwords", "key": variable(name)}}
        assert (env(workload)["TRINE_NATS_USER"], env(workload)["TRINE_NATS_PASSWORD"]) == (name, secret)
        assert "secretRef" not in str(container(workload)["envFrom"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_settings_are_known_and_valid(overlay: str) -> None:
    common = config("trine-settings")
    for name, workload in of("Deployment", overlay).items():
        own = env(workload)
        assert container(workload)["args"] == [name], "what deploy/entrypoint.sh runs"
        values = common | {key: value for key, value in own.items() if isinstance(value, str)}
        fields: dict[str, Any] = {key.removeprefix("TRINE_").lower(): value for key, value in values.items()}
        known = set().union(*(kind.model_fields for kind in SETTINGS.values()))
        assert set(fields) <= known and set(own) <= {f"TRINE_{field.upper()}" for field in SETTINGS[name].model_fields}
        SETTINGS[name](**{field: value for field, value in fields.items() if field in SETTINGS[name].model_fields})


def test_nats_takes_its_configuration(tmp_path: Path) -> None:
    """As it is laid out in the pod: files of two ConfigMaps, and the variables that the manifest sets."""
    for name in ("cluster", "secure"):
        (tmp_path / name).mkdir()
        for file, text in config(f"nats-{name}").items():
            (tmp_path / name / file).write_text(text)
    (nats,) = of("StatefulSet").values()
    given = {name: value if isinstance(value, str) else "nats-0" for name, value in env(nats).items()}
    script = DEPLOY / "secure" / "certificates.sh"
    subprocess.run(["sh", script, tmp_path, "nats-0.nats"], check=True, timeout=30)
    ours = {"tls.crt": "server.pem", "tls.key": "server.key", "ca.crt": "ca.pem"}
    given = {n: str(tmp_path / ours[v.rsplit("/", 1)[1]]) if "/tls/" in v else v for n, v in given.items()}
    users = re.findall(r'user: "([^"]+)"', config("nats-secure")["users.conf"])
    given |= {variable(user): "pw" for user in users}
    (start,) = [argument for argument in container(nats)["args"] if argument.endswith(".conf")]
    conf = tmp_path / Path(start).relative_to("/etc/nats")
    command = [str(find_server()), "-t", "-c", str(conf)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10, env=os.environ | given)
    assert not done.returncode, done.stderr


def test_a_full_nats_server_stays_below_its_limits() -> None:
    """The rule of docs/operations.md, by what the streams in memory may hold."""
    (nats,) = of("StatefulSet").values()
    streams = decode_streams(SUBJECTS, DecodeSettings())
    beside = sum(stream.max_bytes for stream in streams if stream.storage == "memory")
    needed = 1.27 * (int(config("trine-settings")["TRINE_CACHE_BYTES"]) + beside) / MiB + 64
    most = int(container(nats)["resources"]["limits"]["memory"].removesuffix("Gi")) * 1024
    assert needed <= int(env(nats)["GOMEMLIMIT"].removesuffix("MiB")) < most


def test_everybody_knows_all_servers() -> None:
    (nats,) = of("StatefulSet").values()
    service, count = nats["spec"]["serviceName"], nats["spec"]["replicas"]
    hosts = [f"{nats['metadata']['name']}-{i}.{service}" for i in range(count)]
    common = config("trine-settings")
    assert common["TRINE_NATS_URL"] == ",".join(f"tls://{host}:4222" for host in hosts)
    assert int(common["TRINE_NATS_REPLICAS"]) == count
    assert yaml.safe_load(env(nats)["TRINE_NATS_ROUTES"]) == [f"nats://{host}:6222" for host in hosts]
    assert of("Service")[service]["spec"]["clusterIP"] == "None"


def test_selectors_select() -> None:
    labels = {name: workload["spec"]["template"]["metadata"]["labels"] for name, workload in workloads().items()}
    for kind in ("Service", "PodDisruptionBudget"):
        for name, doc in of(kind).items():
            selector = doc["spec"]["selector"]
            wanted = selector.get("matchLabels", selector)
            assert [pod for pod, its in labels.items() if wanted.items() <= its.items()] == [name]
    assert set(of("PodDisruptionBudget")) == set(labels)


def triggers() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, doc in of("ScaledObject").items():
        for trigger in doc["spec"]["triggers"]:
            yield name, trigger


def test_scaled_objects_are_what_keda_documents() -> None:
    found = of("ScaledObject")
    assert set(found) == {"prefill", "decode"}
    for name, doc in found.items():
        spec = doc["spec"]
        assert doc["apiVersion"] == "keda.sh/v1alpha1" and set(spec) <= SCALED
        assert spec["scaleTargetRef"] == {"name": name} and "replicas" not in of("Deployment")[name]["spec"]
        assert 1 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
        behavior = {"behavior": spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]}
        hpa = {"minReplicas": 1, "maxReplicas": 2, "scaleTargetRef": {"kind": "Deployment", "name": name}, **behavior}
        whole = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "spec": hpa}
        kubernetes_validate.validate(whole, KUBERNETES, strict=True)
    for _, trigger in triggers():
        fields, given = SCALERS[trigger["type"]], trigger["metadata"]
        assert {field for field, needed in fields.items() if needed} <= set(given) <= set(fields)
        assert all(isinstance(value, str) for value in given.values())
        assert all(float(value) > 0 for field, value in given.items() if field.lower().endswith("threshold"))


def test_queues_that_scale_are_those_of_the_code() -> None:
    (nats,) = of("StatefulSet").values()
    namespace, service = nats["metadata"]["namespace"], nats["spec"]["serviceName"]
    monitor = env(nats)["TRINE_NATS_SERVER_MONITOR"].rpartition(":")[2]
    queues = {}
    for name, trigger in triggers():
        if trigger["type"] == "nats-jetstream":
            given = trigger["metadata"]
            assert given["natsServerMonitoringEndpoint"] == f"{service}.{namespace}.svc.cluster.local:{monitor}"
            assert given["account"] == "$G"
            queues[name] = given["stream"], given["consumer"]
    assert queues == {
        "prefill": (SUBJECTS.prefill_stream, SUBJECTS.prefill_consumer),
        "decode": (SUBJECTS.request_stream, SUBJECTS.request_consumer("normal")),
    }
    assert config("trine-settings")["TRINE_MODEL"] == DEFAULT_MODEL


def test_metrics_that_scale_are_those_of_the_gateway() -> None:
    families = {family.name: family for family in Gateway(GatewaySettings()).metrics.registry.collect()}
    ((name, query),) = [(n, t["metadata"]["query"]) for n, t in triggers() if t["type"] == "prometheus"]
    promql_parser.parse(query)
    found = re.findall(r'(trine_\w+)\{role="(\w+)",model="([^"]+)"\}', query)
    assert [(role, model) for _, role, model in found] == [("decode", DEFAULT_MODEL)] * 2 and name == "decode"
    assert {metric for metric, _, _ in found} <= set(families)
    scraped = of("Deployment")["gateway"]["spec"]["template"]["metadata"]["annotations"]
    (port,) = container(of("Deployment")["gateway"])["ports"]
    assert scraped["prometheus.io/port"] == str(port["containerPort"]) == env(of("Deployment")["gateway"])["TRINE_PORT"]


def test_a_gpu_for_each_engine() -> None:
    found = of("Deployment", "gpu")
    limits = {
        name: container(workload)["resources"]["limits"].get("nvidia.com/gpu") for name, workload in found.items()
    }
    assert limits == {"prefill": 1, "decode": 1, "drafter": None, "gateway": None}
    assert container(found["decode"])["image"].startswith("trine-cuda:")
    assert container(found["gateway"])["image"].startswith("trine-gateway:")
