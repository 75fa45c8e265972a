"""Import of transformers' losses without ``scipy.optimize``, with equal matching of boxes."""

import subprocess
import sys

SCRIPT = """
import sys
from winml.modelkit.models.library_access import import_losses

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


def test_import_losses():
    finished = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert finished.stdout.split() == ["1", "0", "2", "True"]


def test_import_losses_after_scipy():
    script = "import scipy.optimize as real\n" + SCRIPT.replace("assert ", "assert True or ")
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert finished.stdout.split() == ["1", "0", "2", "True"]
