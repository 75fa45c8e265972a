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
compilers = {"torch._dynamo.eval_frame", "torch.distributed.tensor._ops"}
assert not compilers & {*sys.modules}

from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode(allow_non_fake_inputs=True) as mode:
    fake = mode.from_tensor(torch.ones(2, 3)) + torch.ones(3, 2).T
assert (2, 3) == fake.shape and not compilers & {*sys.modules}
masking_utils.TransformGetItemToIndex()

from torch.distributed.tensor import DTensor, placement_types
assert not isinstance(fake, DTensor) and issubclass(sys.modules["torch.distributed.tensor"].DTensor, torch.Tensor)

import torch._dynamo.utils
assert torch._dynamo.utils is sys.modules["torch._dynamo.utils"]
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.__file__
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert torch.equal(plain, torch.compile(model, backend="eager")(ids).logits)
program = torch.export.export(model, (ids,), {"use_cache": False})
assert torch.equal(plain, program.module()(ids, use_cache=False).logits)
"""
STRUCTURE = """
import sys
from winml.modelkit.ort.library_imports import import_transformers

import_transformers()
from transformers.utils import import_utils
listed = vars(sys.modules["transformers.models"])
anew = vars(import_utils._LazyModule("anew", "", import_utils.define_import_structure(listed["__file__"])))
for name in ("_class_to_module", "_modules"):
    assert listed[name] == anew[name] and listed[name], name
missing, missing_anew = (
    {name: {*backends} for name, backends in module["_object_missing_backend"].items()} for module in (listed, anew)
)
assert missing == missing_anew
assert {*listed["__all__"]} == {*anew["__all__"]}
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
    """A model is made and run without ``torch._dynamo`` and ``torch.distributed``; compilation still works."""
    run(COMMAND)


def test_model_modules_are_those_that_transformers_lists():
    run(STRUCTURE)
