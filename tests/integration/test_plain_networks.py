"""Networks of torch.nn modules: their default hierarchy, equal for both exporters and to the modules seen by hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional

from checkpoints import CONFIGS, build_model, make_distinct
from oracle import observe
from tag_checks import check_file, load_nodes, tagged_operators
from winml.modelkit import ExportResult, WinMLExportConfig, export_pytorch, optimize_onnx
from winml.modelkit.models.live_module import loaded_from_module
from winml.modelkit.ort.feeds import make_feeds
from winml.modelkit.tags.torch_modules import record_calls
from winml.modelkit.tags.tree import build_tree

WORK = frozenset({"Conv", "ConvTranspose", "BatchNormalization", "LayerNormalization", "GRU", "LSTM"})
PRODUCTS = WORK | {"MatMul"}


class Pitch(nn.Module):
    """Convolutions with functional activations between, registered one by one, as in torchcrepe."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv1_BN = nn.Conv2d(1, 4, (5, 1)), nn.BatchNorm2d(4)
        self.conv2, self.conv2_BN = nn.Conv2d(4, 4, (3, 1)), nn.BatchNorm2d(4)
        self.classifier = nn.Linear(24, 3)

    def forward(self, audio: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1_BN(self.conv1(audio[:, None, :, None]))), (2, 1))
        x = functional.max_pool2d(functional.relu(self.conv2_BN(self.conv2(x))), (2, 1))
        return torch.sigmoid(self.classifier(x.flatten(1)))


class Scaling(nn.Module):
    """A class of the model between modules of torch.nn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - 0.4) / 0.3


class Slices(nn.Module):
    """Groups of layers with a direct call of their forward, so that the container is on no call stack."""

    def __init__(self) -> None:
        super().__init__()
        self.slice1 = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.slice2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU())

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        first = self.slice1(x)
        return [first, self.slice2(first)]


class Head(nn.Module):
    """A class of the model around modules of torch.nn, which stay inside."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Dropout(), nn.Conv2d(4, 1, 1, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


class Distance(nn.Module):
    """Compares two images by their features, as lpips does."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling, self.net = Scaling(), Slices()
        self.lins = nn.ModuleList([Head(), Head()])

    def forward(self, image: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        features = self.net.forward(self.scaling(image))
        others = self.net.forward(self.scaling(other))
        pairs = zip(features, others, strict=True)
        parts = [lin((a - b) ** 2).mean((2, 3)) for lin, (a, b) in zip(self.lins, pairs, strict=True)]
        return torch.stack(parts).sum(0)


class Recurrent(nn.Module):
    """Tokens, a recurrent layer, and a score for the last state."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.cell = kind(6, 5, batch_first=True, bidirectional=True)
        self.norm, self.head = nn.LayerNorm(10), nn.Linear(10, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, _ = self.cell(self.embedding(ids))
        return self.head(self.norm(states)[:, -1])


class Block(nn.Module):
    """Two convolutions with a residual connection, as in torchvision's ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.downsample = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.bn1(self.conv1(x)) + self.downsample(x))


class Residual(nn.Module):
    """Plain modules around groups of blocks with a class."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.layer1, self.layer2 = nn.Sequential(Block(), Block()), nn.Sequential(Block())
        self.fc = nn.Linear(4, 2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.layer2(self.layer1(functional.relu(self.norm(self.stem(image)))))
        return self.fc(x.mean((2, 3)))


class Encoding(nn.Module):
    """Layers of torch.nn made of layers of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(states))


class Attending(nn.Module):
    """Attention of torch.nn between layers of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.norm(states + self.attention(self.query(states), states, states)[0])


class Hourglass(nn.Module):
    """Downsampling and upsampling with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(2, 3, 2, stride=2), nn.Conv2d(3, 4, 2, stride=2)])
        self.up = nn.ModuleDict({"first": nn.ConvTranspose2d(4, 3, 2, 2), "last": nn.ConvTranspose2d(6, 2, 2, 2)})

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        half = torch.tanh(self.down[0](image))
        up = self.up["first"](torch.tanh(self.down[1](half)))
        return self.up["last"](torch.cat([up, half], 1))


class Twins(nn.Module):
    """A branch called for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.head((self.branch(left) - self.branch(right)).abs())


def group() -> nn.Module:
    """Build nested groups without a class."""
    features = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Sequential(nn.Conv1d(4, 3, 3)))
    return nn.Sequential(features, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(3, 2))


Tensors = Callable[[], tuple[torch.Tensor, ...]]
NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], Tensors, frozenset[str], float]] = {
    "convolutions by name": (Pitch, lambda: (torch.randn(2, 32),), PRODUCTS, 65),
    "slices beside own classes": (Distance, lambda: (torch.randn(1, 3, 12, 12), torch.randn(1, 3, 12, 12)), WORK, 50),
    "GRU": (lambda: Recurrent(nn.GRU), lambda: (torch.randint(0, 11, (1, 7)),), WORK, 15),
    "LSTM": (lambda: Recurrent(nn.LSTM), lambda: (torch.randint(0, 11, (1, 7)),), WORK, 15),
    "blocks in groups": (Residual, lambda: (torch.randn(1, 3, 10, 10),), PRODUCTS, 20),
    "TransformerEncoder": (Encoding, lambda: (torch.randn(2, 5, 8),), WORK, 0),
    "Transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 12, batch_first=True),
        lambda: (torch.randn(1, 5, 8), torch.randn(1, 4, 8)),
        WORK,
        0,
    ),
    "MultiheadAttention": (Attending, lambda: (torch.randn(1, 5, 8),), WORK, 5),
    "hourglass": (Hourglass, lambda: (torch.randn(1, 2, 8, 8),), PRODUCTS, 50),
    "twins": (Twins, lambda: (torch.randn(2, 6), torch.randn(2, 6)), PRODUCTS, 40),
    "groups without a class": (group, lambda: (torch.randn(1, 2, 12),), PRODUCTS, 0),
}
"""Network, inputs, counted operators, and largest share of nodes at the root in percent."""


