"""The files that start whole clusters: right by the schemas of those who read them, and by Legato's own."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import ray
import yaml
from jsonschema import Draft202012Validator
from ray._common.runtime_env_uri import Protocol, parse_uri
from ray._private import ray_constants
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from cluster.config.load import ConfigError, LegatoConfig, load_config, load_document
from cluster.deployment.ray_environment import RAY_ENVIRONMENT, SERVE_ENVIRONMENT
from cluster.deployment.worker import DRAIN_S
from tests.cluster.config.test_config import FILES, ROOT

CONFIGS = ROOT / "ray_configs"
KUBERAY, RAY_UP, POLICIES = (CONFIGS / f"{name}.yaml" for name in ("kuberay", "cluster", "kuberay_policies"))
# KubeRay's own definition of a RayService, with all of Kubernetes' pod templates in it.
RAY_SERVICE = Path(__file__).with_name("kuberay_rayservice.json")
RAY_CLUSTER = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
# The version that the wheel and the image have.
RAY_VERSION = "2.60.0"
WHEEL = f"legato-{importlib.metadata.version('legato')}-py3-none-any.whl"
# How long `ray start` drains its node when it is told to end.
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


def document(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def problems(found: Any, schema: Path) -> list[str]:
    validator = Draft202012Validator(json.loads(schema.read_text(encoding="utf-8")))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(found)]


def pods() -> dict[str, dict[str, Any]]:
    """The one container of each kind of pod, and its pod's spec."""
    cluster = document(KUBERAY)["spec"]["rayClusterConfig"]
    groups = {"head": cluster["headGroupSpec"], **{group["groupName"]: group for group in cluster["workerGroupSpecs"]}}
    return {name: group["template"]["spec"] for name, group in groups.items()}


def serve_config() -> tuple[dict[str, Any], LegatoConfig]:
    found = yaml.safe_load(document(KUBERAY)["spec"]["serveConfigV2"])
    return found, load_config(found["applications"][0]["args"])


def test_every_file_is_checked() -> None:
    assert {*FILES, KUBERAY, RAY_UP, POLICIES} == set(CONFIGS.glob("*.yaml"))


def test_kuberay_takes_the_service() -> None:
    assert problems(document(KUBERAY), RAY_SERVICE) == []


@pytest.mark.parametrize(
    ("where", "what"),
    [
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "template", "spec", "containers", 0), "readynessProbe"),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0), "group"),
        (("spec",), "serveConfig"),
    ],
)
def test_what_the_service_must_not_hold_is_seen(where: tuple[str | int, ...], what: str) -> None:
    """The schema finds nothing, so it is itself looked at."""
    found = branch = document(KUBERAY)
    for step in where:
        branch = branch[step]
    branch[what] = {}
    assert any(what in problem for problem in problems(found, RAY_SERVICE))


def test_serve_and_legato_take_what_the_service_serves() -> None:
    found, config = serve_config()
    schema = ServeDeploySchema.model_validate(found)
    assert set(found) <= set(ServeDeploySchema.model_fields)
    assert schema.http_options.host == "0.0.0.0", "probes and the Kubernetes service come from outside of the pod"
    assert schema.applications[0].import_path == "cluster.app:build"
    assert schema.logging_config is not None and schema.logging_config.encoding == "JSON"
    assert config.network.host == "node" and config.network.require_ray_token
    variables = found["controller_options"]["runtime_env"]["env_vars"]
    assert variables.keys() == SERVE_ENVIRONMENT.keys()


def test_the_configuration_in_the_service_is_checked_where_it_stands(tmp_path: Path) -> None:
    """Also where the file holds other objects of Kubernetes beside it."""
    assert load_document(KUBERAY, manifests=True) == serve_config()
    text = KUBERAY.read_text(encoding="utf-8")
    (number,) = [number for number, line in enumerate(text.splitlines(), 1) if "wait_for_nodes: true" in line]
    path = tmp_path / "service.yaml"
    path.write_text(text.replace("wait_for_nodes: true", "wait_for_node: true", 1) + "---\nkind: Service\n")
    told = f"service.yaml, line {number}: wait_for_node is no setting; did you mean wait_for_nodes"
    with pytest.raises(ConfigError, match=told):
        load_document(path, manifests=True)
    path.write_text("kind: Service\napiVersion: v1\n")
    with pytest.raises(ConfigError, match=r"a manifest of kind Service without `spec\.serveConfigV2`"):
        load_document(path, manifests=True)


