from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
