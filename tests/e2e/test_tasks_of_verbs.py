"""Names of tasks, as the user or the model card spells them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx
import pytest

from checkpoints import save_checkpoint
from e2e.in_process import run_here
from winml.modelkit import WinMLAutoModel


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder of a small ViT."""
    return save_checkpoint("vit", tmp_path_factory.mktemp("checkpoints") / "vit")


def test_image_feature_extraction_keeps_its_name(here: Path, vit: Path) -> None:
    """Summary, JSON, sidecar, file, config and Python have the requested name."""
    asked = ("-m", vit, "-t", "image-feature-extraction", "--random-weights")
    exported = run_here("export", *asked, "-o", "m.onnx", "--no-verify")
    assert "task       image-feature-extraction (from --task)" in exported.out
    described = {entry.key: entry.value for entry in onnx.load(here / "m.onnx").metadata_props}
    sidecar = json.loads((here / "m_htp_metadata.json").read_text(encoding="utf-8"))
    config = json.loads(run_here("config", *asked).out)
    inspected = json.loads(run_here("inspect", "-m", vit, "-t", "image-feature-extraction", "-f", "json").out)
    names = [
        json.loads(described["winml.model"])["task"],
        sidecar["tracing"]["task"],
        config["loader"]["task"],
        inspected["model"]["task"],
    ]
    assert ["image-feature-extraction"] * 4 == names
    assert "WinMLModelForFeatureExtraction" == inspected["model"]["inference_class"]
    model = WinMLAutoModel.from_pretrained(str(vit), task="image-feature-extraction", random_weights=True)
    assert ("WinMLModelForFeatureExtraction", "image-feature-extraction") == (type(model).__name__, model.task)


def test_task_variant_is_chosen_if_the_architecture_supports_it(vit: Path, small_bert: Path) -> None:
    """Text models have no image features, and a translation needs a decoder."""
    for task in ("image-feature-extraction", "translation"):
        refused = run_here("inspect", "-m", small_bert, "-t", task)
        assert (2, "") == (refused.code, refused.out)
        assert f"bert models have no {task} task" in refused.err
    listed = json.loads(run_here("inspect", "-m", vit, "--list-tasks", "-f", "json").out)["tasks"]
    assert "image-feature-extraction" in listed
    assert "summarization" not in listed


@pytest.mark.parametrize(
    ("card", "task", "words"),
    [
        (
            "---\npipeline_tag: fill-mask\n---\n# A model\n",
            "fill-mask",
            "pipeline_tag fill-mask",
        ),
        (
            "---\npipeline_tag: sentence-similarity\n---\n",
            "feature-extraction",
            "sentence-similarity",
        ),
        ("---\npipeline_tag: image-classification\n---\n", "feature-extraction", "type 'bert'"),
        ("---\npipeline_tag: [\n---\n", "feature-extraction", "type 'bert'"),
        ("---\n- a\n---\n", "feature-extraction", "type 'bert'"),
        ("# No facts", "feature-extraction", "type 'bert'"),
    ],
)
def test_model_card_decides_the_task_if_the_config_names_no_architecture(
    tmp_path: Path, small_bert: Path, card: str, task: str, words: str
) -> None:
    """A damaged card, or one with a task that the architecture lacks, is ignored."""
    folder = Path(shutil.copytree(small_bert, tmp_path / "bert"))
    (folder / "README.md").write_text(card, encoding="utf-8")
    assert "architecture BertModel" in run_here("inspect", "-m", folder).out
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    record = json.loads(run_here("inspect", "-m", folder, "-f", "json").out)["model"]
    assert task == record["task"]
    assert words in record["task_rule"]
