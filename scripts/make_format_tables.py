#!/usr/bin/env python3
"""Writes the reference tables of tests/data/formats from two independent libraries.

    pip install numpy ml_dtypes==0.6.0 gfloat==0.5.2
    scripts/make_format_tables.py           # write the tables
    scripts/make_format_tables.py --check   # 1 and the file's name when a table on disk differs

Every entry is computed by ml_dtypes and by gfloat, and the script stops where they disagree. Neither saturates in every
format, so ml_dtypes gets clipped values and gfloat is asked for saturation; what they do otherwise is asserted and
printed. NaN inputs are left out: a NaN's code is a convention (in the formats without a NaN, ml_dtypes gives a zero of
the other sign and gfloat refuses).
"""

import argparse
import dataclasses
import pathlib
import sys
from importlib.metadata import version

import gfloat
import ml_dtypes
import numpy as np
from gfloat import formats as gf

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "formats"
VERSIONS = {"ml_dtypes": "0.6.0", "gfloat": "0.5.2"}


@dataclasses.dataclass(frozen=True)
class Element:
    """An element format in both libraries, and the width of its code."""

    name: str
    dtype: type
    info: gfloat.FormatInfo
    bits: int


ELEMENTS = [
    Element("e4m3", ml_dtypes.float8_e4m3fn, gf.format_info_ocp_e4m3, 8),
    Element("e5m2", ml_dtypes.float8_e5m2, gf.format_info_ocp_e5m2, 8),
    Element("e2m3", ml_dtypes.float6_e2m3fn, gf.format_info_ocp_e2m3, 6),
    Element("e3m2", ml_dtypes.float6_e3m2fn, gf.format_info_ocp_e3m2, 6),
    Element("e2m1", ml_dtypes.float4_e2m1fn, gf.format_info_ocp_e2m1, 4),
]
# Neither library names UE4M3. ml_dtypes: the non-negative half of E4M3; gfloat: an unsigned format of seven bits.
UE4M3 = dataclasses.replace(gf.format_info_ocp_e4m3, name="ue4m3", k=7, is_signed=False, has_nz=False)
SCALES = [
    Element("e8m0", ml_dtypes.float8_e8m0fnu, gf.format_info_ocp_e8m0, 8),
    Element("ue4m3", ml_dtypes.float8_e4m3fn, UE4M3, 7),
]


def float_bits(values):
    return np.asarray(values, np.float32).view(np.uint32)