@pytest.mark.parametrize(
    ("begin", "end", "line"),
    [("|\n    ", "", 7), ("|2-\n    ", "", 7), (">\n    ", "", 4), ('"', '"', 4), ("'\n    ", "'", 4)],
    ids=["literal", "literal, indented", "folded", "quoted", "quoted once"],
)
def test_lines_in_a_manifest_are_those_of_the_file(tmp_path: Path, begin: str, end: str, line: int) -> None:
    """Of a text whose lines YAML joins, the line is told on which it begins."""
    path = tmp_path / "service.yaml"
    config = "{applications:\n\n    [{import_path: cluster.app:build, args: {prefil: {}}}]}"
    path.write_text(f"apiVersion: v1\nkind: RayService\nspec:\n  serveConfigV2: {begin}{config}{end}\n")
    with pytest.raises(ConfigError, match=rf"service\.yaml, line {line}: prefil is no setting"):
        load_document(path, manifests=True)


def test_a_file_for_another_program_says_which() -> None:
    with pytest.raises(ConfigError, match=r"is for `kubectl apply`: `legato check .*kuberay\.yaml` checks"):
        load_document(KUBERAY)
    with pytest.raises(ConfigError, match=r"is for `ray up` .* check ray_configs/gpu_autoscale\.yaml\."):
        load_document(RAY_UP, manifests=True)
    with pytest.raises(ConfigError, match=r"kuberay_policies\.yaml is for `kubectl apply`, a manifest of kind Network"):
        load_document(POLICIES, manifests=True)


def test_every_pool_of_the_service_has_its_pods() -> None:
    """A worker fits a pod of its group, and the group is as large as the pool may become."""
    _, config = serve_config()
    groups = {group["groupName"]: group for group in document(KUBERAY)["spec"]["rayClusterConfig"]["workerGroupSpecs"]}
    for role, pool in config.pools.items():
        group = groups[role]
        has = json.loads(json.loads(group["rayStartParams"]["resources"]))
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert pool.resources == has == {f"{role}_node": 1}
        assert (pool.num_cpus, pool.num_gpus) == (0, float(limits["nvidia.com/gpu"]))
        assert group["rayStartParams"]["num-cpus"] == "0", "nothing but workers is put on pods with GPUs"
        assert pool.autoscaling is not None
        assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (
            pool.autoscaling.min_replicas,
            pool.replicas,
            pool.autoscaling.max_replicas,
        )
    room = groups["gateway"]["replicas"] * int(groups["gateway"]["rayStartParams"]["num-cpus"])
    assert room > config.gateway.replicas * config.gateway.num_cpus


def test_pods_have_the_secret_rays_settings_and_shared_memory() -> None:
    cluster = document(KUBERAY)["spec"]["rayClusterConfig"]
    assert cluster["rayVersion"] == RAY_VERSION and cluster["authOptions"]["mode"] == "token"
    for pod in pods().values():
        (container,) = pod["containers"]
        variables = {variable["name"]: variable for variable in container["env"]}
        assert "secretKeyRef" in variables["LEGATO_SECRET"]["valueFrom"]
        assert RAY_ENVIRONMENT.items() <= {name: found.get("value") for name, found in variables.items()}.items()
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["shm"] == "/dev/shm" and pod["volumes"][0]["emptyDir"]["medium"] == "Memory"


def test_pods_share_what_the_hub_gave_and_what_clients_leave() -> None:
    """In one volume that all have and that the image's user may write; no pod has either for itself."""
    _, config = serve_config()
    for pod in pods().values():
        (container,) = pod["containers"]
        (shared,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "shared"]
        (home,) = [found["value"] for found in container["env"] if found["name"] == "HF_HOME"]
        assert "persistentVolumeClaim" in {volume["name"]: volume for volume in pod["volumes"]}["shared"]
        assert Path(home).parent == Path(shared) and pod["securityContext"]["fsGroup"] == 1000
        assert config.gateway.storage is not None and Path(config.gateway.storage).parent == Path(shared)


