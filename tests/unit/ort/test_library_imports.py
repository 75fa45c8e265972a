"""Import of transformers without libraries that only training and compilation need."""

import subprocess
import sys

LOSSES = """
import sys
from winml.modelkit.ort.library_imports import import_losses

import_losses()
from transformers import BertModel
# scipy.stats, which scikit-learn imports for older transformers, imports it as well.
assert "scipy.optimize" not in sys.modules or "scipy.stats" in sys.modules

from transformers.loss.loss_for_object_detection import linear_sum_assignment
rows, columns = linear_sum_assignment([[4, 1, 3], [2, 0, 5], [3, 2, 2]])
print(*columns)

import scipy.optimize
print(scipy.optimize.minimize_scalar(lambda value: (value - 2) ** 2).success)
"""
COMMAND = """
import os, sys
os.environ["_WINML_COMMAND"] = "1"
from winml.modelkit.ort import library_imports

library_imports.import_transformers()
library_imports.import_losses()
import torch
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils
torch.manual_seed(0)
sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
ids = torch.tensor([[1, 2, 3]])
plain = model(ids).logits
assert "torch._dynamo.convert_frame" not in sys.modules

from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode(allow_non_fake_inputs=True) as mode:
    fake = mode.from_tensor(torch.ones(2, 3)) + torch.ones(3, 2).T
assert (2, 3) == fake.shape
masking_utils.TransformGetItemToIndex()

import torch._dynamo.utils
assert torch._dynamo.utils is sys.modules["torch._dynamo.utils"]
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.__file__
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert torch.equal(plain, torch.compile(model, backend="eager")(ids).logits)
program = torch.export.export(model, (ids,), {"use_cache": False})
assert torch.equal(plain, program.module()(ids, use_cache=False).logits)
"""
LISTED = """
import transformers, transformers.models
for module in (transformers, transformers.models):
    for name in ("_class_to_module", "_modules", "_object_missing_backend", "__all__"):
        listed = vars(module)[name]
        for key in sorted(listed):
            value = listed[key] if isinstance(listed, dict) else ""
            print(name, key, value if isinstance(value, str) else sorted(value), sep="|")
"""


def run(script: str) -> list[str]:
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.split()


def test_import_losses():
    assert ["1", "0", "2", "True"] == run(LOSSES)


def test_import_losses_after_scipy():
    script = "import scipy.optimize as real\n" + LOSSES.replace("assert ", "assert True or ")
    assert ["1", "0", "2", "True"] == run(script)


def test_process_of_a_command_imports_the_compiler_when_it_is_used():
    """A model is made and run without ``torch._dynamo``; compilation still works."""
    run(COMMAND)


def test_model_modules_are_those_that_transformers_lists():
    fast = "from winml.modelkit.ort.library_imports import import_transformers\nimport_transformers()\n"
    expected = run(LISTED)
    assert len(expected) > 1000
    assert expected == run(fast + LISTED)


SYMBOLS = """
import os, sys
os.environ["_WINML_COMMAND"] = "1"
from winml.modelkit.ort import library_imports

library_imports.import_transformers()
import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true, sym_and, sym_eq, sym_or
plain = torch.nn.functional.layer_norm(torch.empty(2, 3, device="meta") + 1, (3,))
assert plain.shape == (2, 3) and not {"sympy.core", "torch.utils._sympy.functions"} & {*sys.modules}
assert sym_eq((1, 2), torch.Size([1, 2])) and not sym_eq([1, 2], [1]) and sym_and(True, True) and not sym_or(False)
assert not guard_or_false(False) and guard_or_true(True)

import sympy.core.symbol
assert sympy is sys.modules["sympy"] and sympy.Symbol is sympy.core.symbol.Symbol
seen = []
class Dynamic(torch.nn.Module):
    def forward(self, x):
        size = x.shape[0]
        seen.append(type(size))
        assert sym_eq((size, 2), (size, 2)) and guard_or_false(size > 1) and sym_or(size > 1, False)
        return (x + 1).sum(0)
rows = torch.export.Dim("rows")
program = torch.export.export(Dynamic(), (torch.ones(3, 2),), dynamic_shapes=({0: rows},))
assert torch.SymInt in seen
compilers = {"torch._dynamo.convert_frame", "torch._functorch.partitioners", "networkx"}
assert not compilers & {*sys.modules} and "torch.export._trace" in sys.modules
assert torch.equal(torch.full((2,), 14.0), program.module()(torch.ones(7, 2)))

class Branch(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
for strict in (False, True):
    program = torch.export.export(Branch(), (torch.ones(3, 2),), dynamic_shapes=({0: rows},), strict=strict)
    program = program.run_decompositions({})
    assert torch.equal(torch.full((5, 2), -2.0), program.module()(torch.full((5, 2), -1.0)))
assert "torch._dynamo.convert_frame" in sys.modules
"""


def test_process_of_a_command_imports_sympy_for_symbolic_sizes():
    """Operators on the meta device run without sympy, and exports with dynamic sizes without the compiler; a branch
    imports it in the middle of an export.
    """
    run(SYMBOLS)
