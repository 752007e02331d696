"""Every kernel configuration that the runner can choose, compiled ahead of time: a table that is checked in.

    python -m engine.kernel_table --write docs/kernels.json      compile all and write the table (minutes)
    python -m engine.kernel_table --check docs/kernels.json      compile all and compare
                                                  --sample      compile one of each kernel for sm_90, compare the rest
                                                                by name and by the hash of the kernel's file

The configurations are found by walking the runner's own forward with tensors that have no memory, for the models of
``MODELS``, every kind of weights and KV, invariant and not, over every layout that makes a difference.  Each is
compiled for sm_80, sm_90 and sm_100 without a GPU, and must keep the rules: no stack, shared memory within 227 KiB,
wgmma in prefill on sm_90, mma.sync in decode, 128-bit loads wherever rows are read.

What must hold: a change of a kernel or of a tiling changes the table, so it is made knowingly.  The table says nothing
about speed.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.config import EngineConfig
from engine.device_batch import Layout, Piece, build_step
from engine.device_weights import KINDS, DeviceWeights, Layer
from engine.kernels.feed import feed
from engine.kernels.launch import INTERPRETED, Launch, recording
from engine.kernels.linear import Matrix
from engine.kernels.quantised import GROUP, Quantised
from engine.kernels.sample import sample_rows
from engine.runner_triton import limits_of
from engine.triton_forward import Forward
from models.known_shapes import SHAPES
from models.shape import ModelShape

#: One of each kind that differs in a kernel's constants: 3 queries a KV head and width 576; head 64 and 4 a head; head
#: 128; biases and 7 a head; norms on q and k.
MODELS: Final = ("smollm2", "llama-3.2-1b", "llama-3.1-8b", "qwen2.5-0.5b", "qwen3-8b")
ARCHITECTURES: Final = (80, 90, 100)
SHARED_LIMIT: Final = 227 * 1024
#: mangled type of an argument, as triton writes signatures
_TYPES: Final = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


# --- which configurations there are ---
def _matrix(outputs: int, inputs: int, kind: str, *, top: bool = False) -> Matrix:
    """A matrix without memory, of the kind that ``device_weights`` would make."""
    if kind not in ("int8", "int4"):
        return torch.empty(outputs, inputs, dtype=KINDS[kind], device="meta")
    four = kind == "int4" and not top
    step = 2 * GROUP if four else GROUP
    groups = -(-inputs // step) * step // GROUP
    scales = torch.empty(groups, outputs, dtype=torch.float16, device="meta")
    if four:
        data = torch.empty(outputs, groups * GROUP // 2, dtype=torch.uint8, device="meta")
        return Quantised(data, scales, scales, outputs, inputs, exact=True)
    data = torch.empty(outputs, groups * GROUP, dtype=torch.int8, device="meta")
    return Quantised(data, scales, None, outputs, inputs, exact=True)


def _weights(shape: ModelShape, kind: str) -> DeviceWeights:
    """Of one layer: all layers are alike."""

    def vector(n: int) -> torch.Tensor:
        return torch.empty(n, dtype=KINDS[kind], device="meta")

    q, kv, hidden = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim, shape.hidden
    layer = Layer(
        norm1=vector(hidden),
        qkv=_matrix(q + 2 * kv, hidden, kind),
        o=_matrix(hidden, q, kind),
        norm2=vector(hidden),
        gate_up=_matrix(2 * shape.ffn, hidden, kind),
        down=_matrix(hidden, shape.ffn, kind),
        bias=vector(q + 2 * kv) if shape.qkv_bias else None,
        head_norms=(vector(shape.head_dim), vector(shape.head_dim)) if shape.qk_norm else None,
    )
    embedding = _matrix(shape.vocab, hidden, kind, top=True)
    head = embedding if shape.tied_embeddings else _matrix(shape.vocab, hidden, kind, top=True)
    return DeviceWeights(kind, embedding, (layer,), vector(hidden), head)


def _layouts(shape: ModelShape, forward: Forward) -> Iterator[Layout]:
    """Steps that reach every branch of the tilings: rows below and above each height, one split and more, both prefill
    tiles."""
    for rows in (1, 17, 33, 65):
        for longest in (1, forward.limits.split + 1):
            yield forward.limits.decode_layout(rows, longest)
    for n in (16, 2048):
        yield build_step([Piece([0] * n, 0, range(-(-n // forward.limits.page)), (n - 1,), False)], forward.limits)[0]


def launches(arch: int) -> list[Launch]:
    """Every configuration for one architecture, once."""
    found: dict[str, Launch] = {}
    for name in MODELS:
        shape = SHAPES[name].shape
        rope = torch.empty(2, shape.max_context, shape.head_dim // 2, device="meta")
        for kind in (kind for kind in KINDS if kind != "fp32"):
            # fp8 came with sm_89; the runner refuses it before
            for kv_dtype in (KINDS[kind], torch.float8_e4m3fn) if arch >= 89 else (KINDS[kind],):
                cache = torch.empty(1024, shape.n_kv_heads, shape.head_dim, dtype=kv_dtype, device="meta")
                for invariant in (True, False):
                    config = EngineConfig(max_batch=64, token_budget=2048, backend="triton", invariant=invariant)
                    limits = limits_of(shape, config, shape.max_context)
                    forward = Forward(shape, _weights(shape, kind), (rope[0], rope[1]), limits, invariant, 1, 132)
                    for layout in _layouts(shape, forward):
                        ints = torch.empty(layout.size, dtype=torch.int32, device="meta")
                        with recording(arch) as seen:
                            logits = forward(layout, ints, [(cache, cache)])
                            heat = torch.empty(len(logits), device="meta")
                            whole = torch.empty(len(logits), dtype=torch.int64, device="meta")
                            sample_rows(logits, heat, whole, whole)
                            feed(layout.views(ints)["ids"], whole)
                        for one in seen:
                            found.setdefault(label(one), one)
    return [found[key] for key in sorted(found)]


def label(one: Launch) -> str:
    """Kernel, types of its tensors and constants: what makes a configuration."""
    signature, constants, aligned = _specialised(one)
    kinds = ",".join(kind.removeprefix("*") for kind in signature.values() if kind.startswith("*"))
    fixed = " ".join(f"{name}={_said(value)}" for name, value in constants.items())
    specialised = [p.name for p in one.kernel.params if not p.do_not_specialize and signature[p.name] == "i32"]
    odd = "".join(f" {name}!16" for name in specialised if name not in aligned)
    return f"{one.kernel.fn.__name__.strip('_')} [{kinds}] {fixed}{odd} warps={one.warps} stages={one.stages}"


def _said(value: object) -> str:
    return str(getattr(value, "name", value))


def _specialised(one: Launch) -> tuple[dict[str, str], dict[str, Any], set[str]]:
    """signature, constants and parameters divisible by 16, as triton's launcher makes them from the same arguments."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: set[str] = set()
    kernel = one.kernel
    for parameter, value in zip(kernel.params, one.arguments, strict=False):
        name = parameter.name
        if isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            aligned.add(name)  # torch's allocator gives 256 bytes and every field of a step begins at 64
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                aligned.add(name)
    for name, value in one.constants.items():
        signature[name], constants[name] = "constexpr", value
    ordered = {parameter.name: signature[parameter.name] for parameter in kernel.params}
    return ordered, constants, aligned


