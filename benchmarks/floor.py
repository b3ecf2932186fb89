"""The least time a shape can take on some accelerators, and a model of how near the kernels come to it.

    python -m benchmarks.floor --tokens 16384 --vocab 151936 [--hidden 4096] [--live 0.6] [--dead 0.3] [--json FILE]
    python -m benchmarks.floor --recount

Nothing here is measured. The floor of a path is max(bytes / memory bandwidth, matrix operations / peak rate), with the
vendors' numbers. The model of our kernels adds the time their instructions take to issue; they are counted in the code
that the compiler makes for whole blocks of bf16 rows that start on 16 bytes (`--recount` counts again). It leaves out
latency, barriers, launches, and whatever the memory system does not reach of its bandwidth: the share of the floor it
names is the best to hope for, and where it is below 100 % the instructions are why.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Device:
    """Dense bf16 peak and bandwidth from the vendor's datasheet of that product.

    The clock is the one that the peak implies: peak / (units * matrix operations of a unit per clock).
    """

    name: str
    family: str  # whose instruction counts apply
    tflops: float
    terabytes_per_second: float
    units: int  # multiprocessors or compute units
    matrix_operations_per_clock: int  # of one unit, bf16
    lanes_per_clock: int  # ordinary instructions that one unit starts per clock, in lanes
    special_lanes_per_clock: int  # exponentials
    special_blocks_others: bool  # whether an exponential occupies the issue slots of other instructions

    @property
    def hertz(self) -> float:
        return self.tflops * 1e12 / (self.units * self.matrix_operations_per_clock)


DEVICES = (
    Device("A100 SXM 80GB", "nvidia", 312, 2.039, 108, 2048, 128, 16, False),
    Device("H100 SXM", "nvidia", 989, 3.35, 132, 4096, 128, 16, False),
    Device("H200", "nvidia", 989, 4.8, 132, 4096, 128, 16, False),
    Device("MI300X", "amd", 1307, 5.3, 304, 2048, 64, 16, True),
)


@dataclass(frozen=True)
class Instructions:
    """Vector instructions, exponentials among them, that a kernel spends on one logit."""

    all: float
    special: float


# counted by --recount in the code for sm_90 (also taken for sm_80) and gfx942
COUNTED = {
    ("nvidia", "forward"): Instructions(14.69, 1.06),
    ("nvidia", "backward, live row"): Instructions(22.12, 1.0),
    ("nvidia", "backward, dead row"): Instructions(3.88, 0.0),
    ("amd", "forward"): Instructions(20.75, 1.12),
    ("amd", "backward, live row"): Instructions(24.38, 1.0),
    ("amd", "backward, dead row"): Instructions(1.5, 0.0),
}
COUNTED_TARGETS = {"nvidia": "sm_90", "amd": "gfx942"}


@dataclass(frozen=True)
class Shape:
    """N tokens, V columns, H hidden; `live` tokens have a gradient, `dead` ones are known to have none beforehand."""

    tokens: int
    vocab: int
    hidden: int
    dtype: str
    live: float
    dead: float


@dataclass(frozen=True)
class Route:
    """One way through the loss: what it moves and computes, and what our kernels spend on it if they run it."""

    name: str
    bytes: float
    operations: float  # floating point, exponentials as one
    matrix: bool  # whether they run on the matrix units
    instructions: tuple[tuple[str, float], ...] = ()  # (what of COUNTED, on how many logits)


class _Traffic(TorchDispatchMode):
    """Adds up the bytes of the operands and results of the size of the logits, for every operator that runs."""

    # these read or write one element of a row
    INDEXED = ("aten.gather", "aten.scatter_add")

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.bytes = elements, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = str(function)
        operands = [a for a in args if isinstance(a, Tensor)]
        view = isinstance(result, Tensor) and any(
            a.untyped_storage().data_ptr() == result.untyped_storage().data_ptr() for a in operands
        )
        if not view and not name.startswith(self.INDEXED):
            reads = [] if name.startswith("aten.new_zeros") else operands
            writes = [r for r in torch.utils._pytree.tree_leaves(result) if isinstance(r, Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in (*reads, *writes) if t.numel() == self.elements)
        return result


def eager_bytes_per_logit(dtype: str) -> tuple[float, float]:
    """(forward, backward) traffic of `logits.float().log_softmax(-1).gather(...)` per logit.

    Counted from the operators that PyTorch runs, each operand read once. That flatters it: its softmax reads a row that
    does not fit the shared memory of a multiprocessor two or three times.
    """
    rows, columns = 5, 7
    logits = torch.zeros(rows, columns, dtype=DTYPES[dtype], requires_grad=True)
    ids = torch.zeros(rows, 1, dtype=torch.long)
    with _Traffic(rows * columns) as forward:
        logprobs = logits.float().log_softmax(-1).gather(-1, ids)
        loss = logprobs.sum()
    with _Traffic(rows * columns) as backward:
        loss.backward()
    return forward.bytes / (rows * columns), backward.bytes / (rows * columns)


def paths(shape: Shape) -> list[Route]:
    """Every path of a shape. What has N elements (targets, log-probabilities, statistics) counts, what has S not."""
    logits, size = shape.tokens * shape.vocab, ELEMENT_BYTES[shape.dtype]
    product = 2.0 * shape.tokens * shape.hidden * shape.vocab
    live, per_token = shape.live, 8 + 4 + 8  # target, log-probability or its gradient, two statistics
    eager = eager_bytes_per_logit(shape.dtype)
    weights = (shape.vocab + shape.tokens) * shape.hidden * size
    return [
        # multiply, maximum, subtract, exponential, add
        Route("forward from logits", logits * size + shape.tokens * per_token, 5.0 * logits, False,
              (("forward", logits),)),
        # multiply, two subtractions, exponential, subtract, two multiplications; a dead row is written and not read
        Route("backward from logits", logits * size * (1 + live) + shape.tokens * per_token, 7.0 * live * logits, False,
              (("backward, live row", live * logits), ("backward, dead row", (1 - live) * logits))),
        Route("eager PyTorch forward", logits * eager[0], 5.0 * logits, False),
        Route("eager PyTorch backward", logits * eager[1], 4.0 * logits, False),
        Route("head, three products", weights, 3 * product, True),
        Route("head, four products", weights, 4 * product, True),
        Route("head, live and dead known", weights, (1 - shape.dead + 2 * live) * product, True),
    ]  # fmt: skip


def floor_seconds(path: Route, device: Device) -> float:
    """max(bytes / bandwidth, matrix operations / peak)."""
    compute = path.operations / (device.tflops * 1e12) if path.matrix else 0.0
    return max(path.bytes / (device.terabytes_per_second * 1e12), compute)


def predicted_seconds(path: Route, device: Device) -> float | None:
    """The model of our kernels: the larger of memory time and issue time. None for paths that are not ours."""
    if not path.instructions:
        return None
    ordinary = special = 0.0
    for name, count in path.instructions:
        each = COUNTED[device.family, name]
        ordinary += each.all * count
        special += each.special * count
    if device.special_blocks_others:
        ordinary += special * (device.lanes_per_clock / device.special_lanes_per_clock - 1)
    per_second = device.units * device.hertz
    issue = max(ordinary / device.lanes_per_clock, special / device.special_lanes_per_clock) / per_second
    return max(floor_seconds(path, device), issue)


def rows(shape: Shape) -> list[dict[str, Any]]:
    """One row per path and device."""
    result = []
    for path in paths(shape):
        for device in DEVICES:
            floor, predicted = floor_seconds(path, device), predicted_seconds(path, device)
            result.append({
                "path": path.name, "bytes": path.bytes, "operations": path.operations, "device": device.name,
                "floor_ms": floor * 1e3, "model_ms": None if predicted is None else predicted * 1e3,
                "model_share": None if predicted is None else floor / predicted,
            })  # fmt: skip
    return result


def table(shape: Shape) -> str:
    """The same for people: floors in ms, and for our kernels the share of it that the model predicts."""
    lines = [
        f"N = {shape.tokens}, V = {shape.vocab}, H = {shape.hidden}, {shape.dtype}, live {shape.live:.0%}, known dead "
        f"{shape.dead:.0%}.",
        "Floors in ms from datasheet numbers; in brackets the share of the floor that a model of our kernels predicts",
        "(memory against instruction issue). Nothing is measured.",
        f"{'path':<28}{'GB':>9}{'TFLOP':>9}" + "".join(f"{d.name:>18}" for d in DEVICES),
    ]
    lines.append("-" * len(lines[-1]))
    for path in paths(shape):
        cells = []
        for device in DEVICES:
            floor, predicted = floor_seconds(path, device), predicted_seconds(path, device)
            share = "" if predicted is None else f" ({floor / predicted:.0%})"
            cells.append(f"{floor * 1e3:.3f}{share}".rjust(18))
        lines.append(f"{path.name:<28}{path.bytes / 1e9:>9.3f}{path.operations / 1e12:>9.3f}" + "".join(cells))
    return "\n".join(lines)


# Counting instructions -----------------------------------------------------------------------------------------------


def parse(text: str, family: str) -> list[tuple[str, str]]:
    """[(kind, text)] of a disassembly: "label" or "op"."""
    result = []
    for line in text.splitlines():
        line = line.split(";")[0].strip()
        label = re.fullmatch(r"(\.L\w+):", line)
        if label:
            result.append(("label", label[1]))
        elif family == "nvidia" and (found := re.match(r"/\*[0-9a-f]{4,}\*/\s+([^.\s].*)", line)):
            result.append(("op", found[1].strip()))
        elif family == "amd" and re.match(r"[a-z]\w+(\s|$)", line) and "_" in line.split()[0]:
            result.append(("op", line))
    return result


def _branch(op: str) -> tuple[str, bool] | None:
    """(label, whether it may fall through) of a branch."""
    found = re.match(r"(@\S+\s+)?BRA\b.*?\(?(\.L\w+)", op) or re.match(r"(s_cbranch\w+|s_branch)\s+(\.L\w+)", op)
    if found is None:
        return None
    conditional = bool(found[1]) and not found[1].startswith("s_branch")
    return found[2], conditional


def _ends(op: str) -> tuple[bool, bool]:
    """(whether the program may end here, whether it must)."""
    return ("EXIT" in op or "s_endpgm" in op), bool(re.match(r"EXIT|s_endpgm", op))


def walks(code: list[tuple[str, str]]) -> Iterator[list[str]]:
    """The instructions of every way from the start to an end that takes no jump backwards."""
    places = {text: i for i, (kind, text) in enumerate(code) if kind == "label"}
    stack: list[tuple[int, list[str]]] = [(0, [])]
    while stack:
        at, seen = stack.pop()
        while at < len(code):
            kind, text = code[at]
            if kind == "op":
                seen = [*seen, text]
                may, must = _ends(text)
                if may:
                    yield seen
                if must:
                    break
                branch = _branch(text)
                if branch is not None and branch[0] in places:
                    label, conditional = branch
                    if places[label] > at:
                        if conditional:
                            stack.append((at + 1, seen))
                        at = places[label]
                        continue
                    if not conditional:
                        break
            at += 1


def loops(code: list[tuple[str, str]]) -> Iterator[list[str]]:
    """The instructions between the target of every jump backwards and the jump."""
    places = {text: i for i, (kind, text) in enumerate(code) if kind == "label"}
    for i, (kind, text) in enumerate(code):
        branch = _branch(text) if kind == "op" else None
        if branch is not None and places.get(branch[0], i) < i:
            yield [t for k, t in code[places[branch[0]] : i + 1] if k == "op"]


# 16 bytes, without a predicate
_WIDE_LOAD, _WIDE_STORE = r"^(LDG\.E\.128|global_load_dwordx4)", r"^(STG\.E\.128|global_store_dwordx4)"
_LOGIT_LOAD, _STORE = r"LDG\.E\.128|global_load_dwordx4", r"STG\.E\.128|global_store_dwordx4"


def _times(ops: list[str], pattern: str) -> int:
    return sum(bool(re.search(pattern, op)) for op in ops)


def _per_logit(ops: list[str], wide: int, family: str, element_bytes: int = 2) -> Instructions:
    vector = [op for op in ops if family == "nvidia" or op.startswith("v_")]
    special = _times(ops, r"^(@\S+\s+)?MUFU\.EX2|^v_exp_f32")
    logits = wide * 16 // element_bytes
    return Instructions(round(len(vector) / logits, 2), round(special / logits, 2))


def count(kernel: str, text: str, family: str) -> dict[str, Instructions]:
    """What a kernel spends per logit on whole blocks of a row, from its disassembly."""
    code = parse(text, family)
    if "fwd" in kernel:
        body = max(loops(code), key=lambda ops: _times(ops, _WIDE_LOAD))
        return {"forward": _per_logit(body, _times(body, _WIDE_LOAD), family)}
    # a whole block is read and written without a mask; a dead row is written, masked or not, and never read
    ways = list(walks(code))
    wide = max(_times(w, _WIDE_LOAD) for w in ways)
    live = min((w for w in ways if _times(w, _WIDE_LOAD) == wide and _times(w, _WIDE_STORE) == wide), key=len)
    dead = min((w for w in ways if not _times(w, _LOGIT_LOAD) and _times(w, _STORE) >= wide), key=len)
    return {
        "backward, live row": _per_logit(live, wide, family),
        "backward, dead row": _per_logit(dead, wide, family),
    }


def recount() -> dict[tuple[str, str], Instructions]:
    """COUNTED from the kernels as they are now; needs Triton and TRITON_INTERPRET unset."""
    from . import static

    result = {}
    for family, target in COUNTED_TARGETS.items():
        for variant in static.variants():
            if variant.label == "bf16" and variant.rows == "aligned":
                text = static.disassemble(variant, target)
                result |= {(family, name): value for name, value in count(variant.kernel, text, family).items()}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.floor", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--dtype", choices=list(ELEMENT_BYTES), default="bf16")
    parser.add_argument("--live", type=float, default=1.0, help="share of tokens that have a gradient")
    parser.add_argument("--dead", type=float, default=0.0, help="share of tokens whose advantage is 0")
    parser.add_argument("--json", type=Path, help="also write the rows as JSON")
    parser.add_argument("--recount", action="store_true", help="count the kernels' instructions and stop")
    arguments = parser.parse_args()
    if min(arguments.tokens, arguments.vocab, arguments.hidden) < 1:
        parser.error("tokens, vocab and hidden must be at least 1")
    if arguments.live < 0 or arguments.dead < 0 or arguments.live + arguments.dead > 1 + 1e-9:
        parser.error("live and dead are shares: each at least 0, together at most 1")
    if arguments.recount:
        counted = {f"{family}, {name}": asdict(value) for (family, name), value in recount().items()}
        text = json.dumps(counted, indent=1)
        print(text)
        if arguments.json:
            arguments.json.write_text(text)
        return 0
    names = ("tokens", "vocab", "hidden", "dtype", "live", "dead")
    shape = Shape(**{name: getattr(arguments, name) for name in names})
    print(table(shape))
    if arguments.json:
        arguments.json.write_text(json.dumps({"shape": asdict(shape), "rows": rows(shape)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
