"""deploy/: manifests against Kubernetes' schemas, the Containerfile, the Slurm script at work."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from zlm.cli.parse import parse
from zlm.supervisor.drain import ABORT_SECONDS, STOP_SECONDS

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
KUBERNETES = ("1.31.0", "1.37.0")
KUSTOMIZATION = DEPLOY / "kubernetes" / "kustomization.yaml"
SCRIPTS = [
    ROOT / "bin" / "zlm-install",
    ROOT / "tests" / "support" / "systemd_machine.sh",
    DEPLOY / "slurm" / "zlm.sbatch",
]


def manifest(name: str) -> Any:
    return yaml.safe_load((DEPLOY / "kubernetes" / f"{name}.yaml").read_text())


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize(
    "path", [path for path in MANIFESTS if path != KUSTOMIZATION], ids=lambda path: path.stem
)
def test_manifests_fit_the_schemas(path: Path, version: str) -> None:
    kubernetes_validate.validate(yaml.safe_load(path.read_text()), version, strict=True)


def test_a_wrong_manifest_would_be_seen() -> None:
    deployment = manifest("deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, KUBERNETES[0], strict=True)


def test_the_kustomization_names_every_manifest() -> None:
    kustomization = yaml.safe_load(KUSTOMIZATION.read_text())
    others = {path.name for path in MANIFESTS} - {KUSTOMIZATION.name, "secret.example.yaml"}
    assert set(kustomization["resources"]) == others
    container = manifest("deployment")["spec"]["template"]["spec"]["containers"][0]
    assert [image["name"] for image in kustomization["images"]] == [container["image"]]


def test_the_manifests_belong_together() -> None:
    deployment, service = manifest("deployment"), manifest("service")
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    (container,) = pod["spec"]["containers"]
    (port,) = container["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert manifest("models")["metadata"]["name"] == claim
    secret = manifest("secret.example")
    assert container["envFrom"][0]["secretRef"]["name"] == secret["metadata"]["name"]
    assert set(secret["stringData"].values()) == {""}, "an example has no secrets"


def test_the_pod_serves_and_ends_as_zlm_does() -> None:
    pod = manifest("deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config, _ = parse(["--host", "0.0.0.0", *container["args"]])
    assert config.server.port == container["ports"][0]["containerPort"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness")}
    assert {probe["path"] for probe in probes.values()} == {"/health/ready"}
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    drained = config.server.shutdown_timeout_seconds + ABORT_SECONDS + STOP_SECONDS
    stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > stop + drained


# What is used of https://lws.sigs.k8s.io's LeaderWorkerSet; pods have Kubernetes' own schema.
POD = {"type": "object", "required": ["spec"]}
LEADER_WORKER_SET = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "spec": {
            "type": "object",
            "required": ["leaderWorkerTemplate"],
            "additionalProperties": False,
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "required": ["workerTemplate"],
                    "additionalProperties": False,
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {
                            "enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                        },
                        "leaderTemplate": POD,
                        "workerTemplate": POD,
                    },
                },
            },
        },
    },
}


def lws() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the LeaderWorkerSet and the Service before it."""
    text = (DEPLOY / "leaderworkerset" / "zlm.yaml").read_text()
    nodes, service = yaml.safe_load_all(text)
    return nodes, service


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_leader_worker_set_fits_the_schemas(version: str) -> None:
    nodes, service = lws()
    jsonschema.validate(nodes, LEADER_WORKER_SET)
    kubernetes_validate.validate(service, version, strict=True)
    group = nodes["spec"]["leaderWorkerTemplate"]
    for name in ("leaderTemplate", "workerTemplate"):
        pod = {"apiVersion": "v1", "kind": "Pod", **group[name], "metadata": {"name": "zlm"}}
        kubernetes_validate.validate(pod, version, strict=True)
    assert (
        service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/name"]
        == (nodes["metadata"]["name"])
    )


