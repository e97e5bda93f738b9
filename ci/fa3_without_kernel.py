"""What becomes of an FA3 build without the (64, 512) kernels: refused by its flags, and with those hidden by the canary.

python ci/fa3_without_kernel.py      with tokenspeed-fa3 as the only FA3 that can be imported
"""

from __future__ import annotations

import sys

import torch

from mla_backends import NoAdapterRuns, PagedCache, Problem, get_backend
from mla_backends.catalogue import serving


def main() -> None:
    backend = get_backend(adapter="fa3")
    by_flags = str(backend.explain(Problem(16)))
    print(by_flags)
    assert "flash_attn_config says FLASH_ATTENTION_DISABLE_HDIMDIFF64" in by_flags, "not refused by its build flags"

    sys.modules["flash_attn_config"] = None  # type: ignore[assignment]  # its import fails from here on
    serving.cache_clear()
    assert backend.explain(Problem(16))["fa3"].runs, "without flags the package looks whole"
    cache = PagedCache.allocate(4, 64, "bf16", "cuda")
    table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    lens = torch.ones(1, dtype=torch.int32, device="cuda")
    try:
        backend.plan(cache, table, lens, num_heads=16, softmax_scale=0.07)
    except NoAdapterRuns as refused:
        print(refused)
        if "canary" not in str(refused):
            raise
        return
    raise AssertionError("a build that returns garbage was served")


if __name__ == "__main__":
    main()
