"""Child program: compiles kernels for GPUs that need not be there, and prints what each takes as JSON."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from cacheblend.core.kernels import attention_triton, deviation_triton, kv_placement_triton, operations
from cacheblend.core.kernels.attention import AttentionSpec, HeadShape
from cacheblend.core.kernels.kv_placement import Piece, Placement
from cacheblend.core.kernels.operations import Served
from cacheblend.core.kernels.rope import KeyRotation

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a program can have, by compute capability."""


def attention(
    capability,
    head_dim,
    group,
    rows,
    window=0,
    is_capped=False,
    sinks=False,
    page=0,
    splits=1,
    float8=0,
    edges=False,
    is_assembled=False,
):
    """The attention kernel as `attend_rows` would launch it."""
    shared = SHARED[capability] << 10
    slots, tile_keys, warps, stages = attention_triton.tile_shape(group, rows, head_dim, page, shared=shared)
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
        **({} if edges else {"edges": None}),
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
        **dict.fromkeys(("positions", "edges"), "*i64"),
        "block_table": "*i32",
    }
    aligned = ("query_", "key_", "value_")
    found = compiled(
        attention_triton._attend, capability, types, constants, aligned, num_warps=warps, num_stages=stages
    )
    expected = attention_triton.shared_bytes(slots, tile_keys, stages, head_dim, page)
    found |= {"expected": expected, "most": shared}
    return found | {"spilled": spilled(found["ptx"], capability)} if is_assembled else found


def placing(capability, head_dim, kind, half=0, is_half=True, page=0, float8=0):
    """The placing kernel as `place` would launch it."""
    constants = {
        "kind": kv_placement_triton._KINDS[kind],
        "dtype": triton.language.bfloat16,
        "float8": float8,
        "head_dim": head_dim,
        "dims": triton.next_power_of_2(head_dim),
        "pairs": triton.next_power_of_2(half),
        "rest": triton.next_power_of_2(head_dim - 2 * half),
        "tile_rows": kv_placement_triton._TILE_ROWS,
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
    return compiled(kv_placement_triton._place, capability, types, constants, aligned, num_warps=4)


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


def asking(capability, head_dim, group, window=False, is_capped=False):
    """The kernel of what keys receive of rows that ask, as `attend_asking` would launch it."""
    constants = {
        "group": group,
        "head_dim": head_dim,
        "dims": triton.next_power_of_2(head_dim),
        "tile": attention_triton._ASKING_TILE,
        "is_capped": is_capped,
        **({} if window else {"edges": None}),
    }
    types = {
        **dict.fromkeys(("query", "keys"), "*bf16"),
        **dict.fromkeys(("places", "edges"), "*i64"),
        **dict.fromkeys(("sums", "received"), "*fp32"),
        **dict.fromkeys(("logit", "cap"), "fp32"),
    }
    kernel, aligned = attention_triton._receive, ("query_", "key_")
    found = compiled(kernel, capability, types, constants, aligned, num_warps=4)
    return found | {"spilled": spilled(found["ptx"], capability)}


def compiled(kernel, capability, types, constants, aligned, **options):
    """Shared memory and code; strides with one of the beginnings `aligned` are multiples of 16, as pointers are."""
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    divisible = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if (kind.startswith("*") and not kernel.params[place].do_not_specialize_on_alignment)
        or (kind != "constexpr" and name.startswith(aligned))
    }
    source = ASTSource(kernel, signature, constants, divisible)
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {"shared": found.metadata.shared, "ptx": found.asm["ptx"]}


def spilled(ptx, capability):
    """Bytes that the assembler stores to local memory for want of registers."""
    arch = re.search(r"\.target (sm_\w+)", ptx)[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", "--gpu-name", arch, str(file), "-o", str(Path(folder) / "cubin")]
        words = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", words)))


MODULES = {
    **dict.fromkeys(("_attend", "_join", "_receive"), attention_triton),
    "_deviation": deviation_triton,
    "_place": kv_placement_triton,
}
COMPILED = {name: getattr(module, name) for name, module in MODULES.items()}


class Counting:
    """Stands in for a kernel: notes what would be compiled, and starts nothing."""

    def __init__(self, kernel, capability):
        backend = make_backend(GPUTarget("cuda", capability, 32))
        self._bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.variants = set()

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **options):
        _, specialization, options = self._bind(*args, **options, debug=False)
        self.variants.add(f"{specialization} {options}")


