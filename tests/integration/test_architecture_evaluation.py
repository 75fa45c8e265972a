"""Does the evaluation of architectures export, check, keep and resume?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from house.sources import REPOSITORY

TYPES = ("bert", "detr", "time_series_transformer")
"""One that works, one that needs a package nobody installs here, one whose default config makes no model."""


def evaluate(folder: Path) -> tuple[str, dict[str, Any]]:
    """Run the script and return what it printed, and what it keeps of each model type."""
    command = [sys.executable, "scripts/architecture_eval.py", *TYPES, "--jobs", "1", "--output", str(folder)]
    command += ["--exporters", "auto"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, encoding="utf-8", check=True)
    content = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return done.stdout, {cell["model"]: cell for cell in content["cells"]}


def test_evaluation_exports_once_and_tells_why_others_were_not_attempted(tmp_path: Path) -> None:
    """Run again, nothing is done twice: times are as they were."""
    printed, kept = evaluate(tmp_path)
    assert "auto: 1 of 1 attempted exported and verified (100.0 %)" in printed
    assert "2 not built" in printed
    cell = kept["random:bert"]
    assert "done" == cell["state"]
    assert 100.0 == cell["measures"]["coverage_percent"]
    assert "/BertModel/BertEmbeddings" in cell["details"]["attempt"]["tags"]
    assert cell["peak_bytes"] > 0
    assert ("failed", "model") == (kept["random:detr"]["state"], kept["random:detr"]["step"])
    assert "prediction_length" in kept["random:time_series_transformer"]["problem"]
    assert ">random:bert</td>" in (tmp_path / "results.html").read_text(encoding="utf-8")
    assert (printed, kept) == evaluate(tmp_path)
    assert [] == list(tmp_path.rglob("*.onnx"))
