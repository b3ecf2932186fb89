"""benchmarks.floor against numbers worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.floor import (
    COUNTED,
    DEVICES,
    Device,
    Route,
    Shape,
    count,
    eager_bytes_per_logit,
    floor_seconds,
    paths,
    predicted_seconds,
    table,
)

# 1,000 tokens, 1,000 columns, 100 hidden: a million logits, a product of 2e8 operations
SHAPE = Shape(tokens=1000, vocab=1000, hidden=100, dtype="bf16", live=0.5, dead=0.25)
A100, H100, H200, MI300X = DEVICES


def route(name: str, shape: Shape = SHAPE) -> Route:
    return next(p for p in paths(shape) if p.name == name)


@pytest.mark.parametrize(
    "name, moved, operations",
    [
        ("forward from logits", 2_000_000 + 20_000, 5e6),  # 2 bytes a logit; id 8, log-probability 4, statistics 8
        ("backward from logits", 3_000_000 + 20_000, 3.5e6),  # half of the rows read, all written
        ("eager PyTorch forward", 14_000_000, 5e6),
        ("eager PyTorch backward", 22_000_000, 4e6),
        ("head, three products", 400_000, 6e8),
        ("head, four products", 400_000, 8e8),
        ("head, live and dead known", 400_000, 3.5e8),  # (1 - 0.25) + 2 * 0.5 products
    ],
)
def test_paths_move_and_compute_what_is_counted_by_hand(name: str, moved: float, operations: float) -> None:
    found = route(name)
    assert (found.bytes, found.operations) == pytest.approx((moved, operations))


def test_paths_from_logits_make_2_passes_and_the_live_share() -> None:
    passes = route("forward from logits").bytes + route("backward from logits").bytes - 2 * 20_000
    assert passes / 2_000_000 == pytest.approx(2 + SHAPE.live)


def test_eager_traffic_is_that_of_the_operators_it_runs() -> None:
    # cast 2 + 4, log_softmax 4 + 4; zeros 4, log_softmax backward 4 + 4 + 4, cast 4 + 2; float32 needs no cast
    assert eager_bytes_per_logit("bf16") == (14.0, 22.0)
    assert eager_bytes_per_logit("fp32") == (8.0, 16.0)


def test_floor_of_a_memory_bound_path_is_bytes_over_bandwidth() -> None:
    assert floor_seconds(route("forward from logits"), A100) == pytest.approx(2.02e6 / 2.039e12)


def test_floor_of_a_head_is_operations_over_peak() -> None:
    assert floor_seconds(route("head, three products"), A100) == pytest.approx(6e8 / 312e12)


def test_floor_of_a_head_with_few_tokens_is_the_weight_over_bandwidth() -> None:
    narrow = Shape(tokens=1, vocab=1000, hidden=100, dtype="bf16", live=1.0, dead=0.0)
    assert floor_seconds(route("head, three products", narrow), H100) == pytest.approx(1001 * 100 * 2 / 3.35e12)


@pytest.mark.parametrize("device, gigahertz", [(A100, 1.41), (H100, 1.83), (H200, 1.83), (MI300X, 2.10)])
def test_clock_that_the_peak_implies_is_the_vendors(device: Device, gigahertz: float) -> None:
    assert device.hertz / 1e9 == pytest.approx(gigahertz, abs=0.01)


def test_prediction_on_nvidia_is_memory_or_issue_whichever_is_longer() -> None:
    forward = route("forward from logits")
    issue = 1e6 * COUNTED["nvidia", "forward"].all / (132 * 128 * H200.hertz)
    assert predicted_seconds(forward, H200) == pytest.approx(max(2.02e6 / 4.8e12, issue))


def test_prediction_on_amd_lets_an_exponential_take_four_slots() -> None:
    each = COUNTED["amd", "forward"]
    issue = 1e6 * (each.all + 3 * each.special) / (304 * 64 * MI300X.hertz)
    assert predicted_seconds(route("forward from logits"), MI300X) == pytest.approx(max(2.02e6 / 5.3e12, issue))


def test_prediction_of_dead_rows_costs_less_than_of_live_ones() -> None:
    times = [
        predicted_seconds(route("backward from logits", Shape(1000, 1000, 1, "bf16", live, 0.0)), H200)
        for live in (0.0, 0.5, 1.0)
    ]
    assert times[0] < times[1] < times[2]


@pytest.mark.parametrize("name", ("eager PyTorch forward", "head, three products"))
def test_prediction_of_a_path_that_is_not_ours_is_none(name: str) -> None:
    assert predicted_seconds(route(name), H100) is None


def test_table_names_every_path_and_device_and_says_that_nothing_is_measured() -> None:
    text = table(SHAPE)
    assert all(p.name in text for p in paths(SHAPE))
    assert all(d.name in text for d in DEVICES)
    assert "Nothing is measured" in text


NVIDIA = """
        /*0000*/                   LDG.E R1, desc[UR4][R2.64] ;
        /*0010*/              @P0 BRA `(.L_x_0) ;
        /*0020*/              @!P1 STG.E.128 desc[UR4][R4.64], RZ ;
        /*0030*/                   EXIT ;
.L_x_0:
        /*0040*/              @P4 BRA `(.L_x_1) ;
        /*0050*/                   LDG.E.128 R8, desc[UR4][R6.64] ;
        /*0060*/                   MUFU.EX2 R9, R8 ;
        /*0070*/                   FMUL R9, R9, R10 ;
        /*0080*/                   STG.E.128 desc[UR4][R4.64], R8 ;
        /*0090*/                   EXIT ;
