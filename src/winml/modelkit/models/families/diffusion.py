"""Parts of a diffusers pipeline: text encoders, denoiser, and both halves of the autoencoder.

Inputs and outputs have the names that optimum's ``ORTDiffusionPipeline`` expects. All sizes are dynamic unless the user
fixes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from winml.modelkit.errors import CheckpointError, UsageError, opt
from winml.modelkit.file_names import VAE_DECODER, VAE_ENCODER
from winml.modelkit.models.checkpoints.pipeline_files import DENOISERS, TEXT_ENCODERS, VAE, PipelineFiles
from winml.modelkit.models.families.family import part_of_decision
from winml.modelkit.models.inputs.decision import decide_inputs, forward_keywords
from winml.modelkit.models.inputs.dynamic_axes import open_axes
from winml.modelkit.models.inputs.nested_arguments import NestedArguments
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.specs import DynamicDimension, DynamicRequest, InputTensorSpec, OpenSize

_BATCH, _TOKENS, _HEIGHT, _WIDTH = "batch_size", "sequence_length", "height", "width"
_LATENT_HEIGHT, _LATENT_WIDTH, _PATCHES = "latent_height", "latent_width", "packed_height_width"
_EXAMPLES: Mapping[str, int] = {_BATCH: 2, _TOKENS: 3, _LATENT_HEIGHT: 5, _LATENT_WIDTH: 7, _PATCHES: 15}
"""Chosen: sizes at tracing, distinct and quick to run. Odd latents: a UNet traced on them computes the sizes of its
upsampling from its inputs, and so fits any size; traced on even ones, it doubles sizes."""
_MOST_TIMESTEPS = 999
_TIME_IDS, _SCORED_TIME_IDS = 6, 5
"""Specified by Stable Diffusion XL: original size, crop and target size; or in place of the latter one score."""
_LARGEST_EDGE = 1024.0


class PipelineModules(torch.nn.Module):
    """The modules of a pipeline, as one model whose parts are exported. It is never called as a whole."""

    def forward(self, *_arguments: object, **_keywords: object) -> Any:
        """Raise an error: the pipeline calls its modules one by one."""
        raise NotImplementedError("a pipeline has no forward")


def join_modules(files: PipelineFiles, modules: Mapping[str, torch.nn.Module]) -> PipelineModules:
    """Return the modules of a pipeline as one model, of a class with the name of the pipeline."""
    model: PipelineModules = type(files.class_name, (PipelineModules,), {})()
    for name, module in modules.items():
        model.add_module(name, module)
    return model.eval()


def diffusion_parts(
    model: torch.nn.Module, files: PipelineFiles, request: ModelRequest, *, has_fractions: bool
) -> tuple[ModelPart, ...]:
    """Return the parts of a pipeline in the order in which they run.

    Args:
        model: The modules of the pipeline, possibly on the ``meta`` device.
        files: The folder of the pipeline.
        request: Request of the user.
        has_fractions: True if timesteps lie between integers; a UNet then takes them as floats.

    Raises:
        UsageError: a size does not apply to a pipeline.
        CheckpointError: a module takes inputs that are not known.
    """
    sizes = _Sizes(model, request)
    denoiser_name = next(name for name in DENOISERS if files.find(name) is not None)
    denoiser = model.get_submodule(denoiser_name)
    drafts = _DENOISER_INPUTS[type(denoiser).__name__](denoiser.config, files)
    if has_fractions and drafts["timestep"].dtype == "int64":
        drafts["timestep"] = dataclasses.replace(drafts["timestep"], dtype="float32")
    # Both read the states of a layer before the last one.
    reads_layers = "text_embeds" in drafts or type(denoiser).__name__ == "SD3Transformer2DModel"
    text_parts = [
        _text_encoder_part(model, name, request, sizes, has_layers=reads_layers)
        for name in TEXT_ENCODERS
        if files.find(name) is not None
    ]
    output = "out_sample" if denoiser_name == "unet" else "out_hidden_states"
    vae: Any = model.get_submodule(VAE)
    latents = {"latent_sample": _Draft((_BATCH, vae.config.latent_channels, _LATENT_HEIGHT, _LATENT_WIDTH))}
    images = {"sample": _Draft((_BATCH, vae.config.in_channels, _HEIGHT, _WIDTH))}
    return (
        *text_parts,
        sizes.part(model, denoiser_name, denoiser_name, drafts, _denoiser_arguments(drafts, output)),
        sizes.part(model, VAE_ENCODER, VAE, images, None, entry=_encoder_of),
        sizes.part(model, VAE_DECODER, VAE, latents, None, entry=_decoder_of),
    )


@dataclasses.dataclass(frozen=True)
class _Draft:
    """Input of a module before its sizes are decided."""

    shape: tuple[int | str, ...]
    """Numbers, and names of sizes."""
    dtype: str | None = None
    """`None`: the type of the weights."""
    value_range: tuple[float, float] | None = None


class _Sizes:
    """Sizes of a pipeline: fixed by the user, or dynamic."""

    def __init__(self, model: torch.nn.Module, request: ModelRequest) -> None:
        """Convert the requested sizes, of which height and width count pixels, into sizes of latents.

        Raises:
            UsageError: a size does not apply to a pipeline.
        """
        self._request = request
        vae: Any = model.get_submodule(VAE)
        scale = 2 ** (len(vae.config.block_out_channels) - 1)
        self._examples = {**_EXAMPLES, _HEIGHT: 3 * scale, _WIDTH: 5 * scale}
        keys = (_BATCH, _HEIGHT, _WIDTH, _TOKENS)
        for key in (*request.fixed_sizes, *request.left_open):
            if key not in keys:
                raise UsageError(
                    f"{opt.shape_config}: {key} does not apply to a diffusers pipeline",
                    hint=f"It has {', '.join(keys)}.",
                )
        if request.left_open:
            raise UsageError(
                f"{opt.shape_config}: {', '.join(request.left_open)}: sizes of a pipeline are dynamic already",
                hint="Omit them, or pass numbers, which fix them.",
            )
        self.fixed = dict(request.fixed_sizes)
        for pixels, latents in ((_HEIGHT, _LATENT_HEIGHT), (_WIDTH, _LATENT_WIDTH)):
            if pixels not in self.fixed:
                continue
            if self.fixed[pixels] % scale:
                raise UsageError(
                    f"{opt.shape_config}: {pixels} {self.fixed[pixels]} is no multiple of {scale}",
                    hint=f"Pass a multiple of {scale}, the pixels of a latent.",
                )
            self.fixed[latents] = self.fixed[pixels] // scale
        if _LATENT_HEIGHT in self.fixed and _LATENT_WIDTH in self.fixed:
            # Flux reads rows of patches of two by two latents.
            self.fixed[_PATCHES] = (self.fixed[_LATENT_HEIGHT] // 2) * (self.fixed[_LATENT_WIDTH] // 2)

    def part(
        self,
        model: torch.nn.Module,
        name: str,
        path: str,
        drafts: Mapping[str, _Draft],
        arguments: NestedArguments | None,
        entry: Callable[[torch.nn.Module], Callable[..., Any]] | None = None,
    ) -> ModelPart:
        """Return a part whose inputs have these drafts."""
        dtype = str(next(model.get_submodule(path).parameters()).dtype).removeprefix("torch.")
        specs = tuple(
            InputTensorSpec(
                name=key,
                shape=tuple(self.fixed.get(size, size) if isinstance(size, str) else size for size in draft.shape),
                dtype=draft.dtype or dtype,
                value_range=draft.value_range,
            )
            for key, draft in drafts.items()
        )
        names = dict.fromkeys(size for spec in specs for size in spec.shape if isinstance(size, str))
        return ModelPart(
            model=model,
            name=name,
            path=path,
            inputs=specs,
            arguments=arguments,
            entry=entry,
            forward_kwargs={} if entry is not None else {"return_dict": False},
            dimensions=tuple(DynamicDimension(name=size, example=self._examples[size]) for size in names),
        )


def _text_encoder_part(
    model: torch.nn.Module, name: str, request: ModelRequest, sizes: _Sizes, *, has_layers: bool
) -> ModelPart:
    """Return the part of a text encoder, which takes token ids alone; with ``has_layers``, it returns all layers."""
    encoder: Any = model.get_submodule(name)
    decision = decide_inputs(
        encoder, encoder.config, task="feature-extraction", shape=request.shape_config, batch_size=request.batch_size
    )
    tokens = tuple(spec for spec in decision.inputs if spec.name == "input_ids")
    decision = dataclasses.replace(decision, inputs=tokens, notes=())
    is_clip = encoder.config.model_type == "clip_text_model"
    decision = open_axes(
        decision,
        DynamicRequest(),
        {key: OpenSize() for key in (_BATCH, _TOKENS) if key not in sizes.fixed},
        firm_keys=frozenset(sizes.fixed) & {_BATCH, _TOKENS},
    )
    keywords = {**forward_keywords(encoder), **({"output_hidden_states": True} if has_layers and is_clip else {})}
    return part_of_decision(model, decision, keywords, None, name=name, path=name)


def _denoiser_arguments(drafts: Mapping[str, _Draft], output: str) -> NestedArguments:
    """Return the conversion of inputs into arguments of a denoiser, whose only output gets a name."""
    added = tuple(name for name in ("text_embeds", "time_ids") if name in drafts)

    def build(tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
        arguments: dict[str, object] = {name: tensor for name, tensor in tensors.items() if name not in added}
        return {**arguments, **({"added_cond_kwargs": {name: tensors[name] for name in added}} if added else {})}

    names = tuple(name for name in drafts if name not in added)
    return NestedArguments(
        (*names, *(("added_cond_kwargs",) if added else ())), {}, build, lambda outputs: {output: outputs[0]}
    )


def _unet_inputs(config: Any, files: PipelineFiles) -> dict[str, _Draft]:
    """Return the inputs of the UNet of Stable Diffusion 1, 2 and XL.

    Raises:
        CheckpointError: it takes other conditions than text.
    """
    conditions = {
        "class_embed_type": (None,), "num_class_embeds": (None,), "addition_embed_type": (None, "text_time"),
        "encoder_hid_dim_type": (None,),
    }  # fmt: skip
    for key, known in conditions.items():
        if getattr(config, key, None) not in known:
            raise CheckpointError(
                f"{files.folder}: the unet takes conditions beside text ({key} {getattr(config, key)}), which is not "
                "supported",
                hint="Export the module alone, from a script: file.py:function.",
            )
    width = config.cross_attention_dim
    width = width if isinstance(width, int) else width[0]
    drafts = {
        "sample": _Draft((_BATCH, config.in_channels, _LATENT_HEIGHT, _LATENT_WIDTH)),
        "timestep": _Draft((), "int64", (0, _MOST_TIMESTEPS)),
        "encoder_hidden_states": _Draft((_BATCH, _TOKENS, width)),
    }
    if config.time_cond_proj_dim is not None:
        drafts["timestep_cond"] = _Draft((_BATCH, config.time_cond_proj_dim))
    if config.addition_embed_type is not None:
        count = _SCORED_TIME_IDS if files.has_aesthetic_score else _TIME_IDS
        text_width = config.projection_class_embeddings_input_dim - count * config.addition_time_embed_dim
        drafts["text_embeds"] = _Draft((_BATCH, text_width))
        drafts["time_ids"] = _Draft((_BATCH, count), value_range=(0, _LARGEST_EDGE))
    return drafts


def _sd3_inputs(config: Any, _files: PipelineFiles) -> dict[str, _Draft]:
    """Return the inputs of the transformer of Stable Diffusion 3."""
    return {
        "hidden_states": _Draft((_BATCH, config.in_channels, _LATENT_HEIGHT, _LATENT_WIDTH)),
        "encoder_hidden_states": _Draft((_BATCH, _TOKENS, config.joint_attention_dim)),
        "pooled_projections": _Draft((_BATCH, config.pooled_projection_dim)),
        "timestep": _Draft((_BATCH,), "float32", (0, _MOST_TIMESTEPS)),
    }


def _flux_inputs(config: Any, _files: PipelineFiles) -> dict[str, _Draft]:
    """Return the inputs of the transformer of Flux: rows of patches, and the position of each patch and token."""
    drafts = {
        "hidden_states": _Draft((_BATCH, _PATCHES, config.in_channels)),
        "encoder_hidden_states": _Draft((_BATCH, _TOKENS, config.joint_attention_dim)),
        "pooled_projections": _Draft((_BATCH, config.pooled_projection_dim)),
        "timestep": _Draft((_BATCH,), "float32", (0, 1)),
        "img_ids": _Draft((_PATCHES, len(config.axes_dims_rope)), value_range=(0, 63)),
        "txt_ids": _Draft((_TOKENS, len(config.axes_dims_rope)), value_range=(0, 63)),
    }
    if config.guidance_embeds:
        drafts["guidance"] = _Draft((_BATCH,), value_range=(1, 10))
    return drafts


_DENOISER_INPUTS: Mapping[str, Callable[[Any, PipelineFiles], dict[str, _Draft]]] = {
    "UNet2DConditionModel": _unet_inputs,
    "SD3Transformer2DModel": _sd3_inputs,
    "FluxTransformer2DModel": _flux_inputs,
}


def _encoder_of(vae: Any) -> Callable[..., Any]:
    """Return the encoder of an autoencoder: mean and logarithm of the variance of the latents of an image."""

    def encode(sample: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"latent_parameters": vae.encode(sample).latent_dist.parameters}

    return encode


def _decoder_of(vae: Any) -> Callable[..., Any]:
    """Return the decoder of an autoencoder: latents → image."""

    def decode(latent_sample: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"sample": vae.decode(latent_sample).sample}

    return decode
