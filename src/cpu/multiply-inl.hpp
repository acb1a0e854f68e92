// C += sum over segments of A_s B_s, and the orders of operands that it takes. Three ways: FP32 multiply-adds with any
// vector, and BF16, in which every value of a quantized operand is exact, with AMX tiles or AVX-512's dot products.
#if defined(MXFLASH_CPU_MULTIPLY_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef MXFLASH_CPU_MULTIPLY_INL
#undef MXFLASH_CPU_MULTIPLY_INL
#else
#define MXFLASH_CPU_MULTIPLY_INL
#endif

#include "cpu/simd-inl.hpp"

#if HWY_TARGET == HWY_AVX3
#include <immintrin.h>
#endif

HWY_BEFORE_NAMESPACE();
namespace mxflash::cpu::HWY_NAMESPACE {

/// Segment s adds A_s [m][k] times B_s [k][n]. All sizes are multiples of 32 and rows contiguous.
struct Product {
  std::size_t m = 0;
  std::size_t n = 0;
  std::size_t k = 0;
  std::size_t segments = 1;
  const void* const* a = nullptr;
  const void* const* b = nullptr;
  float* c = nullptr;  ///< [m][n]
  float initial = 0;   ///< 0: C starts at zero; 1: it is added to.
};

/// Operands in FP32. B is [k][n].
struct FmaMultiply {
  using Element = float;

  /// Of x [dims][32] as B of products over dims, `padded` rows.
  static void columns(const float* x, std::size_t dims, std::size_t padded, Element* out) {
    for (std::size_t i = 0; i < dims * kBlockSize; i += kLanes) hn::StoreU(hn::Load(kF, x + i), kF, out + i);
    for (std::size_t i = dims * kBlockSize; i < padded * kBlockSize; ++i) out[i] = 0.0F;
  }
  /// As A of products over dims.
  static void rows(const float* x, std::size_t dims, std::size_t padded, Element* out, Element* /*staging*/) {
    transpose(reinterpret_cast<const std::uint32_t*>(x), kBlockSize, dims, kBlockSize,
              reinterpret_cast<std::uint32_t*>(out), padded);
    for (std::size_t r = 0; r < kBlockSize; ++r) {
      for (std::size_t d = dims; d < padded; ++d) out[r * padded + d] = 0.0F;
    }
  }
  /// As A of products over the 32 lanes.
  static void lanes(const float* x, std::size_t dims, std::size_t padded, Element* out) {
    columns(x, dims, padded, out);
  }
  /// As B of products over the 32 lanes: [32][padded].
  static void pairs(const float* x, std::size_t dims, std::size_t padded, Element* out, Element* staging) {
    rows(x, dims, padded, out, staging);
  }
  /// Rows 2 pair and 2 pair + 1 of a B of 32 columns.
  static HWY_INLINE void put_pair(Element* tile, std::size_t pair, std::size_t lane, VF even, VF odd) {
    hn::StoreU(even, kF, tile + 2 * pair * kBlockSize + lane);
    hn::StoreU(odd, kF, tile + (2 * pair + 1) * kBlockSize + lane);
  }
  static bool is_zero(const Element* tile, std::size_t row, std::size_t lane) {
    return tile[row * kBlockSize + lane] == 0.0F;
  }
  /// Times a power of two.
  static void scaled(const Element* from, std::size_t count, float factor, Element* to) {
    for (std::size_t i = 0; i < count; ++i) to[i] = from[i] * factor;
  }
  static void begin() {}
  static void end() {}

  static void run(const Product& p) {
    for (std::size_t n = 0; n < p.n; n += 2 * kLanes) {
      for (std::size_t m = 0; m < p.m; m += kRows) panel(p, m, n);
    }
  }

 private:
  // As many accumulators as registers allow beside two of B and one of A.
  static constexpr std::size_t kRows = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SCALAR ? 4 : 8;

