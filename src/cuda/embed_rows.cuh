// 16 queries of a warp against a group of 32 keys: scores, then their maxima, or weights, sums and output. A thread has
// parts of two rows, `r` = 0 and 1 (eight apart): columns 8 n + 2 quad and the next of a group.
#pragma once

#include "cuda/embed_forward.cuh"

namespace mxflash::cuda {

/// What the first pass makes of a thread's two rows. s is a logit, t the same with V's exponent.
struct RowMaxima {
  float t[2] = {-INFINITY, -INFINITY};
  float s[2] = {-INFINITY, -INFINITY};
  float fold[2] = {-kE8m0Bias, -kE8m0Bias};  ///< Where V folds.
  float height[2] = {-INFINITY, -INFINITY};  ///< Of V; at the end with t: log2 of what a key adds. Inf: poisoned.
};

/// Whether a row sees the key in a column of a group: of a group that no row's mask cuts, and of others. `from`: the
/// first of a thread's rows.
struct EveryKey {
  [[nodiscard]] __device__ bool sees(int /*r*/, int /*column*/) const { return true; }
};
struct SomeKeys {
  __device__ SomeKeys(const KeyRange32* from, std::int32_t first)
      : begin{from[0].begin - first, from[8].begin - first}, end{from[0].end - first, from[8].end - first} {}
  [[nodiscard]] __device__ bool sees(int r, int column) const { return begin[r] <= column && column < end[r]; }

  std::int32_t begin[2];
  std::int32_t end[2];
};

template <class Traits, class Exp>
class EmbedRows {
 public:
  __device__ EmbedRows(const EmbedForwardArguments& arguments, const EmbedWork& of, EmbedShared<Traits>& shared)
      : a(arguments), work(of), s(shared), lane(threadIdx.x % 32) {}

  /// First pass, of one tile.
  __device__ void look(const Step& step, int stage, RowMaxima& most) {
    if (!meets(step)) return;
    const Stage& tile = s.stage[stage];
    const TileKind& kind = a.tables.kind[step.kind()];
    multiply_scores(tile);
    if (every_row_sees(step)) {
      measure(kind, tile, EveryKey{}, most);
    } else {
      measure(kind, tile, SomeKeys{s.visible + query_of(0), step.key()}, most);
    }
  }

  /// Between the passes.
  __device__ void refer(const RowMaxima& most) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      RowReference of;
      of.t = reference_above(most_of_row(most.t[r]));
      of.s = reference_above(most_of_row(most.s[r]));
      of.light = fmaxf(most_of_row(most.fold[r]) - kLightOctaves, static_cast<float>(-kE8m0Bias));
      of.height = fmaxf(ceilf(most_of_row(most.height[r])) - of.t - kMostHeight, kLeastHeight);
      s.row[query_of(r)] = of;  // The same from all four threads, each of which has then written what it reads.
      sum[r] = 0;
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i][j] = 0;
    }
  }

  /// Second pass, of one tile.
  __device__ void weigh(const Step& step, int stage) {
    if (!meets(step)) return;
    // What follows from it is computed anew for every tile: kept, it would take registers that are not there.
    lane = opaque(lane);
    const Stage& tile = s.stage[stage];
    const TileKind& kind = a.tables.kind[step.kind()];
    multiply_scores(tile);
    if (every_row_sees(step)) {
      to_weights(kind, tile.about, EveryKey{});
    } else {
      to_weights(kind, tile.about, SomeKeys{s.visible + query_of(0), step.key()});
    }
    multiply_values(tile);
  }

  __device__ void store() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float all = sum[r] + __shfl_xor_sync(0xFFFFFFFFU, sum[r], 1);
      all += __shfl_xor_sync(0xFFFFFFFFU, all, 2);
      const int query = query_of(r);
      if (query >= work.item.queries) continue;
      const std::int64_t place = (std::int64_t{work.item.query_row} + query) * a.sizes.heads + work.head;
      const bool empty = s.visible[query].empty();
      const RowReference of = s.row[query];
      if (quad() == 0 && work.part == 0) {
        a.lse[place] = empty ? -INFINITY : (of.s + log2f(all)) * std::numbers::ln2_v<float>;
      }
      const bool poisoned = of.height == INFINITY;
      const auto unit = static_cast<int>(fminf(fmaxf(of.t - of.s + of.height, -300.0F), 300.0F));
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        const int dim = work.part * Traits::kValueDims + 8 * i + 2 * quad();
        if (dim >= a.sizes.value_dim) continue;
        float two[2];
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          two[b] = empty ? 0.0F : poisoned ? NAN : scalbnf(out[i][2 * r + b] / all, unit);
        }
        write(place * a.sizes.value_dim + dim, two[0], two[1]);
      }
    }
  }

 private:
  using Stage = typename EmbedShared<Traits>::Stage;
  static constexpr int kScores = kGroup / 8;               // Of eight keys.
  static constexpr int kOutputs = Traits::kValueDims / 8;  // Of eight dims.
  /// P is held where P V is below this power of two and P itself below 2^60 or so: sums of 2^17 keys stay inside FP32,
  /// and neither a weight of 2^-127 nor the product with a subnormal V falls out of it.
  static constexpr float kMostHeight = 100.0F;
  static constexpr float kLeastHeight = -60.0F;

  static __device__ int warp() { return static_cast<int>(threadIdx.x / 32); }
  [[nodiscard]] __device__ int quad() const { return static_cast<int>(lane % 4); }
  [[nodiscard]] __device__ int query_of(int r) const {
    return warp() * kWarpQueries + static_cast<int>(lane / 4) + 8 * r;
  }
  /// Row and chunk of a lane's address for load_matrices where matrices 0 and 1 are rows 0 to 15 of one chunk.
  [[nodiscard]] __device__ int row_16() const { return static_cast<int>(lane % 16); }
  [[nodiscard]] __device__ int chunk_16() const { return static_cast<int>(lane / 16); }
  /// The same where they are two chunks of rows 0 to 7.
  [[nodiscard]] __device__ int row_8() const { return static_cast<int>(lane / 16 * 8 + lane % 8); }
  [[nodiscard]] __device__ int chunk_8() const { return static_cast<int>(lane / 8 % 2); }
  /// Column of the scores [n][b] and [n][2 + b].
  [[nodiscard]] __device__ int column(int n, int b) const { return 8 * n + 2 * quad() + b; }
  /// Which of eight pairs of keys the scores [n] are.
  [[nodiscard]] __device__ int pair_of(int n) const { return n % 2 * 4 + quad(); }

  /// Two keys that lie together, in one load.
  struct alignas(16) TwoKeys {
    EmbeddedKey key[2];
  };
  [[nodiscard]] __device__ TwoKeys load(const EmbeddedKey* about, int n) const {
    return *reinterpret_cast<const TwoKeys*>(about + column(n, 0));
  }

  __device__ void multiply_scores(const Stage& stage) {
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[n][j] = 0;
    }
    const std::uint32_t query =
        row_address<Traits::kKeyBytes>(shared_address(s.queries), warp() * kWarpQueries + row_16(), chunk_16());
    const std::uint32_t key = row_address<Traits::kKeyBytes>(shared_address(stage.keys), row_8(), chunk_8());
