"""Registry of the optimizer's capabilities: all supported changes of a graph.

Command flags, config keys and the pipeline are derived from the registry. Pure data; imports nothing heavy, so that
``--help`` and ``--list`` are fast.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from winml.modelkit.ort.fused_operators import kernel_types, providers_with_kernels
from winml.modelkit.registries import Registry

Level = Literal["none", "basic", "extended", "full"]
"""Default set of capabilities; each level includes the previous levels."""
LEVELS: tuple[Level, ...] = get_args(Level)
LEVEL_WORDS: Mapping[Level, str] = {
    "none": "only optimizations that are enabled by name",
    "basic": "ONNX operators only, which every execution provider runs",
    "extended": "also ONNX Runtime operators (com.microsoft) that the execution provider supports",
    "full": "also fused attention; the fastest level on CPU",
}
"""Level → description."""

Operators = Literal["onnxruntime", "standard"]
"""Operators to fuse into."""
OPERATOR_SETS: tuple[Operators, ...] = get_args(Operators)
STANDARD_OPSET = 24
"""Chosen: the oldest opset with Attention, RMSNormalization, RotaryEmbedding and Swish."""
LEAST_STANDARD_OPSET = 23
"""Specified: the first opset with Attention, RMSNormalization and RotaryEmbedding."""

Engine = Literal["winml", "onnxruntime"]
"""Implementation of a change: a pass of winml, in memory; or ONNX Runtime's offline optimizer, through a file."""

_ORT: Engine = "onnxruntime"
_CPU = ("cpu",)


@dataclass(frozen=True)
class Capability:
    """One change that can be switched on and off."""

    name: str
    words: str
    """Description, in one clause."""
    level: Level | None
    """First level that enables it by default; None: only enabled by name."""
    engine: Engine
    transformers: tuple[str, ...] = ()
    """ONNX Runtime's graph transformers and rewrite rules that implement it with operators of the ONNX domain."""
    since_opset: int = 0
    """Minimum opset for ``transformers``: they create an operator introduced in this version. 0: any.
    Specified by ONNX.
    """
    contrib_transformers: tuple[str, ...] = ()
    """Transformers that create operators of ONNX Runtime; only from level ``extended`` on, or if enabled by name."""
    providers: tuple[str, ...] = ()
    """Short names of the execution providers that run the operators it creates; empty: any. By default, the providers
    with kernels for ``kernels``."""
    makes: tuple[str, ...] = ()
    """Operators created only by this capability; their number gives how often it fired."""
    layer: str = ""
    """ONNX operator that it replaces by one of ONNX Runtime, weight included; such a weight cannot be quantized. Empty:
    none."""
    marks: tuple[str, ...] = ()
    """Text in the names of new nodes and weights, if operators do not show how often it fired. Without either, as for
    capabilities that only remove nodes, the number is unknown.
    """
    config: tuple[tuple[str, str], ...] = ()
    """Entries of ONNX Runtime's session configuration it needs."""
    needs_layouts: bool = False
    """True if the result is fast only on processors like the optimizing processor."""
    implementation: str = ""
    """For the engine ``winml``: ``module:class`` of its :class:`~winml.modelkit.onnx.stage.GraphPass`, created without
    arguments. Imported when it runs, so that listing capabilities imports no graph library.
    """
    standard_opset: int = 0
    """First opset with operators of ONNX that replace those it creates (``operators: standard``); 0: none."""
    standard_implementation: str = ""
    """Like ``implementation``, for operators of ONNX; empty: the operators are replaced one by one afterwards."""
    sets: tuple[str, str] | None = None
    """For a capability without a separate pass: the capability whose pass it changes, and the keyword to set."""
    kernels: tuple[str, ...] = ()
    """Operators of ONNX Runtime that it creates, as named in the table of kernels (``ort/fused_operators``)."""
    replaces_kernels: bool = False
    """True if ``kernels`` replace those of the capability whose pass it changes."""

    def __post_init__(self) -> None:
        """Set the default of ``providers``."""
        object.__setattr__(self, "providers", self.providers or providers_with_kernels(self.kernels))

    def has_kernels(self, provider: str | None, types: Collection[str]) -> bool:
        """Return True unless a provider has kernels, and none of them for one of these float types.

        The CPU provider runs other types between casts.

        Args:
            provider: Short name of the provider; None: any.
            types: Float types of the graph, as numpy names them.
        """
        if provider is None or provider == "cpu" or not types:
            return True
        rows = (kernel_types(operator) for operator in self.kernels)
        return all(provider not in row or set(types).intersection(row[provider]) for row in rows)

    @property
    def flag(self) -> str:
        """The name as spelled in a command option (``gelu-fusion``)."""
        return self.name.replace("_", "-")


