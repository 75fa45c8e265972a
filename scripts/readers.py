"""Runs the tests that need a program that opens files of winml. Started by `make readers`.

Each program of the table `READERS` is installed into a folder of its own under ``build/readers``, then the tests with
the marker ``reader`` and its name are run. A folder is kept until the versions listed in ``tests/readers`` change.
Programs of the system are installed by apt-get if that is available. A program that cannot be installed is listed with
the reason and its tests are left out. Exit code 1: a test failed, or a program was installed and has no test.

    python scripts/readers.py [NAME …]              # default: all programs
    python scripts/readers.py --install [NAME …]    # without the tests; needs Python with pip, and no package
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

import windows

if TYPE_CHECKING:
    import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
INSTALLED = REPOSITORY / "build" / "readers"
VERSIONS = REPOSITORY / "tests" / "readers"
STAMP = ".versions"
"""File of an installed folder: digest of the versions it was made from. Written last."""
_INSTALLATIONS = 3
"""Installations at the same time. Chosen: one computes while others wait for the network or the disk."""
_PIP_OPTIONS = ("-q", "--no-compile")
"""Most modules of these packages are never imported, and compiling them takes as long as unpacking them."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class NotInstalledError(Exception):
    """A program cannot be installed; the message is the reason."""


@dataclass(frozen=True)
class Installer:
    """Installs packages into a folder and reads their versions from it."""

    file: str
    """File in ``tests/readers`` that pins the packages; ``{}`` is the name of the reader."""
    install: Callable[[Path, Path], None]
    """Called with that file and the folder."""
    read_version: Callable[[Path, str], str]
    """Called with the folder and the name of a package."""


def _install_environment(requirements: Path, folder: Path) -> None:
    _run(sys.executable, "-m", "venv", "--without-pip", folder)
    _run(sys.executable, "-m", "pip", "--python", _interpreter(folder), "install", *_PIP_OPTIONS, "-r", requirements)


def _install_newest(requirements: Path, folder: Path) -> None:
    """Install the project with the newest versions of its dependencies, and the pinned torch.

    Newer versions of torch from the default package index come with several gigabytes of GPU libraries.
    """
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (torch,) = (line for line in pins if line.startswith("torch=="))
    _run(sys.executable, "-m", "venv", "--without-pip", folder)
    pip = (sys.executable, "-m", "pip", "--python", _interpreter(folder), "install", *_PIP_OPTIONS)
    _run(*pip, "-r", requirements, torch)


def _install_windows(requirements: Path, folder: Path) -> None:
    """Install Python for Windows and packages, and a program ``bin/python`` that runs it under Wine."""
    wine = find_program(windows.WINE)
    assert wine is not None, "its program was looked up before"
    tools = folder / "tools"
    pip = (sys.executable, "-m", "pip")
    # uv, unlike pip, evaluates the conditions of requirements for Windows.
    _run(*pip, "install", *_PIP_OPTIONS, "--target", tools, "-r", VERSIONS / "uv.txt")
    _run(*pip, "download", "-q", "--no-deps", "-d", tools, "-r", requirements.with_stem("windows-python"))
    uv = str(tools / "bin" / "uv")
    try:
        windows.unpack_python(next(tools.glob("*.tar.gz")), folder)
        packages = windows.packages_folder(folder)
        _run(uv, "pip", "install", "-q", *windows.TARGET, "--target", packages, "-r", requirements)
        program = windows.write_program(folder, wine)
    except OSError as error:
        raise NotInstalledError(str(error)) from error
    _run(str(program), "-c", windows.FIRST_RUN)


def _install_packages(requirements: Path, folder: Path) -> None:
    _run(sys.executable, "-m", "pip", "install", *_PIP_OPTIONS, "--target", folder, "-r", requirements)


def _install_node_packages(lock: Path, folder: Path) -> None:
    folder.mkdir()
    for file in (lock, lock.with_name("package.json")):
        shutil.copyfile(file, folder / file.name)
    # Scripts of packages download libraries for GPUs.
    _run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", folder)


def _read_python_version(folder: Path, package: str) -> str:
    patterns = ("lib/python*/site-packages", "Lib/site-packages", "cp*/Lib/site-packages")
    path = [folder, *(place for pattern in patterns for place in folder.glob(pattern))]
    return next(iter(distributions(name=package, path=[str(place) for place in path]))).version


def _read_node_version(folder: Path, package: str) -> str:
    version: str = json.loads((folder / "node_modules" / package / "package.json").read_bytes())["version"]
    return version


