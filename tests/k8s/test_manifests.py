"""The manifests, rendered: valid by the published schemas, and saying what they must say."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from pydantic import ValidationError

REPOSITORY = Path(__file__).parents[2]
OVERLAYS = sorted(
    f"overlays/{path.name}" for path in (REPOSITORY / "scripts/k8s/overlays").iterdir()
)
OLDEST, NEWEST = "1.29", "1.36"
PART = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")

Manifest = dict[str, Any]
Render = Callable[[str], list[Manifest]]


class InvalidManifestError(Exception):
    """A manifest that a cluster would refuse, or take in part."""


def validate(manifest: Manifest) -> None:
    """Validate against the published schema; a JobSet by its own, its Jobs by Kubernetes'."""
    if manifest["kind"] != "JobSet":
        for version in (OLDEST, NEWEST):
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                raise InvalidManifestError(str(error)) from error
        return
    # Here, since it is hundreds of modules, and each process that collects tests would import them.
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    try:
        model = JobsetV1alpha2JobSet.from_dict(manifest)
    except (ValidationError, TypeError) as error:
        raise InvalidManifestError(str(error)) from error
    assert model is not None
    header = {key: manifest[key] for key in ("apiVersion", "kind", "metadata")}
    for ours, known in zip(
        manifest["spec"]["replicatedJobs"], model.to_dict()["spec"]["replicatedJobs"], strict=True
    ):
        validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": ours["name"]},
                  "spec": ours["template"]["spec"]})  # fmt: skip
        _same_keys({**ours, "template": {}}, {**known, "template": {}})
    jobs = {"replicatedJobs": []}
    _same_keys({**manifest, "spec": manifest["spec"] | jobs},
               {**model.to_dict(), **header, "spec": model.to_dict()["spec"] | jobs})  # fmt: skip


def _same_keys(ours: Manifest, known: Manifest) -> None:
    """The published model drops what it does not know, so a misspelt field would vanish."""
    if ours != known:
        raise InvalidManifestError(f"unknown to the schema: {ours} became {known}")


@pytest.fixture(params=OVERLAYS)
def objects(request: pytest.FixtureRequest, render: Render) -> list[Manifest]:
    """The objects of one overlay."""
    return render(request.param)


def jobset_of(objects: list[Manifest]) -> Manifest:
    (jobset,) = (one for one in objects if one["kind"] == "JobSet")
    return jobset


def jobs_of(objects: list[Manifest]) -> dict[str, Manifest]:
    return {job["name"]: job for job in jobset_of(objects)["spec"]["replicatedJobs"]}


def pod_of(job: Manifest) -> Manifest:
    spec: Manifest = job["template"]["spec"]["template"]["spec"]
    return spec


def pods_of(objects: list[Manifest]) -> Iterator[Manifest]:
    for one in objects:
        if one["kind"] in ("Job", "Deployment"):
            yield one["spec"]["template"]["spec"]
        if one["kind"] == "JobSet":
            yield from map(pod_of, one["spec"]["replicatedJobs"])


def containers_of(pod: Manifest) -> list[Manifest]:
    return [*pod.get("initContainers", []), *pod["containers"]]


@pytest.mark.parametrize("path", [*OVERLAYS, "aggregate", "watch"])
def test_every_object_is_valid(path: str, render: Render) -> None:
    objects = render(path)
    for one in objects:
        validate(one)
    assert {one["kind"] for one in objects} in (
        {"ConfigMap", "PersistentVolumeClaim", "JobSet"}, {"Job"}, {"Deployment", "Service"},
    )  # fmt: skip


JOBS, TRAIN = ("spec", "replicatedJobs"), ("spec", "replicatedJobs", 0)
POD = (*TRAIN, "template", "spec", "template", "spec")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("spec", "failurePolicies"), {"maxRestarts": 3}),
        (("spec", "failurePolicy", "maxRestarts"), "three"),
        ((*TRAIN, "depends_on"), [{"name": "x", "status": "Complete"}]),
        ((*TRAIN, "replicas"), "1"),
        ((*TRAIN, "template", "spec", "parallelism"), "2"),
        ((*TRAIN, "template", "spec", "completionmode"), "Indexed"),
        ((*POD, "restartPolicies"), "Never"),
        ((*POD, "containers", 0, "livenessprobe"), {}),
        ((*POD, "containers", 0, "command"), "bash"),
        ((*POD, "volumes", 1, "emptyDir", "sizelimit"), "1Gi"),
        ((*POD, "containers"), None),
    ],
)
def test_the_validation_sees_what_a_cluster_would_refuse(
    render: Render, where: tuple[str | int, ...], value: object
) -> None:
    jobset = copy.deepcopy(jobset_of(render("overlays/2x4")))
    validate(jobset)
    *parents, last = where
    inner: Any = jobset
    for key in parents:
        inner = inner[key]
    inner[last] = value
    with pytest.raises(InvalidManifestError):
        validate(jobset)