@pytest.fixture(autouse=True)
def _layers_run_one_by_one() -> Iterator[None]:
    """Disable the fast path of torch's transformer layers, which calls no inner modules."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(was_enabled)


def exported(model: nn.Module, inputs: tuple[torch.Tensor, ...], path: Path, **options: object) -> ExportResult:
    """Export without verification, which other tests cover."""
    config = WinMLExportConfig(**{"verify": False, **options})  # type: ignore[arg-type]
    return export_pytorch(model, path, inputs, config=config, overwrite=True)


@pytest.mark.parametrize("network", NETWORKS)
def test_plain_network_is_tagged_by_execution_with_either_exporter(network: str, tmp_path: Path) -> None:
    """Modules and tags are equal, and each module has the operators that hooks saw."""
    make, draw, counted, most_at_root = NETWORKS[network]
    torch.manual_seed(3)
    model, inputs = make().eval(), draw()
    make_distinct(model)
    oracle = observe(model, *inputs)
    found = {}
    for exporter in ("torchscript", "dynamo"):
        result = exported(model, inputs, tmp_path / f"{exporter}.onnx", exporter=exporter)
        check_file(result, model, oracle, counted)
        assert len(result.only_part.tree) > 3
        assert result.only_part.coverage.at_root_percent <= most_at_root
        assert any(note.startswith("Classes of torch.nn in the hierarchy") for note in result.notes)
        tags = {node.path: node.tag for node in result.only_part.tree}
        found[exporter] = (tags, Counter(tagged_operators(load_nodes(result), counted)))
    assert found["torchscript"] == found["dynamo"]


def test_wrapper_of_a_plain_network_is_transparent(tmp_path: Path) -> None:
    """A module that its wrapper only calls counts as the model, at any depth of wrapping."""

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    result = exported(Wrapper(Wrapper(Pitch())), (torch.randn(2, 32),), tmp_path / "net.onnx")
    assert "/Wrapper/Wrapper/Pitch/Conv2d.conv1" in {node.tag for node in result.only_part.tree}


def test_own_classes_keep_their_torch_modules(tmp_path: Path) -> None:
    """Modules of torch.nn inside the model's own classes are hidden; groups of own classes are in the tree."""
    result = exported(Residual(), (torch.randn(1, 3, 10, 10),), tmp_path / "net.onnx")
    assert [
        "/Residual",
        "/Residual/Conv2d",
        "/Residual/BatchNorm2d",
        "/Residual/Sequential.layer1",
        "/Residual/Sequential.layer1/Block.0",
        "/Residual/Sequential.layer1/Block.1",
        "/Residual/Sequential.layer2",
        "/Residual/Sequential.layer2/Block.0",
        "/Residual/Linear",
    ] == [node.tag for node in result.only_part.tree]