@pytest.mark.parametrize(
    ("name", "tolerates"), [("head", False), ("gateway", False), ("prefill", True), ("decode", True)]
)
def test_pods_compile_where_no_other_pod_writes(name: str, tolerates: bool) -> None:
    """Triton's cache breaks where several pods compile into it. Those with GPUs go where a taint keeps others away."""
    pod = pods()[name]
    (container,) = pod["containers"]
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    (triton,) = [Path(found["value"]) for found in container["env"] if found["name"] == "TRITON_CACHE_DIR"]
    assert mounts["cache"] in triton.parents and mounts["cache"] == Path("/home/ray/.cache")
    assert "emptyDir" in {volume["name"]: volume for volume in pod["volumes"]}["cache"]
    assert ("tolerations" in pod) is tolerates


Labels = dict[str, str]
NAMESPACE = {"kubernetes.io/metadata.name": "default"}


@functools.cache  # nobody changes what it gives
def policies(kind: str) -> list[Any]:
    return [found for found in yaml.safe_load_all(POLICIES.read_text(encoding="utf-8")) if found["kind"] == kind]


def labels() -> dict[str, Labels]:
    """Those of each kind of pod: the file's, and those that KubeRay adds to them."""
    cluster = document(KUBERAY)["spec"]["rayClusterConfig"]
    found = {"head": cluster["headGroupSpec"]["template"]["metadata"]["labels"] | {"ray.io/node-type": "head"}}
    for group in cluster["workerGroupSpecs"]:
        ray = {"ray.io/node-type": "worker", "ray.io/group": group["groupName"]}
        found[group["groupName"]] = group["template"]["metadata"]["labels"] | ray
    return found


def chosen(selector: dict[str, Any], has: Labels) -> bool:
    assert set(selector) <= {"matchLabels"}, "no other selector is understood here"
    return bool(selector.get("matchLabels", {}).items() <= has.items())


def lets_in(to: Labels, port: int, pod: Labels, namespace: Labels = NAMESPACE) -> bool:
    """Whether a pod gets in, by Kubernetes' rules: a pod that no policy selects is open, and policies add up."""
    selecting = [found["spec"] for found in policies("NetworkPolicy") if chosen(found["spec"]["podSelector"], to)]
    assert all(spec["policyTypes"] == ["Ingress"] for spec in selecting)
    for rule in [rule for spec in selecting for rule in spec["ingress"]]:
        ports = [entry["port"] for entry in rule.get("ports", []) if entry["protocol"] == "TCP"]
        for peer in rule["from"]:
            there = (
                chosen(peer["namespaceSelector"], namespace) if "namespaceSelector" in peer else namespace == NAMESPACE
            )
            if there and chosen(peer.get("podSelector", {}), pod) and ("ports" not in rule or port in ports):
                return True
    return not selecting


PORTS = (6379, 8000, 8080, 8265, 8404, 10001, 10002, 30000, 45_678, 52365)
OPERATOR = {"app.kubernetes.io/name": "kuberay-operator", "app.kubernetes.io/component": "kuberay-operator"}
OTHERS: dict[str, tuple[Labels, Labels, set[tuple[str, int]]]] = {
    "a stranger": ({"app": "stranger"}, NAMESPACE, set()),
    "operator": (OPERATOR, {"kubernetes.io/metadata.name": "kuberay"}, {("head", 8265)}),
    "front": ({"app": "legato-front"}, NAMESPACE, {(name, 8000) for name in ("gateway", "prefill", "decode")}),
    "a front elsewhere": ({"app": "legato-front"}, {"kubernetes.io/metadata.name": "others"}, set()),
    "another Legato": ({"app": "legato"}, {"kubernetes.io/metadata.name": "others"}, set()),
    "prometheus": (
        {"app": "prometheus"},
        {"kubernetes.io/metadata.name": "monitoring"},
        {(name, 8080) for name in ("head", "gateway", "prefill", "decode")},
    ),
}


@pytest.mark.parametrize("who", OTHERS)
def test_policies_let_in_whom_the_guide_says(who: str) -> None:
    pod, namespace, expected = OTHERS[who]
    found = {(name, port) for name, to in labels().items() for port in PORTS if lets_in(to, port, pod, namespace)}
    assert found == expected


