"""Outputs of ``winml run``, compared with the pipelines of transformers on the PyTorch model, task by task.

Scores agree within 1e-4, boxes within a pixel; texts, labels and spans are equal. If transformers 5 has no pipeline,
the reference is PyTorch with the same postprocessing, or sentence-transformers' mean of the tokens.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import soundfile
import torch
import transformers
from PIL import Image

from checkpoints import CONFIGS, make_distinct, save_image_processor, save_sam
from e2e.in_process import run_here
from encoder_decoder import save_encoder_decoder
from evaluation_checkpoints import WORDS, pipeline_of, save_task_checkpoint, sentences, text_tokenizer
from installed_versions import PICTURES_WITHOUT_TORCHVISION
from winml.modelkit import WinMLAutoModel, run_model
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.export.exporting import HTPExporter
from winml.modelkit.generate.task_inputs import LOADED_TASKS, run_task
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.specs import DynamicRequest

TEXT = sentences(1)[0]
OTHER = sentences(2, seed=5)[1]
CLOSE = 1e-4
"""Rounding of float32; up to 1e-6 was observed."""
pytestmark = pytest.mark.usefixtures("libraries_may_warn")


@dataclass(frozen=True)
class Case:
    """A checkpoint of a task, arguments of the command, and arguments of the pipeline."""

    save: Callable[[Path], object]
    arguments: tuple[str, ...]
    passed: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    is_open: bool = True


def _text(class_name: str, labels: tuple[str, ...] | None = None) -> Callable[[Path], object]:
    return lambda path: save_task_checkpoint(path, "bert", class_name, text_tokenizer(), labels=labels, **_ONE_LAYER)


_ONE_LAYER = {"num_hidden_layers": 1}


def _image(architecture: str, class_name: str, processor: Any, **changes: Any) -> Callable[[Path], object]:
    return lambda path: save_task_checkpoint(path, architecture, class_name, processor(), **changes)


def _save_vit(path: Path) -> None:
    save_task_checkpoint(path, "vit", "ViTForImageClassification", labels=("crane", "bee", "crane"), **_ONE_LAYER)
    save_image_processor(path, 32)


def _save_clip(path: Path) -> None:
    save_task_checkpoint(path, "clip", "CLIPModel", text_tokenizer())
    size = {"height": 32, "width": 32}
    transformers.CLIPImageProcessorPil(size=size, crop_size=size).save_pretrained(path)


def _save_depth(path: Path) -> None:
    torch.manual_seed(0)
    backbone = {**CONFIGS["segformer"][1], "model_type": "segformer"}
    sizes = {key: value for key, value in backbone.items() if key not in ("model_type", "image_size")}
    model = transformers.GLPNForDepthEstimation(transformers.GLPNConfig(**{**sizes, "decoder_hidden_size": 16}))
    make_distinct(model)
    model.save_pretrained(path)
    transformers.GLPNImageProcessorPil(size_divisor=32).save_pretrained(path)


def _save_swin2sr(path: Path) -> None:
    config = transformers.Swin2SRConfig(
        image_size=32, embed_dim=16, depths=[1], num_heads=[2], window_size=4, upscale=LARGER
    )
    _save_model(path, transformers.Swin2SRForImageSuperResolution(config))
    transformers.Swin2SRImageProcessorPil().save_pretrained(path)


def _save_audio(class_name: str) -> Callable[[Path], object]:
    def save(path: Path) -> None:
        labels = ("speech", "music", "noise") if class_name.endswith("Classification") else None
        extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=False)
        changes = {"classifier_proj_size": 16, **_ONE_LAYER}
        save_task_checkpoint(path, "wav2vec2", class_name, extractor, labels=labels, **changes)
        if class_name.endswith("CTC"):
            vocabulary = {"[PAD]": 0, "|": 1, "[UNK]": 2, **{chr(97 + place): place + 3 for place in range(26)}}
            (path / "vocab.json").write_text(json.dumps(vocabulary))
            transformers.Wav2Vec2CTCTokenizer(
                str(path / "vocab.json"), pad_token="[PAD]", unk_token="[UNK]"
            ).save_pretrained(path)

    return save


def _save_layoutlm(path: Path) -> None:
    tokenizer = text_tokenizer()
    config = transformers.LayoutLMConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_attention_heads=2, intermediate_size=64, **_ONE_LAYER
    )
    _save_model(path, transformers.LayoutLMForQuestionAnswering(config), tokenizer)


def _save_owl(path: Path) -> None:
    tokenizer, encoder = text_tokenizer(), {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    text = {**encoder, **_ONE_LAYER, "vocab_size": len(tokenizer), "eos_token_id": 3}
    vision = {**encoder, **_ONE_LAYER, "image_size": 32, "patch_size": 16}
    config = transformers.OwlViTConfig(text_config=text, vision_config=vision, projection_dim=32)
    _save_model(path, transformers.OwlViTForObjectDetection(config), tokenizer)
    transformers.OwlViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(path)


def _save_clap(path: Path) -> None:
    tokenizer, encoder = text_tokenizer(), {"hidden_size": 32, "projection_dim": 32}
    text = {**encoder, **_ONE_LAYER, "vocab_size": len(tokenizer), "intermediate_size": 64, "num_attention_heads": 2}
    audio = {
        **encoder, "patch_embeds_hidden_size": 16, "depths": [1, 1], "num_attention_heads": [2, 2], "spec_size": 64,
        "num_mel_bins": 16, "patch_size": 4, "patch_stride": [4, 4], "window_size": 4,
    }  # fmt: skip
    config = transformers.ClapConfig(text_config={**text, "pad_token_id": 0}, audio_config=audio, projection_dim=32)
    _save_model(path, transformers.ClapModel(config), tokenizer)
    transformers.ClapFeatureExtractor(
        feature_size=16, sampling_rate=16_000, max_length_s=1, hop_length=80, fft_window_size=1024,
        truncation="rand_trunc",
    ).save_pretrained(path)  # fmt: skip


def _save_video(path: Path) -> None:
    config = transformers.VideoMAEConfig(
        image_size=32, patch_size=16, num_frames=4, hidden_size=32, num_attention_heads=2, intermediate_size=64,
        id2label={0: "run", 1: "jump"}, **_ONE_LAYER,
    )  # fmt: skip
    _save_model(path, transformers.VideoMAEForVideoClassification(config))
    size = {"height": 32, "width": 32}
    transformers.VideoMAEImageProcessorPil(size=size, crop_size=size).save_pretrained(path)


def _save_model(path: Path, model: Any, *processors: Any) -> None:
    make_distinct(model)
    for saved in (model, *processors):
        saved.save_pretrained(path)


PHOTO = ("--image", "photo.png")
LARGER = 2
"""Factor of the image-to-image model."""
DRAWN = {"image-to-image", "object-detection", "zero-shot-object-detection", "image-segmentation", "depth-estimation"}
PAGE = [[word, [10 * place, 20, 10 * place + 9, 40]] for place, word in enumerate(TEXT.split())]
LABELS = ("--label", WORDS[0], "--label", WORDS[1])
CASES = {
    "text-classification": Case(_text("BertForSequenceClassification", ("bad", "good", "so")), ("--text", TEXT), TEXT),
    "token-classification": Case(
        _text("BertForTokenClassification", ("O", "B-art-film", "B-LOC")), ("--text", TEXT), TEXT,
        {"aggregation_strategy": "simple"},
    ),
    "question-answering": Case(
        _text("BertForQuestionAnswering"), ("--input", f"question={OTHER}", "--input", f"context={TEXT}")
    ),
    "document-question-answering": Case(
        _save_layoutlm, ("--input", f"question={OTHER}", "--input", f"word_boxes={json.dumps(PAGE)}"),
        {"question": OTHER, "word_boxes": PAGE},
    ),
    "fill-mask": Case(_text("BertForMaskedLM"), ("--text", f"{TEXT} [MASK]"), f"{TEXT} [MASK]"),
    "feature-extraction": Case(_text("BertModel"), ("--text", TEXT, "--text", OTHER)),
    "image-classification": Case(_save_vit, PHOTO, "photo.png", is_open=False),
    "object-detection": Case(
        _image("yolos", "YolosForObjectDetection",
               lambda: transformers.YolosImageProcessorPil(size={"height": 32, "width": 32}), labels=("ant", "bee")),
        (*PHOTO, "--threshold", "0.3"), "photo.png", {"threshold": 0.3}, is_open=False,
    ),
    "image-segmentation": Case(
        _image("segformer", "SegformerForSemanticSegmentation",
               lambda: transformers.SegformerImageProcessorPil(size={"height": 32, "width": 32}),
               labels=("sky", "sea", "sand")),
        PHOTO, "photo.png", is_open=False,
    ),
    "zero-shot-image-classification": Case(
        _save_clip, (*PHOTO, *LABELS), "photo.png",
        {"candidate_labels": [WORDS[0], WORDS[1]]},
    ),
    "zero-shot-object-detection": Case(
        _save_owl, (*PHOTO, *LABELS, "--threshold", "0.01"), "photo.png",
        {"candidate_labels": [WORDS[0], WORDS[1]], "threshold": 0.01}, is_open=False,
    ),
    "zero-shot-audio-classification": Case(
        _save_clap, ("--audio", "sound.wav", *LABELS), "samples", {"candidate_labels": [WORDS[0], WORDS[1]]},
        is_open=False,
    ),
    "video-classification": Case(_save_video, PHOTO * 5, is_open=False),
    "image-to-image": Case(_save_swin2sr, PHOTO, is_open=False),
    "depth-estimation": Case(_save_depth, PHOTO, "photo.png", is_open=False),
    "automatic-speech-recognition": Case(_save_audio("Wav2Vec2ForCTC"), ("--audio", "sound.wav"), "sound"),
    "audio-classification": Case(_save_audio("Wav2Vec2ForSequenceClassification"), ("--audio", "sound.wav"), "sound"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a photo and a recording."""
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    sound = np.random.default_rng(0).standard_normal(8000).astype(np.float32) / 4
    soundfile.write(tmp_path / "sound.wav", sound, 16_000, subtype="FLOAT")
    soundfile.write(tmp_path / "slow.wav", sound[::2], 8_000, subtype="FLOAT")
    return tmp_path


