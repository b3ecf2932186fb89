"""token_logprobs against float64 PyTorch: vocabulary sizes, dtypes, entropy."""

from __future__ import annotations

import pytest
import torch

from hacpo_kernels import token_logprobs
from hacpo_kernels.reference import reference_token_logprobs

from .builders import TOLERANCE, leaf, relative_error

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# around one lane, one warp and one block of each kernel (2048 or 1024 columns backward, 4096 or 2048 forward)
SMALL = (1, 2, 31, 33, 127, 1000, 1024, 1025, 2048, 2049, 4096, 4097)
REAL = (32000, 50257, 151937)


def check(vocab_size: int, rows: int, dtype: torch.dtype, backend: str, entropy: bool) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (3.0 * torch.randn(rows, vocab_size, generator=generator)).to(dtype)
    target_ids = torch.randint(0, vocab_size, (rows,), generator=generator)
    target_ids[-1] = vocab_size - 1
    weights = torch.randn(2, rows, generator=generator, dtype=torch.float64)

    mine, wide = leaf(logits), leaf(logits.double())
    actual = token_logprobs(mine, target_ids, entropy=True, backend=backend)
    expected = reference_token_logprobs(wide, target_ids)
    tolerance = TOLERANCE[dtype]
    narrow = torch.float64 if dtype == torch.float64 else torch.float32
    assert actual[0].dtype == actual[1].dtype == narrow
    assert (actual[0] - expected[0]).abs().max() <= min(tolerance, 1e-5)
    assert (actual[1] - expected[1]).abs().max() <= min(tolerance, 1e-5)

    both = 2 if entropy else 1
    torch.stack([a * w.to(narrow) for a, w in zip(actual[:both], weights, strict=False)]).sum().backward()
    torch.stack([e * w for e, w in zip(expected[:both], weights, strict=False)]).sum().backward()
    assert mine.grad.dtype == dtype
    assert relative_error(mine.grad, wide.grad) <= tolerance


@pytest.mark.parametrize("vocab_size", SMALL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_logprobs_small_vocabulary_equals_reference(vocab_size: int, dtype: torch.dtype, backend: str) -> None:
    check(vocab_size, 3, dtype, backend, entropy=False)


@pytest.mark.parametrize("vocab_size", REAL)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_token_logprobs_real_vocabulary_equals_reference(vocab_size: int, dtype: torch.dtype, backend: str) -> None:
    check(vocab_size, 2, dtype, backend, entropy=False)


@pytest.mark.parametrize("vocab_size", (1, 33, 2049, 4097))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_logprobs_with_entropy_equals_reference(vocab_size: int, dtype: torch.dtype, backend: str) -> None:
    check(vocab_size, 3, dtype, backend, entropy=True)


def test_token_logprobs_large_logits_stay_finite(backend: str) -> None:
    logits = leaf(torch.tensor([[3e4, 0.0, -3e4], [-3e4, -3e4, -3e4 + 1.0]]))
    logprobs, entropies = token_logprobs(logits, torch.tensor([1, 2]), entropy=True, backend=backend)
    torch.testing.assert_close(logprobs, torch.tensor([-3e4, -0.551445]), rtol=1e-6, atol=1e-5)
    (logprobs.sum() + entropies.sum()).backward()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("shift", (-5e3, 7e3))
def test_token_logprobs_shifted_logits_give_the_same(shift: float, backend: str) -> None:
    logits = torch.randint(-8, 8, (3, 50), generator=torch.Generator().manual_seed(0)).float()
    ids = torch.tensor([0, 20, 49])
    torch.testing.assert_close(
        token_logprobs(logits + shift, ids, backend=backend), token_logprobs(logits, ids, backend=backend)
    )


def test_token_logprobs_rows_far_from_the_maximum_in_a_later_block_keep_it(backend: str) -> None:
    # the running maximum has to move up in the last block, and the sum gathered before it must fade
    logits = torch.zeros(1, 9001, dtype=torch.float64)
    logits[0, -1] = 40.0
    expected = reference_token_logprobs(logits, torch.tensor([0]))
    actual = token_logprobs(logits, torch.tensor([0]), entropy=True, backend=backend)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", (torch.int8, torch.uint8, torch.int16, torch.int32), ids=str)
def test_token_logprobs_narrow_integer_ids_mean_the_same(dtype: torch.dtype, backend: str) -> None:
    # neither V = 1000 nor -100 fits uint8, where it would wrap to 156
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([3, 100, 127] if dtype == torch.int8 else [3, 156, 240 if dtype == torch.uint8 else 999])
    expected = token_logprobs(logits, ids, backend=backend)
    assert (expected < 0).all()
    assert torch.equal(token_logprobs(logits, ids.to(dtype), backend=backend), expected)
    mine, theirs = leaf(logits), leaf(logits)
    token_logprobs(mine, ids.to(dtype), backend=backend).sum().backward()
    token_logprobs(theirs, ids, backend=backend).sum().backward()
    assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("shape", [(0, 7), (0, 4, 7), (4, 0, 7)])
def test_token_logprobs_no_rows_gives_empty_and_an_empty_gradient(shape: tuple[int, ...], backend: str) -> None:
    logits = torch.zeros(shape, requires_grad=True)
    logprobs, entropies = token_logprobs(
        logits, torch.zeros(shape[:-1], dtype=torch.long), entropy=True, backend=backend
    )
    assert logprobs.shape == entropies.shape == shape[:-1]
    (logprobs.sum() + entropies.sum()).backward()
    assert logits.grad.shape == shape


def test_token_logprobs_padded_equals_packed_bit_for_bit(backend: str) -> None:
    generator = torch.Generator().manual_seed(1)
    logits, ids = torch.randn(2, 3, 65, generator=generator), torch.randint(0, 65, (2, 3), generator=generator)
    padded = token_logprobs(logits, ids, backend=backend)
    packed = token_logprobs(logits.reshape(6, 65), ids.reshape(6), backend=backend)
    assert padded.shape == (2, 3)
    assert torch.equal(padded.reshape(6), packed)


def test_token_logprobs_same_input_gives_the_same_bits(backend: str) -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([1, 2, 3])
    runs = []
    for _ in range(2):
        mine = leaf(logits)
        logprobs = token_logprobs(mine, ids, backend=backend)
        logprobs.sum().backward()
        runs.append((logprobs.detach(), mine.grad))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