def test_size_follows_the_settings(objects: list[Manifest]) -> None:
    (settings,) = (one["data"] for one in objects if one["kind"] == "ConfigMap")
    train = jobs_of(objects)["train"]["template"]["spec"]
    assert train["parallelism"] == train["completions"] == int(settings["NUM_NODES"])
    assert train["completionMode"] == "Indexed"
    gpus = {
        one["resources"]["limits"].get("nvidia.com/gpu")
        for one in containers_of(train["template"]["spec"])
    }
    on_cpu = settings.get("DEVICE") == "cpu"
    assert gpus == {None if on_cpu else int(settings["RANKS_PER_NODE"])}


@pytest.mark.parametrize("path", [*OVERLAYS, "aggregate", "watch"])
def test_nothing_runs_as_root_or_with_rights_it_does_not_need(path: str, render: Render) -> None:
    for pod in pods_of(render(path)):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostIPC", "hostPID"} & pod.keys()
        for container in containers_of(pod):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


def test_all_that_is_mounted_and_named_is_there(objects: list[Manifest]) -> None:
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    for pod in pods_of(objects):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for volume in volumes.values():
            claim = volume.get("persistentVolumeClaim")
            assert not claim or ("PersistentVolumeClaim", claim["claimName"]) in names
        for container in containers_of(pod):
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounts.keys() <= volumes.keys()
            assert mounts["workspace"] == container["workingDir"] == "/workspace"
            for source in container["envFrom"]:
                assert ("ConfigMap", source["configMapRef"]["name"]) in names


def test_training_has_shared_memory_probes_and_a_check_before(objects: list[Manifest]) -> None:
    pod = pod_of(jobs_of(objects)["train"])
    (train,) = pod["containers"]
    (shared,) = (mount for mount in train["volumeMounts"] if mount["mountPath"] == "/dev/shm")
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == shared["name"])
    assert volume["emptyDir"]["medium"] == "Memory"
    assert "healthcheck.py" in pod["initContainers"][0]["command"][-1]
    for probe in ("startupProbe", "livenessProbe"):
        assert "--liveness" in train[probe]["exec"]["command"]


def test_paths_in_the_image_are_paths_of_the_checkout(objects: list[Manifest]) -> None:
    words = re.findall(r"/opt/megascan/([\w./-]+)", str(objects))
    assert len(words) >= 3
    assert [word for word in words if not (REPOSITORY / word).is_file()] == []


def test_every_variable_in_a_command_is_set(objects: list[Manifest], make_pod: Any) -> None:
    for name in jobs_of(objects):
        pod = make_pod(objects, name)
        for container in containers_of(pod.spec):
            used = re.findall(r"\$\((\w+)\)", str(container))
            assert set(used) <= pod.environment(container).keys()


def test_jobs_follow_one_another(objects: list[Manifest]) -> None:
    jobs = jobset_of(objects)["spec"]["replicatedJobs"]
    after = [(job["name"], *(other["name"] for other in job.get("dependsOn", []))) for job in jobs]
    expected: list[tuple[str, ...]] = [("train",), ("aggregate", "train")]
    if "prepare" in jobs_of(objects):
        expected = [("prepare",), ("train", "prepare"), ("aggregate", "train")]
    assert after == expected


def test_the_first_pod_is_where_the_ranks_meet(objects: list[Manifest]) -> None:
    jobset = jobset_of(objects)
    coordinator = jobset["spec"]["coordinator"]
    assert coordinator == {"replicatedJob": "train", "jobIndex": 0, "podIndex": 0}
    last = jobs_of(objects)["train"]["template"]["spec"]["completions"] - 1
    name = jobset["metadata"]["name"]
    assert PART.fullmatch(f"{name}-train-0-{last}-xxxxx")


def test_rdma_is_asked_for_where_the_overlay_has_it(render: Render) -> None:
    def asks(path: str) -> tuple[bool, bool]:
        (train,) = pod_of(jobs_of(render(path))["train"])["containers"]
        has_device = any(name.startswith("rdma/") for name in train["resources"]["limits"])
        return has_device, train["securityContext"]["capabilities"].get("add") == ["IPC_LOCK"]

    assert asks("overlays/4x8") == (True, True)
    assert asks("overlays/2x4") == asks("overlays/cpu-smoke") == (False, False)


def test_the_volume_has_the_room_that_the_health_check_wants(objects: list[Manifest]) -> None:
    """A probe that fails for want of 5 GB would end every pod."""
    (claim,) = (one for one in objects if one["kind"] == "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    size = re.fullmatch(r"(\d+)Gi", claim["spec"]["resources"]["requests"]["storage"])
    assert size
    assert int(size[1]) >= 10


def test_images_are_those_of_the_overlay(objects: list[Manifest]) -> None:
    images = {container["image"] for pod in pods_of(objects) for container in containers_of(pod)}
    assert images == {
        "registry.example.com/megascan:0.1", "registry.example.com/megascan-cpu:0.1",
    }  # fmt: skip


def test_the_watch_is_scraped_and_probed_where_it_listens(render: Render) -> None:
    by_kind = {one["kind"]: one for one in render("watch")}
    deployment, service = by_kind["Deployment"], by_kind["Service"]
    (watch,) = deployment["spec"]["template"]["spec"]["containers"]
    (port,) = watch["ports"]
    asked = watch["args"][watch["args"].index("--prometheus") + 1]
    assert int(asked) == port["containerPort"] == service["spec"]["ports"][0]["port"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    for probe in ("startupProbe", "livenessProbe"):
        assert watch[probe]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