.L_x_1:
        /*00a0*/              @!P5 LDG.E.128 R8, desc[UR4][R6.64] ;
        /*00b0*/              @!P5 STG.E.128 desc[UR4][R4.64], R8 ;
        /*00c0*/                   EXIT ;
"""


def test_count_follows_the_unmasked_way_of_a_live_row_and_the_short_one_of_a_dead_row() -> None:
    counted = count("_logprob_bwd_kernel", NVIDIA, "nvidia")
    assert counted["backward, live row"].all == round(8 / 8, 2)
    assert counted["backward, live row"].special == round(1 / 8, 2)
    assert counted["backward, dead row"].all == round(4 / 8, 2)


def test_count_of_a_loop_is_its_body() -> None:
    loop = """
        /*0000*/                   MOV R1, R2 ;
.L_x_0:
        /*0010*/                   LDG.E.128 R8, desc[UR4][R6.64] ;
        /*0020*/                   MUFU.EX2 R9, R8 ;
        /*0030*/                   FADD R9, R9, R10 ;
        /*0040*/              @P0 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
"""
    assert count("_logprob_fwd_kernel", loop, "nvidia")["forward"].all == 4 / 8


def test_counted_numbers_are_those_of_the_kernels_as_they_are(module: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "counted.json"
    done = module("floor", "--recount", "--json", str(path))
    assert done.returncode == 0, done.stderr
    found = {key: value["all"] for key, value in json.loads(path.read_text()).items()}
    assert found == pytest.approx({f"{f}, {n}": value.all for (f, n), value in COUNTED.items()}, rel=0.1)


def test_command_writes_the_rows_it_prints(module: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "floor.json"
    done = module(
        "floor", "--tokens", "1000", "--vocab", "1000", "--hidden", "100", "--live", "0.5", "--json", str(path)
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(path.read_text())
    assert written["shape"]["live"] == 0.5
    assert len(written["rows"]) == len(paths(SHAPE)) * len(DEVICES)
    assert "forward from logits" in done.stdout


@pytest.mark.parametrize("arguments", [("--tokens", "0"), ("--live", "1.5"), ("--live", "0.8", "--dead", "0.3")])
def test_command_refuses_a_shape_that_cannot_be(arguments: tuple[str, ...], module: Callable[..., Any]) -> None:
    assert module("floor", *arguments).returncode == 2
