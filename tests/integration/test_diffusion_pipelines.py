"""Diffusers pipelines: parts, folder, one image compared with PyTorch, and refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers

from readers import python_of
from winml.modelkit import build_model, export_model, load_pipeline
from winml.modelkit.errors import CheckpointError, InputError, ModelPathError, UsageError
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.models.resolution import resolve_model

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: the extra diffusion needs Python 3.11")

TOKENS = 16
PARTS = ("text_encoder", "unet", "vae_encoder", "vae_decoder")


def save_text_encoder(folder: Path, class_name: str = "CLIPTextModel") -> None:
    """Save a text encoder with one layer, for an alphabet of letters."""
    torch.manual_seed(1)
    if class_name == "T5EncoderModel":
        config = transformers.T5Config(vocab_size=54, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    else:
        config = transformers.CLIPTextConfig(
            vocab_size=54, hidden_size=32, intermediate_size=32, num_attention_heads=4, num_hidden_layers=1,
            max_position_embeddings=TOKENS, bos_token_id=52, eos_token_id=53, pad_token_id=53, projection_dim=32,
        )  # fmt: skip
    getattr(transformers, class_name)(config).save_pretrained(folder)


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of letters."""
    folder.mkdir()
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "CLIPTokenizer", "model_max_length": TOKENS, "pad_token": "<|endoftext|>"})
    )


def save_pipeline(
    folder: Path, class_name: str, denoiser: torch.nn.Module, texts: tuple[str, ...], scheduler: Any
) -> Path:
    """Save a pipeline of random weights, with the text encoders of these classes."""
    torch.manual_seed(2)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=4, latent_channels=4,
        up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, sample_size=32,
    )  # fmt: skip
    name = "unet" if isinstance(denoiser, diffusers.UNet2DConditionModel) else "transformer"
    index: dict[str, Any] = {"_class_name": class_name, "_diffusers_version": diffusers.__version__}
    for component, module in (("vae", vae), (name, denoiser), ("scheduler", scheduler)):
        module.save_pretrained(folder / component)
        index[component] = ["diffusers", type(module).__name__]
    for count, text in enumerate(texts, start=1):
        suffix = "" if count == 1 else f"_{count}"
        save_text_encoder(folder / f"text_encoder{suffix}", text)
        save_tokenizer(folder / f"tokenizer{suffix}")
        index[f"text_encoder{suffix}"] = ["transformers", text]
        index[f"tokenizer{suffix}"] = ["transformers", "CLIPTokenizer"]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def unet(**options: Any) -> torch.nn.Module:
    """Return a UNet with one attention block on each side."""
    torch.manual_seed(0)
    model: torch.nn.Module = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 8), layers_per_block=1, sample_size=8, norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **{"cross_attention_dim": 32, **options},
    )  # fmt: skip
    return model


def stable_diffusion_xl(folder: Path) -> Path:
    """Save a pipeline of the shape of Stable Diffusion XL."""
    model = unet(
        cross_attention_dim=64, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80, use_linear_projection=True,
    )  # fmt: skip
    texts = ("CLIPTextModel", "CLIPTextModelWithProjection")
    return save_pipeline(folder, "StableDiffusionXLPipeline", model, texts, diffusers.EulerDiscreteScheduler())


def stable_diffusion_3(folder: Path) -> Path:
    """Save a pipeline of the shape of Stable Diffusion 3."""
    torch.manual_seed(0)
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=4,
        caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=64, out_channels=4,
        pos_embed_max_size=32,
    )  # fmt: skip
    texts = ("T5EncoderModel",)
    return save_pipeline(folder, "StableDiffusion3Pipeline", model, texts, diffusers.FlowMatchEulerDiscreteScheduler())


def flux(folder: Path) -> Path:
    """Save a pipeline of the shape of Flux."""
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    texts = ("T5EncoderModel",)
    return save_pipeline(folder, "FluxPipeline", model, texts, diffusers.FlowMatchEulerDiscreteScheduler())


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a pipeline of the shape of Stable Diffusion 1.5."""
    folder = tmp_path_factory.mktemp("pipelines") / "stable_diffusion"
    scheduler = diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False)
    return save_pipeline(folder, "StableDiffusionPipeline", unet(), ("CLIPTextModel",), scheduler)


@pytest.fixture
def copied(pipeline: Path, tmp_path: Path) -> Path:
    """Return a copy of the pipeline that a test may change."""
    return Path(shutil.copytree(pipeline, tmp_path / "copied"))


@pytest.fixture(scope="module")
def built(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a build whose height is dynamic."""
    folder = tmp_path_factory.mktemp("builds") / "built"
    sizes = {"batch_size": 1, "width": 16, "sequence_length": TOKENS}
    build_model(pipeline, folder, sizes=sizes, config={"optim": None})
    return folder


