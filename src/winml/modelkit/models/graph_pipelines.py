"""Diffusers pipelines whose modules run as ONNX graphs: the loop, tokenizers and scheduler are those of diffusers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import VAE_DECODER, VAE_ENCODER
from winml.modelkit.models.checkpoints.pipeline_files import DENOISERS, TEXT_ENCODERS, VAE
from winml.modelkit.models.tensors import to_numpy, to_torch
from winml.modelkit.ort.graph_inputs import element_type
from winml.modelkit.ort.sessions import Session
from winml.modelkit.ort.shared_settings import attribute_replaced

_LAYER = "hidden_states."
"""Start of the names of a text encoder's outputs with the states of each layer."""


def take_storage_out(modules: nn.Module) -> None:
    """Replace parameters on the ``meta`` device by parameters on the CPU whose elements share one zero; in place.

    A pipeline reads dtype and device of its modules from parameters.
    """
    for module in modules.modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            zeros = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(module, name, nn.Parameter(zeros, requires_grad=False) if is_parameter else zeros)


@contextmanager
def run_as_graphs(modules: nn.Module, sessions: Mapping[str, Session]) -> Iterator[None]:
    """Run the modules of a pipeline as graphs inside the block.

    Args:
        modules: Modules by the names of the pipeline's components.
        sessions: Part → its graph.
    """
    with ExitStack() as stack:
        for name, method, function in _replacements(modules, sessions):
            stack.enter_context(attribute_replaced(modules.get_submodule(name), method, function))
        yield


def replace_by_graphs(modules: nn.Module, sessions: Mapping[str, Session]) -> None:
    """Run the modules of a pipeline as graphs from now on; in place."""
    for name, method, function in _replacements(modules, sessions):
        setattr(modules.get_submodule(name), method, function)


def _replacements(modules: nn.Module, sessions: Mapping[str, Session]) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yield component, method, and the function that replaces the method, for each graph."""
    for part, session in sessions.items():
        if part in TEXT_ENCODERS:
            yield part, "forward", _text_encoder(part, session)
        elif part in DENOISERS:
            yield part, "forward", _denoiser(modules.get_submodule(part), part, session)
        elif part == VAE_DECODER:
            yield VAE, "decode", _vae_decoder(session)
        elif part == VAE_ENCODER:
            yield VAE, "encode", _vae_encoder(session)


def _run(session: Session, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run a graph on the tensors that are its inputs, converted to its types."""
    feeds = {
        name: to_numpy(tensors[name].to(getattr(torch, element_type(type_name))))
        for name, type_name in session.inputs.items()
    }
    return {name: to_torch(array) for name, array in session.run(feeds).items()}


def _text_encoder(part: str, session: Session) -> Callable[..., Any]:
    """Return the forward of a text encoder that runs a graph.

    The forward raises UsageError if the states of layers are requested and the graph does not return them, or for a
    mask that hides tokens.
    """
    from transformers.utils.generic import ModelOutput

    def forward(
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **_keywords: object,
    ) -> Any:
        if attention_mask is not None and not bool(attention_mask.all()):
            raise UsageError(f"{part}: the graph takes no attention mask", hint="Leave padding visible.")
        outputs = _run(session, {"input_ids": input_ids})
        layers = tuple(tensor for name, tensor in outputs.items() if name.startswith(_LAYER))
        if output_hidden_states and not layers:
            raise UsageError(
                f"{part}: the graph does not return the states of layers, which clip_skip reads",
                hint="Omit clip_skip.",
            )
        named: dict[str, Any] = {name: value for name, value in outputs.items() if not name.startswith(_LAYER)}
        record = ModelOutput({**named, **({"hidden_states": layers} if output_hidden_states else {})})
        return tuple(record.values()) if return_dict is False else record

    return forward


def _denoiser(module: nn.Module, part: str, session: Session) -> Callable[..., Any]:
    """Return the forward of a UNet or transformer that runs a graph.

    The forward raises UsageError for a tensor that the graph does not take, such as the residuals of a ControlNet.
    """
    signature = inspect.signature(type(module).forward)

    def forward(*arguments: object, **keywords: object) -> Any:
        bound = signature.bind(module, *arguments, **keywords).arguments
        nested = [value for value in bound.values() if isinstance(value, Mapping)]
        tensors = {
            name: value
            for named in (bound, *nested)
            for name, value in named.items()
            if isinstance(value, torch.Tensor)
        }
        if unknown := tensors.keys() - session.inputs.keys():
            raise UsageError(
                f"{part}: the graph has no input {min(unknown)}", hint=f"It takes {', '.join(session.inputs)}."
            )
        (output,) = _run(session, tensors).values()
        return _record(output, returns_record=bound.get("return_dict", True) is not False)

    return forward


def _record(sample: torch.Tensor, *, returns_record: bool) -> Any:
    """Return an output as the modules of diffusers do: a record with ``sample``, or a tuple."""
    from diffusers.models.autoencoders.vae import DecoderOutput

    return DecoderOutput(sample=sample) if returns_record else (sample,)


def _vae_decoder(session: Session) -> Callable[..., Any]:
    def decode(z: torch.Tensor, return_dict: bool = True, generator: object = None) -> Any:
        del generator  # the decoder draws nothing
        return _record(_run(session, {"latent_sample": z})["sample"], returns_record=return_dict)

    return decode


def _vae_encoder(session: Session) -> Callable[..., Any]:
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
    from diffusers.models.modeling_outputs import AutoencoderKLOutput

    def encode(x: torch.Tensor, return_dict: bool = True) -> Any:
        latents = DiagonalGaussianDistribution(_run(session, {"sample": x})["latent_parameters"])
        return AutoencoderKLOutput(latent_dist=latents) if return_dict else (latents,)

    return encode