@pytest.mark.parametrize("selection", ["none", "all", ("Conv2d",)])
def test_other_selections_are_obeyed(selection: str | tuple[str, ...], tmp_path: Path) -> None:
    """``none`` hides all modules of torch.nn, ``all`` shows all, and a list shows the named classes."""
    result = exported(Residual(), (torch.randn(1, 3, 10, 10),), tmp_path / "net.onnx", torch_module=selection)
    assert not any("torch.nn" in note for note in result.notes)
    wanted = {"none": (), "all": ("Conv2d", "BatchNorm2d", "Sequential", "Linear"), ("Conv2d",): ("Conv2d",)}[selection]
    classes = {node.class_name for node in result.only_part.tree if node.is_torch_nn}
    assert set(wanted) == classes


@pytest.mark.parametrize("architecture", CONFIGS)
def test_transformers_model_has_the_modules_of_its_classes(architecture: str) -> None:
    """The tree has no modules of torch.nn, even directly below the root."""
    model = build_model(architecture)
    part = loaded_from_module(model, None).only_part
    feeds = {name: torch.from_numpy(value) for name, value in make_feeds(part.inputs, seed=1).items()}
    with torch.no_grad(), record_calls(model) as trace:
        model(**feeds, **part.forward_kwargs)
    tree, without = build_tree(trace), build_tree(trace, "none")
    assert [node.tag for node in without] == [node.tag for node in tree]
    assert () == tree.notes


def test_transformers_model_beside_plain_modules_keeps_its_tags(tmp_path: Path) -> None:
    """Plain modules beside the transformers model are in the hierarchy, and those inside it are not."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = build_model("bert")
            self.head = nn.Sequential(nn.Linear(32, 4), nn.ReLU(), nn.Linear(4, 2))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.backbone(ids)[0].mean(1)[:, :32])

    model = Classifier().eval()
    with torch.no_grad(), record_calls(model) as trace:
        model(torch.ones(1, 8, dtype=torch.int64))
    inside = [node for node in build_tree(trace) if node.path.startswith("backbone")]
    assert not any(node.is_torch_nn for node in inside)
    assert ["head", "head.0", "head.1", "head.2"] == [node.path for node in build_tree(trace) if "head" in node.path]


class NormalizedResidual(nn.Module):
    """Two normalized convolutions, the second with a residual, and one shared activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu = nn.ReLU()

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return an image with the same number of channels."""
        hidden = self.relu(self.bn1(self.conv1(image)))
        return self.relu(image + self.bn2(self.conv2(hidden)))


def test_layout_change_is_not_attributed_to_neighbouring_modules(tmp_path: Path) -> None:
    """ONNX Runtime's reordering after a normalization belongs to the normalization alone."""
    torch.manual_seed(0)
    model = NormalizedResidual().eval()
    for norm in (model.bn1, model.bn2):
        nn.init.uniform_(norm.weight)
        nn.init.uniform_(norm.running_mean)
    source, target = tmp_path / "source.onnx", tmp_path / "target.onnx"
    config = WinMLExportConfig(verify=False, exporter="torchscript")
    export_pytorch(model, source, torch.randn(1, 8, 16, 16), config=config)
    optimize_onnx(source, target, nchwc_layout=True, verify=False)
    nodes = {node.output[0]: node for node in onnx.load(target).graph.node}
    made = {entry.key: entry.value for entry in nodes["/bn2/BatchNormalization_output_0"].metadata_props}
    assert "/NormalizedResidual/BatchNorm2d.bn2" == made["winml.hierarchy.tag"]
    assert "winml.hierarchy.modules" not in made