ENVIRONMENT = Installer("{}.txt", _install_environment, _read_python_version)
"""A virtual environment, for programs that need other versions than winml."""
NEWEST = Installer("{}.txt", _install_newest, _read_python_version)
"""A virtual environment with what an installation of the project resolves to today."""
PACKAGES = Installer("{}.txt", _install_packages, _read_python_version)
"""A folder for PYTHONPATH, for packages that are imported together with winml."""
WINDOWS = Installer("{}.txt", _install_windows, _read_python_version)
"""Python for Windows with packages, run under Wine."""
NODE_PACKAGES = Installer("{}/package-lock.json", _install_node_packages, _read_node_version)


@dataclass(frozen=True)
class Reader:
    """A program that opens files of winml, and its test files."""

    name: str
    """Argument of the marker ``reader``."""
    tests: tuple[str, ...]
    installer: Installer | None = None
    packages: tuple[str, ...] = ()
    """Packages whose versions are printed."""
    programs: tuple[tuple[str, ...], ...] = ()
    """Programs of the system. Each is a tuple of alternatives; the first is also the name of the Debian package."""


_LAYOUTS = "tests/integration/test_layouts.py"
_COMPILERS = "tests/integration/test_compilers.py"
_PAGES = ("tests/unit/report/test_page.py", "tests/unit/view/test_view.py", "tests/integration/test_module_profile.py")
READERS = (
    Reader(
        "genai",
        (_LAYOUTS, "tests/integration/test_adapters.py"),
        ENVIRONMENT,
        ("onnxruntime-genai", "onnxruntime", "onnxruntime-ep-webgpu"),
    ),
    Reader(
        "optimum",
        (_LAYOUTS, "tests/integration/test_diffusion_pipelines.py"),
        ENVIRONMENT,
        ("optimum-onnx", "transformers", "sentence-transformers", "diffusers"),
    ),
    Reader(
        "transformers.js", (_LAYOUTS,), NODE_PACKAGES, ("@huggingface/transformers",), (("node",), ("npm",), BROWSERS)
    ),
    Reader("lm-eval", (_LAYOUTS,), ENVIRONMENT, ("lm_eval", "onnxruntime-genai", "onnxruntime")),
    Reader("openvino", ("tests/integration/test_readers_of_folders.py",), ENVIRONMENT, ("openvino",)),
    # Has neither torch nor transformers.
    Reader(
        "openvino-onnxruntime", (_COMPILERS, "tests/e2e/test_without_torch.py"), ENVIRONMENT, ("onnxruntime-openvino",)
    ),
    Reader(
        "newest",
        ("tests/e2e/test_newest_versions.py",),
        NEWEST,
        ("torch", "transformers", "onnxruntime", "onnx", "numpy"),
    ),
    Reader("openvino-plug-in", (_COMPILERS,), PACKAGES, ("onnxruntime-ep-openvino",)),
    Reader("qnn", (_COMPILERS,), PACKAGES, ("onnxruntime-qnn", "onnxruntime")),
    # Runs on the Vulkan driver in software that comes with Chromium.
    Reader("webgpu", ("tests/integration/test_webgpu.py",), PACKAGES, ("onnxruntime-ep-webgpu",), (BROWSERS,)),
    Reader("ray", ("tests/integration/test_ray_sweep.py",), PACKAGES, ("ray",)),
    Reader("site", ("tests/docs/test_site_in_browser.py",), PACKAGES, ("mkdocs", "mkdocs-material"), (BROWSERS,)),
    Reader("chromium", _PAGES, programs=(BROWSERS,)),
    Reader("windows", ("tests/e2e/test_windows.py",), WINDOWS, ("torch", "onnxruntime"), (windows.WINE,)),
    # Resolves constraints.txt for other systems.
    Reader("uv", ("tests/architecture/test_dependencies.py",), ENVIRONMENT, ("uv",)),
    Reader("zsh", ("tests/e2e/test_completions.py",), programs=(("zsh",),)),
    Reader("fish", ("tests/e2e/test_completions.py",), programs=(("fish",),)),
)


def folder_of(name: str) -> Path:
    """Return the folder into which a reader is installed."""
    return INSTALLED / name


def python_of(name: str) -> Path:
    """Return the interpreter of a reader that is installed as an environment."""
    return _interpreter(folder_of(name))


def _interpreter(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


@dataclass
class Row:
    """Installation and test results of one reader, as printed."""

    reader: Reader
    versions: str = ""
    reason: str = ""
    """Why the reader is not installed; empty if it is installed."""
    setup_seconds: float = 0.0
    test_seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)

    def as_text(self) -> str:
        """Format one line of the table."""
        result = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items())) or "no test"
        opened = f"not installed: {self.reason}" if self.reason else f"{result:<22}  {self.versions}"
        return f"{self.reader.name:<21} {self.setup_seconds:7.1f} {self.test_seconds:7.1f}  {opened}"