# --- compiling ---
def compiled(one: Launch, architecture: int) -> dict[str, Any]:
    """registers, stack and shared memory (bytes), and which instructions of interest the PTX has."""
    signature, constants, aligned = _specialised(one)
    names = list(signature)
    source = ASTSource(
        fn=one.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": one.warps, "num_stages": one.stages, "enable_fp_fusion": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{what}:(\d+)", usage).group(1)) for what in ("REG", "STACK"))  # type: ignore[union-attr]
    product = next((name for name in ("tcgen05.mma", "wgmma", "mma.sync") if name in ptx), "")
    wide = bool(
        re.search(r"ld\.global\S*\.v4\.b32|cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (0x10|16)", ptx)
    )
    return {
        "registers": registers,
        "stack": stack,
        "shared": int(kernel.metadata.shared),
        "product": product,
        "wide_loads": wide,
    }


def source_hash(one: Launch) -> str:
    """Of the kernel's file: what may have changed what it compiles to."""
    text = Path(inspect.getfile(one.kernel.fn)).read_text(encoding="utf-8")
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def broken_rules(name: str, architecture: int, row: dict[str, Any]) -> list[str]:
    """What a configuration must not do; [] when all is well."""
    wrong = []
    if row["stack"]:
        wrong.append(f"stack {row['stack']}")
    if row["shared"] > SHARED_LIMIT:
        wrong.append(f"shared memory {row['shared']}")
    if name.startswith("paged_prefill") and architecture == 90 and row["product"] != "wgmma":
        wrong.append(f"no wgmma but {row['product'] or 'no product'}")
    if name.startswith("paged_decode") and row["product"] != "mma.sync":
        wrong.append(f"no mma.sync but {row['product'] or 'no product'}")
    if name.startswith(_WIDE) and not row["wide_loads"]:
        wrong.append("no 128-bit loads")
    return [f"{name} on sm_{architecture}: {what}" for what in wrong]


