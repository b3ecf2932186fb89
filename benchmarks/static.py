"""What the compiler makes of each kernel, for accelerators that need not be there.

    python -m benchmarks.static [--json FILE] [--targets sm_90 gfx942]

Every kernel is compiled ahead of time for sm_80, sm_90, sm_100 and gfx942. The table gives registers, spills (bytes of
local or scratch memory), the widest and the narrowest access to the logits in bits, shared memory and threads. The
`V` column says how the rows lie: "aligned" rows start on 16 bytes (V divisible by 16, as the vocabularies of most
models are); "odd" rows do not (V = 50257, or a vocabulary to which a token was added). Blocks of an odd row begin on
the 16-byte boundary before it, so that only the blocks at its two ends use narrow accesses.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hacpo_kernels.backends import triton_kernels, triton_ops

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
ELEMENT_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Variant:
    """One specialization of a kernel: its argument types, compile-time values and what is known to divide by 16."""

    kernel: str
    label: str
    rows: str  # "aligned", "odd" or "-" where no logits are read
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    warps: int


@dataclass(frozen=True)
class Report:
    kernel: str
    variant: str
    rows: str
    target: str
    registers: int
    spill_bytes: int
    load_bits: tuple[int, int]  # (narrowest vector access, widest) of the logits; (0, 0) where none are read
    store_bits: tuple[int, int]
    shared_bytes: int
    threads: int
    offsets_64bit: bool


def _logit_variant(
    kernel: str,
    dtype: str,
    aligned: bool,
    *,
    entropy: bool = False,
    softcap: bool = False,
    mask: bool = False,
    grad_dtype: str | None = None,
) -> Variant:
    backward = "bwd" in kernel
    constants: dict[str, Any] = {
        "ACC": triton.language.float32, "HAS_MASK": mask, "HAS_SOFTCAP": softcap, "HAS_ROW_TEMPERATURE": False,
        "HAS_ENTROPY": entropy, "temperature_ptr": None, "stride_v": 1,
        "PEEL": not aligned, "ELEMENT_BYTES": ELEMENT_SIZES[dtype],
        "BLOCK_V": (triton_ops.bwd_block if backward else triton_ops.fwd_block)(ELEMENT_SIZES[dtype]),
    }  # fmt: skip
    signature = {
        "logits_ptr": f"*{dtype}", "grad_logits_ptr": f"*{grad_dtype or dtype}", "target_ids_ptr": "*i64",
        "mask_ptr": "*i1", "logprobs_ptr": "*fp32", "stats_ptr": "*fp32", "entropies_ptr": "*fp32",
        "grad_logprobs_ptr": "*fp32", "grad_entropies_ptr": "*fp32", "scale": "fp32", "softcap": "fp32",
        "temperature": "fp32",
    }  # fmt: skip
    for name in ("N", "T", "V", "stride_b", "stride_t", "grad_stride_b", "grad_stride_t"):
        signature[name] = "i32"
    if not mask:
        constants["mask_ptr"] = None
    if not entropy:
        constants |= {"entropies_ptr": None, "grad_entropies_ptr": None}
    if backward:
        constants["grad_stride_v"] = 1
    pointers = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    divisible = pointers + (("V", "stride_b", "stride_t", "grad_stride_b", "grad_stride_t") if aligned else ())
    options = "".join(f"+{name}" for name, on in (("entropy", entropy), ("softcap", softcap), ("mask", mask)) if on)
    warps = triton_ops.BWD_WARPS if backward else triton_ops.FWD_WARPS
    label = f"{dtype}{options}" if grad_dtype is None else f"{dtype}->{grad_dtype}{options}"
    return Variant(kernel, label, "aligned" if aligned else "odd", signature, constants, divisible, warps)


def _sequence_variant(label: str, *, token: bool, kl: bool, cross: bool) -> Variant:
    names = triton_kernels._sequence_kernel.arg_names
    pointers = {name: "*fp32" for name in names if name.endswith("_ptr")}
    pointers |= {"mask_ptr": "*i1", "cu_seqlens_ptr": "*i64", "is_cross_ptr": "*i1", "lengths_ptr": "*i64"}
    pointers |= {"live_ptr": "*i8", "clipped_ptr": "*i8"}
    scalars = ("alpha", "cross_low", "cross_high", "epsilon_low", "epsilon_high", "beta")
    signature = pointers | {"N": "i32"} | dict.fromkeys(scalars, "fp32")
    constants: dict[str, Any] = {
        "HAS_MASK": True, "HAS_WEIGHTS": cross, "HAS_CROSS": cross, "HAS_LENGTHS": True, "HAS_KL": kl,
        "TOKEN_RATIO": token, "CROSS_RULE": 2 if cross else 0, "BLOCK_N": triton_ops.SEQUENCE_BLOCK,
    }  # fmt: skip
    if not cross:
        constants |= {"is_cross_ptr": None, "weights_ptr": None}
    if not kl:
        constants["ref_logprobs_ptr"] = None
    if not token:
        constants["old_logprobs_ptr"] = None
    return Variant("_sequence_kernel", label, "-", signature, constants, tuple(pointers), triton_ops.SEQUENCE_WARPS)


def variants() -> list[Variant]:
    """Every kernel in the specializations that people meet, and with every option on."""
    result = []
    for kernel in ("_logprob_fwd_kernel", "_logprob_bwd_kernel"):
        for dtype in ELEMENT_SIZES:
            for aligned in (True, False):
                result.append(_logit_variant(kernel, dtype, aligned))
        result.append(_logit_variant(kernel, "bf16", True, entropy=True, softcap=True, mask=True))
    # the fused head's: float32 logits of low-precision operands, their gradient rounded as it is written
    result.append(_logit_variant("_logprob_bwd_kernel", "fp32", True, grad_dtype="bf16"))
    result.append(_sequence_variant("hacpo", token=False, kl=False, cross=True))
    result.append(_sequence_variant("grpo+kl", token=True, kl=True, cross=False))
    result.append(_sequence_variant("hacpo+token+kl", token=True, kl=True, cross=True))
    return result


def _compiled(variant: Variant, target: str) -> Any:
    function = getattr(triton_kernels, variant.kernel)
    names = function.arg_names
    signature = {n: "constexpr" if n in variant.constants else variant.signature[n] for n in names}
    constants = {(names.index(name),): value for name, value in variant.constants.items() if name in names}
    divisible = [name for name in variant.divisible if name in names and name not in variant.constants]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=TARGETS[target], options={"num_warps": variant.warps})


def _read(compiled: Any, target: str) -> tuple[str, int, int]:
    return _read_nvidia(compiled) if target.startswith("sm") else _read_amd(compiled)


def disassemble(variant: Variant, target: str) -> str:
    """The instructions of one variant for one target."""
    return _read(_compiled(variant, target), target)[0]


def compile_variant(variant: Variant, target: str) -> Report:
    """Compiles one variant for one target and reads the result."""
    compiled = _compiled(variant, target)
    reads_logits = variant.rows != "-"
    text, registers, spills = _read(compiled, target)
    loads, stores = _widths(text, target, variant) if reads_logits else ((0, 0), (0, 0))
    return Report(
        kernel=variant.kernel.strip("_").removesuffix("_kernel"),
        variant=variant.label,
        rows=variant.rows,
        target=target,
        registers=registers,
        spill_bytes=spills,
        load_bits=loads,
        store_bits=stores,
        shared_bytes=compiled.metadata.shared,
        threads=variant.warps * TARGETS[target].warp_size,
        offsets_64bit=_offsets_are_64bit(compiled.asm["ttir"]),
    )


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _read_nvidia(compiled: Any) -> tuple[str, int, int]:
    """(SASS, registers per thread, bytes of local memory per thread)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_tool("cuobjdump"), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
        sass = subprocess.run([_tool("nvdisasm"), file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)", usage.stdout + usage.stderr)
    assert found is not None, usage.stdout
    local_accesses = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    spills = int(found[3]) + (int(found[2]) if local_accesses else 0)
    return sass, int(found[1]), spills


def _read_amd(compiled: Any) -> tuple[str, int, int]:
    """(assembly, vector registers per lane, bytes of scratch per lane)."""
    text = compiled.asm["amdgcn"]

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s*(\d+)", text)
        assert found is not None, key
        return int(found[1])

    # spilled scalar registers go to lanes of a vector register there, not to memory
    return text, number("vgpr_count"), number("private_segment_fixed_size") + 4 * number("vgpr_spill_count")


def _widths(text: str, target: str, variant: Variant) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bits of the narrowest and widest vectorised accesses to global memory, loads and stores.

    Scalars per row (the target, its logit, the statistics) are accesses of 16 to 64 bits too, so what tells is the
    widest; the narrowest counts only what occurs at least as often as a block of logits needs.
    """
    if target.startswith("sm"):
        sizes = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "": 32, "64": 64, "128": 128, "256": 256}
        loads = [
            sizes[m]
            for m in re.findall(r"\bLDG\.E(?:\.EF|\.EL|\.CONSTANT|\.STRONG)*\.?(U8|S8|U16|S16|64|128|256|)", text)
        ]
        stores = [sizes[m] for m in re.findall(r"\bSTG\.E(?:\.EF|\.EL|\.STRONG)*\.?(U8|S8|U16|S16|64|128|256|)", text)]
    else:
        names = {"ubyte": 8, "byte": 8, "ushort": 16, "short": 16, "short_d16": 16, "short_d16_hi": 16, "dword": 32,
                 "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}  # fmt: skip
        kinds = "|".join(sorted(names, key=len, reverse=True))
        pattern = r"\b(?:global|buffer|flat)_{}_(" + kinds + r")\b"
        loads = [names[m] for m in re.findall(pattern.format("load"), text)]
        stores = [names[m] for m in re.findall(pattern.format("store"), text)]
    result = []
    for widths in (loads, stores):
        # the bulk: what moves at least a quarter of all the bytes that the code names
        moved = {width: width * widths.count(width) for width in set(widths)}
        bulk = [width for width, bits in moved.items() if 4 * bits >= sum(moved.values())]
        result.append((min(bulk), max(widths)) if widths else (0, 0))
    return result[0], result[1]


def _offsets_are_64bit(ttir: str) -> bool:
    """Every pointer is advanced by 64-bit offsets, columns inside a row included; literal constants are exempt."""
    offsets = re.findall(r"tt\.addptr %\S+, (%\S+) [^:]*: [^,]*, (?:tensor<[^>]*x(i\d+)>|(i\d+))", ttir)
    offsets = [(a or b) for operand, a, b in offsets if not operand.startswith("%c")]
    return bool(offsets) and all(width == "i64" for width in offsets)


def reports(targets: list[str]) -> list[Report]:
    return [compile_variant(variant, target) for variant in variants() for target in targets]


def table(rows: list[Report]) -> str:
    columns = (("kernel", -14), ("variant", -24), ("V", -9), ("target", -8), ("regs", 5), ("spills", 8), ("load", 10),
               ("store", 10), ("shared", 8), ("threads", 9), ("offsets", 9))  # fmt: skip
    header = "".join(f"{name:<{-width}}" if width < 0 else f"{name:>{width}}" for name, width in columns)
    lines = [header, "-" * len(header)]
    for r in rows:
        load, store = (f"{low}-{high}" if low != high else f"{high}" for low, high in (r.load_bits, r.store_bits))
        offsets = "64 bit" if r.offsets_64bit else "MIXED"
        lines.append(
            f"{r.kernel:<14}{r.variant:<28}{r.rows:<9}{r.target:<8}{r.registers:>5}{r.spill_bytes:>8}{load:>10}"
            f"{store:>10}{r.shared_bytes:>8}{r.threads:>9}{offsets:>9}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.static", description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", choices=sorted(TARGETS), default=list(TARGETS))
    parser.add_argument("--json", type=Path, help="also write the rows as JSON")
    arguments = parser.parse_args()
    if triton_ops.INTERPRETED:
        parser.error("TRITON_INTERPRET=1 replaces the kernels by interpreted ones; unset it")
    rows = reports(arguments.targets)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