  static HWY_INLINE void panel(const Product& p, std::size_t m, std::size_t n) {
    VF low[kRows];
    VF high[kRows];
    float* c = p.c + m * p.n + n;
    for (std::size_t r = 0; r < kRows; ++r) {
      low[r] = hn::Zero(kF);
      high[r] = hn::Zero(kF);
    }
    for (std::size_t s = 0; s < p.segments; ++s) {
      const float* a = static_cast<const float*>(p.a[s]) + m * p.k;
      const float* b = static_cast<const float*>(p.b[s]) + n;
      for (std::size_t k = 0; k < p.k; ++k) {
        const VF b_low = hn::LoadU(kF, b + k * p.n);
        const VF b_high = hn::LoadU(kF, b + k * p.n + kLanes);
        for (std::size_t r = 0; r < kRows; ++r) {
          const VF broadcast = hn::Set(kF, a[r * p.k + k]);
          low[r] = hn::MulAdd(broadcast, b_low, low[r]);
          high[r] = hn::MulAdd(broadcast, b_high, high[r]);
        }
      }
    }
    for (std::size_t r = 0; r < kRows; ++r) {
      if (p.initial != 0.0F) {
        low[r] = hn::Add(low[r], hn::LoadU(kF, c + r * p.n));
        high[r] = hn::Add(high[r], hn::LoadU(kF, c + r * p.n + kLanes));
      }
      hn::StoreU(low[r], kF, c + r * p.n);
      hn::StoreU(high[r], kF, c + r * p.n + kLanes);
    }
  }
};

#if HWY_TARGET == HWY_AVX3

/// Operands in BF16. A is [k / 32][m][32], so that tiles are read in order, B is [k / 2][n][2]: rows in pairs.
/// Subnormal operands count as zero.
struct Bf16Operands {
  using Element = std::uint16_t;

  static HWY_INLINE VU pair_of(VF even, VF odd) {
    return hn::Or(hn::ShiftRight<16>(hn::BitCast(kU, even)), hn::And(hn::BitCast(kU, odd), hn::Set(kU, 0xFFFF0000U)));
  }
  static std::uint32_t* words(Element* elements) { return reinterpret_cast<std::uint32_t*>(elements); }

  static void columns(const float* x, std::size_t dims, std::size_t padded, Element* out) {
    std::uint32_t* to = words(out);
    for (std::size_t pair = 0; pair < dims / 2; ++pair) {
      for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
        const float* from = x + 2 * pair * kBlockSize + lane;
        hn::StoreU(pair_of(hn::Load(kF, from), hn::Load(kF, from + kBlockSize)), kU, to + pair * kBlockSize + lane);
      }
    }
    for (std::size_t i = dims / 2 * kBlockSize; i < padded / 2 * kBlockSize; ++i) to[i] = 0;
  }
  static void rows(const float* x, std::size_t dims, std::size_t padded, Element* out, Element* staging) {
    constexpr std::size_t kWords = kBlockSize / 2;  // of a row of one panel
    columns(x, dims, padded, staging);
    for (std::size_t panel = 0; panel < padded / 2; panel += kWords) {
      transpose(words(staging) + panel * kBlockSize, kBlockSize, kWords, kBlockSize, words(out) + panel * kBlockSize,
                kWords);
    }
  }
  static void lanes(const float* x, std::size_t dims, std::size_t padded, Element* out) {
    const hn::Rebind<std::uint16_t, I32> half;
    for (std::size_t i = 0; i < dims * kBlockSize; i += kLanes) {
      const VU bits = hn::BitCast(kU, hn::Load(kF, x + i));
      hn::StoreU(hn::DemoteTo(half, hn::BitCast(kI, hn::ShiftRight<16>(bits))), half, out + i);
    }
    for (std::size_t i = dims * kBlockSize; i < padded * kBlockSize; ++i) out[i] = 0;
  }
  static void pairs(const float* x, std::size_t dims, std::size_t padded, Element* out, Element* staging) {
    lanes(x, dims, padded, staging);
    transpose(words(staging), kBlockSize / 2, padded, kBlockSize / 2, words(out), padded);
  }
  static HWY_INLINE void put_pair(Element* tile, std::size_t pair, std::size_t lane, VF even, VF odd) {
    hn::StoreU(pair_of(even, odd), kU, words(tile) + pair * kBlockSize + lane);
  }

  static bool is_zero(const Element* tile, std::size_t row, std::size_t lane) {
    return (tile[(row / 2 * kBlockSize + lane) * 2 + row % 2] & 0x7FFFU) == 0;
  }

  static void scaled(const Element* from, std::size_t count, float factor, Element* to) {
    for (std::size_t i = 0; i < count; ++i) {
      const float wide = __builtin_bit_cast(float, static_cast<std::uint32_t>(from[i]) << 16) * factor;
      to[i] = static_cast<Element>(__builtin_bit_cast(std::uint32_t, wide) >> 16);
    }
  }
};

#define MXFLASH_DOT __attribute__((target("avx512bf16")))

struct DotMultiply : Bf16Operands {
  static void begin() {}
  static void end() {}

  static void run(const Product& p) {
    for (std::size_t n = 0; n < p.n; n += 2 * kLanes) {
      for (std::size_t m = 0; m < p.m; m += kRows) panel(p, m, n);
    }
  }

 private:
  static constexpr std::size_t kRows = 8;  // Of 16 accumulators, beside two of B and one of A.

  MXFLASH_DOT static HWY_INLINE __m512 dot(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }

