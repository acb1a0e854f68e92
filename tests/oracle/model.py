"""The numerics contract a second time: dense numpy matrices over a whole document, guided by one recipe's JSON alone.

Written from docs/numerics.md, docs/formats.md and docs/recipes.md, not from the sources, so that a mistake in one is
unlikely to be in the other. Clear rather than fast.
"""

import dataclasses
import itertools
import math

import ml_dtypes
import numpy as np

LOG2_E = math.log2(math.e)
NO_EXPONENT = -127  # of an all-zero block

# max, mantissa bits, least exponent of a normal, threshold of uos
FORMATS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 3, -6, 448.0),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0, 2, -14, 57344.0),
    "e2m3": (ml_dtypes.float6_e2m3fn, 7.5, 3, 0, 7.875),
    "e3m2": (ml_dtypes.float6_e3m2fn, 28.0, 2, -2, 28.0),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0, 1, 0, 7.25),
}
# Rows and columns, 0 for all.
BLOCKS = {
    "token": (1, 0),
    "tokens:32": (32, 0),
    "dims:16": (1, 16),
    "dims:32": (1, 32),
    "channel:16": (16, 1),
    "channel:32": (32, 1),
    "square:32": (32, 32),
    "tensor": (0, 0),
    "static": (0, 0),
}
# The upper half of the Philox stream of each operand that may round stochastically.
STREAMS = {
    ("dp", "left"): 1,
    ("dv", "tokens"): 2,
    ("dp", "right"): 3,
    ("dq", "tokens"): 4,
    ("dk", "tokens"): 5,
    ("dq", "weights"): 6,
    ("dk", "weights"): 7,
}


def single(x):
    return np.asarray(x, np.float32).astype(np.float64)


def half(x):
    return x.astype(np.float16).astype(np.float64)


def power(exponent):
    return np.ldexp(1.0, exponent)


# Formats


def element_format(encoding):
    return "e2m1" if encoding == "nvfp4" else encoding


def is_quantized(operand):
    return operand["encoding"] not in ("f32", "bf16")


def folds(operand):
    return is_quantized(operand) and operand["block"] in ("token", "tokens:32")


def step_at(x, name):
    """The distance of the format's values around |x|."""
    _, _, mantissa, least, _ = FORMATS[name]
    return power(np.maximum(np.frexp(x)[1] - 1, least) - mantissa)


def nearest(x, name):
    """The value of the nearest code of the FP32 that x rounds to."""
    dtype, top = FORMATS[name][:2]
    return np.clip(x, -top, top).astype(np.float32).astype(dtype).astype(np.float64)


def stochastic(x, name, random):
    x = single(x)
    top = FORMATS[name][1]
    magnitude = np.abs(x)
    step = step_at(magnitude, name)
    below = np.floor(magnitude / step)
    up = random < np.floor((magnitude / step - below) * 2.0**32)
    return np.copysign(np.minimum((below + up) * step, top), x)


def encode(x, operand, random):
    name = element_format(operand["encoding"])
    return nearest(x, name) if operand["rounding"] == "nearest" else stochastic(x, name, random)


def scale_exponent(maximum, name, rule):
    """The power-of-two scale of a block with that maximum."""
    limit = FORMATS[name][4] if rule == "uos" else FORMATS[name][1]
    significand, exponent = np.frexp(single(maximum))
    limit_significand, limit_exponent = math.frexp(limit)
    above = 0 if rule == "floor" else (significand > limit_significand)
    return np.where(maximum > 0, np.clip(exponent - limit_exponent + above, -127, 127), NO_EXPONENT)


def philox(seed, stream, index):
    """Word 0 of Philox4x32-10 of counter (index, stream)."""
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    index = index.astype(np.uint64)
    x0, x1 = index & low, index >> shift
    x2, x3 = np.full_like(x0, stream & 0xFFFFFFFF), np.full_like(x0, stream >> 32)
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * x0, np.uint64(0xCD9E8D57) * x2
        x0, x1 = (product1 >> shift) ^ x1 ^ np.uint64(key0), product1 & low
        x2, x3 = (product0 >> shift) ^ x3 ^ np.uint64(key1), product0 & low
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return x0


