"""What the compiler makes of the kernels for every target, none of which need be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT

Row = dict[str, Any]
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


@pytest.fixture(scope="module")
def rows(module: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    path: Path = tmp_path_factory.mktemp("static") / "rows.json"
    done = module("static", "--json", str(path))
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def failing(rows: list[Row], wrong: Callable[[Row], bool]) -> list[str]:
    return [f"{r['kernel']} {r['variant']} {r['rows']} {r['target']}: {r}" for r in rows if wrong(r)]


def of_logits(rows: list[Row]) -> list[Row]:
    return [r for r in rows if r["kernel"].startswith("logprob")]


def test_every_kernel_compiles_for_every_target(rows: list[Row]) -> None:
    kernels = {(r["kernel"], r["variant"], r["rows"]) for r in rows}
    assert {r[0] for r in kernels} >= {"logprob_fwd", "logprob_bwd", "sequence"}
    assert {(*k, t) for k in kernels for t in TARGETS} == {
        (r["kernel"], r["variant"], r["rows"], r["target"]) for r in rows
    }


def test_no_kernel_spills_a_register(rows: list[Row]) -> None:
    assert failing(rows, lambda r: r["spill_bytes"] != 0) == []


def test_every_offset_is_64_bit(rows: list[Row]) -> None:
    # N * V passes 2**31 at 14,135 rows of a vocabulary of 151,936
    assert failing(rows, lambda r: not r["offsets_64bit"]) == []


def test_no_program_has_more_than_1024_threads(rows: list[Row]) -> None:
    assert failing(rows, lambda r: not 32 <= r["threads"] <= 1024) == []


def test_threads_follow_the_warp_size_of_the_target(rows: list[Row]) -> None:
    threads = {(r["kernel"], r["variant"], r["rows"], r["target"]): r["threads"] for r in rows}
    for (*name, target), count in threads.items():
        if target == "gfx942":
            assert count == 2 * threads[(*name, "sm_90")]


def test_aligned_rows_are_read_16_bytes_at_a_time_and_no_less(rows: list[Row]) -> None:
    aligned = [r for r in of_logits(rows) if r["rows"] == "aligned"]
    assert aligned
    assert failing(aligned, lambda r: r["load_bits"] != [128, 128]) == []


def test_aligned_gradients_are_written_16_bytes_at_a_time_and_no_less(rows: list[Row]) -> None:
    aligned = [r for r in of_logits(rows) if r["rows"] == "aligned" and r["kernel"] == "logprob_bwd"]
    same = [r for r in aligned if "->" not in r["variant"]]
    assert same
    assert failing(same, lambda r: r["store_bits"] != [128, 128]) == []


def test_gradients_in_half_the_width_of_the_logits_are_written_in_whole_lanes(rows: list[Row]) -> None:
    # four float32 in, four bfloat16 out: gfx942 stores the 8 bytes of a lane, the others exchange lanes to store 16
    narrowed = [r for r in of_logits(rows) if "->" in r["variant"]]
    assert narrowed
    assert failing(narrowed, lambda r: r["store_bits"] != ([64] * 2 if r["target"] == "gfx942" else [128] * 2)) == []


def test_rows_of_an_odd_vocabulary_are_still_read_16_bytes_at_a_time(rows: list[Row]) -> None:
    # V = 50257: blocks start on the boundary before the row, and only the two at its ends are narrow
    odd = [r for r in of_logits(rows) if r["rows"] == "odd"]
    assert odd
    assert failing(odd, lambda r: r["load_bits"][1] != 128) == []


def test_gradients_of_an_odd_vocabulary_are_still_written_16_bytes_at_a_time(rows: list[Row]) -> None:
    odd = [r for r in of_logits(rows) if r["rows"] == "odd" and r["kernel"] == "logprob_bwd"]
    assert odd
    assert failing(odd, lambda r: r["store_bits"][1] != 128) == []


def test_shared_memory_fits_the_smallest_target(rows: list[Row]) -> None:
    assert failing(rows, lambda r: r["shared_bytes"] > 48 * 1024) == []


def test_static_under_the_interpreter_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.static"], cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert "TRITON_INTERPRET=1 replaces the kernels" in done.stderr