def names_and_types(path: Path) -> dict[str, int]:
    """Return input → element type of a file."""
    return {value.name: value.type.tensor_type.elem_type for value in onnx.load(path).graph.input}


def test_parts_lie_in_folders_that_optimum_reads(built: Path) -> None:
    """Each graph is beside the config of its module, and the files of tokenizer and scheduler are copied."""
    for part in PARTS:
        assert (built / part / "model.onnx").is_file()
        assert (built / part / "config.json").is_file()
    for name in ("model_index.json", "tokenizer/vocab.json", "tokenizer/merges.txt", "scheduler/scheduler_config.json"):
        assert (built / name).is_file()


def test_inputs_have_the_names_of_optimum(built: Path) -> None:
    """Reads as optimum does: it passes tensors by these names, integer timesteps, and names the outputs."""
    types = onnx.TensorProto
    expected = {"sample": types.FLOAT, "timestep": types.INT64, "encoder_hidden_states": types.FLOAT}
    assert names_and_types(built / "unet" / "model.onnx") == expected
    assert list(names_and_types(built / "vae_decoder" / "model.onnx")) == ["latent_sample"]
    outputs = [onnx.load(built / part / "model.onnx").graph.output[0].name for part in PARTS]
    assert outputs == ["last_hidden_state", "out_sample", "latent_parameters", "sample"]


def test_nodes_name_the_modules_of_the_pipeline(built: Path) -> None:
    """Tags begin with the class of the pipeline and the class of the module."""
    nodes = onnx.load(built / "unet" / "model.onnx").graph.node
    tags = [{entry.key: entry.value for entry in node.metadata_props}["winml.hierarchy.tag"] for node in nodes]
    assert all(tag.startswith("/StableDiffusionPipeline/UNet2DConditionModel") for tag in tags)


def test_image_of_all_parts_equals_pytorch(built: Path) -> None:
    """The last part records the comparison of an image."""
    record = json.loads((built / "vae_decoder" / "model_htp_metadata.json").read_text(encoding="utf-8"))
    image = record["verification"]["image"]
    assert image["max_abs_diff"] < 1e-4 < image["tolerance"]
    assert (image["height"], image["width"]) == (32, 16)


_OPTIMUM = """
import json, sys
import torch
from optimum.onnxruntime import ORTStableDiffusionPipeline

pipeline = ORTStableDiffusionPipeline.from_pretrained(sys.argv[1])
latents = torch.tensor(json.loads(sys.argv[2]))
options = {"height": 24, "width": 16, "num_inference_steps": 2, "guidance_scale": 1.0, "output_type": "np"}
print(json.dumps(pipeline("a cat", latents=latents, **options).images.tolist()))
"""


@pytest.mark.reader("optimum")
@pytest.mark.filterwarnings("ignore::Warning:diffusers")
def test_optimum_makes_the_image_of_diffusers(built: Path, pipeline: Path) -> None:
    """At equal latents."""
    latents = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 4, 12, 8)).astype(np.float32))
    loaded = diffusers.DiffusionPipeline.from_pretrained(pipeline)
    loaded.set_progress_bar_config(disable=True)
    options = {"height": 24, "width": 16, "num_inference_steps": 2, "guidance_scale": 1.0, "output_type": "np"}
    expected = loaded("a cat", latents=latents, **options).images
    command = [str(python_of("optimum")), "-c", _OPTIMUM, str(built), json.dumps(latents.tolist())]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert 0 == done.returncode, done.stderr
    np.testing.assert_allclose(json.loads(done.stdout.splitlines()[-1]), expected, atol=1e-4)


@pytest.mark.filterwarnings("ignore::Warning:diffusers")
def test_loaded_pipeline_makes_the_image_of_diffusers(built: Path, pipeline: Path) -> None:
    """A build runs in the loop of diffusers, at a height that no trace had."""
    images = []
    for loaded in (diffusers.DiffusionPipeline.from_pretrained(pipeline), load_pipeline(built)):
        loaded.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(5)
        output = loaded(
            "a cat", height=24, width=16, num_inference_steps=2, guidance_scale=1.0, generator=generator,
            output_type="np",
        )  # fmt: skip
        images.append(output.images)
    assert images[0].std() > 0.01
    np.testing.assert_allclose(images[1], images[0], atol=1e-4)