def exported(checkpoint: Path, task: str, *, is_open: bool) -> Path:
    """Export a checkpoint; config and processor files go beside the ONNX file."""
    model = checkpoint.parent / f"{checkpoint.name}-onnx" / "model.onnx"
    model.parent.mkdir()
    dynamic = DynamicRequest(batch=is_open, sequence=is_open, image_size=task in ("depth-estimation", "image-to-image"))
    HTPExporter(WinMLExportConfig(verify=False)).export_checkpoint(
        ModelRequest(str(checkpoint), task=LOADED_TASKS.get(task, task), dynamic=dynamic), model
    )
    return model


def answer(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    """Return the JSON output of ``winml run``."""
    outcome = run_here("run", *arguments, "--format", "json")
    assert code == outcome.code, outcome.err
    record: dict[str, Any] = json.loads(outcome.out)
    return record


@pytest.mark.parametrize(
    "task",
    [pytest.param(task, marks=PICTURES_WITHOUT_TORCHVISION if task == "image-segmentation" else ()) for task in CASES],
)
def test_task_answer_equals_the_pipeline(task: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels, texts, boxes and scores equal the pipeline's, and ``--reference`` confirms it."""
    monkeypatch.chdir(folder)
    case = CASES[task]
    case.save(folder / task)
    model = exported(folder / task, task, is_open=case.is_open)

    save = ("--save", f"{task}.png") if task in DRAWN else ()
    found = answer(model, *case.arguments, *save, "--reference")

    assert task == found["task"]
    assert found["reference"]["is_same"], found["reference"]
    assert found["entries"]
    if "--text" in case.arguments:
        long = answer(model, "--text", " ".join([*case.arguments[1].split()[::-1], TEXT] * 200), "--reference")
        assert long["reference"]["is_same"], long["reference"]
        assert 1 == sum("is cut to" in note for note in long["notes"])
    if save:
        drawn, photo = (Image.open(name).convert("RGB") for name in (f"{task}.png", "photo.png"))
        if task == "image-to-image":
            # The processor fills the image up to whole windows.
            assert tuple(size * LARGER for size in photo.size) <= drawn.size
            return
        assert drawn.size == photo.size
        assert np.any(np.asarray(drawn) != np.asarray(photo))
    if case.passed is None:
        return
    passed = case.passed
    if passed in ("sound", "samples"):
        samples, rate = soundfile.read("sound.wav", dtype="float32")
        passed = {"raw": samples, "sampling_rate": rate} if passed == "sound" else samples
    expected = pipeline_of(folder / task, task)(passed, **case.options)
    if task == "depth-estimation":
        assert float(expected["predicted_depth"].max()) == pytest.approx(found["entries"][0]["maximum"], abs=CLOSE)
        return
    expected = [expected] if isinstance(expected, dict) else expected
    if task == "image-classification":
        assert len(expected) == len(found["entries"])  # two classes have one name
    for item, entry in zip(expected, found["entries"], strict=False):
        if "score" in item and item["score"] is not None:
            assert item["score"] == pytest.approx(entry["score"], abs=CLOSE)
        names = {"label", "entity_group", "token_str"} & item.keys()
        if names and task != "image-segmentation":
            assert item[names.pop()] == entry["label"]
        if task == "automatic-speech-recognition":
            assert item["text"] == entry["text"]
        if "answer" in item:
            assert (item["answer"], item["start"], item["end"]) == (entry["text"], entry["start"], entry["end"])
        if "box" in item:
            assert list(item["box"].values()) == entry["box"]


def test_audio_is_never_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Audio too long for a fixed graph is refused, and the option in the message accepts all of it."""
    monkeypatch.chdir(folder)
    task = "automatic-speech-recognition"
    CASES[task].save(folder / "speech")
    soundfile.write("long.wav", np.random.default_rng(1).standard_normal(40_000).astype(np.float32) / 4, 16_000)
    fixed = exported(folder / "speech", task, is_open=False)
    outcome = run_here("run", fixed, "--audio", "long.wav", "--reference", "--format", "json")
    assert (2, "") == (outcome.code, outcome.out)
    for words in ("40000 samples (2.5 s)", "16000 (1 s)", "--dynamic-seq-len"):
        assert words in outcome.err
    dynamic = run_here("export", "-m", "speech", "-o", "dynamic/model.onnx", "--dynamic-seq-len", "--no-verify")
    assert 0 == dynamic.code, dynamic.err
    found = answer("dynamic/model.onnx", "--audio", "long.wav", "--reference")
    samples, rate = soundfile.read("long.wav", dtype="float32")
    expected = pipeline_of(folder / "speech", task)({"raw": samples, "sampling_rate": rate})["text"]
    assert expected == found["entries"][0]["text"] == found["reference"]["entries"][0]["text"]


def test_embedding_of_audio_is_the_mean_of_the_states(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs of the graph decide that ``feature-extraction`` takes audio, for files and checkpoints."""
    monkeypatch.chdir(folder)
    task = "feature-extraction"
    _save_audio("Wav2Vec2Model")(folder / "features")
    model = exported(folder / "features", task, is_open=True)

    found = answer(model, "--audio", "sound.wav", "--reference")
    assert found["reference"]["is_same"], found["reference"]
    extractor = transformers.Wav2Vec2FeatureExtractor.from_pretrained(folder / "features")
    pytorch = transformers.Wav2Vec2Model.from_pretrained(folder / "features").eval()
    embeddings = []
    for name in ("sound.wav", "half.wav"):
        samples, rate = soundfile.read("sound.wav", dtype="float32")
        samples = samples if name == "sound.wav" else samples[:4000]
        soundfile.write(name, samples, rate, subtype="FLOAT")
        with torch.inference_mode():
            states = pytorch(**extractor(samples, sampling_rate=rate, return_tensors="pt")).last_hidden_state
        embeddings.append(states[0].mean(0).double().numpy())
    assert embeddings[0] == pytest.approx(found["entries"][0]["values"], abs=CLOSE)

    similar = answer(model, "--audio", "sound.wav", "--audio", "half.wav")
    cosine = np.dot(*embeddings) / np.prod([np.linalg.norm(row) for row in embeddings])
    assert [("half.wav", pytest.approx(cosine, abs=CLOSE))] == [
        (entry["text"], entry["score"]) for entry in similar["entries"]
    ]
    refused = run_here("run", model, "--text", TEXT)
    assert 2 == refused.code
    assert "takes audio" in refused.err
    built = answer(folder / "features", "--task", task, "--audio", "sound.wav")
    assert found["entries"][0]["values"] == pytest.approx(built["entries"][0]["values"], abs=CLOSE)


def test_padding_of_a_fixed_graph_is_left_out_of_the_embedding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second in a graph of one second gives the mean of the first half of the states."""
    monkeypatch.chdir(folder)
    _save_audio("Wav2Vec2Model")(folder / "fixed-features")
    model = exported(folder / "fixed-features", "feature-extraction", is_open=False)
    found = answer(model, "--audio", "sound.wav")
    extractor = transformers.Wav2Vec2FeatureExtractor.from_pretrained(folder / "fixed-features")
    samples = np.pad(soundfile.read("sound.wav", dtype="float32")[0], (0, 8000))
    features = extractor(samples, sampling_rate=16_000, return_tensors="pt")
    with torch.inference_mode():
        states = transformers.Wav2Vec2Model.from_pretrained(folder / "fixed-features").eval()(**features)
    expected = states.last_hidden_state[0, : -(-states.last_hidden_state.shape[1] // 2)].mean(0).numpy()
    assert expected == pytest.approx(found["entries"][0]["values"], abs=CLOSE)


def test_models_without_a_processor_for_an_input_accept_tensors_only() -> None:
    """Whisper with its decoder and a model of numbers take tensors only; a vision model with a mask takes images."""
    assert run_task("feature-extraction", ("input_features", "decoder_input_ids"))[1] is None
    assert run_task("feature-extraction", ("past_values",))[1] is None
    assert "image-feature-extraction" == run_task("feature-extraction", ("pixel_values", "attention_mask"))[0]


def test_short_audio_is_padded_for_the_graph_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch takes the unpadded audio, so that the comparison shows the effect of the padding."""
    monkeypatch.chdir(folder)
    task = "automatic-speech-recognition"
    CASES[task].save(folder / "padded")
    fixed = exported(folder / "padded", task, is_open=False)
    outcome = run_here("run", fixed, "--audio", "sound.wav", "--reference", "--format", "json")
    record = json.loads(outcome.out)
    samples, rate = soundfile.read("sound.wav", dtype="float32")
    expected = pipeline_of(folder / "padded", task)({"raw": samples, "sampling_rate": rate})["text"]
    assert expected == record["reference"]["entries"][0]["text"]
    assert [True] == ["padded with silence to 16000" in note for note in record["notes"] if "audio" in note]
    assert (0 if record["reference"]["is_same"] else 3) == outcome.code


def test_text_is_cut_for_the_graph_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch reads the whole text, and the option in the note exports a graph that does so too."""
    monkeypatch.chdir(folder)
    task = "text-classification"
    CASES[task].save(folder / "cut")
    sizes = ("--shape-config", '{"sequence_length": 16}')
    done = run_here("export", "-m", "cut", "-o", "fixed/model.onnx", *sizes, "--no-verify")
    assert 0 == done.code, done.err
    text = " ".join(sentences(5))
    outcome = run_here("run", "fixed/model.onnx", "--text", text, "--reference", "--format", "json")
    record = json.loads(outcome.out)
    expected = {item["label"]: item["score"] for item in pipeline_of(folder / "cut", task)(text, top_k=None)}
    found = {entry["label"]: entry["score"] for entry in record["reference"]["entries"]}
    assert expected == pytest.approx(found, abs=CLOSE)
    assert (0 if record["reference"]["is_same"] else 3) == outcome.code
    (note,) = (note for note in record["notes"] if "is cut to" in note)
    assert "input length of the graph" in note
    assert "--dynamic-seq-len" in note
    opened = run_here("export", "-m", "cut", "-o", "whole/model.onnx", "--dynamic-seq-len", "--no-verify")
    assert 0 == opened.code, opened.err
    whole = answer("whole/model.onnx", "--text", text, "--reference")
    assert expected == pytest.approx({entry["label"]: entry["score"] for entry in whole["entries"]}, abs=CLOSE)
    assert not [note for note in whole["notes"] if "is cut to" in note]


def _save_whisper(path: Path) -> None:
    """Write a small Whisper with special tokens, letters and timestamps as its vocabulary."""
    save_encoder_decoder(path, "whisper")
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").unlink()
    kinds = [
        "endoftext",
        "startoftranscript",
        "en",
        "translate",
        "transcribe",
        "startoflm",
        "startofprev",
        "nospeech",
        "notimestamps",
    ]
    marks = [f"<|{kind}|>" for kind in kinds]
    words = [first + second for first in ("", "b", "c") for second in string.ascii_lowercase]
    times = [f"<|{place * 0.02:.2f}|>" for place in range(51)]
    letters = words[: 120 - 2 - len(marks) - len(times)]
    names = ["<pad>", "<bos>", *marks[:2], *letters, *marks[2:], *times]  # the reader knows where times begin
    vocabulary = {name: place for place, name in enumerate(names)}
    silent = [place for name, place in vocabulary.items() if name not in letters]
    settings = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps({**settings, "suppress_tokens": silent}))
    end = {f"{kind}_token": marks[0] for kind in ("unk", "bos", "eos", "pad")}
    transformers.WhisperTokenizer(vocab=vocabulary, merges=[], **end, additional_special_tokens=marks).save_pretrained(
        path
    )


def test_speech_of_whisper_is_the_text_of_the_pipeline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoder and decoder run in the loop of transformers, up to the positions of the decoder."""
    monkeypatch.chdir(folder)
    _save_whisper(folder / "whisper")
    task = "automatic-speech-recognition"
    model = exported(folder / "whisper", task, is_open=False)
    samples, rate = soundfile.read("sound.wav", dtype="float32")
    loop = {"generate_kwargs": {"max_new_tokens": 60}}
    expected = pipeline_of(folder / "whisper", task)({"raw": samples, "sampling_rate": rate}, **loop)["text"]
    assert expected.strip()
    found = answer(model.parent, "--audio", "sound.wav", "--reference")
    assert task == found["task"]
    assert found["reference"]["is_same"], found["reference"]
    assert expected == found["entries"][0]["text"]


def test_mask_of_a_point_equals_the_processor_and_pytorch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point of an image, or of a grid, gets the mask that PyTorch scores best; other points are refused."""
    monkeypatch.chdir(folder)
    save_sam(folder / "masks")
    pixels = np.random.default_rng(0).integers(0, 255, (36, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save("wide.png")
    points = [[20, 20], [45, 10]]
    model = exported(folder / "masks", "mask-generation", is_open=False).parent
    passed = ("--image", "wide.png", "--input", f"points={points}")
    found = answer(model, *passed, "--save", "masks.png", "--reference")
    assert found["reference"]["is_same"], found["reference"]
    assert (60, 36) == Image.open("masks.png").size
    pytorch = transformers.SamModel.from_pretrained(folder / "masks").eval()
    processor = transformers.SamProcessor(transformers.SamImageProcessorPil.from_pretrained(folder / "masks"))
    row = processor(Image.open("wide.png"), input_points=[[[point] for point in points]], return_tensors="pt")
    with torch.inference_mode():
        outputs = pytorch(pixel_values=row["pixel_values"], input_points=row["input_points"].float())
    sizes = (row["original_sizes"], row["reshaped_input_sizes"])
    (masks,) = processor.post_process_masks(outputs.pred_masks, *sizes)
    expected = {}
    for point, scores, choices in zip(points, outputs.iou_scores[0], masks, strict=True):
        best = int(scores.argmax())
        expected[f"{point[0]}, {point[1]}"] = (float(scores[best]), float(choices[best].float().mean()))
    entries = {entry["label"]: (entry["score"], entry["share"]) for entry in found["entries"]}
    assert expected.keys() == entries.keys()
    for label, (score, share) in expected.items():
        assert score == pytest.approx(entries[label][0], abs=CLOSE)
        # At most one pixel is decided by rounding.
        assert share == pytest.approx(entries[label][1], abs=1 / pixels[..., 0].size + CLOSE)
    opened = WinMLAutoModel.from_pretrained(model)
    ours = opened(pixel_values=row["pixel_values"], input_points=row["input_points"])
    torch.testing.assert_close(outputs.iou_scores, ours.iou_scores, rtol=CLOSE, atol=CLOSE)
    refused = run_here("run", model, "--image", "wide.png", "--input", "points=[[1,2,3]]")
    assert 2 == refused.code
    assert "[[120, 80]]" in refused.err
    refused = run_here("run", model, "--image", "wide.png", "--input", "points=[]")
    assert 2 == refused.code
    assert "empty" in refused.err
    # Without points: those of a grid, by the pipeline of transformers on both sides.
    found = answer(model, "--image", "wide.png", "--reference")
    assert found["reference"]["is_same"], found["reference"]
    assert ["object 1"] == [entry["label"] for entry in found["entries"]]


def _save_vits(path: Path, **changes: float) -> None:
    """Write a VITS of two layers with a character tokenizer, and with no noise by default."""
    path.mkdir()
    characters = "_ abcdefghijklmnopqrstuvwxyz"
    vocabulary = {name: number for number, name in enumerate((*characters, "<unk>"))}
    (path / "vocab.json").write_text(json.dumps(vocabulary))
    tokenizer = transformers.VitsTokenizer(path / "vocab.json", phonemize=False, is_uroman=False, pad_token="_")
    config = transformers.VitsConfig(**{
        "vocab_size": len(vocabulary), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "ffn_dim": 32, "flow_size": 8, "spectrogram_bins": 9, "prior_encoder_num_flows": 2,
        "prior_encoder_num_wavenet_layers": 1, "posterior_encoder_num_wavenet_layers": 1,
        "duration_predictor_filter_channels": 16,
        "upsample_initial_channel": 16, "upsample_rates": [4], "upsample_kernel_sizes": [8],
        "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1]], "sampling_rate": 8000,
        "use_stochastic_duration_prediction": False, "noise_scale": 0.0, "noise_scale_duration": 0.0, **changes,
    })  # fmt: skip
    torch.manual_seed(0)
    transformers.VitsModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def test_speech_equals_the_pipeline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A VITS without noise gives the pipeline's audio; the graph of one with noise draws it."""
    monkeypatch.chdir(folder)
    task, text = "text-to-audio", "a word of ten"
    _save_vits(folder / "spoken")
    expected = pipeline_of(folder / "spoken", task)(text)
    # The export is verified: the length of the audio is computed by the graph.
    done = run_here("export", "-m", "spoken", "-o", "voice/model.onnx", "--dynamic-seq-len")
    assert 0 == done.code, done.err
    found = answer("voice/model.onnx", "--text", text, "--reference", "--save", "speech.wav")
    assert found["reference"]["is_same"], found["reference"]
    (entry,) = found["entries"]
    assert ([len(expected["audio"])], expected["sampling_rate"]) == (entry["shape"], entry["rate_hz"])
    samples, rate_hz = soundfile.read("speech.wav", dtype="float32")
    assert expected["sampling_rate"] == rate_hz
    # A step of 16 bits, and the rounding of PyTorch.
    assert expected["audio"] == pytest.approx(samples, abs=1 / 32768 + CLOSE)
    _save_vits(folder / "noisy", noise_scale=0.7)
    # Verified, too, with fixed numbers.
    done = run_here("export", "-m", "noisy", "-o", "noise/model.onnx", "--dynamic-seq-len", "-f", "json")
    assert 0 == done.code, done.err
    assert json.loads(done.out)["verification"]["fixes_numbers"]
    model = Path("noise/model.onnx")
    twice = answer(model, "--text", text, "--text", text, "--reference")
    assert twice["reference"]["is_same"], twice["reference"]
    assert any("noise" in note for note in twice["notes"])
    assert twice["entries"][0]["values"] != twice["entries"][1]["values"]
    refused = run_here("run", model, "--text", "12345")
    assert 2 == refused.code
    assert "no tokens" in refused.err
    # Padding is judged with fixed numbers.
    done = run_here("export", "-m", "noisy", "-o", "padded/model.onnx")
    assert 0 == done.code, done.err
    assert 1 == len(answer("padded/model.onnx", "--text", text)["entries"])
    refused = run_here("run", model, "--text", text, "--save", "speech.png")
    assert 2 == refused.code
    assert "speech.wav" in refused.err


def test_labels_of_an_image_are_read_one_by_one_by_a_graph_of_one_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default export of CLIP has fixed sizes; short labels are padded, and scores equal the pipeline's."""
    monkeypatch.chdir(folder)
    _save_clip(folder / "fixed-clip")
    task, labels = "zero-shot-image-classification", [WORDS[0], f"{WORDS[1]} {WORDS[2]}", WORDS[3]]
    model = exported(folder / "fixed-clip", task, is_open=False)
    found = answer(model, *PHOTO, *(part for label in labels for part in ("--label", label)), "--reference")
    assert found["reference"]["is_same"], found["reference"]
    expected = pipeline_of(folder / "fixed-clip", task)("photo.png", candidate_labels=labels)
    assert [item["label"] for item in expected] == [entry["label"] for entry in found["entries"]]
    for item, entry in zip(expected, found["entries"], strict=True):
        assert item["score"] == pytest.approx(entry["score"], abs=CLOSE)


def test_candidate_labels_equal_the_pipeline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A classifier with an entailment class accepts labels; another classifier refuses them."""
    monkeypatch.chdir(folder)
    task, labels = "zero-shot-classification", [WORDS[0], WORDS[1]]
    asked = ("--text", TEXT, *(part for label in labels for part in ("--label", label)))
    for name, classes in (("inference", ("contradiction", "entailment")), ("moods", ("bad", "good"))):
        _text("BertForSequenceClassification", classes)(folder / name)
    model = exported(folder / "inference", task, is_open=True)
    found = answer(model, *asked, "--reference")
    assert found["reference"]["is_same"], found["reference"]
    expected = pipeline_of(folder / "inference", task)(TEXT, candidate_labels=labels)
    assert expected["labels"] == [entry["label"] for entry in found["entries"]]
    assert expected["scores"] == pytest.approx([entry["score"] for entry in found["entries"]], abs=CLOSE)
    outcome = run_here("run", exported(folder / "moods", "text-classification", is_open=True), *asked)
    assert 2 == outcome.code
    assert "entailment" in outcome.err


def test_each_of_several_texts_has_its_result(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task with one text runs on each text, and every result names its text; two inputs cannot both be lists."""
    monkeypatch.chdir(folder)
    CASES["text-classification"].save(folder / "several")
    model = exported(folder / "several", "text-classification", is_open=True)
    both = answer(model, "--text", TEXT, "--text", OTHER, "--reference")
    assert both["reference"]["is_same"], both["reference"]
    alone = [{**entry, "input": text} for text in (TEXT, OTHER) for entry in answer(model, "--text", text)["entries"]]
    assert alone == both["entries"]
    assert [entry["input"] for entry in alone] == [entry["input"] for entry in both["reference"]["entries"]]
    table = run_here("run", model, "--text", TEXT, "--text", OTHER).out
    assert len(alone) == sum(line.startswith((TEXT[:20], OTHER[:20])) for line in table.splitlines())
    pairs = ("--input", "text_pair=a", "--input", "text_pair=b")
    assert 2 == run_here("run", model, "--text", TEXT, "--text", OTHER, *pairs).code
    misspelled = run_here("run", model, "--text", TEXT, "--text-pair", OTHER)
    assert 2 == misspelled.code
    assert "--input 'text_pair=" in misspelled.err


def test_unreadable_mask_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask beyond the maximum is not read; without a mask token no position can be marked."""
    monkeypatch.chdir(folder)
    _text("BertForMaskedLM")(folder / "maskless")
    model = exported(folder / "maskless", "fill-mask", is_open=True)
    late = run_here("run", model, "--text", f"{TEXT} {TEXT * 50} [MASK]")
    assert 2 == late.code, late.err
    assert "beyond the first 64 tokens" in late.err
    settings = model.parent / "tokenizer_config.json"
    record = json.loads(settings.read_text(encoding="utf-8"))
    settings.write_text(json.dumps({**record, "mask_token": None}), encoding="utf-8")
    outcome = run_here("run", model, "--text", f"{TEXT} [MASK]")
    assert 2 == outcome.code, outcome.err
    assert "mask_token" in outcome.err


def test_unfitting_inputs_are_refused_with_the_accepted_inputs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong task, a misspelled name, a text for an image model and a file that is no image are refused."""
    monkeypatch.chdir(folder)
    _save_vit(folder / "refusing")
    model = exported(folder / "refusing", "image-classification", is_open=False)
    (folder / "broken.png").write_bytes(b"no image")

    def refusal_of(*arguments: str, code: int = 2) -> str:
        outcome = run_here("run", model, *arguments)
        assert code == outcome.code, outcome.err
        return outcome.err

    assert "was exported for image-classification" in refusal_of(*PHOTO, "--task", "fill-mask")
    assert "Did you mean 'image'" in refusal_of("--input", "imge=@photo.png")
    assert "image-classification takes image" in refusal_of("--text", "a word")
    assert "none of BMP" in refusal_of("--image", "broken.png", code=1)
    assert "no image and no arrays to save" in refusal_of(*PHOTO, "--save", "answer.png")
    (model.parent / "preprocessor_config.json").unlink()
    assert "image processor" in refusal_of(*PHOTO)


def test_inputs_that_are_no_tensors_have_no_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence is named as such, and no command is suggested that would need values of it; ranks are stated."""
    monkeypatch.chdir(tmp_path)
    head = '<ir_version: 8, opset_import: ["" : 17]>'
    listed = "g (seq(float[4]) s) => (float[n] y) { y = ConcatFromSequence <axis = 0> (s) }"
    onnx.save(onnx.parser.parse_model(f"{head} {listed}"), "listed.onnx")
    schema = answer("listed.onnx", "--schema")
    assert ["sequence"] == [tensor["dtype"] for tensor in schema["tensors"]]
    assert not schema["example"]
    assert 2 == run_here("run", "listed.onnx", "--input", "s=[1,2]").code
    optimized = run_here("optimize", "listed.onnx", "-o", "fast.onnx")
    assert 0 == optimized.code, optimized.err
    assert "winml perf" not in optimized.out + optimized.err
    assert "winml inspect fast.onnx" in optimized.out + optimized.err
    onnx.save(onnx.parser.parse_model(f"{head} g (float[b, 2] x) => (float[b, 2] y) {{ y = Neg (x) }}"), "neg.onnx")
    refused = run_here("run", "neg.onnx", "--input", "x=[1,2]")
    assert 2 == refused.code
    assert "2 dimensions" in refused.err
    assert "max_length" not in refused.err


def test_text_tensors_are_read_from_json_files_and_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings of JSON, of NumPy files and of Python reach the graph; numbers and pickled objects are refused."""
    monkeypatch.chdir(tmp_path)
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 3]>
        named (string[n] t) => (int64[n] y)
        { y = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b"], values_int64s = [3, 7]> (t) }
    """)
    onnx.save(model, "named.onnx")
    texts = np.array(["b", "a"])
    np.save("unicode.npy", texts)
    np.save("bytes.npy", texts.astype("S"))
    np.save("objects.npy", texts.astype(object))
    np.save("numbers.npy", np.array([1, 2]))
    for value in ('["b","a"]', "@unicode.npy", "@bytes.npy"):
        found = answer("named.onnx", "--input", f"t={value}")
        assert {"t": "string[2]"} == found["inputs"], value
        assert [7, 3] == found["entries"][0]["values"], value
    for array in (texts, texts.astype("S"), texts.astype(object), ["b", "a"]):
        assert (7, 3) == run_model("named.onnx", {"t": array}).entries[0].values
    for value, code in (("[1,2]", 2), ('["a",["b"]]', 2), ("b", 2), ("@numbers.npy", 2), ("@objects.npy", 1)):
        refused = run_here("run", "named.onnx", "--input", f"t={value}")
        assert code == refused.code, refused.err
        assert "string" in refused.err or "dtype U" in refused.err, refused.err


def test_numbers_of_json_have_the_dtype_of_their_input(tmp_path: Path) -> None:
    """Whole numbers become floats or shorter integers; a value outside the input's type is refused."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        typed (float16[a] x, int32[b] n, bool[c] c) => (float16[a] y, int32[b] m, bool[c] d)
        { y = Add (x, x)  m = Identity (n)  d = Not (c) }
    """)
    onnx.save(model, tmp_path / "typed.onnx")
    numbers = ("--input", "x=[1,2]", "--input", "c=[true,false]")
    found = answer(tmp_path / "typed.onnx", *numbers, "--input", "n=[3,4]")
    assert {"x": "float16[2]", "n": "int32[2]", "c": "bool[2]"} == found["inputs"]
    for name, value, words in (
        ("n", "[3.5,4]", ("3.5", "int32", "-2147483648 to 2147483647")),
        ("n", "[1e23,4]", ("1e+23", "int32")),
        ("n", "[true,4]", ("true", "int32")),
        ("x", "[1,7e4]", ("70000.0", "float16", "65504")),
        ("x", "[1,true]", ("true", "float16")),
        ("c", "[true,2]", ("2", "bool")),
    ):
        passed = {"x": "[1,2]", "c": "[true,false]", "n": "[3,4]", name: value}
        options = [word for item in passed.items() for word in ("--input", "=".join(item))]
        refused = run_here("run", tmp_path / "typed.onnx", *options)
        assert 2 == refused.code
        assert all(text in refused.err for text in (f"--input {name}", *words)), refused.err
    for pair in ("z=[1]", "x=[[1,2],[3]]"):
        refused = run_here("run", tmp_path / "typed.onnx", "--input", pair)
        assert 2 == refused.code
        assert pair[0] in refused.err
        assert "inhomogeneous" not in refused.err