@pytest.mark.parametrize(("name", "index"), [("leaderTemplate", 0), ("workerTemplate", 1)])
def test_the_leader_worker_set_runs_one_engine(name: str, index: int) -> None:
    group = lws()[0]["spec"]["leaderWorkerTemplate"]
    pod = group[name]["spec"]
    (container,) = pod["containers"]
    values = {"GROUP_SIZE": group["size"], "WORKER_INDEX": index, "LEADER_ADDRESS": "zlm-0.zlm"}
    args = [
        re.sub(r"\$\(LWS_(\w+)\)", lambda found: str(values[found[1]]), word)
        for word in container["args"]
    ]
    parallel = parse(args)[0].parallel
    assert (parallel.nnodes, parallel.node_rank) == (group["size"], index)
    assert parallel.workers_per_node == container["resources"]["limits"]["nvidia.com/gpu"]
    drained = 30 + ABORT_SECONDS + STOP_SECONDS
    stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > stop + (0 if index else drained)
    assert not index or stop >= drained, "a node that leaves takes the others' requests along"


def entrypoint() -> list[str]:
    found = re.search(r"^ENTRYPOINT (\[.*\])$", (DEPLOY / "Containerfile").read_text(), re.M)
    assert found
    return json.loads(found[1])


@pytest.mark.parametrize(
    "words",
    [
        ["google/gemma-3-270m-it"],
        ["--model", "google/gemma-3-270m-it", "--max-model-len", "2048"],
        ["google/gemma-3-270m-it", "--host", "127.0.0.1", "--api-key", "k"],
    ],
    ids=" ".join,
)
def test_the_image_takes_flags_of_serve(words: list[str]) -> None:
    assert entrypoint()[:2] == ["zlm", "serve"]
    config, _ = parse([*entrypoint()[2:], *words])
    assert config.model.model == "google/gemma-3-270m-it"
    assert config.server.host == ("127.0.0.1" if "127.0.0.1" in words else "0.0.0.0")