@pytest.mark.parametrize(
    ("save", "inputs"),
    [
        (stable_diffusion_3, {"hidden_states": 4, "encoder_hidden_states": 3, "pooled_projections": 2, "timestep": 1}),
        (
            flux,
            {
                "hidden_states": 3, "encoder_hidden_states": 3, "pooled_projections": 2, "timestep": 1, "img_ids": 2,
                "txt_ids": 2, "guidance": 1,
            },
        ),
    ],
    ids=["sd3", "flux"],
)  # fmt: skip
def test_transformer_of_a_pipeline_equals_pytorch(
    tmp_path: Path, save: Callable[[Path], Path], inputs: dict[str, int]
) -> None:
    """The transformers of Stable Diffusion 3 and of Flux are exported and verified: input → rank."""
    folder = save(tmp_path / "pipeline")
    sizes = {"batch_size": 1, "height": 16, "width": 12, "sequence_length": 5}
    part = export_model(folder, tmp_path / "model.onnx", sizes=sizes, submodel=("transformer",)).only_part
    assert {spec.name: len(spec.shape) for spec in part.inputs} == inputs
    assert part.verification is not None
    assert part.verification.is_verified


def test_unet_of_xl_takes_pooled_text_sizes_and_fractions_of_steps(tmp_path: Path) -> None:
    """Its Euler scheduler divides 1000 training steps into any number, and the layers of its texts are outputs."""
    resolved = resolve_model(ModelRequest(str(stable_diffusion_xl(tmp_path / "pipeline"))))
    parts = {part.name: part for part in resolved.parts}
    types = {spec.name: (len(spec.shape), spec.dtype) for spec in parts["unet"].inputs}
    assert types == {
        "sample": (4, "float32"), "timestep": (0, "float32"), "encoder_hidden_states": (3, "float32"),
        "text_embeds": (2, "float32"), "time_ids": (2, "float32"),
    }  # fmt: skip
    assert parts["text_encoder_2"].forward_kwargs["output_hidden_states"] is True


def test_autoencoder_of_xl_stays_float32_in_half_precision(tmp_path: Path) -> None:
    """It overflows in float16, and diffusers runs it in float32 too."""
    resolved = resolve_model(ModelRequest(str(stable_diffusion_xl(tmp_path / "pipeline")), dtype="fp16"))
    types = {part.name: part.inputs[0].dtype for part in resolved.parts}
    assert (types["unet"], types["vae_encoder"], types["vae_decoder"]) == ("float16", "float32", "float32")


def change_index(folder: Path, **entries: object) -> None:
    """Change entries of the index of a pipeline."""
    path = folder / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def test_safety_checker_is_left_out_with_a_note(copied: Path) -> None:
    """The safety checker has no part, and a note names it."""
    change_index(copied, safety_checker=["stable_diffusion", "StableDiffusionSafetyChecker"])
    resolved = resolve_model(ModelRequest(str(copied)))
    assert tuple(part.name for part in resolved.parts) == PARTS
    assert any("safety_checker" in note for note in resolved.notes)


def test_unknown_component_is_refused(copied: Path) -> None:
    """A module with unknown inputs is named."""
    change_index(copied, controlnet=["diffusers", "ControlNetModel"])
    with pytest.raises(CheckpointError, match="controlnet of class ControlNetModel"):
        resolve_model(ModelRequest(str(copied)))


def test_code_of_a_pipeline_is_not_run(copied: Path) -> None:
    """Neither the class of the pipeline nor of a component comes from a Python file of the folder."""
    (copied / "unet" / "own_unet.py").write_text("raise SystemExit('this code ran')")
    change_index(copied, unet=["own_unet", "OwnUNet"])
    with pytest.raises(CheckpointError, match=r"own_unet\.py"):
        resolve_model(ModelRequest(str(copied), trust_remote_code=True))
    change_index(copied, _class_name=["own_pipeline", "OwnPipeline"])
    with pytest.raises(CheckpointError, match="own_pipeline"):
        resolve_model(ModelRequest(str(copied), trust_remote_code=True))


def test_missing_weights_are_named(copied: Path) -> None:
    """A component without weights is reported before a library is imported."""
    (copied / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ModelPathError, match="vae: has no weights"):
        resolve_model(ModelRequest(str(copied)))


def test_layout_is_refused(pipeline: Path, tmp_path: Path) -> None:
    """A pipeline has one layout, without a request."""
    with pytest.raises(UsageError, match="one layout"):
        build_model(pipeline, tmp_path / "built", config={"layout": "genai"})


def test_adapter_and_unknown_size_are_refused(pipeline: Path) -> None:
    """LoRAs of diffusers are fused with diffusers; sizes are those of images."""
    with pytest.raises(UsageError) as refused:
        resolve_model(ModelRequest(str(pipeline), adapter=("lora",)))
    assert "fuse_lora" in refused.value.hint
    with pytest.raises(UsageError, match="no multiple of 2"):
        export_model(pipeline, "model.onnx", sizes={"height": 15})


def test_missing_diffusers_names_the_extra(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without diffusers, the error names the command that installs it."""
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(InputError) as refused:
        resolve_model(ModelRequest(str(pipeline)))
    assert "pip install" in refused.value.hint
    assert "diffus" in refused.value.hint