  MXFLASH_DOT static void panel(const Product& p, std::size_t m, std::size_t n) {
    constexpr std::size_t kWords = kBlockSize / 2;  // Of a row of A in one panel of k.
    __m512 low[kRows];
    __m512 high[kRows];
    float* c = p.c + m * p.n + n;
    for (std::size_t r = 0; r < kRows; ++r) {
      low[r] = p.initial != 0.0F ? _mm512_loadu_ps(c + r * p.n) : _mm512_setzero_ps();
      high[r] = p.initial != 0.0F ? _mm512_loadu_ps(c + r * p.n + kLanes) : _mm512_setzero_ps();
    }
    for (std::size_t s = 0; s < p.segments; ++s) {
      const auto* a = static_cast<const std::int32_t*>(p.a[s]) + m * kWords;
      const auto* b = static_cast<const std::int32_t*>(p.b[s]) + n;
      for (std::size_t k = 0; k < p.k; k += kBlockSize, a += p.m * kWords) {
        for (std::size_t word = 0; word < kWords; ++word, b += p.n) {
          const __m512i b_low = _mm512_loadu_si512(b);
          const __m512i b_high = _mm512_loadu_si512(b + kLanes);
          for (std::size_t r = 0; r < kRows; ++r) {
            const __m512i pair = _mm512_set1_epi32(a[r * kWords + word]);
            low[r] = dot(low[r], pair, b_low);
            high[r] = dot(high[r], pair, b_high);
          }
        }
      }
    }
    for (std::size_t r = 0; r < kRows; ++r) {
      _mm512_storeu_ps(c + r * p.n, low[r]);
      _mm512_storeu_ps(c + r * p.n + kLanes, high[r]);
    }
  }
};

#define MXFLASH_AMX __attribute__((target("amx-tile,amx-bf16")))

struct AmxMultiply : Bf16Operands {
  /// The shape of all eight tiles: 16 rows of 64 bytes. Held by the thread until `end`.
  MXFLASH_AMX static void begin() {
    struct alignas(64) Shape {
      std::uint8_t palette = 1;
      std::uint8_t start = 0;
      std::uint8_t reserved[14] = {};
      std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static const Shape shape;  // In memory: the compiler sees but its first eight bytes used, and drops other stores.
    _tile_loadconfig(&shape);
  }
  MXFLASH_AMX static void end() { _tile_release(); }

  static void run(const Product& p) {
    for (std::size_t m = 0; m < p.m; m += kBlockSize) {
      for (std::size_t n = 0; n < p.n; n += kBlockSize) square(p, m, n);
    }
  }

 private:
  /// 32 rows of A that come later: tiles wait for their loads, and the hardware does not foresee them.
  static HWY_INLINE void prefetch(const Element* rows) {
    for (std::size_t r = 0; r < kBlockSize; ++r) __builtin_prefetch(rows + r * kBlockSize);
  }

  /// 32 x 32 of C in four tiles.
  MXFLASH_AMX static void square(const Product& p, std::size_t m, std::size_t n) {
    constexpr std::size_t kTile = 16;
    float* c = p.c + m * p.n + n;
    const std::size_t c_bytes = p.n * sizeof(float);
    if (p.initial != 0.0F) {
      _tile_loadd(0, c, c_bytes);
      _tile_loadd(1, c + kTile, c_bytes);
      _tile_loadd(2, c + kTile * p.n, c_bytes);
      _tile_loadd(3, c + kTile * p.n + kTile, c_bytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    constexpr std::size_t kRowBytes = kBlockSize * sizeof(Element);
    const std::size_t b_bytes = p.n * sizeof(std::uint32_t);
    for (std::size_t s = 0; s < p.segments; ++s) {
      const Element* a = static_cast<const Element*>(p.a[s]) + m * kBlockSize;
      const std::uint32_t* b = static_cast<const std::uint32_t*>(p.b[s]) + n;
      const Element* next = s + 1 < p.segments ? static_cast<const Element*>(p.a[s + 1]) + m * kBlockSize : a;
      for (std::size_t k = 0; k < p.k; k += kBlockSize) {
        const Element* rows = a + k * p.m;
        const std::uint32_t* pairs = b + k / 2 * p.n;
        prefetch(p.k == kBlockSize ? next : rows + 2 * kBlockSize * p.m);
        _tile_loadd(4, rows, kRowBytes);
        _tile_loadd(6, pairs, b_bytes);
        _tile_loadd(7, pairs + kTile, b_bytes);
        _tile_loadd(5, rows + kTile * kBlockSize, kRowBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + kTile, c_bytes);
    _tile_stored(2, c + kTile * p.n, c_bytes);
    _tile_stored(3, c + kTile * p.n + kTile, c_bytes);
  }
};

#endif  // HWY_AVX3

}  // namespace mxflash::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
