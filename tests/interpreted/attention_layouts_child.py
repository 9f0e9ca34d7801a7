"""How the batch-invariant attention kernels lay out their matrix products on a GPU, as JSON.

Read by `test_compilation.py`; a process of its own, started without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
from typing import Any

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from kernels.triton.attention import cascade as cascade_attention
from kernels.triton.attention import decode as decode_attention
from kernels.triton.attention import prefill as prefill_attention
from kernels.triton.attention.tiles import Operands, shipped_operands
from kernels.triton.shipped import Shipped

_TARGET = GPUTarget("cuda", 90, 32)
_NAMED = re.compile(r"^(#\w+) = (.*)$", re.MULTILINE)
_PRODUCT = re.compile(r"tt\.dot .* : (tensor.*?)(?: loc\(.*\))?$", re.MULTILINE)


def gpu_ir_of(shipped: Shipped) -> str:
    """As `triton.compile` makes it on its way to the machine's code, which takes longest and which nobody looks at."""
    source = ASTSource(shipped.kernel, dict(shipped.signature), constexprs=dict(shipped.constants))
    backend = make_backend(_TARGET)
    options = backend.parse_options({"num_warps": shipped.num_warps, "num_stages": shipped.num_stages})
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    context, metadata = ir.context(), {**vars(options), "target": _TARGET}
    ir.load_dialects(context)
    backend.load_dialects(context)
    generation, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(_TARGET, options, generation, modules, context)
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, metadata)
    return str(module)


def products_of(shipped: Shipped) -> list[str]:
    """The types of its matrix products, with layouts written out. Row sums are of such a product, laid out as it is."""
    text = gpu_ir_of(shipped)
    layouts = dict(_NAMED.findall(text))
    return sorted({re.sub(r"#\w+", lambda use: layouts.get(use[0], use[0]), line) for line in _PRODUCT.findall(text)})


def kernels_of(operands: Operands) -> dict[str, Shipped]:
    return {
        "prefill": prefill_attention.configuration(operands, True),
        "decode": decode_attention.configuration(operands, True),
        "cascade": cascade_attention.configuration(operands),
    }


def main() -> None:
    operands = next(operands for operands in shipped_operands() if operands.geometry.head_dim == 128)
    print(json.dumps({name: products_of(kernel) for name, kernel in kernels_of(operands).items()}))


if __name__ == "__main__":
    main()