def counting(capability, processors=132):
    """Puts such in the place of all kernels, for a device that need not be there."""
    kernels = {name: Counting(kernel, capability) for name, kernel in COMPILED.items()}
    for name, each in kernels.items():
        setattr(MODULES[name], name, each)
    attention_triton._shared_memory = lambda device: SHARED[capability] << 10
    attention_triton._processors = lambda device: processors
    return kernels


def variants(capability, heads, kv_heads, head_dim, calls, page=0, window=None, processors=132):
    """Kernels that `attend_rows` would compile for calls of (rows, length) in one kind of layer."""
    kernels = counting(capability, processors)
    for rows, length in calls:
        rows = min(rows, length)
        query = torch.empty(rows + 1, heads, head_dim, dtype=torch.bfloat16).transpose(0, 1)[:, 1:]
        positions, table = torch.arange(length - rows - 1, length)[1:], None
        shape = kv_heads, length, head_dim
        if page:
            table = torch.arange(-(-length // page) + 1, dtype=torch.int32)[1:]
            shape = len(table), page, kv_heads, head_dim
        keys, values = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(2))
        attention_triton.attend_rows(query, keys, values, positions, AttentionSpec(0.1, window), table)
    return {name: len(each.variants) for name, each in kernels.items() if each.variants}


def warmed(capability, shape, pairs, calls, page=0):
    """Of each kernel, [what is compiled where a model of such layers is opened, what requests add]."""
    cpu, half, kernels = torch.device("cpu"), torch.bfloat16, counting(capability)
    torch.empty, torch.Tensor.new_empty = torch.zeros, torch.Tensor.new_zeros  # what no kernel writes is the same
    operations._has_kernels, operations._SUM_TOLERANCE = lambda *_: True, 2.0
    own = {
        operations.ATTEND_ROWS: attention_triton.attend_rows,
        operations.ATTEND_ASKING: attention_triton.attend_asking,
        operations.PLACE: kv_placement_triton.place,
        operations.KV_DEVIATION: deviation_triton.kv_deviation,
    }
    for operation, kernel in own.items():
        operation._served = {(cpu, half): Served(kernel, "Triton")}
        operation._plain = kernel if operation is not operations.KV_DEVIATION else operation._plain
    layer, rotation = HeadShape(**shape), KeyRotation(torch.rand(pairs), "half")
    served = operations.serve(cpu, half, [(layer, rotation)], page=page)
    assert all(each.is_kernel for each in served.values()), served
    opened = {name: len(each.variants) for name, each in kernels.items()}
    heads, kv_heads, head_dim = layer.heads, layer.kv_heads, layer.head_dim
    sinks = torch.zeros(heads, dtype=half) if layer.has_sinks else None
    spec = AttentionSpec(0.1, layer.window, 30.0 if layer.is_capped else None, sinks)
    for rows, length in calls:
        rows = min(rows, length)
        query = torch.empty(rows + 1, heads, head_dim, dtype=half).transpose(0, 1)[:, 1:]
        positions, table = torch.arange(length - rows - 1, length)[1:], None
        keys, values = torch.empty(2, kv_heads, length, head_dim, dtype=half).unbind()
        fresh = [torch.empty(rows, kv_heads, head_dim, dtype=half).transpose(0, 1) for _ in range(2)]
        for loaded, at in (((keys, values), positions), ((keys[:, positions], values[:, positions]), None)):
            operations.kv_deviation(fresh, loaded, "kv", at)
        if rows < 1000:
            operations.attend_asking(query, keys, values, positions, torch.arange(length + 1)[1:] - 1, spec)
        operations.attend_rows(query, keys, values, positions, spec)
        if page:
            table = torch.arange(-(-length // page) + 1)[1:] - 1
            keys, values = torch.empty(2, len(table), page, kv_heads, head_dim, dtype=half).unbind()
            operations.attend_rows(query, keys, values, positions, spec, table)
        record = torch.empty(kv_heads, 2, rows, head_dim, dtype=half)
        pieces = [Piece(0, rows, at, at, 1, at) for at in range(min(4, rows))]
        operations.place([record], Placement(pieces), keys, values, rotation, table)
    return {name: [opened[name], len(each.variants) - opened[name]] for name, each in kernels.items()}


KERNELS = {
    "variants": variants,
    "warmed": warmed,
    "attention": attention,
    "asking": asking,
    "deviation": deviation,
    "placing": placing,
}

if __name__ == "__main__":
    print(json.dumps([KERNELS[case.pop("kernel")](**case) for case in json.loads(sys.argv[1])]))
