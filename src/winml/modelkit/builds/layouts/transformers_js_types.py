"""Model types for which transformers.js has a class, by task."""

from __future__ import annotations

from collections.abc import Mapping

_NAMES: Mapping[str, str] = {
    "text-generation": (
        "afmoe apertus arcee bloom codegen cohere cohere2 deepseek_v3 deepseek_v4 ernie4_5 exaone falcon falcon_h1 "
        "gemma gemma2 gemma3 gemma3_text gemma3n gemma4 glm glm_moe_dsa gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss "
        "gptj granite granitemoehybrid helium hrm_text hunyuan_v1_dense jais lfm2 lfm2_moe lfm3 llama llama4_text "
        "mbart ministral ministral3 mistral mistral4 mobilellm modernbert-decoder mpt nanochat nemotron_h olmo "
        "olmo2 olmo3 olmo_hybrid openelm opt phi phi3 phi3_v qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5 "
        "qwen3_5_moe qwen3_5_text qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe smollm3 solar_open stablelm starcoder2 "
        "trocr vaultgemma youtu zaya"
    ),
    "text2text-generation": "bart blenderbot blenderbot-small longt5 m2m_100 marian mbart mt5 t5",
    "fill-mask": (
        "albert bert camembert convbert deberta deberta-v2 distilbert electra esm eurobert mobilebert modernbert "
        "mpnet neobert roberta roformer squeezebert xlm xlm-roberta"
    ),
    "text-classification": (
        "albert bart bert camembert convbert deberta deberta-v2 distilbert electra esm eurobert mbart mobilebert "
        "modernbert mpnet neobert roberta roformer squeezebert xlm xlm-roberta"
    ),
    "token-classification": (
        "bert camembert convbert deberta deberta-v2 distilbert electra esm eurobert modernbert mpnet neobert "
        "openai_privacy_filter roberta roformer xlm xlm-roberta"
    ),
    "question-answering": (
        "albert bert camembert convbert deberta deberta-v2 distilbert electra mobilebert mpnet neobert roberta "
        "roformer squeezebert xlm xlm-roberta"
    ),
    "document-question-answering": "vision-encoder-decoder",
    "image-classification": (
        "beit convnext convnextv2 deit dinov2 dinov2_with_registers efficientnet fastvit hiera ijepa mobilenet_v1 "
        "mobilenet_v2 mobilenet_v3 mobilenet_v4 mobilevit mobilevitv2 pvt resnet segformer swin vit vit_msn"
    ),
    "image-segmentation": (
        "clipseg detr maskformer mobilenet_v1 mobilenet_v2 mobilenet_v3 mobilenet_v4 sapiens segformer swin"
    ),
    "object-detection": "d_fine detr rf_detr rt_detr rt_detr_v2 table-transformer yolos",
    "zero-shot-object-detection": "grounding-dino owlv2 owlvit",
    "depth-estimation": "chmv2 depth_anything depth_pro dpt glpn metric3d metric3dv2 sapiens",
    "image-to-image": "swin2sr",
    "automatic-speech-recognition": (
        "cohere_asr hubert lite-whisper moonshine parakeet_ctc speecht5 unispeech unispeech-sat wav2vec2 "
        "wav2vec2-bert wavlm whisper"
    ),
    "audio-classification": "audio-spectrogram-transformer hubert unispeech unispeech-sat wav2vec2 wav2vec2-bert wavlm",
    "audio-xvector": "wavlm",
    "audio-frame-classification": "pyannote unispeech-sat wav2vec2 wavlm",
    "mask-generation": "sam",
    "image-to-text": "vision-encoder-decoder",
    "image-text-to-text": "gemma3 llava qwen2_5_vl",
}
"""Specified by transformers.js 4.3.2, ``src/models/registry.js``. Of ``image-text-to-text``, the model types with the
tokens of PyTorch: transformers.js passes no token types, and those of PaliGemma mark more than images. Of
``mask-generation``, those with one tensor of image vectors, which are exported in two parts."""

TYPES: Mapping[str, frozenset[str]] = {task: frozenset(names.split()) for task, names in _NAMES.items()}
"""Task → model types. A task without an entry has no class: models of any type are opened."""
