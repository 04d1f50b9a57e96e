"""Every Triton kernel compiled for a GPU that need not be here: that it compiles, fits into shared memory, what it spills.

    python scripts/compile_check.py                      # Hopper: sm_90, 227 KiB of shared memory a program
    python scripts/compile_check.py --arch 80 --shared 163 --kinds bfloat16:128:64

A kind is dtype:head_dim:block of an index. Launches are taken down instead of made, and what was launched is compiled; exit
code 1 where something does not compile or fit. Right results and speed: scripts/gpu_check.py, `hybridize bench`.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from hybridize.kernels import proof
from hybridize.kernels.indexed import indexed_attention, indexed_token_attention

KINDS = "bfloat16:128:64,bfloat16:64:128,float16:256:128,bfloat16:96:16,float32:64:64"
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32"}
CPU = torch.device("cpu")


def launches(dtype: torch.dtype, head_dim: int, block: int) -> list:
    """(kernel, positional, named) of each launch of the proof's and of indexed attention's at this block, made by nobody."""
    found = []
    real, JITFunction.run = JITFunction.run, lambda kernel, *args, grid, warmup, **named: found.append((kernel, args, named))
    try:
        for errors in (
            proof._window_errors,
            proof._decode_errors,
            proof._token_errors,
            proof._rotary_errors,
            proof._opened_errors,
        ):
            errors(CPU, dtype, head_dim)
        proof._matvec_errors(CPU, dtype)
        b, g, r, t, columns = 2, 2, 3, 200, 300
        q, k, v = (torch.zeros(b, n, m, head_dim, dtype=dtype) for n, m in ((g * r, t), (g, columns), (g, columns)))
        index = [torch.zeros(*x.shape[:3], 16, dtype=dtype) for x in (q, k)]
        where = torch.tensor([0, r]), torch.full((b,), columns - t), torch.zeros(b, dtype=torch.int64)
        how = (block, 4, 0.9, head_dim**-0.5)
        leaves = [x.requires_grad_(dtype is not torch.float32) for x in (q, k, v)]  # fp32: kernels/dispatch.py
        out = indexed_attention(*leaves, *index, *where, *how)
        if out.requires_grad:
            out.sum().backward()
        with torch.no_grad():
            indexed_token_attention(q[:, :, -1:], k, v, index[0][:, :, -1:], index[1], *where, *how)
    finally:
        JITFunction.run = real
    return found


def source_of(kernel: JITFunction, args: tuple, named: dict) -> tuple[ASTSource, dict]:
    """(what to compile, its options), specialised as a launch with these arguments would be."""
    options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
    given = dict(zip(kernel.arg_names, args)) | named
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value, name = given[parameter.name], parameter.name
        if parameter.is_constexpr or (type(value) is int and value == 1) or value is None:
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(i,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "i1" if isinstance(value, bool) else "i32" if isinstance(value, int) else "fp32"
            if signature[name] == "i32" and value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes), options


def usage(cubin: bytes) -> str:
    """Registers and stack as cuobjdump, which Triton carries, says them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    return " ".join(word.lower() for word in said.split() if word.startswith(("REG:", "STACK:")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=KINDS)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--shared", type=int, default=227, help="KiB that a program may have")
    args = parser.parse_args()
    wrong = 0
    for kind in args.kinds.split(","):
        dtype, head_dim, block = kind.split(":")
        done = set()
        for kernel, given, named in launches(getattr(torch, dtype), int(head_dim), int(block)):
            source, options = source_of(kernel, given, named)
            key = (kernel.__name__, str(source.signature), str(source.constants), str(options))
            if key in done:
                continue
            done.add(key)
            try:
                made = triton.compile(source, target=GPUTarget("cuda", args.arch, 32), options=options)
            except Exception as error:  # a compiler's failure can be of any type, and the others are to be seen
                wrong += 1
                print(f"{kind:18} {kernel.__name__:22} DOES NOT COMPILE: {type(error).__name__}: {error}"[:600], flush=True)
                continue
            fits = made.metadata.shared <= args.shared * 1024
            wrong += not fits
            said = f"{made.metadata.shared:7} bytes of shared memory, {usage(made.asm['cubin'])}"
            print(f"{kind:18} {kernel.__name__:22} {said}{'' if fits else ' DOES NOT FIT'}", flush=True)
    print(f"{wrong} of the kernels would not run")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
