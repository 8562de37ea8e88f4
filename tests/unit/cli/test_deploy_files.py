"""Dockerfile and docker-compose.yml fit the code: no Docker is needed to see that."""

import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from worker.settings import Settings, load_settings
from worker.settings_words import env_name

ROOT = Path(__file__).parents[3]
VARIABLES = {env_name(name): name for name in Settings.model_fields}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """(instruction, the rest) of each line of the Dockerfile, continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8")).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def image_environment(instructions: list[tuple[str, str]]) -> dict[str, str]:
    words = [word for name, rest in instructions if name == "ENV" for word in shlex.split(rest)]
    return dict(word.split("=", 1) for word in words)


def test_every_variable_of_ours_is_a_setting_that_accepts_its_value(
    compose: dict[str, Any], instructions: list[tuple[str, str]]
) -> None:
    worker = compose["services"]["worker"]["environment"]
    values = {name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", str(value)) for name, value in worker.items()}
    for source in (image_environment(instructions), values):
        ours = {name: value for name, value in source.items() if name.startswith("PAGEMILL_")}
        assert ours.keys() <= VARIABLES.keys()
        load_settings({VARIABLES[name]: value for name, value in ours.items()})


def test_the_image_runs_as_a_user_without_rights_and_asks_readyz(instructions: list[tuple[str, str]]) -> None:
    names = [name for name, _ in instructions]
    assert dict(instructions)["USER"] == "pagemill"
    assert names.index("USER") < names.index("ENTRYPOINT")
    port = image_environment(instructions)["PAGEMILL_METRICS_PORT"]
    assert f"http://127.0.0.1:{port}/readyz" in dict(instructions)["HEALTHCHECK"]
    assert dict(instructions)["EXPOSE"] == port


def test_the_image_has_every_package_of_ours_and_docker_sees_what_is_copied(
    instructions: list[tuple[str, str]],
) -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    copied = {
        word
        for name, rest in instructions
        if name == "COPY" and not rest.startswith("--from")
        for word in rest.split()[:-1]
    }
    assert set(packages["targets"]["wheel"]["packages"]) <= copied
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")
    }
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


def test_compose_names_only_what_it_defines(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for service in services.values():
        assert service.get("depends_on", {}).keys() <= services.keys()
        named = [volume.split(":")[0] for volume in service.get("volumes", [])]
        assert set(named) <= compose["volumes"].keys()
    host = services["worker"]["environment"]["PAGEMILL_REDIS_URL"].split("//")[1].split(":")[0]
    assert host in services
    assert services["worker"]["depends_on"][host]["condition"] == "service_healthy"
    assert "healthcheck" in services[host]


def test_the_server_keeps_its_data_and_never_evicts(compose: dict[str, Any]) -> None:
    command = compose["services"]["valkey"]["command"]
    assert ("--appendonly", "yes") in set(pairwise(command))
    assert ("--maxmemory-policy", "noeviction") in set(pairwise(command))


def test_docker_waits_longer_than_the_worker_does(compose: dict[str, Any]) -> None:
    worker = compose["services"]["worker"]
    grace = float(worker["environment"]["PAGEMILL_SHUTDOWN_GRACE_S"])
    assert float(worker["stop_grace_period"].removesuffix("s")) > grace