_PASSES = "winml.modelkit.optimize"
_GELUS = ("Gelu", "com.microsoft:Gelu", "com.microsoft:BiasGelu")
_LAYER_NORMS = ("LayerNormalization", "com.microsoft:SkipLayerNormalization")
_SKIP_NORM = "SkipSimplifiedLayerNormalization"
_ATTENTION = "com.microsoft:GroupQueryAttention"
_BIASED_ATTENTION, _ROTARY_ATTENTION = f"{_ATTENTION}(attention_bias)", f"{_ATTENTION}(do_rotary)"
_PACKED_ATTENTION = f"{_ATTENTION}(packed)"
_RULES_FOR_NOTHING = (
    "EliminateIdentity", "EliminateSlice", "UnsqueezeElimination", "EliminateDropout", "ExpandElimination",
    "CastElimination", "PreShapeNodeElimination", "NoopElimination",
)  # fmt: skip
_RULES_FOR_QDQ = (
    "DoubleQDQPairsRemover", "QDQPropagationTransformer", "WeightBiasQuantization", "EnsureUniqueDQForNodeUnit",
    "WhereDummyDq", "ConstantFoldingDQ",
)  # fmt: skip
_CONTRIB_FOR_QDQ = (
    "ClipQuantRewrite", "ReluQuantRewrite", "QDQS8ToU8Transformer", "QDQSelectorActionTransformer",
    "QDQFinalCleanupTransformer", "MatMulNBitsFusion", "DQMatMulNBitsFusion", "Avx2WeightS8ToU8Transformer",
)  # fmt: skip

