"""``--dry-run`` refuses a model that the run refuses before it loads weights, with the same exit code and message."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from e2e.in_process import run_here
from e2e.workplace import Outcome

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
CHANGES: dict[str, dict[str, object]] = {
    "plain": {},
    "code": {"auto_map": {"AutoModel": "code.M"}},
    "quantized": {"quantization_config": GPTQ},
    "unknown class": {"architectures": ["NoSuchModel"]},
    "unknown type": {"model_type": "nosuch"},
}
"""Name → keys of the config of a checkpoint."""
REQUESTS = {
    "not on this machine": ("missing",),
    "needs code": ("code",),
    "quantized tensors missing": ("quantized",),
    "unknown class": ("unknown class",),
    "unknown type": ("unknown type",),
    "task of other models": ("plain", "--task", "image-classification"),
    "class of other models": ("plain", "--model-class", "Nope"),
    "size too large": ("plain", "--shape-config", '{"sequence_length": 100000}'),
    "layout without a class": ("plain", "--layout", "genai"),
}


@pytest.fixture(name="checkpoints", autouse=True)
def make_checkpoints(here: Path, small_bert: Path) -> Path:
    """Copies of a checkpoint whose configs state other things."""
    for name, keys in CHANGES.items():
        folder = Path(shutil.copytree(small_bert, here / name))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**config, **keys}), encoding="utf-8")
    return here


def _complaint(outcome: Outcome) -> str:
    return outcome.err[outcome.err.index("error") :].partition(": ")[2]


@pytest.mark.parametrize(
    ("verb", "name"),
    [(verb, name) for verb in ("export", "build") for name in REQUESTS if verb == "build" or "layout" not in name],
)
def test_dry_run_refuses_what_the_run_refuses(checkpoints: Path, verb: str, name: str) -> None:
    """Nothing is written by either."""
    model, *options = REQUESTS[name]
    output = {"export": "out/model.onnx", "build": "out"}[verb]
    arguments = (verb, "-m", model, "-o", output, *options)
    planned = run_here(*arguments, "--dry-run")
    assert not (checkpoints / "out").exists()
    done = run_here(*arguments)
    assert planned.code == done.code != 0
    assert _complaint(planned) == _complaint(done)