def floats(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def decode(element):
    """The float32 bits of every code; every NaN becomes 0x7FC00000."""
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    first = codes.view(element.dtype).astype(np.float32)
    second = gfloat.decode_ndarray(element.info, codes.astype(np.int64)).astype(np.float32)
    nan = np.isnan(first)
    require(np.array_equal(nan, np.isnan(second)), f"{element.name}: the libraries disagree on which codes are NaN")
    same = (float_bits(first) == float_bits(second)) | nan
    require(same.all(), f"{element.name}: the libraries decode codes {codes[~same]} differently")
    return np.where(nan, np.uint32(0x7FC00000), float_bits(first))


def encode(element, bits):
    """Nearest-even, saturating codes of float32 bits, none of them NaN."""
    values = floats(bits)
    limit = np.float32(element.info.max)
    first = np.clip(values, -limit, limit).astype(element.dtype).view(np.uint8)
    rounded = gfloat.round_ndarray(element.info, values.astype(np.float64), gfloat.RoundMode.TiesToEven, sat=True)
    second = gfloat.encode_ndarray(element.info, rounded).astype(np.uint8)
    same = first == second
    require(same.all(), f"{element.name}: the libraries encode {values[~same][:5]} differently")
    return first


def describe_overflow(element, bits):
    """Says what each library does beyond max when it is not told to saturate; up to max, neither may differ."""
    values = floats(bits)
    saturated = encode(element, bits)
    with np.errstate(invalid="ignore", over="ignore"):
        plain = values.astype(element.dtype).view(np.uint8)
    beyond = plain != saturated
    require((np.abs(values[beyond]) > element.info.max).all(), f"{element.name}: ml_dtypes differs up to max")
    if element.info.num_nans == 0:
        require(not beyond.any(), f"{element.name}: ml_dtypes does not saturate")
        require(refuses(element, values), f"{element.name}: gfloat without sat has a code beyond max")
        return f"{element.name}: ml_dtypes saturates without clip; gfloat refuses without sat"
    unsaturated = gfloat.round_ndarray(element.info, values.astype(np.float64), gfloat.RoundMode.TiesToEven, sat=False)
    require(np.array_equal(beyond, ~np.isfinite(unsaturated)), f"{element.name}: the libraries overflow differently")
    first = values[beyond & (values > 0)].min()
    given = " ".join(sorted({f"0x{code:02x}" for code in plain[beyond]}))
    return f"{element.name}: without clip and sat both leave the finite codes at {first!s} (ml_dtypes: {given})"


def refuses(element, values):
    try:
        gfloat.round_ndarray(element.info, values.astype(np.float64), gfloat.RoundMode.TiesToEven, sat=False)
    except ValueError:
        return True
    return False


def sweep(element):
    """Float32 bits, both signs: around every tie and value, the smallest floats, max and beyond, a coarse scan."""
    decoded = floats(decode(element)[: 1 << (element.bits - 1)])
    values = decoded[np.isfinite(decoded)].astype(np.float64)
    step = values[-1] - values[-2]
    ties = np.append((values[1:] + values[:-1]) / 2, values[-1] + step / 2)
    require((ties.astype(np.float32) == ties).all(), f"{element.name}: a tie is not a float32")
    near = np.arange(-4, 5)
    centres = [float_bits(ties), float_bits(values[1:]), float_bits([values[-1] + step, 2 * values[-1]])]
    around = (np.concatenate(centres).astype(np.int64)[:, None] + near).ravel()
    smallest = np.arange(0, 5)
    normal = 0x00800000 + near
    scan = np.arange(0, 0x7F800000, 0x00155555)
    edges = np.array([0x7F7FFFFF, 0x7F800000])
    magnitudes = np.unique(np.concatenate([around, smallest, normal, scan, edges]))
    return np.concatenate([magnitudes, magnitudes + 0x80000000]).astype(np.uint32)


def decode_table():
    lines = ["# format, code, float32 bits (7fc00000: NaN)"]
    for element in ELEMENTS + SCALES:
        lines += [f"{element.name} {code:02x} {bits:08x}" for code, bits in enumerate(decode(element))]
    return lines


def bf16_table():
    """All BF16 values but NaNs, as runs of consecutive patterns with one code."""
    patterns = np.concatenate([np.arange(0, 0x7F81), np.arange(0x8000, 0xFF81)]).astype(np.uint32)
    lines = ["# format, first BF16 pattern, last BF16 pattern, code of all of them"]
    for element in ELEMENTS:
        codes = encode(element, patterns << np.uint32(16))
        starts = np.flatnonzero(np.append(True, (np.diff(codes) != 0) | (np.diff(patterns) != 1)))
        for start, end in zip(starts, np.append(starts[1:], len(codes)), strict=True):
            lines.append(f"{element.name} {patterns[start]:04x} {patterns[end - 1]:04x} {codes[start]:02x}")
    return lines


def fp32_table(element):
    bits = sweep(element)
    lines = ["# float32 bits, code"]
    return lines + [f"{pattern:08x} {code:02x}" for pattern, code in zip(bits, encode(element, bits), strict=True)]


def make_tables():
    tables = {"decode.txt": decode_table(), "encode_bf16.txt": bf16_table()}
    tables |= {f"encode_fp32_{element.name}.txt": fp32_table(element) for element in ELEMENTS}
    made_by = "# scripts/make_format_tables.py, " + ", ".join(f"{name} {is_}" for name, is_ in VERSIONS.items())
    return {name: ("\n".join([made_by, *lines]) + "\n").encode() for name, lines in tables.items()}


def require(condition, message):
    if not condition:
        sys.exit(f"make_format_tables: {message}")


def compare(tables):
    on_disk = {path.name for path in FOLDER.glob("*")}
    require(on_disk == set(tables), f"{FOLDER} holds {sorted(on_disk)}, expected {sorted(tables)}")
    for name, data in tables.items():
        require((FOLDER / name).read_bytes() == data, f"{name} differs from what the libraries say")


def write(tables):
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, data in tables.items():
        (FOLDER / name).write_bytes(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the tables on disk, write nothing")
    check = parser.parse_args().check
    for name, wanted in VERSIONS.items():
        require(version(name) == wanted, f"{name} is {version(name)}, needs {wanted}")
    for element in ELEMENTS:
        print(describe_overflow(element, sweep(element)))
    tables = make_tables()
    (compare if check else write)(tables)
    print(f"{len(tables)} tables, {sum(map(len, tables.values()))} bytes: {'the same' if check else 'written'}")


if __name__ == "__main__":
    main()