_ENTRIES = (
    # Operators of ONNX itself.
    Capability(
        "constant_folding", "fold constants: compute nodes that depend on constants only", "basic", _ORT,
        transformers=("ConstantFolding",),
    ),
    Capability(
        "common_subexpression_elimination", "eliminate common subexpressions, and share equal scalars", "basic",
        _ORT, transformers=("CommonSubexpressionElimination", "ConstantSharing"),
    ),
    Capability(
        "noop_elimination", "remove nodes without effect: x + 0, x · 1, casts to the same type, full slices",
        "basic", _ORT, transformers=_RULES_FOR_NOTHING,
    ),
    Capability(
        "reshape_fusion", "replace a shape computed at run time by an equivalent constant",
        "basic", _ORT, transformers=("ReshapeFusion",),
    ),
    Capability(
        "transpose_elimination", "push Transpose nodes through the graph until they cancel", "basic", _ORT,
        transformers=("TransposeOptimizer",), contrib_transformers=("TransposeOptimizer_CPUExecutionProvider",),
    ),
    Capability(
        "gemm_sum_fusion", "fuse Gemm with the addition after it", "basic", _ORT,
        transformers=("GemmSumFusion",),
    ),
    Capability(
        "gemm_transpose_fusion", "fuse Gemm with the Transpose nodes around it", "basic", _ORT,
        transformers=("GemmTransposeFusion",),
    ),
    Capability(
        "matmul_batch_norm_fusion", "fold BatchNormalization into the weights of the MatMul before it", "basic",
        _ORT, transformers=("MatMul_BatchNormalization_Fusion",), marks=("MatMulBnFusion_GemmB_",),
    ),
    Capability(
        "conv_batch_norm_fusion", "fold BatchNormalization into the weights of the Conv before it",
        "basic", _ORT, transformers=("ConvBNFusion",), marks=("ConvBnFusion_W_",),
    ),
    Capability(
        "conv_add_fusion", "fold the addition of a constant into the bias of the Conv before it", "basic",
        _ORT, transformers=("ConvAddFusion",), marks=("ConvAddFusion_",),
    ),
    Capability(
        "conv_mul_fusion", "fold the multiplication by a constant into the weights of the Conv before it",
        "basic", _ORT, transformers=("ConvMulFusion",), marks=("ConvMulFusion_W_",),
    ),
    Capability(
        "pad_fusion", "fold Pad into the convolution or pooling after it", "basic", _ORT,
        transformers=("Pad_Fusion",),
    ),
    Capability(
        "relu_clip_fusion", "fuse Relu with the Clip after it", "basic", _ORT,
        transformers=("FuseReluClip",),
    ),
    Capability(
        "div_mul_fusion", "replace 1 / x · y by y / x", "basic", _ORT,
        transformers=("DivMulFusion",),
    ),
    Capability(
        "not_where_fusion", "remove a Not by swapping the branches of the Where after it", "basic", _ORT,
        transformers=("NotWhereFusion",),
    ),
    Capability(
        "gelu_fusion", "fuse the nodes of GELU into one", "basic", _ORT,
        transformers=("GeluFusionL1",), since_opset=20, contrib_transformers=("GeluFusionL2",),
        kernels=("com.microsoft:Gelu",), makes=_GELUS,
    ),
    Capability(
        "layer_norm_fusion", "fuse the nodes of layer normalization into one", "basic", _ORT,
        transformers=("LayerNormFusionL1",), since_opset=17, contrib_transformers=("LayerNormFusionL2",),
        kernels=("LayerNormalization",), makes=_LAYER_NORMS,
    ),
    # Operators of ONNX Runtime.
    Capability(
        "fast_gelu_fusion", "fuse the nodes of GELU with tanh into FastGelu", "extended", _ORT,
        contrib_transformers=("FastGeluFusion",), kernels=("com.microsoft:FastGelu",),
        makes=("com.microsoft:FastGelu",), standard_opset=20,
    ),
    Capability(
        "tanh_gelu_fusion", "fuse the nodes of GELU with tanh, with a cube written as x · x · x, into FastGelu",
        "extended", "winml", kernels=("com.microsoft:FastGelu",), makes=("com.microsoft:FastGelu",),
        implementation=f"{_PASSES}.gelu_fusion:TanhGeluFusionPass", standard_opset=20,
    ),
    Capability(
        "quick_gelu_fusion", "fuse x · sigmoid(1.702 x), and x · sigmoid(x), into QuickGelu", "extended",
        _ORT, contrib_transformers=("QuickGeluFusion",), kernels=("com.microsoft:QuickGelu",),
        makes=("com.microsoft:QuickGelu",), standard_opset=24,
    ),
    Capability(
        "bias_gelu_fusion", "fuse Gelu with the addition before it", "extended", _ORT,
        contrib_transformers=("BiasGeluFusion",), kernels=("com.microsoft:BiasGelu",),
        makes=("com.microsoft:BiasGelu",),
    ),
    Capability(
        "skip_layer_norm_fusion", "fuse LayerNormalization with the addition before it", "extended", _ORT,
        contrib_transformers=("SkipLayerNormFusion", "BiasSkipLayerNormFusion"),
        kernels=("com.microsoft:SkipLayerNormalization",),
        makes=("com.microsoft:SkipLayerNormalization",),
    ),
    Capability(
        "matmul_transpose_fusion", "fuse MatMul with the Transpose nodes before it", "extended", _ORT,
        contrib_transformers=("MatmulTransposeFusion",), kernels=("com.microsoft:FusedMatMul",),
        marks=("MatmulTransposeFusion",),
        layer="MatMul",
    ),
    # The kernel of CUDA takes Relu only.
    Capability(
        "conv_activation_fusion", "fuse Conv with the activation after it", "extended", _ORT,
        contrib_transformers=("ConvActivationFusion",), providers=("cpu", "webgpu"),
        kernels=("com.microsoft:FusedConv",), makes=("com.microsoft:FusedConv",),
        layer="Conv",
    ),
    Capability(
        "gather_fusion", "replace several Gather or Slice nodes of one tensor by Split", "extended", _ORT,
        contrib_transformers=("GatherSliceToSplitFusion", "GatherToSliceFusion"), providers=("cpu", "cuda"),
    ),
    Capability(
        "dynamic_quantize_matmul_fusion", "fuse dynamic quantization, integer MatMul and scaling into one node",
        "extended", _ORT,
        contrib_transformers=("MatMulIntegerToFloatFusion", "DynamicQuantizeMatMulFusion"),
        kernels=("com.microsoft:DynamicQuantizeMatMul", "com.microsoft:MatMulIntegerToFloat"),
        makes=("com.microsoft:DynamicQuantizeMatMul", "com.microsoft:MatMulIntegerToFloat"),
    ),
    Capability(
        "simplified_layer_norm_fusion", "fuse the nodes of RMSNorm into one", "extended",
        "winml", kernels=("SimplifiedLayerNormalization",),
        makes=("SimplifiedLayerNormalization", f"com.microsoft:{_SKIP_NORM}"),
        implementation=f"{_PASSES}.decoders.norm_fusions:RootMeanSquareNormFusionPass", standard_opset=23,
    ),
    Capability(
        "skip_simplified_layer_norm_fusion", "fuse RMSNorm with the addition before it",
        "extended", "winml", kernels=(f"com.microsoft:{_SKIP_NORM}",), makes=(f"com.microsoft:{_SKIP_NORM}",),
        implementation=f"{_PASSES}.decoders.norm_fusions:SkipNormFusionPass",
    ),
    Capability(
        "group_query_attention_fusion", "fuse attention with a KV cache into GroupQueryAttention", "full", "winml",
        kernels=(_BIASED_ATTENTION,), makes=("com.microsoft:GroupQueryAttention",),
        implementation=f"{_PASSES}.decoders.grouped_attention_fusion:GroupQueryAttentionFusionPass",
    ),
    Capability(
        "attention_fusion", "fuse attention into MultiHeadAttention, or into Attention of ONNX", "full", "winml",
        kernels=("com.microsoft:MultiHeadAttention",), makes=("com.microsoft:MultiHeadAttention", "Attention"),
        implementation=f"{_PASSES}.attention_fusion:AttentionFusionPass",
        standard_opset=23, standard_implementation=f"{_PASSES}.standard_attention:StandardAttentionFusionPass",
    ),
    # The next three only when enabled by name, and in builds for onnxruntime-genai and WebGPU: positions that skip
    # numbers inside a row, and padding inside a row, would have other outputs.
    Capability(
        "rotary_attention_fusion", "rotate queries and keys inside GroupQueryAttention, by their place in the KV cache",
        None, "winml", kernels=(_ROTARY_ATTENTION,), marks=("cos_by_position",),
        sets=("group_query_attention_fusion", "rotates"),
    ),
    Capability(
        "right_padding",
        "hide padding by the number of visible tokens in a row instead of a mask: padding comes last, as in "
        "onnxruntime-genai",
        None, "winml", kernels=(_ATTENTION,), marks=("/mask/visible_count",),
        sets=("group_query_attention_fusion", "pads_right"), replaces_kernels=True,
    ),
    Capability(
        "packed_projection_fusion", "compute queries, keys and values of GroupQueryAttention by one product", None,
        "winml", kernels=(_PACKED_ATTENTION,), marks=("/packed_qkv/MatMul",), layer="MatMul",
        implementation=f"{_PASSES}.decoders.packed_projections:PackedProjectionPass",
    ),
    # Only if enabled by name. Products of three axes and additions become Gemm between two reshapes, and the graph is
    # longer; ONNX Runtime does that by itself when it opens a file. OpenVINO drops the activation of a FusedGemm.
    Capability(
        "matmul_add_fusion", "fuse MatMul and the addition after it into Gemm", None, _ORT,
        transformers=("MatMulAddFusion",), makes=("Gemm", "com.microsoft:FusedGemm"),
    ),
    # ONNX Runtime 1.31 removes a scale that a second product still reads, and then cannot load the graph.
    Capability(
        "matmul_scale_fusion", "fuse MatMul with the scaling after it", None, _ORT,
        contrib_transformers=("MatMulScaleFusion",), kernels=("com.microsoft:FusedMatMul",),
        marks=("MatMulScaleFusion",),
    ),
    Capability(
        "gemm_activation_fusion", "fuse Gemm with the activation after it", None, _ORT,
        contrib_transformers=("GemmActivationFusion",), kernels=("com.microsoft:FusedGemm",),
        makes=("com.microsoft:FusedGemm",),
        layer="Gemm",
    ),
    Capability(
        "gelu_approximation", "approximate GELU by FastGelu; changes the outputs slightly", None, _ORT,
        contrib_transformers=("GeluApproximation",), kernels=("com.microsoft:FastGelu",),
        makes=("com.microsoft:FastGelu",),
        config=(("optimization.enable_gelu_approximation", "1"),),
    ),
    Capability(
        "quantized_operator_fusion",
        "run the operators between DequantizeLinear and QuantizeLinear on integers; changes the outputs slightly",
        None, _ORT, transformers=_RULES_FOR_QDQ, contrib_transformers=_CONTRIB_FOR_QDQ, providers=_CPU,
    ),
    Capability(
        "nchwc_layout", "use the NCHWc layout of convolutions that fits the vector width of this CPU", None, _ORT,
        contrib_transformers=("NchwcTransformer", "NhwcTransformer", "ConvAddActivationFusion"), providers=_CPU,
        makes=("com.microsoft.nchwc:Conv",), needs_layouts=True,
    ),
)  # fmt: skip