# Blocks


def over_blocks(x, block, reduce=np.max, fill=0.0):
    """Of every element of a matrix, what `reduce` makes of its block."""
    rows, columns = (extent or max(x.shape[axis], 1) for axis, extent in enumerate(block))
    high, wide = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
    padded = np.full((high * rows, wide * columns), fill, x.dtype)
    padded[: x.shape[0], : x.shape[1]] = x
    tiles = reduce(padded.reshape(high, rows, wide, columns), axis=(1, 3))
    return tiles.repeat(rows, 0).repeat(columns, 1)[: x.shape[0], : x.shape[1]]


def quantize(x, operand, random, level_block):
    """Codes' values and, element by element, the scale that belongs to each; level_block is nvfp4's second level's."""
    x = single(x)
    if not is_quantized(operand):
        return (x if operand["encoding"] == "f32" else x.astype(ml_dtypes.bfloat16).astype(np.float64)), np.ones(
            x.shape
        )
    maximum = over_blocks(np.abs(x), BLOCKS[operand["block"]])
    if operand["encoding"] != "nvfp4":
        exponent = scale_exponent(maximum, operand["encoding"], operand["rule"])
        return encode(x * power(-exponent), operand, random), power(exponent)
    level = np.ones(x.shape)
    if operand["second_level"] == "adaptive":
        top = over_blocks(np.abs(x), level_block)
        significand, exponent = np.frexp(top / (448.0 * 6.0))
        level = np.where(top > 0, power(exponent - (significand == 0.5)), 1.0)
    sixth = maximum / level / 6.0  # a double: no tie of E4M3 that was none
    scale = np.minimum(np.rint(sixth / step_at(sixth, "e4m3")) * step_at(sixth, "e4m3"), 448.0)
    scale = np.where(maximum > 0, np.maximum(scale, 2.0**-9), 0.0)
    quotient = np.divide(x / level, scale, out=np.zeros(x.shape), where=scale > 0)
    return encode(quotient, operand, random), scale * level


# Token operands


def rotation_shift(dims):
    return math.ceil(math.log2(dims) / 2)


def rotate(x, dtype):
    """H 2^-s x along the last axis, by additions in that type alone."""
    dims = x.shape[-1]
    x = (x * 2.0 ** -rotation_shift(dims)).astype(dtype)
    distance = 1
    while distance < dims:
        pairs = x.reshape(*x.shape[:-1], dims // (2 * distance), 2, distance)
        x = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2)
        x = x.reshape(*x.shape[:-3], dims)
        distance *= 2
    return x


@dataclasses.dataclass
class Tokens:
    """A token operand of one document and head: a row stands for values 2^exponent."""

    values: np.ndarray
    exponents: np.ndarray
    folds: bool = False

    @property
    def whole(self):
        return self.values * power(self.exponents)[:, None]


@dataclasses.dataclass
class Sequence:
    """q, k, v or dO of one document and head, as FP32, zero where poisoned."""

    rows: np.ndarray
    poisoned: np.ndarray
    tensor_maximum: float  # over all documents and heads
    head: int

    def tokens(self, recipe, product, side, seed, cut=False):
        place = recipe[product]["cut"] if cut else recipe[product]
        operand = place[side]
        random = random_bits(self.rows.shape, seed, product, side, self.head, operand)
        if is_quantized(operand) and operand["block"] == "tensor":
            scale = single(self.tensor_maximum / FORMATS[operand["encoding"]][1]) or 1.0
            values = single(encode(single(self.rows / scale), operand, random) * scale)
            return Tokens(values, np.zeros(len(self.rows), int))
        level_block = (1, 0) if operand["block"] == "dims:16" else (128, 0)
        codes, scales = quantize(self.rows, operand, random, level_block)
        if not folds(operand):
            return Tokens(codes * scales, np.zeros(len(self.rows), int))
        return Tokens(codes, np.frexp(scales[:, 0])[1] - 1, True)


