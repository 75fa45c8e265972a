"""Models with several encoders, and vision-language models: their parts, and the generated text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import PIL.Image
import pytest
import torch
from packaging.version import Version
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    ClapConfig,
    ClapModel,
    CLIPModel,
    LlavaForConditionalGeneration,
)

from checkpoints import save_checkpoint
from e2e.in_process import run_here
from graphs import run_onnx
from vision_language import PLACE, save_image, save_vision_language, vision_language_processor
from winml.modelkit import ExportResult, HTPExporter, WinMLExportConfig, WinMLModelForImageTextToText, build_hf_model
from winml.modelkit.errors import UsageError
from winml.modelkit.models.caches.layout import loop_cache_name
from winml.modelkit.models.inputs.options import ShapeConfig
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.models.resolution import resolve_model
from winml.modelkit.onnx.bundle import ModelBundle
from winml.modelkit.onnx.specs import DynamicRequest
from winml.modelkit.ort.decoding.parts import VisionLanguageDecoder
from winml.modelkit.ort.graph_inputs import graph_inputs
from winml.modelkit.ort.sessions import Session
from winml.modelkit.profile.perf import pytorch_run
from winml.modelkit.quantize.calibration.calibration_data import Calibration
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.samples.generated_samples import decoding_samples

pytestmark = pytest.mark.usefixtures("libraries_may_warn")

NAMES = ("vision", "embedding", "decoder")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llava with its processor."""
    return save_vision_language(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def exported(checkpoint: Path) -> ExportResult:
    """The three parts, in a folder inside the checkpoint; its files are found in the parent folder."""
    (checkpoint / "onnx").mkdir()
    exporter = HTPExporter(WinMLExportConfig())
    return exporter.export_checkpoint(ModelRequest(str(checkpoint)), checkpoint / "onnx" / "net.onnx")


def _with_configs(checkpoint: Path, folder: Path) -> Path:
    """Copy the parts and the configs beside the checkpoint into one folder, as ``from_pretrained`` reads them."""
    shutil.copytree(checkpoint / "onnx", folder, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        shutil.copyfile(checkpoint / name, folder / name)
    return folder


def test_parts_are_tagged_as_the_whole_model_and_feed_each_other(exported: ExportResult) -> None:
    """The modules around a method's module are in its paths; each part names the parts it feeds."""
    assert NAMES == tuple(part.name for part in exported.parts)
    assert all(100.0 == part.coverage.percent for part in exported.parts)
    modules = {part.name: {node.module for node in part.nodes} for part in exported.parts}
    assert all(path.startswith("model") for path in modules["vision"])
    assert "model.language_model.layers.1.mlp" in modules["decoder"]
    tags = {node.path: node.tag for part in exported.parts for node in part.tree}
    assert tags["model.multi_modal_projector"].startswith("/LlavaForConditionalGeneration/LlavaModel/")
    feeds = ModelBundle.read([part.model_path for part in exported.parts]).feeds
    assert [("image_features", "embedding")] == [(feed.output, feed.part) for feed in feeds["vision"]]
    assert [("inputs_embeds", "decoder")] == [(feed.output, feed.part) for feed in feeds["embedding"]]
    assert {"decoder"} == {feed.part for feed in feeds["decoder"]}


def test_parts_in_int8_are_compared_together(checkpoint: Path, tmp_path: Path) -> None:
    """All three parts are compared once they are written."""
    config = {"export": {"exporter": "torchscript"}, "optim": None}
    result = build_hf_model(checkpoint, tmp_path / "built", config=config, precision="int8")
    stage = result.manifest.parts[-1].stage("quantize")
    assert stage is not None
    assert stage.together.startswith("all parts together SQNR")


def test_baseline_of_a_part_is_that_part(checkpoint: Path, exported: ExportResult) -> None:
    """PyTorch is timed on the computation of the file, not on the whole model."""
    feeds = {"pixel_values": np.random.default_rng(0).standard_normal((1, 3, 16, 16)).astype(np.float32)}
    (expected,) = run_onnx(exported.parts[0].model_path, feeds).values()
    with pytorch_run(ModelRequest(str(checkpoint)), feeds, threads=None) as run:
        answer: Any = run()
    np.testing.assert_allclose(answer[0].numpy(), expected, rtol=1e-3, atol=1e-5)


def test_text_written_with_the_parts_is_verified(exported: ExportResult) -> None:
    """The text of two rows, one of them padded, equals PyTorch's."""
    verification = exported.parts[-1].verification
    assert verification is not None
    assert verification.generation is not None
    assert (2, 32) == (verification.generation.rows, verification.generation.new_tokens)


@pytest.mark.parametrize("asked", [{}, {"num_beams": 2}])
@pytest.mark.usefixtures("exported")
def test_generate_with_images_equals_pytorch(checkpoint: Path, tmp_path: Path, asked: dict[str, Any]) -> None:
    """The rows have different lengths and image positions; beam search is covered too."""
    make: Any = AutoProcessor
    processor = make.from_pretrained(checkpoint)
    noise = np.random.default_rng(1).integers(0, 255, (2, 20, 30, 3), dtype=np.uint8)
    given = processor(
        images=list(map(PIL.Image.fromarray, noise)), text=["<image> w5 w6 w7", "w9 <image> w1"], padding=True,
        return_tensors="pt",
    )  # fmt: skip
    settings = {"max_new_tokens": 16, "suppress_tokens": [PLACE], **asked}
    reference: Any = LlavaForConditionalGeneration.from_pretrained(checkpoint)
    model: Any = WinMLModelForImageTextToText.from_pretrained(_with_configs(checkpoint, tmp_path))

    assert reference.generate(**given, **settings).tolist() == model.generate(**given, **settings).tolist()
    with pytest.raises(UsageError, match=r"32 .* 16 embeddings"):
        model(input_ids=given["input_ids"], pixel_values=given["pixel_values"][:1])


_IN_PIECES = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"),
    reason="torch before 2.13 cannot follow attention over a number of pictures that the values decide",
)


@pytest.mark.parametrize("kind", ["gemma3", "paligemma", pytest.param("idefics3", marks=_IN_PIECES), "blip-2"])
def test_other_architectures_equal_pytorch(kind: str, tmp_path: Path) -> None:
    """Image tokens that attend to each other, images in pieces, and a language model with its own loop are covered."""
    folder = save_vision_language(tmp_path / kind, kind)
    exporter = HTPExporter(WinMLExportConfig())
    # Embeddings of gemma3 mark the tokens of images, and paligemma's decoder takes token types.
    embedding_of: Any = "features" if kind == "gemma3" else None
    request = ModelRequest(str(folder), task="image-text-to-text", embedding_of=embedding_of)
    exported = exporter.export_checkpoint(request, folder / "onnx" / "net.onnx")
    assert NAMES == tuple(part.name for part in exported.parts)
    assert all(100.0 == part.coverage.percent for part in exported.parts)
    assert "torchscript" == exported.parts[-1].exporter
    verification = exported.parts[-1].verification
    assert verification is not None
    assert verification.generation is not None
    assert 32 == verification.generation.new_tokens

    for name in ("config.json", "generation_config.json"):
        (folder / "onnx" / name).write_bytes((folder / name).read_bytes())
    make: Any = AutoProcessor
    processor = make.from_pretrained(folder)
    place = processor.image_token if isinstance(processor.image_token, str) else ""
    noise = np.random.default_rng(1).integers(0, 255, (2, 20, 30, 3), dtype=np.uint8)
    given = processor(
        images=[[PIL.Image.fromarray(pixels)] for pixels in noise], text=[f"{place} w5 w6 w7", f"w9 {place} w1"],
        padding=True, return_tensors="pt",
    )  # fmt: skip
    settings = {"max_new_tokens": 8, "suppress_tokens": [PLACE]}
    reference: Any = AutoModelForImageTextToText.from_pretrained(folder)
    model: Any = WinMLModelForImageTextToText.from_pretrained(folder / "onnx")
    written = model.generate(**given, **settings)
    given.pop("labels", None)
    assert reference.generate(**given, **settings).tolist() == written.tolist()

    if kind == "paligemma":
        with pytest.raises(UsageError, match="token_type_ids is int64"):
            model(**{**given, "token_type_ids": given["token_type_ids"][:, 1:]})
    if "pixel_attention_mask" in given:
        given["pixel_attention_mask"][0, 0, 0, 0] = 0
        with pytest.raises(UsageError, match="pixel_attention_mask"):
            model(**given)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_images_of_any_size_equal_pytorch(kind: str, tmp_path: Path) -> None:
    """Grids of the images determine grouped patches and token positions; beam search is covered too."""
    folder = save_vision_language(tmp_path / kind, kind)
    request = ModelRequest(str(folder), task="image-text-to-text")
    with pytest.raises(UsageError, match="image_grid_thw") as refused:
        HTPExporter(WinMLExportConfig(exporter="dynamo")).export_checkpoint(request, tmp_path / "net.onnx")
    assert refused.value.step is not None
    assert refused.value.step.startswith("step 1 ")
    exported = HTPExporter(WinMLExportConfig()).export_checkpoint(request, folder / "onnx" / "net.onnx")
    assert NAMES == tuple(part.name for part in exported.parts)
    shapes = {spec.name: spec.shape for spec in exported.parts[0].inputs}
    assert {"pixel_values": ("patches", 1176), "image_grid_thw": ("images", 3)} == shapes
    assert (3, "batch_size", "sequence_length") == {spec.name: spec.shape for spec in exported.parts[-1].inputs}[
        "position_ids"
    ]
    verification = exported.parts[-1].verification
    assert verification is not None
    assert verification.generation is not None
    seen = ["deepstack_features.0"] if kind == "qwen3_vl" else []
    assert ["image_features", *seen] == [spec.name for spec in exported.parts[0].outputs]

    for name in ("config.json", "generation_config.json"):
        (folder / "onnx" / name).write_bytes((folder / name).read_bytes())
    processor = vision_language_processor(kind)
    pictures = [save_image(tmp_path / "0.png"), save_image(tmp_path / "1.png", 1)]
    wide = [PIL.Image.open(path).resize(size) for path, size in zip(pictures, [(120, 80), (200, 60)], strict=True)]
    given = processor(images=wide, text=["w5 <image> w6 w7", "w9 <image> w1"], padding=True, return_tensors="pt")
    assert given["image_grid_thw"][0].tolist() != given["image_grid_thw"][1].tolist()
    reference: Any = AutoModelForImageTextToText.from_pretrained(folder)
    model: Any = WinMLModelForImageTextToText.from_pretrained(folder / "onnx")
    for asked in ({}, {"num_beams": 2}):
        settings = {"max_new_tokens": 8, "suppress_tokens": [PLACE], **asked}
        assert reference.generate(**given, **settings).tolist() == model.generate(**given, **settings).tolist()
    del given["mm_token_type_ids"]
    with pytest.raises(UsageError, match=r"image_grid_thw .*mm_token_type_ids"):
        model.generate(**given, max_new_tokens=1)

    outcome = run_here(
        "generate", str(folder / "onnx"), "-p", "w5 w6", "--image", str(pictures[0]), "--max-new-tokens", "8",
        "--format", "json",
    )  # fmt: skip
    assert 0 == outcome.code, outcome.err
    one = processor(images=[PIL.Image.open(pictures[0])], text=["<image>w5 w6"], return_tensors="pt")
    written = reference.generate(**one, max_new_tokens=8, suppress_tokens=[PLACE])
    assert written[0, one["input_ids"].shape[1] :].tolist() == json.loads(outcome.out)["tokens"]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_images_of_a_stated_size_have_a_constant_grid(kind: str, tmp_path: Path) -> None:
    """For a provider of fixed sizes; images are resized, and another grid of as many patches is refused."""
    folder = save_vision_language(tmp_path / kind, kind)
    exporter = HTPExporter(WinMLExportConfig(ep="qnn", verify=False))
    with pytest.raises(UsageError) as refused:
        exporter.export_checkpoint(ModelRequest(str(folder)), folder / "onnx" / "net.onnx")
    assert '--shape-config \'{"height": ' in refused.value.hint
    sizes = ShapeConfig(height=56, width=112)
    exported = exporter.export_checkpoint(ModelRequest(str(folder), shape_config=sizes), folder / "onnx" / "net.onnx")
    shapes = {spec.name: spec.shape for spec in exported.parts[0].inputs}
    assert {"pixel_values": (32, 1176), "image_grid_thw": (1, 3)} == shapes
    operators = {node.op_type for node in onnx.load(exported.parts[0].model_path).graph.node}
    assert not operators & {"CumSum", "TopK", "NonZero"}, "positions and windows are constants"

    for path in folder.glob("*.json"):
        (folder / "onnx" / path.name).write_bytes(path.read_bytes())
    picture = save_image(tmp_path / "0.png")
    asked = ("-p", "w5 w6", "--image", str(picture), "--max-new-tokens", "8", "--format", "json")
    outcome = run_here("generate", str(folder / "onnx"), *asked)
    assert 0 == outcome.code, outcome.err
    processor = vision_language_processor(kind)
    fitted = PIL.Image.open(picture).convert("RGB").resize((112, 56))
    given = processor(images=[fitted], text=["<image>w5 w6"], return_tensors="pt")
    reference: Any = AutoModelForImageTextToText.from_pretrained(folder)
    written = reference.generate(**given, max_new_tokens=8, suppress_tokens=[PLACE])
    assert written[0, given["input_ids"].shape[1] :].tolist() == json.loads(outcome.out)["tokens"]

    model: Any = WinMLModelForImageTextToText.from_pretrained(folder / "onnx")
    tall = processor(images=[fitted.resize((56, 112))], text=["<image>w5 w6"], return_tensors="pt")
    assert given["pixel_values"].shape == tall["pixel_values"].shape
    with pytest.raises(UsageError, match=r"\[\[1, 8, 4\]\].*\[1, 4, 8\]"):
        model.generate(**tall, max_new_tokens=1)
    samples = decoding_samples(exported.parts[-1].model_path, folder, {}, 2, seed=0)
    assert [(1, 1, 32)] * 2 == [feeds["inputs_embeds"].shape for feeds in samples]


def test_open_axes_apply_to_the_parts_with_these_axes(checkpoint: Path) -> None:
    """The axes have the names of the whole model; the decoder's tokens are vectors, and no axis is ignored."""
    axes = {"input_ids": {0: "rows", 1: "tokens"}, "pixel_values": {0: "pictures"}}
    loaded = resolve_model(ModelRequest(str(checkpoint), dynamic=DynamicRequest(axes=axes)))
    shapes = {part.name: {spec.name: spec.shape for spec in part.inputs} for part in loaded.parts}
    assert "pictures" == shapes["vision"]["pixel_values"][0]
    assert ("rows", "tokens") == shapes["embedding"]["input_ids"]
    assert ("rows", "tokens") == shapes["decoder"]["inputs_embeds"][:2]
    request = ModelRequest(str(checkpoint), dynamic=DynamicRequest(axes={"pixel_values": {2: "high"}}))
    with pytest.raises(UsageError, match="--dynamic-axes: height"):
        resolve_model(request)


def test_samples_of_the_decoder_have_an_image(checkpoint: Path, exported: ExportResult) -> None:
    """Quantization reads embeddings of images and tokens by the other parts, not random values."""
    samples = list(decoding_samples(exported.parts[-1].model_path, checkpoint, {}, 4, seed=0))
    # 16 places and 23 tokens after the first token, whose run has an empty cache.
    assert [39, 1, 1, 1] == [feeds["inputs_embeds"].shape[1] for feeds in samples]


def test_images_of_the_user_calibrate_embedding_and_decoder(
    checkpoint: Path, exported: ExportResult, tmp_path: Path
) -> None:
    """Both read the features of these images; the range of random values cuts them off."""
    for seed in range(2):
        save_image(tmp_path / f"{seed}.png", seed)
    vision, embedding, decoder = (part.model_path for part in exported.parts)
    options = QuantizeOptions(precision="w8a16", calibration_data=str(tmp_path))
    samples = {
        path: list(Calibration(options, checkpoint, {}, 0, path).read_samples(graph_inputs(Session(path))))
        for path in (vision, embedding, decoder)
    }
    assert [2, 2] == [len(samples[path]) for path in (vision, embedding)]
    features = [Session(vision).run(feeds)["image_features"] for feeds in samples[vision]]
    assert not np.array_equal(*features)
    for feeds, expected in zip(samples[embedding], features, strict=True):
        assert np.array_equal(expected, feeds["image_features"])
        assert 16 == np.count_nonzero(feeds["input_ids"] == PLACE)
    vectors = [Session(embedding).run(feeds)["inputs_embeds"][:, 1:] for feeds in samples[embedding]]
    longest = [feeds["inputs_embeds"] for feeds in samples[decoder] if feeds["inputs_embeds"].shape[1] > 1]
    assert [True, True] == [
        np.array_equal(mine[:, :16], theirs[:, :16]) for mine, theirs in zip(longest, vectors, strict=True)
    ]
    generated = Calibration(QuantizeOptions(precision="w8a16"), checkpoint, {}, 0, embedding)
    first = next(generated.read_samples(graph_inputs(Session(embedding))))
    assert 16 == np.count_nonzero(first["input_ids"] == PLACE)
    assert "processor" == generated.as_record()["data"]


def test_parts_for_fixed_sizes_write_the_text_of_pytorch(checkpoint: Path, tmp_path: Path) -> None:
    """The decoder reads single tokens; the embedding keeps its sizes, since it reads a prompt and its image at once."""
    folder = tmp_path / "fixed"
    exporter = HTPExporter(WinMLExportConfig(ep="qnn", verify=False))
    parts = exporter.export_checkpoint(ModelRequest(str(checkpoint)), folder / "net.onnx").parts
    shapes = {part.name: {spec.name: spec.shape for spec in part.inputs} for part in parts}
    assert (1, 3, 16, 16) == shapes["vision"]["pixel_values"]
    assert {str} == {type(shapes["embedding"][name][axis]) for name, axis in (("input_ids", 1), ("image_features", 0))}
    assert (1, 1, 32) == shapes["decoder"]["inputs_embeds"]
    for path in checkpoint.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    picture = save_image(tmp_path / "noise.png")
    asked = ("-p", "w5 w6", "--image", str(picture), "--max-new-tokens", "8", "--format", "json")
    outcome = run_here("generate", str(folder), *asked)
    assert 0 == outcome.code, outcome.err
    assert _written_by_pytorch(checkpoint, picture) == json.loads(outcome.out)["tokens"]


def _written_by_pytorch(checkpoint: Path, picture: Path) -> list[int]:
    """Return the 8 tokens that PyTorch writes after an image and two words."""
    make: Any = AutoProcessor
    given = make.from_pretrained(checkpoint)(images=PIL.Image.open(picture), text="<image>w5 w6", return_tensors="pt")
    reference: Any = LlavaForConditionalGeneration.from_pretrained(checkpoint)
    written = reference.generate(**given, max_new_tokens=8, suppress_tokens=[PLACE])
    tokens: list[int] = written[0, given["input_ids"].shape[1] :].tolist()
    return tokens


def test_images_with_mutual_attention_are_not_cut(tmp_path: Path) -> None:
    """A fixed number of tokens in each run is refused before tracing."""
    request = ModelRequest(
        str(save_vision_language(tmp_path, "gemma3")),
        shape_config=ShapeConfig(sequence_length=8),
        task="image-text-to-text",
    )
    with pytest.raises(UsageError, match="sequence_length 8:"):
        resolve_model(request)


@pytest.mark.usefixtures("exported")
def test_second_turn_of_a_chat_uses_its_own_image(checkpoint: Path, tmp_path: Path) -> None:
    """The logits with the cache of the first turn equal PyTorch's; a placeholder without a new image is refused."""
    make: Any = AutoProcessor
    processor = make.from_pretrained(checkpoint)
    pictures = map(PIL.Image.fromarray, np.random.default_rng(2).integers(0, 255, (2, 20, 30, 3), dtype=np.uint8))
    first, second = (processor(images=item, text="<image> w5 w6", return_tensors="pt") for item in pictures)
    seen = first["attention_mask"].shape[1]
    second["attention_mask"] = torch.ones((1, 2 * seen), dtype=torch.int64)
    reference: Any = LlavaForConditionalGeneration.from_pretrained(checkpoint)
    model: Any = WinMLModelForImageTextToText.from_pretrained(_with_configs(checkpoint, tmp_path))

    cache = loop_cache_name()
    with torch.no_grad():
        before = {cache: reference(**first, use_cache=True)[cache]}
        expected = reference(**second, **before).logits
    begun = model(**first)
    got = model(**second, cache=begun[cache]).logits
    kept = torch.arange(expected.shape[-1]) != PLACE  # scores of placeholders are never returned
    # float32 against float32.
    torch.testing.assert_close(got[..., kept], expected[..., kept], rtol=1e-4, atol=1e-5)
    del second["pixel_values"], second["attention_mask"]
    with pytest.raises(UsageError, match=r"16 .* 0 embeddings"):
        model(**second, cache=begun[cache])


def test_images_are_spread_over_the_runs_of_a_prompt(exported: ExportResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder with few tokens in a run gives the scores of a single run."""
    shown = VisionLanguageDecoder(*(Session(part.model_path) for part in exported.parts))
    (pixels,) = shown.embedder.image_inputs
    size = [item if isinstance(item, int) else 1 for item in pixels.shape]
    image = np.random.default_rng(3).standard_normal(size).astype(np.float32)
    tokens = np.array([[5, *[PLACE] * 16, 6, 7, 8]])
    scores = []
    for step in (None, 7):
        monkeypatch.setattr(shown, "length", step)
        scores.append(shown.run(tokens, cache=shown.empty_cache(1, shown.embedder.encode_images({pixels.name: image}))))
    # float32 in another order.
    np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-5)


def test_command_with_an_image_equals_pytorch(checkpoint: Path, exported: ExportResult, tmp_path: Path) -> None:
    """A prompt without a placeholder gets the image in front; a missing or invalid image file is refused."""
    folder, picture = str(exported.parts[0].model_path.parent), save_image(tmp_path / "noise.png")
    outcome = run_here(
        "generate", folder, "-p", "w5 w6", "--image", str(picture), "--max-new-tokens", "8", "--format", "json"
    )
    assert 0 == outcome.code, outcome.err
    assert _written_by_pytorch(checkpoint, picture) == json.loads(outcome.out)["tokens"]

    refused = {
        "no such file": ["--image", str(tmp_path / "none.png")],
        "cannot be opened": ["--image", str(checkpoint / "config.json")],
        "accepts text and images": ["--audio", "x.wav"],
    }
    for words, options in refused.items():
        assert words in run_here("generate", folder, "-p", "w5", *options).err


def test_encoder_of_recordings_takes_no_mask_of_texts(tmp_path: Path) -> None:
    """The method of CLAP has a parameter for a mask, but computes with the recording alone."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = ClapConfig(
        text_config={**sizes, "vocab_size": 40, "max_position_embeddings": 66, "pad_token_id": 1},
        audio_config={
            "hidden_size": 32, "patch_embeds_hidden_size": 16, "spec_size": 64, "num_mel_bins": 16, "patch_size": 4,
            "patch_stride": [4, 4], "depths": [1, 1], "num_attention_heads": [2, 2], "window_size": 4,
        },
        projection_dim=16,
    )  # fmt: skip
    ClapModel(config).save_pretrained(tmp_path)
    text, audio = resolve_model(ModelRequest(str(tmp_path), submodel=("text", "audio"))).parts
    assert ["input_ids", "attention_mask"] == [spec.name for spec in text.inputs]
    assert ["input_features"] == [spec.name for spec in audio.inputs]


def test_dual_encoder_gives_the_features_of_its_methods(tmp_path: Path) -> None:
    """Text and image features are pooled and projected; without --submodel the model is one graph."""
    folder = save_checkpoint("clip", tmp_path / "clip")
    request = ModelRequest(str(folder), submodel=("text", "vision"))
    exported = HTPExporter(WinMLExportConfig()).export_checkpoint(request, tmp_path / "net.onnx")
    assert [tmp_path / "net_text.onnx", tmp_path / "net_vision.onnx"] == [part.model_path for part in exported.parts]
    model: Any = CLIPModel.from_pretrained(folder).eval()
    rng = np.random.default_rng(0)
    methods = {"text_embeds": model.get_text_features, "image_embeds": model.get_image_features}
    for part, (output, method) in zip(exported.parts, methods.items(), strict=True):
        shapes = {spec.name: tuple(map(int, spec.shape)) for spec in part.inputs}
        feeds: dict[str, Any] = {
            name: np.ones(shape, np.int64) if "mask" in name else rng.integers(3, 30, shape)
            for name, shape in shapes.items()
        }
        if "pixel_values" in feeds:
            feeds["pixel_values"] = rng.standard_normal(shapes["pixel_values"]).astype(np.float32)
        with torch.no_grad():
            expected = method(**{name: torch.from_numpy(value) for name, value in feeds.items()}).pooler_output
        # float32 against float32.
        np.testing.assert_allclose(expected.numpy(), run_onnx(part.model_path, feeds)[output], rtol=1e-4, atol=1e-5)

    assert ["model"] == [part.name for part in resolve_model(ModelRequest(str(folder))).parts]
    with pytest.raises(UsageError, match="--submodel visio: CLIPModel") as refusal:
        resolve_model(ModelRequest(str(folder), submodel=("visio",)))
    assert "text, vision" in str(refusal.value.hint)