RESERVED = frozenset(
    {
        "declared", "enabled", "ep", "exclude", "folds_constants", "is_empty", "is_enabled", "is_limited", "level",
        "module", "named", "operators", "opset", "opset_after", "plug_ins", "refuse_older_opset",
        "refuse_whole_graph_options", "section", "spelled", "stated_options", "uses_contrib", "ways_out",
        "judging_capability", "with_attention_variant", "with_decoder_fusions", "with_plain_layers",
    }
)  # fmt: skip
"""Reserved names: options that are no capabilities, and other attributes of ``OptimizeOptions``."""


def _find_problem(name: str, capability: Capability) -> str:
    """Return the problem of a capability of a plug-in; ``""`` if it is valid."""
    if capability.name != name:
        return f"it calls itself {capability.name}"
    if not name.isidentifier() or name != name.lower() or name in RESERVED or name.startswith(("_", "model_")):
        return "its name cannot be that of an option; expected small letters and underscores, such as cast_removal"
    if capability.engine != "winml" or not capability.implementation:
        return "it has no pass; expected engine 'winml' and an implementation"
    return ""


CAPABILITIES: Registry[Capability] = Registry(
    "passes", "capability", {entry.name: entry for entry in _ENTRIES}, lambda: Capability, _find_problem
)
"""Name → capability, in the order they are listed to users."""

