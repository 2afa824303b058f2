"""Child program: compiles kernels for GPUs that need not be there, and prints what each takes as JSON."""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cacheblend.core.kernels import attention_triton, deviation_triton, placing_triton


def attention(capability, head_dim, group, rows, window=0, is_capped=False, sinks=False, page=0, splits=1, float8=0):
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
        "float8": float8,
        "key_dim": 1,
        "value_dim": 1,
        **({} if sinks else {"sinks": None}),
        **({} if page else {"block_table": None}),
    }
    types = {
        **dict.fromkeys(("query", "sinks"), "*bf16"),
        **dict.fromkeys(("keys", "values"), "*u8" if float8 else "*bf16"),
        **dict.fromkeys(("tops", "totals"), "*fp32"),
        "mixed": "*bf16" if splits == 1 else "*fp32",
        "logit": "fp32",
        "cap": "fp32",
        "positions": "*i64",
        "block_table": "*i32",
    }
    aligned = ("query_", "key_", "value_")
    return compiled(attention_triton._attend, capability, types, constants, aligned, num_warps=warps, num_stages=stages)


def placing(capability, head_dim, kind, half=0, is_half=True, page=0, float8=0):
    """The placing kernel as `place` would launch it."""
    constants = {
        "kind": placing_triton._KINDS[kind],
        "dtype": triton.language.bfloat16,
        "float8": float8,
        "head_dim": head_dim,
        "dims": triton.next_power_of_2(head_dim),
        "pairs": triton.next_power_of_2(half),
        "rest": triton.next_power_of_2(head_dim - 2 * half),
        "tile_rows": placing_triton._TILE_ROWS,
        "half": half,
        "is_half": is_half,
        "page": page,
        "key_dim": 1,
        "value_dim": 1,
        **({} if half else {"turns": None}),
        **({} if page else {"block_table": None}),
    }
    types = {
        **dict.fromkeys(("addresses", "tiles"), "*i64"),
        **dict.fromkeys(("keys", "values"), "*u8" if float8 else "*bf16"),
        **dict.fromkeys(("key_scale", "value_scale"), "fp32"),
        "turns": "*fp32",
        "block_table": "*i32",
    }
    aligned = ("key_block", "key_row", "key_head", "value_block", "value_row", "value_head")
    return compiled(placing_triton._place, capability, types, constants, aligned, num_warps=4)


def deviation(capability, head_dim):
    """The deviation kernel as `kv_deviation` would launch it, of keys and values with dense heads."""
    dims = {f"{pair}_{part}_dim": 1 for pair in ("fresh", "loaded") for part in ("key", "value")}
    constants = {
        **dims,
        "has_keys": True,
        "has_values": True,
        "head_dim": head_dim,
        "dims": triton.next_power_of_2(head_dim),
        "tile_rows": deviation_triton._TILE_ROWS,
    }
    tensors = dict.fromkeys(("fresh_keys", "fresh_values", "loaded_keys", "loaded_values"), "*bf16")
    types = {**tensors, "positions": "*i64", "distance": "*fp32"}
    aligned = ("fresh_key_", "fresh_value_", "loaded_key_", "loaded_value_")
    return compiled(deviation_triton._deviation, capability, types, constants, aligned, num_warps=4)


def compiled(kernel, capability, types, constants, aligned, **options):
    """Shared memory and code; strides with one of the beginnings `aligned` are multiples of 16, as pointers are."""
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    divisible = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (kind != "constexpr" and name.startswith(aligned))
    }
    source = ASTSource(kernel, signature, constants, divisible)
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {"shared": found.metadata.shared, "ptx": found.asm["ptx"]}


KERNELS = {"attention": attention, "deviation": deviation, "placing": placing}

if __name__ == "__main__":
    taken = []
    for case in json.loads(sys.argv[1]):
        found = KERNELS[case.pop("kernel")](**case)
        taken.append({"shared": found["shared"], "ptx": found["ptx"]})
    print(json.dumps(taken))
