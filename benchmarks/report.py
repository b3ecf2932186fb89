"""The benchmark page: measures what is missing, then renders tables and figures from the results.

    python -m benchmarks.report [--fresh] [--output docs/benchmarks] [--rounds 5]

Each measurement is one JSON file in OUTPUT/results and is reused when it is there, so an interrupted run goes on where
it stopped; `--fresh` measures everything again. The page is rendered from these files alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hacpo_kernels import linear_hacpo_loss, linear_token_logprobs

from .head import CONFIG, make_inputs, run
from .memory import peak_bytes

ANCHORS = ((1024, 32768, 512), (512, 151936, 256))
VOCABULARIES = (32768, 49152, 128256, 151936, 262144)  # at N = 512, H = 256
TOKENS = (512, 1024, 2048)  # at V = 32768, H = 512
SEQUENCES = (32, 128, 512)  # at the first anchor
BUDGETS = (64 << 20, 1 << 30)
SEQUENCE = 128

Result = dict[str, Any]


def shapes() -> list[tuple[int, int, int, int]]:
    """(tokens, vocabulary, hidden, sequence length) of every timed shape, without repeats."""
    found = [(*anchor, SEQUENCE) for anchor in ANCHORS]
    found += [(512, vocab, 256, SEQUENCE) for vocab in VOCABULARIES]
    found += [(tokens, 32768, 512, SEQUENCE) for tokens in TOKENS]
    found += [(*ANCHORS[0], length) for length in SEQUENCES]
    return list(dict.fromkeys(found))


def machine() -> Result:
    """What the numbers were measured on."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return {
        "cpu": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def measure_budgets(tokens: int = 8192, vocab: int = 151936, hidden_size: int = 64, length: int = 512) -> Result:
    """Peak of the tensors that one forward and backward allocate, for several budgets."""
    inputs = make_inputs(tokens, vocab, hidden_size, length, 0.0, torch.float32)
    gradients = 4 * (inputs.hidden.numel() + inputs.weight.numel())
    rows = []
    for budget in BUDGETS:

        def call(budget: int = budget) -> object:
            loss = linear_hacpo_loss(
                inputs.hidden, inputs.weight, inputs.targets, inputs.sequences, CONFIG, memory_budget=budget
            ).loss
            return torch.autograd.grad(loss, (inputs.hidden, inputs.weight))

        start = time.perf_counter()
        peak = peak_bytes(call)
        rows.append({"budget": budget, "peak": peak, "seconds": time.perf_counter() - start})
    return {
        "tokens": tokens, "vocab": vocab, "hidden": hidden_size, "sequence": length, "gradients": gradients,
        "all_logits": 4 * tokens * vocab, "rows": rows,
    }  # fmt: skip


def _means(logprobs: Tensor, length: int) -> Tensor:
    return logprobs.view(-1, length).double().mean(-1)


def _scorers(hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Callable[[slice], Tensor]]:
    """Ways to the log-probabilities of a slice of the rows, from the same bf16 operands."""

    def ours(part: slice) -> Tensor:
        budget = (1 << 30) if part == slice(None) else 7 * 4 * weight.shape[0]
        scored = linear_token_logprobs(hidden[part], weight, targets[part], memory_budget=budget)
        assert isinstance(scored, Tensor)
        return scored

    def from_logits(logits: Tensor, part: slice) -> Tensor:
        return logits.log_softmax(-1).gather(-1, targets[part].unsqueeze(-1)).squeeze(-1)

    scorers: dict[str, Callable[[slice], Tensor]] = {
        "exact": lambda part: from_logits(hidden[part].double() @ weight.double().T, part),
        "ours": ours,
        "bf16 logits, eager": lambda part: from_logits((hidden[part] @ weight.T).float(), part),
    }
    try:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    except ImportError:
        return scorers

    def trl(part: slice) -> Tensor:
        chunk = 32768 if part == slice(None) else 4096
        scored: Tensor = ChunkedLogProbFunction.apply(
            hidden[part], weight, None, targets[part], 1.0, chunk, None, 1.0, ()
        )[0]
        return scored

    return {**scorers, "trl": trl}


def measure_ratio_error(vocab: int = 32768, hidden_size: int = 256, sequences: int = 8) -> Result:
    """Largest |s - 1| of sequences whose old and new policy are the same bf16 hidden states and weight.

    Old and new differ only in how the rows are grouped: all at once against one sequence at a time.
    """
    rows = []
    for length in (64, 512):
        inputs = make_inputs(sequences * length, vocab, hidden_size, length, 0.0, torch.bfloat16)
        scorers = _scorers(inputs.hidden.detach(), inputs.weight.detach(), inputs.targets)
        parts = [slice(i * length, (i + 1) * length) for i in range(sequences)]
        truth = _means(torch.cat([scorers["exact"](part) for part in parts]), length)
        for name, score in scorers.items():
            if name == "exact":
                continue
            whole = _means(score(slice(None)), length)
            alone = _means(torch.cat([score(part) for part in parts]), length)
            rows.append(
                {
                    "name": name,
                    "length": length,
                    "regrouped": float(((whole - alone).exp() - 1).abs().max()),
                    "against_exact": float(((whole - truth).exp() - 1).abs().max()),
                }
            )
    return {"vocab": vocab, "hidden": hidden_size, "sequences": sequences, "rows": rows}