def random_bits(shape, seed, product, side, head, operand):
    if operand["rounding"] == "nearest":
        return None
    row, column = np.indices(shape, np.uint64)
    return philox(seed, (STREAMS[product, side] << 32) + head, (row << np.uint64(32)) + column)


# Weights


def exponential(x, key, kind):
    """2^x as FP32."""
    exact = single(np.exp2(x))
    if kind == "exact":
        return exact
    if kind == "mitchell":
        bits, top, shift = np.floor((x + 127 - 0.0695) * 2.0**23), 0x7F7FFFFF, 0
    else:
        bits, top, shift = np.rint((x + 127) * 128 - 7), 0x7F7F, 16
    bits = np.clip(bits, 0, top).astype(np.uint32) << np.uint32(shift)
    rough = bits.view(np.float32).astype(np.float64)
    return rough if kind == "mitchell" else np.where((key // 2) % 8 < 5, rough, exact)


def quantized_p(t, reference, visible, operand, recipe):
    """P of the visible pairs, and where its codes are in the format's normal range."""
    key = np.broadcast_to(np.arange(t.shape[1]), t.shape)
    name = operand["encoding"]
    least = power(FORMATS[name][3]) if is_quantized(operand) else 0.0
    if operand["block"] == "dims:32" and is_quantized(operand):
        group = over_blocks(t, (1, 32), fill=-np.inf)
        floor = np.where(visible, np.floor(np.where(visible, group, 0)), 0)
        maximum = np.exp2(np.where(visible, group - floor, 0))
        exponent = (floor + scale_exponent(maximum, name, operand["rule"])).astype(int)
    else:
        exponent = reference - (round(math.log2(recipe["beta"])) if is_quantized(operand) else 0)
    codes = value_of(exponential(np.where(visible, t - exponent, -np.inf), key, recipe["exponential"]), operand)
    return codes * power(exponent - reference), codes >= least


def value_of(x, operand):
    """Without a scale, to the nearest."""
    if is_quantized(operand):
        return nearest(x, operand["encoding"])
    return x if operand["encoding"] == "f32" else x.astype(ml_dtypes.bfloat16).astype(np.float64)


def shifted(codes, shift, name):
    """Codes times a power of two, rounded again where they fall below the normal range."""
    return nearest(codes * power(shift), name)


# One document and one query head


@dataclasses.dataclass
class Head:
    recipe: dict
    visible: np.ndarray
    cut: np.ndarray  # pairs in tiles that the mask cuts
    scale: float  # with the factor that a rotation leaves
    seed: int
    q: Sequence
    k: Sequence
    v: Sequence
    dout: Sequence | None
    dlse: np.ndarray

    def forward(self):
        recipe, visible, seed = self.recipe, self.visible, self.seed
        q, k = self.q.tokens(recipe, "s", "left", seed), self.k.tokens(recipe, "s", "right", seed)
        s = self.scale * LOG2_E * (q.whole @ k.whole.T)
        self.sees = visible.any(1)
        self.row_poison = self.sees & (self.q.poisoned | (visible & self.k.poisoned).any(1))
        self.o_poison = self.row_poison | (visible & self.v.poisoned).any(1)

        pairs = [(recipe["o"]["weights"], self.v.tokens(recipe, "o", "tokens", seed), visible)]
        if recipe["o"]["cut"]:
            cut = self.cut
            pairs = [(*pairs[0][:2], visible & ~cut)]
            pairs.append(
                (recipe["o"]["cut"]["weights"], self.v.tokens(recipe, "o", "tokens", seed, True), visible & cut)
            )
        e = sum(np.where(where, v.exponents, 0) for _, v, where in pairs)
        # A weight whose V_j is 2^-3 or less of the row's largest may fall below P's normal range however much it counts
        # in l and in the gradients: there it stays unrounded.
        folded = sum(where & v.folds for _, v, where in pairs).astype(bool)
        small = e <= np.max(np.where(folded, e, -np.inf), 1, initial=-np.inf, keepdims=True) - 3
        t = np.where(visible, s + e, -np.inf)
        self.reference = np.where(self.sees, np.ceil(np.max(t, 1, initial=-np.inf)), 0).astype(int)
        key = np.broadcast_to(np.arange(t.shape[1]), t.shape)
        raw = exponential(np.where(visible, s - self.reference[:, None], -np.inf), key, recipe["exponential"])
        o, share = 0, 0
        for operand, v, where in pairs:
            p, normal = quantized_p(np.where(where, t, -np.inf), self.reference[:, None], where, operand, recipe)
            o = o + p @ v.values
            share = share + np.where(small & where & v.folds & ~normal, raw, p * power(-v.exponents))
        self.l = (share if recipe["row_sum"] == "quantized" else raw).sum(1)
        divisor = np.where(self.sees, self.l, 1)[:, None]
        self.w = share / divisor
        self.o = o / divisor
        with np.errstate(divide="ignore"):
            lse = math.log(2) * (self.reference + np.log2(self.l))
        return np.where(self.o_poison[:, None], np.nan, self.o), np.where(self.row_poison, np.nan, lse)

    def backward(self):
        """dQ and dK of the rotated rows, and dV."""
        recipe, visible, seed = self.recipe, self.visible, self.seed
        dout = self.dout.tokens(recipe, "dp", "left", seed)
        v = self.v.tokens(recipe, "dp", "right", seed)
        grad_poison = self.sees & (self.o_poison | self.dout.poisoned | ~np.isfinite(self.dlse))
        self.dlse = np.where(np.isfinite(self.dlse), self.dlse, 0)
        dp = dout.whole @ v.whole.T
        d = (self.w * dp).sum(1)
        ds = np.where(visible & ~grad_poison[:, None], self.scale * self.w * (dp - (d - self.dlse)[:, None]), 0)

        dv_poison = self.row_poison | (self.sees & self.dout.poisoned)
        dv = self.value_gradient(np.where(dv_poison[:, None], 0, self.w))
        dq = self.query_gradient(ds, dout, v)
        dk = self.key_gradient(ds)
        dq[grad_poison] = np.nan
        dk[(visible & grad_poison[:, None]).any(0)] = np.nan
        dv[(visible & dv_poison[:, None]).any(0)] = np.nan
        return dq, dk, dv

    def value_gradient(self, w):
        operand = self.recipe["dv"]["weights"]
        dout = self.dout.tokens(self.recipe, "dv", "tokens", self.seed)
        top = largest(dout.exponents, ~self.dout.poisoned)
        w = w * power(np.where(self.dout.poisoned, 0, dout.exponents - top))[:, None]
        if is_quantized(operand) and operand["block"] == "static":
            multiplier = power(math.frexp(FORMATS[operand["encoding"]][1])[1] - 1)
            a = nearest(multiplier * w, operand["encoding"]) / multiplier
        else:
            codes, scales = quantize(w, operand, None, None)
            a = codes * scales
        return (a.T @ dout.values) * power(top)

    def shared_codes(self):
        weights = self.recipe["dq"]["weights"]
        if weights != self.recipe["dk"]["weights"] or not is_quantized(weights):
            return False
        return weights["block"] in ("square:32", "dims:32")

    def ds_codes(self, ds, product, operand):
        random = random_bits(ds.shape, self.seed, product, "weights", self.q.head, operand)
        level_block = (1, 128) if operand["block"] == "dims:16" else (128, 1)
        return quantize(ds, operand, random, level_block)

    def query_gradient(self, ds, dout, v):
        recipe = self.recipe
        operand = recipe["dq"]["weights"]
        k = self.k.tokens(recipe, "dq", "tokens", self.seed)
        cut = self.cut if recipe["dq"]["cut"] else np.zeros_like(self.visible)
        plain = np.where(cut, 0, ds)
        largest_k = np.abs(k.whole).max(1, initial=0)
        if self.shared_codes():
            codes, scales = self.ds_codes(plain, "dq", operand)
            taken = np.broadcast_to(~self.k.poisoned, ds.shape)
            taken = taken & self.visible if operand["block"] == "dims:32" else taken
            exponents = np.broadcast_to(k.exponents.astype(float), ds.shape)
            top = over_blocks(np.where(taken, exponents, -np.inf), (1, 32), fill=-np.inf)
            top = np.where(np.isfinite(top), top, 0).astype(int)
            shift = np.where(taken, exponents - top, 0).astype(int)
            b = shifted(codes, shift, operand["encoding"]) * scales * power(top)
        else:
            codes, scales = self.ds_codes(plain * power(k.exponents), "dq", operand)
            b = codes * scales
        terms = [(b, k.values)]
        if recipe["dq"]["cut"]:
            k_cut = self.k.tokens(recipe, "dq", "tokens", self.seed, True)
            inside = np.where(cut, ds, 0) * power(k_cut.exponents)
            codes, scales = self.ds_codes(inside, "dq", recipe["dq"]["cut"]["weights"])
            terms.append((codes * scales, k_cut.values))
            largest_k = np.maximum(largest_k, np.abs(k_cut.whole).max(1, initial=0))
        if recipe["dq_accumulation"] == "f32":
            return sum(weights @ values for weights, values in terms)
        return self.half_precision_sum(terms, dout, v, largest_k)

    def half_precision_sum(self, terms, dout, v, norm_k):
        """dQ in FP16 over tiles of 128 keys, scaled so that the bound of |dQ| fits."""
        norm_v = np.linalg.norm(v.whole, axis=1)
        norm_dout = np.linalg.norm(dout.whole, axis=1)
        rows, keys = self.visible.shape
        if self.recipe["dq_accumulation"] == "f16_sequence":
            bound = 2 * norm_dout.max(initial=0) * norm_v.max(initial=0) + np.abs(self.dlse).max(initial=0)
            bound = np.full(rows, bound * norm_k.max(initial=0))
        else:
            last = np.where(self.sees, keys - 1 - np.argmax(self.visible[:, ::-1], 1), 0)
            bound = 2 * norm_dout * np.maximum.accumulate(norm_v)[last] + np.abs(self.dlse)
            bound = bound * np.maximum.accumulate(norm_k)[last]
        bound = abs(self.scale) * bound
        p = 14 - np.ceil(np.log2(np.where(bound > 0, bound, 1))).astype(int)
        total = np.zeros((rows, terms[0][1].shape[1]))
        for begin in range(0, keys, 128):
            tile = slice(begin, begin + 128)
            part = half(single(sum(weights[:, tile] @ values[tile] for weights, values in terms) * power(p)[:, None]))
            total = half(total + part)
        return total * power(-p)[:, None]

    def key_gradient(self, ds):
        recipe = self.recipe
        operand = recipe["dk"]["weights"]
        q = self.q.tokens(recipe, "dk", "tokens", self.seed)
        if self.shared_codes():
            codes, scales = self.ds_codes(ds, "dq", operand)
            exponents = q.exponents[:, None] + np.frexp(scales)[1] - 1
            taken = ~self.q.poisoned[:, None] & over_blocks(self.visible, (1, 32), np.any, False)
            top = over_blocks(np.where(taken, exponents.astype(float), -np.inf), (32, 32), fill=-np.inf)
            top = np.where(np.isfinite(top), top, 0).astype(int)
            shift = np.where(taken, exponents - top, 0).astype(int)
            c = shifted(codes, shift, operand["encoding"]) * power(top)
        else:
            codes, scales = self.ds_codes(ds * power(q.exponents)[:, None], "dk", operand)
            c = codes * scales
        return c.T @ q.values


def largest(exponents, taken):
    return int(exponents[taken].max()) if taken.any() else 0


# All documents and heads


def visibility(queries, keys, left, right, offset):
    i, j = np.arange(queries)[:, None] + offset, np.arange(keys)[None, :]
    visible = np.ones((queries, keys), bool)
    if left is not None:
        visible &= j >= i - left
    if right is not None:
        visible &= j <= i + right
    return visible


def cut_tiles(queries, keys, left, right):
    """Pairs in 32 x 32 tiles where a query does not see a key, those past the last key counted."""
    whole = visibility(queries, -(-keys // 32) * 32, left, right, keys - queries)
    return over_blocks(~whole, (32, 32), np.any, False)[:, :keys]


def with_exact_causality(recipe):
    """dS squares become one scale a query row and 32 keys."""
    recipe = {**recipe}
    for product in ("dq", "dk"):
        weights = recipe[product]["weights"]
        if weights["block"] == "square:32":
            recipe[product] = {**recipe[product], "weights": {**weights, "block": "dims:32"}}
    return recipe


def attention(recipe, inputs, left=None, right=0, seed=0, scale=None):
    """o, lse and, with `do` (and `dlse`, or none) and a recipe that has a backward, dq, dk, dv as float64 arrays.

    left, right: None is no bound.
    """
    dims = inputs["q"].shape[-1]
    scale = 1 / math.sqrt(dims) if scale is None else float(np.float32(scale))
    rotated = recipe["hadamard"] == "required" or (recipe["hadamard"] == "at_128" and dims == 128)
    factor = 2.0 ** (2 * rotation_shift(dims)) / dims if rotated else 1.0
    with_gradients = "do" in inputs and is_training(recipe)

    rows, poisoned, maximum = {}, {}, {}
    for name in ("q", "k", "v", "do") if with_gradients else ("q", "k", "v"):
        values = np.asarray(inputs[name], np.float32)
        poisoned[name] = ~np.isfinite(values).all(-1)
        values = np.where(poisoned[name][..., None], np.float32(0), values)
        values = rotate(values, np.float32) if rotated and name in "qk" else values
        rows[name] = values.astype(np.float64)
        maximum[name] = np.abs(rows[name]).max(initial=0)

    def sequence(name, begin, end, head):
        part = slice(begin, end)
        return Sequence(rows[name][part, head], poisoned[name][part, head], maximum[name], head)

    heads, kv_heads = rows["q"].shape[1], rows["k"].shape[1]
    dlse = np.asarray(inputs.get("dlse", np.zeros(rows["q"].shape[:2])), np.float64)
    out = {"o": np.zeros((*rows["q"].shape[:2], rows["v"].shape[2])), "lse": np.zeros(rows["q"].shape[:2])}
    if with_gradients:
        out |= {"dq": np.zeros_like(rows["q"]), "dk": np.zeros_like(rows["k"]), "dv": np.zeros_like(rows["v"])}
    cu_q, cu_k = inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            one = Head(
                recipe,
                visibility(q1 - q0, k1 - k0, left, right, k1 - k0 - (q1 - q0)),
                cut_tiles(q1 - q0, k1 - k0, left, right),
                scale * factor,
                seed,
                sequence("q", q0, q1, h),
                sequence("k", k0, k1, kv),
                sequence("v", k0, k1, kv),
                sequence("do", q0, q1, h) if with_gradients else None,
                dlse[q0:q1, h],
            )
            out["o"][q0:q1, h], out["lse"][q0:q1, h] = one.forward()
            if with_gradients:
                dq, dk, dv = one.backward()
                out["dq"][q0:q1, h] = rotate(dq, np.float64) if rotated else dq
                out["dk"][k0:k1, kv] += rotate(dk, np.float64) if rotated else dk
                out["dv"][k0:k1, kv] += dv
    return out


def is_training(recipe):
    return recipe["dp"]["left"]["encoding"] != "f32"
