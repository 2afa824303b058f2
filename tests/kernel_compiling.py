"""Child program: compiles kernels for GPUs that need not be there, and prints what each takes as JSON."""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cacheblend.core.kernels import attention_triton

POINTERS = {"positions": "*i64", "block_table": "*i32", "tops": "*fp32", "totals": "*fp32"}


def attention(capability, head_dim, group, rows, window=0, is_capped=False, sinks=False, page=0, splits=1):
    """The attention kernel as `attend_rows` would launch it."""
    slots, tile_keys, warps, stages = attention_triton.tile_shape(group, rows, head_dim)
    constants = {
        "group": group,
        "head_dim": head_dim,
        "dims": max(16, triton.next_power_of_2(head_dim)),
        "slots": slots,
        "tile_keys": tile_keys,
        "window": window,
        "is_capped": is_capped,
        "page": page,
        **({} if sinks else {"sinks": None}),
        **({} if page else {"block_table": None}),
    }
    types = {
        **dict.fromkeys(("query", "keys", "values", "sinks"), "*bf16"),
        "mixed": "*bf16" if splits == 1 else "*fp32",
        "logit": "fp32",
        "cap": "fp32",
        **POINTERS,
    }
    kernel = attention_triton._attend
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = ("query_", "key_", "value_")
    divisible = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.startswith(aligned)
    }
    source = ASTSource(kernel, signature, constants, divisible)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {"shared": compiled.metadata.shared, "ptx": compiled.asm["ptx"]}


if __name__ == "__main__":
    taken = []
    for case in json.loads(sys.argv[1]):
        found = attention(**case)
        products = "wgmma.mma_async" if "wgmma.mma_async" in found["ptx"] else "mma.sync"
        has_products = any(each in found["ptx"] for each in ("wgmma.mma_async", "mma.sync", "tcgen05.mma"))
        taken.append({"shared": found["shared"], "products": products if has_products else "none"})
    print(json.dumps(taken))
