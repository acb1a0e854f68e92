"""mxflash.quantize and files: what the command line writes."""

import ml_dtypes
import numpy
import pytest
import torch

import mxflash
from conftest import CAPTURE
from support import assert_same_bits


@pytest.mark.parametrize("tensor", ["q", "v"])
@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (("--format", "e4m3", "--block", "token"), {"format": "e4m3", "block": "token"}),
        (
            ("--format", "e2m1", "--block", "dims:32", "--scale-rule", "uos", "--hadamard"),
            {"format": "e2m1", "block": "dims:32", "scale_rule": "uos", "hadamard": True},
        ),
        (("--format", "nvfp4", "--block", "dims:16"), {"format": "nvfp4", "block": "dims:16"}),
        (("--format", "e5m2", "--block", "square:32"), {"format": "e5m2", "block": "square:32"}),
        (("--format", "e4m3", "--block", "tensor"), {"format": "e4m3", "block": "tensor"}),
        (
            ("--format", "e2m1", "--block", "tokens:32", "--rounding", "stochastic", "--seed", "7"),
            {"format": "e2m1", "block": "tokens:32", "rounding": "stochastic", "seed": 7},
        ),
    ],
)
def test_codes_are_the_command_lines(tensor, arguments, settings, capture, command_line):
    folder = command_line("quantize", CAPTURE, "--tensor", tensor, *arguments, "--out", "out.safetensors")
    want, _ = mxflash.load(folder / "out.safetensors")
    for x in (capture[tensor], capture[tensor].view(torch.uint16).numpy().view(ml_dtypes.bfloat16)):
        got = mxflash.quantize(x, **settings, cu_seqlens=capture["cu_seqlens"])
        numpy.testing.assert_array_equal(numpy.asarray(got.codes), want["codes"])
        numpy.testing.assert_array_equal(numpy.asarray(got.scales), want["scales"])
        assert_same_bits(got.dequantized, want["dequantized"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "e4m4"}, "format: "),
        ({"format": "bf16"}, "format: 'bf16' given"),
        ({"format": 3}, "format: 3 given"),
        ({"block": "dims:7"}, "block: "),
        ({"block": "dims:16"}, "dims:16"),
        ({"format": "nvfp4"}, "nvfp4"),
        ({"scale_rule": "round"}, "scale_rule: "),
        ({"scale_rule": "uos"}, "uos"),
        ({"format": "nvfp4", "block": "dims:16", "scale_rule": "ceil"}, "scale_rule: ceil given with nvfp4"),
        ({"rounding": "up"}, "rounding: "),
        ({"cu_seqlens": [0, 3]}, "cu_seqlens"),
    ],
)
def test_bad_requests_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        mxflash.quantize(torch.ones(64, 2, 32), **settings)


def test_no_dims_are_refused():
    for shape in ((3, 2, 0), (0, 2, 0), (3, 0, 0)):
        with pytest.raises(ValueError, match="0 dims given"):
            mxflash.quantize(torch.ones(shape))


def test_files_go_round(tmp_path):
    tensors = {
        "q": torch.randn(5, 2, 8).to(torch.bfloat16),
        "half": torch.randn(3).half(),
        "f": torch.randn(4, 6).T,
        "cu_seqlens": torch.tensor([0, 5], dtype=torch.int32),
        "wide": torch.tensor([2**40]),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "empty": torch.zeros(0, 2, 8),
    }
    path = tmp_path / "x.safetensors"
    mxflash.save(path, tensors, {"causal": "true"})
    got, metadata = mxflash.load(path, "torch")
    assert metadata == {"causal": "true"}
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name
    as_numpy, _ = mxflash.load(path)
    assert as_numpy["q"].dtype == ml_dtypes.bfloat16
    mxflash.save(tmp_path / "y.safetensors", as_numpy, metadata)
    assert (tmp_path / "y.safetensors").read_bytes() == path.read_bytes()


def test_bad_files_are_refused_and_outputs_are_whole_or_not_at_all(tmp_path):
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"no header")
    with pytest.raises(RuntimeError, match=r"bad\.safetensors"):
        mxflash.load(bad)
    with pytest.raises(RuntimeError, match="none-such"):
        mxflash.load(tmp_path / "none-such")
    with pytest.raises(ValueError, match="framework: 'jax' given"):
        mxflash.load(CAPTURE, "jax")
    with pytest.raises(ValueError, match="x: type float64 given"):
        mxflash.save(bad, {"x": torch.zeros(3, dtype=torch.float64)})
    with pytest.raises(ValueError, match="NUL"):
        mxflash.save(bad, {"a\0b": torch.zeros(3)})
    with pytest.raises(ValueError, match="metadata: "):
        mxflash.save(bad, {"x": torch.zeros(3)}, {"causal": True})
    with pytest.raises(RuntimeError, match="folder"):
        mxflash.save(tmp_path / "folder" / "x.safetensors", {"x": torch.zeros(3)})
    assert bad.read_bytes() == b"no header"
    assert [path.name for path in tmp_path.iterdir()] == ["bad.safetensors"]