def test_policies_let_pods_of_the_service_reach_each_other_at_all_ports() -> None:
    """Ray and Legato draw ports, so there is no list of them."""
    kinds = labels()
    assert set(kinds) == {"head", "gateway", "prefill", "decode"}
    assert all(lets_in(to, port, pod) for to in kinds.values() for pod in kinds.values() for port in PORTS)


@pytest.mark.parametrize("kind", ["NetworkPolicy", "PodDisruptionBudget"])
def test_kubernetes_takes_the_policies(kind: str) -> None:
    """Rules of ingress by KubeRay's definition of a RayService, which has Kubernetes' own in it. Budgets by Kubernetes'
    rule for pods whose owner cannot be scaled: a number that must be left, and no share."""
    service = json.loads(RAY_SERVICE.read_text(encoding="utf-8"))
    branch = service["properties"]["spec"]["properties"]["rayClusterConfig"]["properties"]["networkPolicy"]
    rules = branch["properties"]["workerGroups"]["items"]["properties"]["ingressRules"] | {"$defs": service["$defs"]}
    assert list(Draft202012Validator(rules).iter_errors([{"form": []}])) != []
    found = policies(kind)
    assert len(found) == 3 and len({policy["metadata"]["name"] for policy in found}) == 3
    groups = {group["groupName"]: group for group in document(KUBERAY)["spec"]["rayClusterConfig"]["workerGroupSpecs"]}
    for policy in found:
        spec = policy["spec"]
        if kind == "NetworkPolicy":
            assert policy["apiVersion"] == "networking.k8s.io/v1"
            assert set(spec) == {"podSelector", "policyTypes", "ingress"}
            assert list(Draft202012Validator(rules).iter_errors(spec["ingress"])) == []
        else:
            assert policy["apiVersion"] == "policy/v1" and set(spec) == {"minAvailable", "selector"}
            (name,) = [name for name, has in labels().items() if chosen(spec["selector"], has)]
            assert type(spec["minAvailable"]) is int
            assert name == "head" or spec["minAvailable"] < groups[name]["replicas"], "a drain gets on"


def test_pods_take_traffic_and_leave_in_order() -> None:
    for name, pod in pods().items():
        if name == "head":
            continue  # KubeRay asks it for Ray's health, which must be good before anything is served
        (container,) = pod["containers"]
        assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": 8000}
        assert container["livenessProbe"]["httpGet"]["path"] == "/api/healthz"
        assert "pkill -TERM" in container["lifecycle"]["preStop"]["exec"]["command"][-1]
        (drain_s,) = [found["value"] for found in container["env"] if found["name"] == DRAIN]
        assert hasattr(ray_constants, DRAIN), "this Ray knows the variable"
        assert DRAIN_S < float(drain_s) < pod["terminationGracePeriodSeconds"]


def test_the_classes_are_all_that_slo_adds_to_two_of_each_worker() -> None:
    """Who has seen the one answer (tests/ray/deployed/test_config_files.py) need not see the other."""
    classes, plain = document(CONFIGS / "slo.yaml"), document(CONFIGS / "cpu_2p2d.yaml")
    assert classes["applications"][0]["args"].pop("slo")
    assert classes == plain


def test_workers_of_one_type_are_what_the_first_of_two_models_has() -> None:
    """Who has seen models.yaml answer for it need not see auto.yaml."""
    several, alone = document(CONFIGS / "models.yaml"), document(CONFIGS / "auto.yaml")
    several["applications"][0]["args"] = several["applications"][0]["args"]["models"][0]
    assert several == alone


