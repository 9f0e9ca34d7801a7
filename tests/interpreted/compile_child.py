"""Compiles one configuration of each shipped kernel, as JSON on standard output: `test_compilation.py` reads it.

A process of its own, started without TRITON_INTERPRET.
"""

from __future__ import annotations

import json

from benchmarks.gpu.compilation import all_shipped, compile_all, fingerprint


def main() -> None:
    everything = all_shipped()
    one_of_each = {shipped.kernel.src: shipped for shipped in everything}.values()
    report = {
        "fingerprints": {shipped.name: fingerprint(shipped) for shipped in everything},
        "architectures": {shipped.name: shipped.architectures for shipped in everything},
        "compiled": compile_all(one_of_each),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