class OutcomesPlugin:
    """Plug-in of pytest that adds up outcomes and seconds by reader."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {row.reader.name: row for row in rows}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the setup, call or teardown of one test."""
        row = self._rows[str(dict(report.user_properties)["reader"])]
        row.test_seconds += report.duration
        if report.when == "call" or report.outcome != "passed":
            row.outcomes[report.outcome] += 1


def find_program(alternatives: Iterable[str]) -> str | None:
    """Return the path of the first alternative that is installed."""
    return next(filter(None, map(shutil.which, alternatives)), None)


def install_programs(readers: Iterable[Reader]) -> None:
    """Install missing programs of the system, as far as apt-get can."""
    missing = {names[0] for reader in readers for names in reader.programs if find_program(names) is None}
    if missing and shutil.which("apt-get") and os.geteuid() == 0:
        _run("apt-get", "update", "-qq")
        for name in sorted(missing):
            with contextlib.suppress(NotInstalledError):
                _run("apt-get", "install", "-qq", "--no-install-recommends", name)


def install_reader(reader: Reader) -> str:
    """Install a reader unless its folder is up to date, and return its versions."""
    versions = [_read_program_version(alternatives) for alternatives in reader.programs]
    if reader.installer is not None:
        pins, folder = VERSIONS / reader.installer.file.format(reader.name), folder_of(reader.name)
        digest, stamp = _digest_pins(pins), folder / STAMP
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != digest:
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            reader.installer.install(pins, folder)
            stamp.write_text(digest, encoding="utf-8")
        versions += [f"{name} {reader.installer.read_version(folder, name)}" for name in reader.packages]
    return ", ".join(versions)


def _read_program_version(alternatives: tuple[str, ...]) -> str:
    if (program := find_program(alternatives)) is None:
        raise NotInstalledError(f"no {alternatives[0]} on this machine; install it, or let apt-get do so as root")
    printed = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    return f"{Path(program).name} {next(word for word in printed.split() if any(map(str.isdigit, word)))}"


def _digest_pins(pins: Path) -> str:
    text = pins.read_text(encoding="utf-8")
    lines = text.splitlines()
    others = [pins.parent / line[3:] for line in lines if line.startswith("-c ")]
    others += pins.parent.glob(f"{pins.stem}-python.txt")  # the interpreter of an installer
    parts = [sys.version, text, *(file.read_text(encoding="utf-8") for file in others)]
    if "." in lines:  # the project, with whatever its requirements resolve to on this day
        parts += [
            (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"),
            datetime.now(timezone.utc).date().isoformat(),
        ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _run(program: str, *arguments: str | Path) -> None:
    """Run a program silently. The last line of its messages that names an error becomes the reason of the failure."""
    command = [shutil.which(program) or program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower() or line.startswith("E:")]
        raise NotInstalledError((errors or lines or [f"{program} ended with exit code {done.returncode}"])[-1])


def _install(row: Row) -> None:
    print(f"installing {row.reader.name}\n", end="", flush=True)  # one write: several installations print
    start = time.monotonic()
    try:
        row.versions = install_reader(row.reader)
    except NotInstalledError as error:
        row.reason = str(error)
    row.setup_seconds = time.monotonic() - start


def _run_tests(rows: list[Row]) -> int:
    installed = [row for row in rows if not row.reason]
    if not installed:
        return 0
    files = sorted({file for row in installed for file in row.reader.tests})
    options = [f"--reader={row.reader.name}" for row in installed]
    # One more than cores: some tests wait for the network or for a page.
    workers = (os.cpu_count() or 1) + 1
    import pytest

    return int(pytest.main([f"-n{workers}", *options, *files], [OutcomesPlugin(installed)]))


def main() -> int:
    """Install the readers, run their tests and print the table."""
    parser = argparse.ArgumentParser(description="Run the tests that need a program which opens what winml writes.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="Reader to install and test. Default: all.")
    parser.add_argument("--install", action="store_true", help="Install, and run no test.")
    arguments = parser.parse_args()
    names: list[str] = arguments.names
    if unknown := sorted({*names} - {reader.name for reader in READERS}):
        parser.error(f"{', '.join(unknown)}: no such reader; there are {', '.join(item.name for item in READERS)}")
    os.chdir(REPOSITORY)
    rows = [Row(reader) for reader in READERS if not names or reader.name in names]
    install_programs(row.reader for row in rows)
    with ThreadPoolExecutor(_INSTALLATIONS) as pool:
        list(pool.map(_install, rows))
    if arguments.install:
        return 0
    code = _run_tests(rows)
    print(f"\n{'reader':<21} {'setup s':>7} {'tests s':>7}  opened", *(row.as_text() for row in rows), sep="\n")
    if untested := [row.reader.name for row in rows if not row.reason and not row.outcomes]:
        print(f"no test was run for {', '.join(untested)}", file=sys.stderr)
    return 1 if untested else code


if __name__ == "__main__":
    sys.exit(main())