#: Kernels that read rows of weights, cache or activations, in the order of memory.
_WIDE: Final = ("paged_prefill", "paged_decode", "gemm_small_m", "gemm_q8", "gemm_q4", "rms_norm", "silu_mul")


def table(*, sample: bool = False) -> dict[str, Any]:
    """All configurations.  sample: compile only one of each kernel, for sm_90."""
    rows: dict[str, Any] = {}
    seen: set[str] = set()  # kernels compiled for the sample
    for arch in ARCHITECTURES:
        for one in launches(arch):
            row = rows.setdefault(label(one), {"source": source_hash(one)})
            name = one.kernel.fn.__name__
            if not sample or (arch == 90 and name not in seen):
                row[f"sm_{arch}"] = compiled(one, arch)
                print(f"sm_{arch} {label(one)}", file=sys.stderr, flush=True)
            elif sample:
                row[f"sm_{arch}"] = None
            if arch == 90:
                seen.add(name)
    ordered = {name: rows[name] for name in sorted(rows)}
    return {"triton": triton.__version__, "models": list(MODELS), "configurations": ordered}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What a person should look at before the table is written anew."""
    found = [] if old["triton"] == new["triton"] else [f"triton {old['triton']} -> {new['triton']}"]
    before, after = old["configurations"], new["configurations"]
    found += [f"gone: {name}" for name in sorted(before.keys() - after.keys())]
    found += [f"new: {name}" for name in sorted(after.keys() - before.keys())]
    for name in sorted(before.keys() & after.keys()):
        if before[name].keys() != after[name].keys():
            found.append(f"changed: {name}, {sorted(before[name])} -> {sorted(after[name])}")
        for key, value in after[name].items():
            if value is not None and before[name].get(key) != value:
                found.append(f"changed: {name}, {key}: {before[name].get(key)} -> {value}")
    return found


def main(arguments: list[str]) -> int:
    """The command line at the top."""
    if INTERPRETED:
        print("TRITON_INTERPRET is set: nothing is compiled in the interpreter", file=sys.stderr)
        return 2
    new = table(sample="--sample" in arguments)
    wrong = [
        what
        for name, row in new["configurations"].items()
        for key, numbers in row.items()
        if key.startswith("sm_") and numbers is not None
        for what in broken_rules(name, int(key.removeprefix("sm_")), numbers)
    ]
    if "--write" in arguments:
        path = Path(arguments[arguments.index("--write") + 1])
        path.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
    elif "--check" in arguments:
        old = json.loads(Path(arguments[arguments.index("--check") + 1]).read_text(encoding="utf-8"))
        wrong += differences(old, new)
    for what in wrong:
        print(what)
    print(f"{len(new['configurations'])} configurations")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
