"""PyTorch's own tables of operators and of modules, with samples of each."""

from __future__ import annotations

from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db as op_db
from torch.testing._internal.common_modules import module_db as module_db
from torch.testing._internal.opinfo import core

# For PyTorch's own suite each list of samples looks for a unittest among all that is being called, and reads where the
# source of each frame is: two thirds of a run's time, and more the more modules there are.
common_utils.extract_test_fn = core.extract_test_fn = lambda: None