DECODER_FUSIONS = (
    "simplified_layer_norm_fusion", "group_query_attention_fusion", "skip_simplified_layer_norm_fusion",
    "tanh_gelu_fusion",
)  # fmt: skip
"""Capabilities that convert a decoder with a cache to the operators expected by ONNX Runtime's runtimes. They read no
weights.
"""

ATTENTION_VARIANT = ("rotary_attention_fusion", "right_padding", "packed_projection_fusion")
"""Capabilities for the attention of a decoder whose positions and padding are known: see the registry."""

WHOLE_GRAPH = ("group_query_attention_fusion", "rotary_attention_fusion", "right_padding")
"""Capabilities that read inputs and outputs of the whole graph, so that they cannot be limited to modules."""

UNUSED_TRANSFORMERS = (
    "AttentionFusion", "BiasDropoutFusion", "BiasSoftmaxFusion", "CastChainElimination", "EmbedLayerNormFusion",
    "GqaValueLayoutTransformer", "GroupQueryAttentionFusion", "GroupQueryAttentionPreNormFusion", "LabelEncoderFusion",
    "MatMulActivationFusion", "MatMulNBitsMlpFusion", "MatMulNBitsQkvFusion", "RocmBlasAltImpl",
    "SimplifiedLayerNormFusion", "SliceConcatToSpaceToDepthFusion", "SwiGluFusion",
)  # fmt: skip
"""Disabled transformers of ONNX Runtime, used by no capability: they are for other providers or for training, or create
operators that ``onnx.checker`` does not know (``SimplifiedLayerNormFusion``).
"""