def test_the_image_is_made_of_what_is_there() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    ignore = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
    kept = [line[1:] for line in ignore if line.startswith("!")]
    assert set(kept) == {"LICENSE", "README.md", "pyproject.toml", "zlm", "kernels"}
    assert all((ROOT / name).exists() for name in kept)
    assert f"torch=={pinned_torch()}" in text
    user = manifest("deployment")["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    assert f"--uid {user} " in text and f"USER {user}:{user}" in text


def pinned_torch() -> str:
    """Return the torch that bin/zlm-install, and so everything here, installs."""
    found = re.search(r"torch==([\d.]+)", (ROOT / "bin" / "zlm-install").read_text())
    assert found
    return found[1]


def tool(name: str) -> str:
    """Return the path of a program that a package of the test extra brings."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_the_containerfile_is_well_written() -> None:
    command = [tool("hadolint"), "--no-color", str(DEPLOY / "Containerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_well_written(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    command = [tool("shellcheck"), "--color=never", "-S", "warning", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


# ------------------------------------------------------------------------------ the Slurm script

FAKE_ZLM = f"""#!{sys.executable}
import http.server, json, os, signal, sys
words = sys.argv[1:]
seen = {{"words": words, "HF_HOME": os.environ["HF_HOME"], "key": os.environ["ZLM_API_KEY"],
    "cluster": os.environ.get("ZLM_CLUSTER_KEY")}}
with open("seen.json", "w") as out:
    json.dump(seen, out)
if "broken" in words:
    sys.exit(1)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health/ready" else 404)
        self.end_headers()

    def log_message(self, *words):
        pass

def leave(*_):
    print("drained", flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, leave)
if "--node-rank" in words:
    signal.pause()
port = int(words[words.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


FAKE_SCONTROL = "#!/bin/sh\nprintf 'gpu1\\ngpu2\\n'\n"
FAKE_SRUN = """#!/bin/bash
for word in "$@"; do [ "$word" = bash ] && break; echo "$word" >>srun.txt; shift; done
mkdir -p rest && cd rest && SLURM_PROCID=0 exec "$@"
"""


def start_job(folder: Path, *words: str, nodes: int = 1) -> subprocess.Popen[str]:
    """Run the batch script as Slurm would, with a zlm that only looks like one."""
    binaries = folder / "env" / "bin"
    binaries.mkdir(parents=True)
    fakes = {"zlm": FAKE_ZLM, "scontrol": FAKE_SCONTROL, "srun": FAKE_SRUN}
    for name, program in fakes.items():
        (binaries / name).write_text(program)
        (binaries / name).chmod(0o755)
    environment = {
        "PATH": os.environ["PATH"],
        "USER": "someone",
        "SCRATCH": str(folder / "scratch"),
        "ZLM_ENV": str(folder / "env"),
        "SLURM_JOB_ID": str(1_000_000 + os.getpid()),
        "SLURM_SUBMIT_HOST": "login1",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": "gpu[1-2]",
    }
    return subprocess.Popen(
        ["bash", str(DEPLOY / "slurm" / "zlm.sbatch"), *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_slurm_job_serves_and_leaves(tmp_path: Path) -> None:
    job = start_job(tmp_path, "google/gemma-4-E2B-it", "--dtype", "bfloat16")
    assert job.stdout is not None
    try:
        first = job.stdout.readline()
        found = next(tmp_path.glob("zlm-*.env"))
        assert f"address and key are in {found}" in first
        said = dict(
            word.split("=", 1) for word in shlex.split(found.read_text()) if word != "export"
        )
        assert found.stat().st_mode & 0o777 == 0o600
        seen = json.loads((tmp_path / "seen.json").read_text())
        port = 20000 + (1_000_000 + os.getpid()) % 20000
        assert said["OPENAI_BASE_URL"].endswith(f":{port}/v1")
        assert said["OPENAI_API_KEY"] == seen["key"] and len(seen["key"]) == 48
        assert seen["HF_HOME"] == f"{tmp_path}/scratch/huggingface"
        config, _ = parse(seen["words"][1:])
        assert config.model.model == "google/gemma-4-E2B-it"
        assert (config.server.host, config.server.port) == ("0.0.0.0", port)
        assert seen["key"] not in " ".join(seen["words"]), "ps shows it"
        assert f":{port} login1" in job.stdout.readline()
        job.send_signal(signal.SIGTERM)  # a minute before the time is up
        assert job.stdout.read() == "drained\n"
        assert job.wait(10) == 0
        assert not list(tmp_path.glob("zlm-*"))
    finally:
        job.kill()
        job.wait()


def test_slurm_job_on_two_nodes(tmp_path: Path) -> None:
    job = start_job(tmp_path, "some/model", "-tp", "2", nodes=2)
    assert job.stdout is not None
    try:
        assert "address and key are in" in job.stdout.readline()
        head, node = (
            json.loads((tmp_path / folder / "seen.json").read_text()) for folder in (".", "rest")
        )
        parts = [parse(seen["words"][1:])[0].parallel for seen in (head, node)]
        assert [part.node_rank for part in parts] == [0, 1]
        assert parts[0].nnodes == 2 and len(parts[0].master_addr or "") > 6
        assert (parts[0].master_addr, parts[0].master_port) == (
            parts[1].master_addr, parts[1].master_port
        )  # fmt: skip
        assert head["cluster"] == node["cluster"] and len(head["cluster"]) == 48
        assert "--nodelist=gpu2" in (tmp_path / "srun.txt").read_text()
        job.send_signal(signal.SIGTERM)
        assert "drained" in job.stdout.read()
        assert job.wait(10) == 0
    finally:
        job.kill()
        job.wait()


def test_slurm_job_that_cannot_start_fails(tmp_path: Path) -> None:
    job = start_job(tmp_path, "broken")
    assert job.wait(20) == 1
    assert not list(tmp_path.glob("zlm-*"))


def test_slurm_job_wants_a_model(tmp_path: Path) -> None:
    job = start_job(tmp_path)
    started = time.monotonic()
    assert job.wait(10) == 2 and time.monotonic() - started < 10
    assert job.stdout is not None and "usage: sbatch" in job.stdout.read()