#pragma unroll
    for (int k = 0; k < Traits::kKeyDims / 16; ++k) {
      std::uint32_t left[4];
      load_matrices(left, query ^ (k * 32));
#pragma unroll
      for (int n = 0; n < kScores; n += 2) {
        std::uint32_t right[4];
        load_matrices(right, (key ^ (k * 32)) + n * 8 * Traits::kKeyBytes);
        multiply_bf16(scores[n], left, right[0], right[1]);
        multiply_bf16(scores[n + 1], left, right[2], right[3]);
      }
    }
  }

  /// The scores hold P.
  __device__ void multiply_values(const Stage& stage) {
    const std::uint32_t value = row_address<Traits::kValueBytes>(shared_address(stage.values), row_16(), chunk_16());
#pragma unroll
    for (int k = 0; k < kGroup / 16; ++k) {
      const std::uint32_t left[4] = {
          pack_bf16(scores[2 * k][0], scores[2 * k][1]), pack_bf16(scores[2 * k][2], scores[2 * k][3]),
          pack_bf16(scores[2 * k + 1][0], scores[2 * k + 1][1]), pack_bf16(scores[2 * k + 1][2], scores[2 * k + 1][3])};
#pragma unroll
      for (int i = 0; i < kOutputs; i += 2) {
        std::uint32_t right[4];
        load_transposed(right, (value ^ (i * 16)) + k * 16 * Traits::kValueBytes);
        multiply_bf16(out[i], left, right[0], right[1]);
        multiply_bf16(out[i + 1], left, right[2], right[3]);
      }
    }
  }

  /// Whether the tile is of its step's kind for the warp, and some row sees it.
  [[nodiscard]] __device__ bool meets(const Step& step) const {
    const WarpKeys& seen = s.warp[warp()];
    const std::int32_t key = step.key();
    if (key >= seen.some.end || key + kGroup <= seen.some.begin) return false;
    return a.tables.kinds == 1 || seen.whole.holds(key) == (step.kind() == kWholeTiles);
  }
  [[nodiscard]] __device__ bool every_row_sees(const Step& step) const {
    const KeyRange32& every = s.warp[warp()].every;
    return every.begin <= step.key() && step.key() + kGroup <= every.end;
  }

  /// A NaN is never the larger. Maxima are held afterwards, which is the same as before.
  template <class Keys>
  __device__ void measure(const TileKind& kind, const Stage& tile, const Keys& keys, RowMaxima& most) {
    const float factor[2] = {s.factor[query_of(0)], s.factor[query_of(1)]};
    RowMaxima own;
    each_pair(tile.about, keys, [&](int n, int b, int r, const EmbeddedKey& key) {
      own.t[r] = fmaxf(own.t[r], logit(scores[n][2 * r + b], key, factor[r]));
      own.height[r] = fmaxf(own.height[r], tile.heights[column(n, b)]);
    });
#pragma unroll
    for (int r = 0; r < 2; ++r) own.s[r] = own.t[r];
    if (kind.folds != 0) {
      own.s[0] = own.s[1] = -INFINITY;
      each_pair(tile.about, keys, [&](int n, int b, int r, const EmbeddedKey& key) {
        own.s[r] = fmaxf(own.s[r], logit(scores[n][2 * r + b], {key.factor, 0.0F}, factor[r]));
        own.fold[r] = fmaxf(own.fold[r], key.fold);
      });
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most.t[r] = fmaxf(most.t[r], own.t[r]);
      most.s[r] = fmaxf(most.s[r], own.s[r]);
      most.fold[r] = fmaxf(most.fold[r], own.fold[r]);
      most.height[r] = fmaxf(most.height[r], held(own.t[r], kFarLogit) + own.height[r]);
    }
  }

  /// `take(n, b, r, key)` of every score whose key the row sees.
  template <class Keys, class Take>
  __device__ void each_pair(const EmbeddedKey* about, const Keys& keys, const Take& take) const {
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      const TwoKeys two = load(about, n);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (keys.sees(r, column(n, b))) take(n, b, r, two.key[b]);
        }
      }
    }
  }

  static __device__ float most_of_row(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFU, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFU, x, 2));
  }
  /// Scores to P, and its share of the row sums.
  template <class Keys>
  __device__ void to_weights(const TileKind& kind, const EmbeddedKey* about, const Keys& keys) {
    const float factor[2] = {s.factor[query_of(0)], s.factor[query_of(1)]};
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      const TwoKeys two = load(about, n);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const EmbeddedKey key = two.key[b];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& t = scores[n][2 * r + b];
          t = keys.sees(r, column(n, b)) ? held(logit(t, key, factor[r]), kFarLogit) : -INFINITY;
          top[r] = fmaxf(top[r], t);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowReference of = s.row[query_of(r)];
      const float divisor = log2_divisor(kind.rule, kind.rule.in_groups == 0 ? 0.0F : most_of_row(top[r]), of.t);
      const float by = held_pow2(divisor - of.t - of.height);
      const float unit = divisor - of.s;
      const auto fold = [&](int n, int b) { return about[column(n, b)].fold; };
      const auto whole = [&](int n, int b, float /*t*/, float code) { return code * held_pow2(unit - fold(n, b)); };
      if (kind.folds == 0 && a.row_sum == RowSum::quantized) {
        sum[r] +=
            round_row(kind.rule, divisor, by, r, [](int, int, float, float code) { return code; }) * held_pow2(unit);
      } else if (a.row_sum == RowSum::quantized && !__any_sync(0xFFFFFFFFU, has_light(about, of.light))) {
        sum[r] += round_row(kind.rule, divisor, by, r, whole);
      } else {
        sum[r] += round_row(kind.rule, divisor, by, r, [&](int n, int b, float t, float code) {
          const bool light = kind.folds != 0 && fold(n, b) <= of.light && code < kind.rule.smallest_normal;
          const bool plain = light || a.row_sum == RowSum::unquantized;
          return plain ? Exp::of(t - fold(n, b) - of.s, pair_of(n)) : whole(n, b, t, code);
        });
      }
    }
  }

  /// Whether a key of the thread's may be light.
  [[nodiscard]] __device__ bool has_light(const EmbeddedKey* about, float most) const {
    bool any = false;
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      const TwoKeys two = load(about, n);
      any = any || two.key[0].fold <= most || two.key[1].fold <= most;
    }
    return any;
  }

  /// Scores of a row to P; the sum of what `counts(n, b, t, code)` says of each: a key's code without V's exponent, or
  /// its weight before rounding where that would be lost.
  template <class Counts>
  __device__ float round_row(const WeightRule& rule, float divisor, float by, int r, const Counts& counts) {
    float all = 0;
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        float& p = scores[n][2 * r + b];
        const float code = rounded_to(rule.to, Exp::of(p - divisor, pair_of(n)));
        all += counts(n, b, p, code);
        p = code * by;
      }
    }
    return all;
  }

  __device__ void write(std::int64_t place, float low, float high) const {
    switch (a.dtype) {
      case DType::bf16:
        *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(a.o) + place) = __floats2bfloat162_rn(low, high);
        break;
      case DType::f16:
        *reinterpret_cast<__half2*>(static_cast<__half*>(a.o) + place) = __floats2half2_rn(low, high);
        break;
      default: *reinterpret_cast<float2*>(static_cast<float*>(a.o) + place) = {low, high};
    }
  }

  const EmbedForwardArguments& a;
  const EmbedWork& work;
  EmbedShared<Traits>& s;
  std::uint32_t lane;
  float sum[2];
  float scores[kScores][4];
  float out[static_cast<std::size_t>(kOutputs)][4];
};

}  // namespace mxflash::cuda
