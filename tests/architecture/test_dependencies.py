"""Declaration, pins and version ranges of the libraries that the package imports."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from architecture.sources import REPOSITORY, imports, modules
from readers import python_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DISTRIBUTIONS = {
    "PIL": "pillow",
    "google": "protobuf",
    "onnx_ir": "onnx-ir",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}
"""Import name → distribution, if they differ by more than spelling."""


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


OF_AN_EXTRA = {
    "evaluate": ("eval",), "generate": ("sentences",), "models": ("gguf", "diffusion"), "report": ("eval",),
    "samples": ("eval",), "sweep": ("ray",), "view": ("eval",),
}  # fmt: skip
"""Subpackage → the extras with the libraries that it imports on demand. Errors name the installation of the extra."""


def _declared() -> set[str]:
    """Return the libraries that may be imported: those of every install and those of the extra of a subpackage."""
    project = _project()
    names = itertools.chain(*OF_AN_EXTRA.values())
    extras = (project["optional-dependencies"][extra] for extra in names)
    return {canonicalize_name(Requirement(line).name) for line in itertools.chain(project["dependencies"], *extras)}


def _pins() -> list[Requirement]:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def _foreign_imports() -> set[str]:
    roots = {found.target.split(".")[0] for module in modules() for found in imports(module.tree)}
    return roots - set(sys.stdlib_module_names) - {"winml"}


def test_every_imported_library_is_declared() -> None:
    """A library installed only as a dependency of another library is not imported."""
    declared = _declared()
    used = {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in _foreign_imports()}
    assert set() == used - declared


def test_every_declared_library_is_used() -> None:
    """No library is declared that the package does not import."""
    declared = _declared()
    used = {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in _foreign_imports()}
    assert set() == declared - used


def test_libraries_of_an_extra_are_imported_by_its_subpackage_alone() -> None:
    """Every other subpackage works without the extra."""
    always = {canonicalize_name(Requirement(line).name) for line in _project()["dependencies"]}
    foreign = _foreign_imports()
    strays = {
        f"{module.name} imports {found.target}"
        for module in modules()
        if module.folder not in OF_AN_EXTRA
        for found in imports(module.tree)
        if (name := found.target.split(".")[0]) in foreign
        and canonicalize_name(DISTRIBUTIONS.get(name, name)) not in always
    }
    assert set() == strays


def test_every_declared_library_is_pinned_within_its_range() -> None:
    """The constraints name exactly one version per interpreter, and it satisfies the range in pyproject."""
    project = _project()
    asked = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    pins: dict[str, list[Requirement]] = {}
    for pin in _pins():
        pins.setdefault(canonicalize_name(pin.name), []).append(pin)
    for requirement in map(Requirement, asked):
        versions = [str(pin.specifier) for pin in pins.get(canonicalize_name(requirement.name), [])]
        assert versions, f"{requirement.name} is not pinned"
        assert all(requirement.specifier.contains(version.removeprefix("==")) for version in versions), versions


def test_constraints_hold_plain_versions_only() -> None:
    """Pins are exact, without local labels, and the file names no index."""
    assert [] == [str(pin) for pin in _pins() if not re.fullmatch(r"==[0-9][0-9a-z.]*", str(pin.specifier)) or pin.url]


def test_environment_without_torch_has_the_packages_for_windows_on_arm() -> None:
    """Tests without torch run with what pip installs there, and with Pillow, which images need everywhere."""
    device = {"sys_platform": "win32", "platform_machine": "ARM64"}
    required = [Requirement(line) for line in _project()["dependencies"]]
    expected = {item.name for item in required if item.marker is None or item.marker.evaluate(device)}
    assert not {"torch", "transformers"} & expected
    listed = _listed("tests/readers/openvino-onnxruntime.txt")
    assert {*expected, "pillow"} == {name.replace("-openvino", "") for name in listed}
    assert expected == _listed("examples/ci/requirements.txt")


def _listed(name: str) -> set[str]:
    """Return the packages of a requirements file."""
    lines = (REPOSITORY / name).read_text(encoding="utf-8").splitlines()
    return {Requirement(line).name for line in lines if not line.startswith(("#", "-"))}


PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "windows", "aarch64-apple-darwin")
"""Systems with wheels of torch: none are for Macs with Intel processors and for Windows on Arm."""
WITHOUT_TORCH = (("3.12", "aarch64-pc-windows-msvc"), ("3.13", "aarch64-pc-windows-msvc"))
"""Python and system without torch, for which PyYAML, ml_dtypes and onnx have wheels; extras need pyarrow."""


@pytest.mark.slow
@pytest.mark.reader("uv")
def test_constraints_resolve_on_every_python_and_system() -> None:
    """Wheels of the pinned versions exist, agree with one another, and bring no library without a pin.

    The GPU libraries of torch are left out, which it pins itself.
    """
    assert _project()["requires-python"] == f">={PYTHONS[0]},<3.{int(PYTHONS[-1].partition('.')[2]) + 1}"
    systems = [*itertools.product(PYTHONS, PLATFORMS), *WITHOUT_TORCH]
    with ThreadPoolExecutor(len(PLATFORMS)) as threads:
        resolutions = dict(zip(systems, threads.map(lambda system: _resolve(*system), systems), strict=True))
    if unreachable := [done.stderr for done in resolutions.values() if "Failed to fetch" in done.stderr]:
        pytest.skip(f"no package index can be reached: {unreachable[0].splitlines()[0]}")
    assert {} == {system: done.stderr for system, done in resolutions.items() if done.returncode}
    pinned = {canonicalize_name(pin.name) for pin in _pins()}
    brought = {
        (system, name)
        for system, done in resolutions.items()
        for line in done.stdout.splitlines()
        if not (name := canonicalize_name(Requirement(line).name)).startswith(("cuda-", "nvidia-", "triton"))
    }
    assert all(any(found == system for found, _ in brought) for system in systems)
    assert set() == {(system, name) for system, name in brought if name not in pinned}


def _resolve(python: str, platform: str) -> subprocess.CompletedProcess[str]:
    """Resolve the requirements with the constraints, from wheels alone; with all extras if there is torch."""
    command = [python_of("uv").with_name("uv"), "pip", "compile", "-q", "--no-header", "--no-annotate"]
    system = ["--only-binary", ":all:", "--python-version", python, "--python-platform", platform]
    extras = () if (python, platform) in WITHOUT_TORCH else ("--all-extras",)
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}  # the oldest that torch supports
    return subprocess.run(
        [*map(str, command), *system, "-c", "constraints.txt", *extras, "pyproject.toml"],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip


def test_extras_of_make_targets_exist() -> None:
    """Tests run with the extras of pyproject.

    The extra of the site is installed when it is built, Ray's with the readers.
    """
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    (always,) = re.findall(r"^EXTRAS = ([\w,]+)$", makefile, re.MULTILINE)
    assert '".[docs]"' in makefile
    assert {*always.split(","), "docs", "ray"} == set(_project()["optional-dependencies"])
