"""Compile what kernel libraries compile on first use, in parallel: one process an adapter and cache format."""

from __future__ import annotations

import subprocess
import sys
import time

SCRIPT = """
import sys
from mla_backends import get_backend
from mla_backends.testing import good_case
from mla_backends.catalogue import installed
from dataclasses import replace
name, cache_format = sys.argv[1:]
backend = get_backend(adapter=name)
problem, _ = good_case(next(a for a in installed() if a.name == name))
q_dtype = {"fp16": "float16"}.get(cache_format, "bfloat16")
print(backend.warmup([replace(problem, cache_format=cache_format, q_dtype=q_dtype, batch=None, max_seq_len=None)]))
"""


def main() -> None:
    from mla_backends import get_backend
    from mla_backends.testing import good_case, installed_adapters, stated

    start = time.time()
    running = []
    for adapter in installed_adapters():
        problem, _ = good_case(adapter)
        if not get_backend().explain(problem)[adapter.name].runs:
            continue
        for cache_format in stated(adapter, "cache_format", ("bf16",)):
            command = [sys.executable, "-c", SCRIPT, adapter.name, cache_format]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    for process in running:
        said, _ = process.communicate()
        print(said.strip()[-600:])
    print(f"warm after {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
