"""Comparisons that name the worst place."""

import numpy
import torch


def as_torch(array):
    """A torch tensor of the same bits; bfloat16 of numpy too."""
    if isinstance(array, torch.Tensor):
        return array.detach()
    if str(array.dtype) == "bfloat16":
        return torch.from_numpy(array.view(numpy.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def assert_same_bits(got, want, name="result"):
    """Type, shape and every bit; NaNs with their payload."""
    got, want = as_torch(got), as_torch(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape), name
    integers = {2: torch.int16, 4: torch.int32}[got.element_size()]
    differs = got.contiguous().view(integers) != want.contiguous().view(integers)
    if differs.any():
        place = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(f"{name}{place}: {got[place].item()}, want {want[place].item()}; {differs.sum()} differ")


def assert_within(got, want, tolerance, name="result"):
    """|got - want| <= tolerance at every element, tolerance a number or a tensor."""
    got, want = as_torch(got).double(), as_torch(want).double()
    assert got.shape == want.shape, name
    if not got.numel():
        return
    excess = (got - want).abs() - tolerance
    worst = excess.argmax()
    place = tuple(int(i) for i in numpy.unravel_index(int(worst), excess.shape))
    bound = tolerance if isinstance(tolerance, float) else tolerance.expand_as(excess)[place].item()
    assert excess.max() <= 0, f"{name}{place}: {got[place]}, want {want[place]} within {bound}"