def _cached(path: Path, fresh: bool, measure: Callable[[], Any]) -> Any:
    if path.exists() and not fresh:
        return json.loads(path.read_text())
    result = {"machine": machine(), "result": measure()}
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def measure_all(folder: Path, fresh: bool, rounds: int) -> None:
    """Every result that the page shows, as JSON files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for tokens, vocab, hidden_size, length in shapes():
        name = f"head-n{tokens}-v{vocab}-h{hidden_size}-t{length}"
        print(name, flush=True)
        _cached(
            folder / f"{name}.json",
            fresh,
            lambda shape=(tokens, vocab, hidden_size, length): run(*shape, torch.float32, rounds),
        )
    print("budgets", flush=True)
    _cached(folder / "budgets.json", fresh, measure_budgets)
    print("ratio error", flush=True)
    _cached(folder / "ratio-error.json", fresh, measure_ratio_error)


def _load(folder: Path, shape: Iterable[int]) -> Result | None:
    tokens, vocab, hidden_size, length = shape
    path = folder / f"head-n{tokens}-v{vocab}-h{hidden_size}-t{length}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _rows(result: Result) -> dict[str, Result]:
    return {row["name"]: row for row in result["result"] if "seconds" in row}


def _shape_table(result: Result) -> str:
    lines = ["| | seconds | to ours | to three products | peak MiB |", "|---|---|---|---|---|"]
    for name, row in _rows(result).items():
        label = "three products alone" if name == "floor" else name
        memory = "-" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
        lines.append(f"| {label} | {row['seconds']:.3f} | {row['to_ours']:.2f} | {row['to_floor']:.2f} | {memory} |")
    return "\n".join(lines)


def _axis_table(folder: Path, axis: str, points: list[tuple[int, int, int, int]], position: int) -> str:
    names = ["ours, 0% dead", "ours, 50% dead", "ours, 80% dead", "eager", "plain", "trl", "liger", "cut-cross-entropy"]
    lines = [f"| {axis} | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 1)]
    for shape in points:
        result = _load(folder, shape)
        if result is None:
            continue
        rows = _rows(result)
        cells = [f"{rows[name]['to_floor']:.2f}" if name in rows else "-" for name in names]
        lines.append(f"| {shape[position]:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _budget_table(result: Result) -> str:
    lines = ["| budget MiB | gradients MiB | peak MiB | peak - gradients | seconds |", "|---|---|---|---|---|"]
    gradients = result["gradients"] / 2**20
    for row in result["rows"]:
        peak = row["peak"] / 2**20
        lines.append(
            f"| {row['budget'] / 2**20:.0f} | {gradients:.0f} | {peak:.0f} | {peak - gradients:.0f} | "
            f"{row['seconds']:.1f} |"
        )
    return "\n".join(lines)


def _ratio_table(result: Result) -> str:
    lines = ["| | tokens of a response | regrouped | against float64 |", "|---|---|---|---|"]
    for row in result["rows"]:
        lines.append(f"| {row['name']} | {row['length']} | {row['regrouped']:.1e} | {row['against_exact']:.1e} |")
    return "\n".join(lines)


def figures(folder: Path, output: Path) -> list[Path]:
    """Time against V and N, and memory against V."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = ["ours, 0% dead", "ours, 50% dead", "eager", "plain", "trl", "liger", "cut-cross-entropy"]
    axes_of = {
        "time": (
            (
                "to_floor",
                "time / three matrix products",
                [(512, v, 256, SEQUENCE) for v in VOCABULARIES],
                1,
                "vocabulary",
            ),
            ("to_floor", "time / three matrix products", [(n, 32768, 512, SEQUENCE) for n in TOKENS], 0, "tokens"),
        ),
        "memory": (
            (
                "peak_mib",
                "peak MiB of tensors allocated",
                [(512, v, 256, SEQUENCE) for v in VOCABULARIES],
                1,
                "vocabulary",
            ),
            ("peak_mib", "peak MiB of tensors allocated", [(n, 32768, 512, SEQUENCE) for n in TOKENS], 0, "tokens"),
        ),
    }
    written = []
    for name, panels in axes_of.items():
        figure, axes = plt.subplots(1, len(panels), figsize=(11, 4), layout="constrained")
        for axis, (key, title, points, position, label) in zip(axes, panels, strict=True):
            for contestant in names:
                xs, ys = [], []
                for shape in points:
                    result = _load(folder, shape)
                    row = _rows(result).get(contestant) if result else None
                    if row is not None and row[key] is not None:
                        xs.append(shape[position])
                        ys.append(row[key])
                if xs:
                    style = "-" if contestant.startswith("ours") else "--"
                    axis.plot(xs, ys, style, marker="o", markersize=4, label=contestant)
            axis.set_xlabel(label)
            axis.set_ylabel(title)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
        axes[0].legend(fontsize=8)
        path = output / f"{name}.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
        written.append(path)
    return written


