"""torch's functions as rows use them: of SharedTensors they give SharedTensors, which torch's stubs do not say."""

from __future__ import annotations

from typing import Any

import torch as _torch
import torch.nn.functional as _F

torch: Any = _torch
F: Any = _F
aten: Any = _torch.ops.aten
