"""Hostile checkpoint folders: winml reads local files only and runs no code of a checkpoint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from hostile_checkpoints import CHECKPOINTS, KERNELS_PACKAGE, TRUSTED_CODE

TESTS = Path(__file__).parents[1]

Results = Mapping[tuple[str, bool], Mapping[str, Any]]


HARMLESS = {"subprocess.Popen ('ninja', ['ninja', '--version'])": "transformers asks whether a build tool is installed"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of every checkpoint, from a separate process: an audit hook cannot be removed."""
    workplace = tmp_path_factory.mktemp("hostile")
    packages = workplace / "packages"
    (packages / "kernels").mkdir(parents=True)
    (packages / "kernels" / "__init__.py").write_text(KERNELS_PACKAGE, encoding="utf-8")
    described = packages / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    path = os.pathsep.join(map(str, (packages, TESTS, TESTS.parent / "src")))
    online = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    ran = subprocess.run(
        [sys.executable, str(TESTS / "hostile_checkpoints.py"), str(workplace)],
        env={**online, "PYTHONPATH": path, "HF_HOME": str(workplace / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"},
        capture_output=True, encoding="utf-8", timeout=600, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    records = [json.loads(line) for line in ran.stdout.splitlines()]
    return {(record["name"], record["trust"]): record for record in records}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint_reaches_no_network_and_runs_no_code(results: Results, name: str) -> None:
    """Loading opens no socket, no process, and no code file except the installed ones."""
    assert [] == [door for door in results[name, False]["doors"] if door not in HARMLESS]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_trusted_checkpoint_runs_the_code_beside_its_config_and_no_other(results: Results, name: str) -> None:
    """Trust in a folder covers its files only: nothing is fetched."""
    doors = [door for door in results[name, True]["doors"] if door not in HARMLESS]
    assert (name in TRUSTED_CODE) == bool(doors)
    assert all(re.fullmatch(r"exec .*\bevil_code\.py", door) for door in doors), doors


def test_checkpoint_with_foreign_kernels_is_used_without_them_with_a_note(results: Results) -> None:
    """The choice of an implementation with equal results is no reason to refuse a model."""
    outcome = results["attention of a kernel", False]["outcome"]
    assert outcome.startswith("done; ")
    assert "'evil/repository'" in outcome


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own code", "RemoteCodeError: "),
        ("an adapter", "CheckpointError: .*adapter"),
        ("other weights", r"CheckpointError: .*'\.\./other\.safetensors'"),
        ("distributed weights", "CheckpointError: .*distributed"),
        ("a pickle that runs", "CheckpointError: .*run code"),
        ("a backbone elsewhere", "CheckpointError: .*the Hub"),
        ("a timm model elsewhere", "CheckpointError: .*elsewhere"),
    ],
)
def test_checkpoint_that_would_be_another_model_is_refused(results: Results, name: str, words: str) -> None:
    """Information that only another repository has cannot be left out."""
    assert re.match(words, results[name, False]["outcome"])


CLOSED = {
    "audio_utils.py": "values of inputs by address: of processors and pipelines only, which are not built",
    "image_utils.py": "values of inputs by address: of processors and pipelines only, which are not built",
    "video_utils.py": "values of inputs by address: of processors and pipelines only, which are not built",
    "models/perception_lm": "an example in a docstring",
    "models/qwen2_audio": "an example in a docstring",
    "testing_utils.py": "transformers' own tests",
    "cli": "commands of transformers; not used",
    "dynamic_module_utils.py": "own code: models/checkpoints/config.py decides, and refuses code of other repositories",
    "generation/utils.py": "custom generate: asked for with trust only, and its file is looked for in the folder",
    "integrations": "kernels: hub_kernels.get_kernel is replaced (ort/foreign_libraries.py)",
    "integrations/peft.py": "a folder with an adapter is refused (models/checkpoints/config.py)",
    "backbone_utils.py": "repo_exists: the network is closed, which ends in a CheckpointError",
    "modeling_utils.py": "conversion of pickles: of Hub ids only, and not offline",
    "safetensors_conversion.py": "conversion of pickles: of Hub ids only, and not offline",
    "models/auto": "own code: transformers' auto classes are not given a folder; inner auto_map entries are dropped",
    "models/timm_backbone": "timm names with a scheme are refused",
    "models/timm_wrapper": "timm names with a scheme are refused",
    "models/mra": "kernels: hub_kernels.get_kernel is replaced",
    "models/rwkv": "kernels: hub_kernels.get_kernel is replaced",
    "models/sam3_video": "kernels: hub_kernels.get_kernel is replaced",
    "models/yoso": "kernels: hub_kernels.get_kernel is replaced",
    "models/rag": "pickles of its retriever, which is not built",
    "pipelines": "not used",
    "quantizers/quantizer_mxfp4.py": "kernels: hub_kernels.get_kernel is replaced",
    "utils": "helpers of the above; the network is closed",
}
"""File of transformers that could fetch or run something → reason why a checkpoint does not reach it."""

_NOT_BUILT = ("tokenization_", "processing_", "image_processing_", "feature_extraction_", "video_processing_")
"""Name prefixes of preprocessing modules, of which winml reads only the JSON files."""

_CALLED = r"(?<![\w.])"
_DOORS = {
    "get_kernel": rf"{_CALLED}get_kernel(_hub)?\(",
    "get_class_from_dynamic_module": rf"{_CALLED}get_class_from_dynamic_module\(",
    "get_cached_module_file": rf"{_CALLED}get_cached_module_file\(",
    "load_custom_generate": r"\bload_custom_generate\(",
    "auto_conversion": rf"{_CALLED}auto_conversion\(",
    "hf_hub_download": rf"{_CALLED}hf_hub_download\(",
    "snapshot_download": rf"{_CALLED}snapshot_download\(",
    "urlopen": rf"{_CALLED}urlopen\(",
    "repo_exists": r"\brepo_exists\(",
    "spec_from_file_location": r"\bspec_from_file_location\(",
    "exec_module": r"\bexec_module\(",
    "pickle": r"\bpickle\.load\(",
    "timm": r"\btimm\.create_model\(",
    "PeftConfig": r"\bPeftConfig\.from_pretrained\(",
    "torch.hub": r"\btorch\.hub\.\w+\(",
    "subprocess": r"\bsubprocess\.\w+\(",
    "httpx": r"\bhttpx\.(get|post|stream)\(",
}
"""Function name → pattern of its call, in files that fetch or run something."""
_DOOR = re.compile("|".join(_DOORS.values()))


def _places_with_doors() -> Iterator[str]:
    root = Path(transformers.__file__).parent
    for path in root.rglob("*.py"):
        place = path.relative_to(root).as_posix()
        if path.name.startswith(("convert_", "modular_", *_NOT_BUILT)):
            continue  # scripts run by hand, sources of other files
        text = path.read_text(encoding="utf-8")
        if not any(word in text for word in _DOORS):
            continue
        lines = (line for line in text.splitlines() if "(" in line)
        if any(_DOOR.search(line) and not line.lstrip().startswith((">>>", "...", "#", "def ")) for line in lines):
            yield place


def test_transformers_has_no_unreviewed_entry_to_network_or_code() -> None:
    """A new function that fetches or runs something must be reviewed, closed, and recorded with the reason."""
    unknown = {
        place
        for place in _places_with_doors()
        if not any(place == known or place.startswith(f"{known}/") for known in CLOSED)
    }
    assert set() == unknown