def render(output: Path) -> str:
    """The page as Markdown, from the JSON files in OUTPUT/results."""
    folder = output / "results"
    anchors = [(anchor, _load(folder, (*anchor, SEQUENCE))) for anchor in ANCHORS]
    first = next(result for _, result in anchors if result is not None)
    about = first["machine"]
    parts = [
        "# Benchmarks of the fused head",
        f"From hidden states and the head's weight to the loss and both gradients, float32, on {about['cpu']}, "
        f"{about['threads']} threads, torch {about['torch']}, {about['date']}. Every contestant computes the same objective "
        "on the same inputs in one process, in turns; its gradients are compared with ours before it is timed. Times are "
        "the best of several rounds. Memory is the peak of the tensors allocated during the call; what is compiled cannot "
        "be seen (-). No accelerator was measured.",
        "`ours, 50% dead`: half of the responses have advantage 0, as when every answer to a prompt has the same reward. "
        "The peers do not skip them, so their time does not depend on it. `plain` is this package's loss from logits "
        "behind a matrix product, `eager` PyTorch's log_softmax.",
        "Reproduce: `pip install trl==1.16.0 liger-kernel==0.8.5 cut-cross-entropy==25.1.1`, then `python -m benchmarks.report --fresh`. One shape: "
        "`python -m benchmarks.head --tokens 1024 --vocab 32768 --hidden 512`.",
    ]
    for (tokens, vocab, hidden_size), result in anchors:
        if result is not None:
            parts += [f"## N = {tokens:,}, V = {vocab:,}, H = {hidden_size}", _shape_table(result)]
    parts += [
        "## Against the vocabulary, N = 512, H = 256",
        "Time as a multiple of the three matrix products alone, measured in the same run.",
        _axis_table(folder, "V", [(512, vocab, 256, SEQUENCE) for vocab in VOCABULARIES], 1),
        "## Against the number of tokens, V = 32,768, H = 512",
        _axis_table(folder, "N", [(tokens, 32768, 512, SEQUENCE) for tokens in TOKENS], 0),
        "## Against the length of a response, N = 1,024, V = 32,768, H = 512",
        _axis_table(folder, "T", [(*ANCHORS[0], length) for length in SEQUENCES], 3),
        "![time](time.png)",
        "![memory](memory.png)",
    ]
    budgets, ratios = folder / "budgets.json", folder / "ratio-error.json"
    if budgets.exists():
        result = json.loads(budgets.read_text())["result"]
        parts += [
            "## Memory budget",
            f"N = {result['tokens']:,}, V = {result['vocab']:,}, H = {result['hidden']}, responses of "
            f"{result['sequence']} tokens. All logits in float32 would take {result['all_logits'] / 2**20:,.0f} MiB.",
            _budget_table(result),
            "`memory_budget` bounds the logits that are in memory at once. A response whose logits do not fit is cached as "
            "far as they go and computed twice for the rest, which is what the small budget pays for.",
        ]
    if ratios.exists():
        result = json.loads(ratios.read_text())["result"]
        parts += [
            "## On-policy ratio error",
            f"bf16 hidden states and weight, V = {result['vocab']:,}, H = {result['hidden']}. Old and new policy are equal, "
            "so every sequence ratio should be 1; the paper's self clip radius is 3e-4. *Regrouped*: old log-probabilities "
            "from all rows at once, new ones from one response at a time (the largest |s - 1|). *Against float64*: how far "
            "the ratio is off when the old log-probabilities are exact, as when they come from another implementation.",
            _ratio_table(result),
        ]
    parts += [
        "## Where there is no gain, and where we need more",
        "With nothing dead, plain matrix products with all logits in memory are the same three products: the gain there is "
        "the passes over the logits, and it shrinks as H grows. Against implementations that tile rows and vocabulary we "
        "hold more logits at once (up to `memory_budget`, 1 GiB by default): that is what saves the fourth product. On a "
        "model whose peak is elsewhere (activations, optimizer), a smaller head changes nothing.",
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    measure_all(options.output / "results", options.fresh, options.rounds)
    (options.output / "README.md").write_text(render(options.output))
    for path in figures(options.output / "results", options.output):
        print(path)
    print(options.output / "README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
