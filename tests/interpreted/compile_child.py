"""Compiles one configuration of each shipped kernel, as JSON on standard output: `test_compilation.py` reads it.

A process of its own, started without TRITON_INTERPRET. Each for all of its architectures if its argument is `all`, else
for one of them, each kernel in turn for another.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from benchmarks.gpu.compilation import all_shipped, compile_all, fingerprint
from kernels.cache_folder import compiling_s


def main() -> None:
    everything = all_shipped()
    one_of_each = list({shipped.kernel.src: shipped for shipped in everything}.values())
    if sys.argv[1:] != ["all"]:
        for number, shipped in enumerate(one_of_each):
            architecture = shipped.architectures[number % len(shipped.architectures)]
            one_of_each[number] = replace(shipped, architectures=(architecture,))
    report = {
        "fingerprints": {shipped.name: fingerprint(shipped) for shipped in everything},
        "architectures": {shipped.name: shipped.architectures for shipped in everything},
        "compiled": compile_all(one_of_each),
        "compiling_s": compiling_s(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
