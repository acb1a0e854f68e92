"""What the tests of mxflash.torch on CUDA tensors share."""

import threading

import pytest
import torch

import mxflash
from support import assert_same_bits

NAMES = ("q", "k", "v")
LENGTHS = [1, 33, 0, 128, 129, 70]
ENGINE = next(engine for engine in mxflash.engines() if engine["name"] == "cuda")
NO_DEVICE = None if torch.cuda.is_available() else "torch has no CUDA device"
MISSING = NO_DEVICE or ENGINE["reason"]
on_device = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
on_two_devices = pytest.mark.skipif(
    MISSING is not None or torch.cuda.device_count() < 2, reason=str(MISSING or "one CUDA device, the test needs two")
)


def cuda(p, device="cuda"):
    return {name: tensor.to(device) for name, tensor in p.items()}


def cycles(seconds):
    """Of torch.cuda._sleep, at least."""
    return int(seconds * 2.0e9)


def in_threads(function, count):
    """What function(i) returns, each called in a thread of its own."""
    results = [None] * count

    def call(i):
        results[i] = function(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def beside_device_0(function):
    """What it returns where device 0 is the current one, which it must still be afterwards."""

    def call(_):
        torch.cuda.set_device(0)
        return function(), torch.cuda.current_device()

    ((got, current),) = in_threads(call, 1)
    assert current == 0
    return got


def assert_same(got, want, names=("o", "lse")):
    for name, a, b in zip(names, got, want, strict=True):
        assert_same_bits(a.cpu(), b.cpu(), name)


def strided(kind, p):
    """The same values, lying otherwise."""
    if kind == "fused":
        return torch.cat([p[name] for name in NAMES], 1).split((4, 2, 2), 1)
    if kind == "heads first":
        return [p[name].transpose(0, 1).contiguous().transpose(0, 1) for name in NAMES]
    if kind == "odd address":  # Not to be read 16 bytes at a time.
        return [torch.nn.functional.pad(p[name], (1, 0))[..., 1:] for name in NAMES]
    return [p[name].repeat_interleave(2, 2)[..., ::2] for name in NAMES]