def test_the_image_starts_a_node_as_the_guide_says(tmp_path: Path) -> None:
    """The shell's line in `docker run`, with a program in Ray's place that says how it was called, and with what."""
    guide = (ROOT / "docs" / "guide" / "clusters.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"legato:0\.1\.0-cuda bash -c '\n(.*?)'\n```", guide, flags=re.DOTALL)
    tells = "printf '%s\\n' \"$@\" mode=$RAY_AUTH_MODE proxy=$RAY_SERVE_ENABLE_HA_PROXY"
    for name, command in (("ray", tells), ("python", f'exec {sys.executable} "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment = {
        name: value for name, value in environment.items() if name not in RAY_ENVIRONMENT | SERVE_ENVIRONMENT
    }
    said = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, check=True).stdout
    resources = json.loads(re.findall(r"--resources=(.*)", said)[0])
    assert resources == {"decode_node": 1} and {"start", "--block", "mode=token", "proxy=1"} <= set(said.splitlines())


def test_nodes_fetch_the_wheel_that_is_built() -> None:
    """It is quickstart.yaml, and the wheel has the name that pip gives it."""
    fetched, quickstart = document(CONFIGS / "runtime_env.yaml"), document(CONFIGS / "quickstart.yaml")
    application = fetched["applications"][0]
    (uri,) = application.pop("runtime_env")["py_modules"]
    assert fetched == quickstart
    assert parse_uri(uri)[0] is Protocol.FILE and uri.endswith(f"/{WHEEL}")
    assert WHEEL in RAY_UP.read_text()


def test_the_image_is_made_of_what_the_wheel_is_made_of() -> None:
    """torch is the one that is tested; and of the tree there is what the wheel needs."""
    made = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (torch,) = re.findall(r"install --no-compile (torch==\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert set(re.findall(r"ARG TORCH=(\S+)", made)) == {torch.removeprefix("torch==")}
    assert f"pip install {torch}\n" in RAY_UP.read_text(encoding="utf-8")
    assert "\nUSER 1000\n" in made and "/health" in made
    assert "install --directory --owner ray --group ray /home/ray/.cache" in made, "else a volume there is root's"
    assert "TRITON_CACHE_DIR=/home/ray/.cache/" in made
    assert re.findall(r"legato-\*\.whl\)\[(\S+)\]", made) == ["gpu,trace", "trace"], "OTEL_* variables are all it needs"
    sent = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), flags=re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.partition(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    others = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"], "docs/guide"}
    assert sent == packages | others
    for name in re.findall(r"ray_configs/(\S+\.yaml)", made):
        assert (CONFIGS / name).is_file()


@pytest.mark.parametrize("index", ["", "https://download.pytorch.org/whl/cpu"])
def test_torch_is_installed_first_from_where_it_is_told(index: str) -> None:
    """Without TORCH_INDEX from where pip is told; what follows it never."""
    quiet = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "TORCH_INDEX"))}
    for target, extra in (("setup", "trace"), ("setup-dev", "dev")):
        command = ["make", "--dry-run", "--always-make", target, *([f"TORCH_INDEX={index}"] if index else [])]
        said = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=True).stdout
        first, then = [line.split(" install ")[1].split() for line in said.splitlines() if " install " in line]
        assert first == ["--no-compile", "torch==2.13.0", *(["--index-url", index] if index else [])]
        assert then == ["--no-compile", "-e", f"'.[{extra}]'"]
    if index:
        assert f"TORCH_INDEX={index}" in (ROOT / "README.md").read_text(encoding="utf-8")


_STUB = """#!/bin/sh
echo "$(basename "$0") $*" >> "$LOG"
if [ "$1 $2" = "-m venv" ]; then
    mkdir -p "$3/bin"
    for name in python pip ruff mypy; do ln -s "$0" "$3/bin/$name"; done
fi
"""


@pytest.fixture
def fresh_make(tmp_path: Path) -> Callable[..., list[list[str]]]:
    """Runs `make` with these targets in a fresh checkout, of which it has the Makefile, with a Python that does nothing
    but to say what it was asked. Returns what pip was to install."""
    (tmp_path / "clone").mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copyfile(ROOT / name, tmp_path / "clone" / name)
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(_STUB)
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "TORCH_INDEX"))}

    def run(*targets: str) -> list[list[str]]:
        log.write_text("")
        subprocess.run(
            ["make", f"PYTHON={python}", *targets],
            cwd=tmp_path / "clone",
            env={**environment, "LOG": str(log)},
            capture_output=True,
            check=True,
        )
        said = log.read_text().splitlines()
        assert any(line.startswith(("python -m cluster serve", "python -m pytest", "ruff check")) for line in said)
        return [line.partition(" install ")[2].split() for line in said if " install " in line]

    return run


TORCH, SERVING, ALL = (["--no-compile", *what] for what in (["torch==2.13.0"], ["-e", ".[trace]"], ["-e", ".[dev]"]))


def test_serving_installs_no_tools(fresh_make: Callable[..., list[list[str]]]) -> None:
    """They come when they are asked for; and nothing is installed twice."""
    assert fresh_make("serve") == [TORCH, SERVING]
    assert fresh_make("serve") == []
    assert fresh_make("test-fast") == [TORCH, ALL]
    assert fresh_make("check", "test", "serve") == []


def test_nothing_is_installed_beside_something_else(fresh_make: Callable[..., list[list[str]]]) -> None:
    """However many jobs `make` may have, as `MAKEFLAGS` says on many a machine."""
    assert fresh_make("--jobs=2", "serve", "test-fast") == [TORCH, SERVING, TORCH, ALL]


def test_checks_and_tests_install_all_at_once(fresh_make: Callable[..., list[list[str]]]) -> None:
    assert fresh_make("check", "test") == [TORCH, ALL]
    assert fresh_make("test", "serve") == []


def test_ray_takes_the_cluster() -> None:
    assert problems(document(RAY_UP), RAY_CLUSTER) == []
    wrong = document(RAY_UP) | {"max_worker": 3}
    assert any("max_worker" in problem for problem in problems(wrong, RAY_CLUSTER))


LOCAL = {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2", "10.0.0.3", "10.0.0.4"]}


def on_machines_of_your_own() -> dict[str, Any]:
    """The file with its head's changes: what is written there, and without what is to be taken out."""
    head, _, _ = RAY_UP.read_text(encoding="utf-8").partition("\ncluster_name")
    told = re.sub(r"\n# *", " ", head).partition("For machines of your own")[2]
    assert "provider: {type: local, head_ip: ..., worker_ips: [...]}" in told
    (given, taken) = told.split("and take out ")
    left_out = re.findall(r"\b[a-z]+_[a-z_]+\b", taken.partition("all of worker_ips")[0])
    assert left_out == ["available_node_types", "head_node_type", "max_workers"] and "ssh_private_key" in given
    found = {name: value for name, value in document(RAY_UP).items() if name not in left_out}
    return {**found, "provider": LOCAL, "auth": {"ssh_user": "me", "ssh_private_key": "~/.ssh/id_ed25519"}}


def test_ray_takes_the_cluster_on_machines_of_your_own() -> None:
    """All of them, and for each the same commands. Ray refuses the file whose provider alone is another one."""
    prepared = prepare_config(on_machines_of_your_own())
    validate_config(prepared)
    (machines,) = prepared["available_node_types"].values()
    assert (machines["min_workers"], prepared["max_workers"]) == (3, 3)
    assert prepared["head_start_ray_commands"] == document(RAY_UP)["head_start_ray_commands"]
    with pytest.raises(click.ClickException, match="available_node_types is not supported"):
        prepare_config(document(RAY_UP) | {"provider": LOCAL})


def test_no_machine_needs_a_user_of_a_certain_name() -> None:
    """A shell finds the wheel where `file_mounts` puts it, whoever `auth.ssh_user` is."""
    found = document(RAY_UP)
    commands = [command for name in found if name.endswith("_commands") for command in found[name]]
    assert [command for command in commands if "/home/" in command] == []
    (install,) = [command for command in commands if WHEEL in command]
    (wheel,) = [path for path in found["file_mounts"] if path.endswith(WHEEL)]
    said = install.replace("~/legato/bin/pip install", "echo")
    shell = subprocess.run(["bash", "-c", said], env={"HOME": "/srv/me"}, capture_output=True, text=True, check=True)
    assert shell.stdout == f"{wheel.replace('~', '/srv/me')}[gpu]\n"


def test_the_cluster_holds_the_configuration_that_it_mounts() -> None:
    found = document(RAY_UP)
    mounted = [Path(name).name for name in found["file_mounts"].values() if name.startswith("ray_configs/")]
    (config,) = [load_config(CONFIGS / name) for name in mounted]
    machine = found["available_node_types"]["gpu"]
    for pool in config.pools.values():
        assert pool.num_gpus == machine["resources"]["GPU"] and pool.num_cpus <= machine["resources"]["CPU"]
        assert pool.autoscaling is not None and pool.autoscaling.start_s >= 300, "it boots, installs, fetches 16 GB"
    assert machine["min_workers"] == sum(pool.replicas for pool in config.pools.values())
    for commands in (found["head_start_ray_commands"], found["worker_start_ray_commands"]):
        assert "cluster environment" in commands[-1] and "LEGATO_SECRET" in commands[-1]
