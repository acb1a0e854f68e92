// 64 queries of a warpgroup: scores, weights, sums, output. A thread has parts of two rows, `r` = 0 and 1 (eight
// apart).
#pragma once

#include <numbers>

#include "cuda/forward.cuh"

namespace mxflash::cuda {

/// What a thread knows of its two rows.
struct RowState {
  std::int32_t begin[2];  ///< Visible keys of the document.
  std::int32_t end[2];
  float factor[2];  ///< Multiplies scores, before the key's.
  float base[2];    ///< m - 8, an integer: weights are 2^(logit - base), 256 at most. Before a key is seen: 0.
  float limit[2];   ///< Logits above base + limit raise m; before a key is seen -inf.
  float scale[2];   ///< Of the sums, by the last tile: 2^(m before - m).

  [[nodiscard]] __device__ bool sees(int r, std::int32_t key) const { return begin[r] <= key && key < end[r]; }
};

/// Whether a row sees a key of a tile: of one that no row's mask cuts, and of others.
struct Whole {
  static __device__ bool sees(const RowState&, int, std::int32_t) { return true; }
};
struct Cut {
  static __device__ bool sees(const RowState& rows, int r, std::int32_t key) { return rows.sees(r, key); }
};

template <class Traits>
class Consumer {
 public:
  __device__ Consumer(const ForwardParameters& parameters, ForwardShared<Traits>& block)
      : p(parameters),
        shared(block),
        group(static_cast<int>(threadIdx.x) / kWarpgroup - 1),
        thread(static_cast<int>(threadIdx.x) % kWarpgroup),
        lane(static_cast<int>(threadIdx.x) % 32),
        row(group * 64 + thread / 32 * 16 + lane / 4),
        quad(lane % 4) {}

  __device__ void run() {
    for (;;) {
      shared.work_full[slot.stage()].wait(slot.phase());
      const Work& work = shared.work[slot.stage()];
      const bool last = work.head < 0;
      if (!last) attend(work);
      release(shared.work_empty[slot.stage()]);
      slot.template advance<kWorkStages>();
      if (last) break;
    }
  }

 private:
  static constexpr int kQuarters = 4;
  static constexpr int kPart = Traits::kScores / kQuarters;

  /// Scales of a thread's keys of a quarter, two to an entry.
  struct Quarter {
    float4 two[static_cast<std::size_t>(kPart / 4)];
  };

  __device__ float& kept(Kept what, int r) const { return shared.kept[group][2 * static_cast<int>(what) + r][thread]; }

  __device__ void release(Barrier& barrier) const {
    __syncwarp();
    if (lane == 0) barrier.arrive();
  }

  __device__ void attend(const Work& work) {
    prepare(work);
    std::int32_t tile = work.tiles.end - 1;
    const std::int32_t first = work.tiles.first;
    if (tile < first) {
      store(work, false);
      return;
    }
    irregular_ = has_irregular(work, work.range);
    if (irregular_) largest_exponents(work);
    shared.queries_full[queries.stage()].wait(queries.phase());
    multiply_scores();
    cute::warpgroup_wait<0>();
    fence(scores);
    weigh(work, tile);
    use_codes();
    bool moved = false;
    auto fresh = ScaleOut::Zero;  // The next product overwrites the accumulators.
    while (tile > first) {
      multiply_scores();
      multiply_values(fresh);
      cute::warpgroup_wait<1>();
      fence(scores);
      weigh(work, tile - 1);
      cute::warpgroup_wait<0>();
      fence(sums);
      release_values();
      // By its place, not by a count: a document that goes on must round its first rows as before.
      if (tile % kTilesBetweenSums == 0) {
        move_sums(moved);
        moved = true;
        fresh = ScaleOut::Zero;
      } else {
        rescale();
        fresh = ScaleOut::One;
      }
      use_codes();
      --tile;
    }
    release(shared.queries_empty[queries.stage()]);
    queries.template advance<Traits::kQueryStages>();
    multiply_values(fresh);
    cute::warpgroup_wait<0>();
    fence(sums);
    release_values();
    store(work, moved);
  }

  __device__ void release_values() {
    release(shared.values_empty[values.stage()]);
    values.template advance<Traits::kStages>();
  }

  __device__ void prepare(const Work& work) {
    const Item& item = work.item;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = row + 8 * r;
      const bool inside = query < item.queries;
      const KeySpan span = visible_keys(item.first_position + query, item.keys, p.band);
      state.begin[r] = inside ? static_cast<std::int32_t>(span.begin) : 0;
      state.end[r] = inside ? static_cast<std::int32_t>(span.end) : 0;
      const std::int64_t place = work.head * p.sizes.rows_q() + item.query_row + query;
      const QueryScale scale = inside ? p.workspace.query_scale[place] : QueryScale{};
      state.factor[r] = scale.factor * p.logit_scale;
      kept(Kept::reach, r) =
          fabsf(p.logit_scale) * scale.norm * work.range.key_norm + fabsf(work.range.most) + kLightOctaves;
      state.base[r] = 0.0F;
      state.limit[r] = -INFINITY;
      state.scale[r] = 1.0F;
      kept(Kept::extra, r) = 0.0F;
      kept(Kept::height, r) = -INFINITY;
      kept(Kept::poisoned, r) = 0.0F;
      kept(Kept::total, r) = 0.0F;
      kept(Kept::moved, r) = 1.0F;
      kept(Kept::most, r) = -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < Traits::kSums; ++i) sums[i] = 0.0F;
    whole_begin_ = __reduce_max_sync(0xFFFFFFFFU, max(state.begin[0], state.begin[1]));
    whole_end_ = __reduce_min_sync(0xFFFFFFFFU, min(state.end[0], state.end[1]));
    constexpr float kNear = 50.0F;  // Then logits and bases are so, and no logit is further than 108 from a base.
    far_ = __any_sync(0xFFFFFFFFU, !(kept(Kept::reach, 0) <= kNear && kept(Kept::reach, 1) <= kNear));
  }

  /// Whether some of these keys must be counted apart: values that the row sum's multipliers do not reach, light keys,
  /// poisoned values. What it decides does not show in rows that see none of them.
  static __device__ bool has_irregular(const Work& work, const Range& range) {
    return range.least <= static_cast<float>(-kE8m0Bias) || range.least <= work.range.most - kLightOctaves ||
           range.least < work.reference - kBelowReference || range.most > work.reference + kAboveReference;
  }

  /// Whether 2^(logit - base) may leave FP32. Before a row has seen a key its base is 0: then on the lower side as
  /// well.
  [[nodiscard]] __device__ bool may_leave() const {
    constexpr float kMost = 108.0F;
    return __any_sync(
        0xFFFFFFFFU, !(kept(Kept::reach, 0) - state.base[0] <= kMost && kept(Kept::reach, 1) - state.base[1] <= kMost));
  }

  /// Of V, over the keys that each row sees.
  __device__ void largest_exponents(const Work& work) {
    const KeyScale* key_scale =
        p.workspace.key_scale + kv_head_of(p, work) * p.sizes.columns() + work.item.first_column;
    const Range* ranges = ranges_of(p, work);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = -INFINITY;
      for (std::int32_t tile = state.begin[r] / Traits::kKeys; tile * Traits::kKeys < state.end[r]; ++tile) {
        const std::int32_t begin = tile * Traits::kKeys;
        const std::int32_t end = min(begin + Traits::kKeys, work.item.keys);
        if (state.begin[r] <= begin && end <= state.end[r]) {
          most = fmaxf(most, ranges[tile].most);
          continue;
        }
        for (std::int32_t key = begin + quad; key < end; key += 4) {
          if (state.sees(r, key)) most = fmaxf(most, key_scale[key].value_exponent);
        }
      }
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFU, most, 1));
      kept(Kept::most, r) = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFU, most, 2));
    }
  }

  __device__ void multiply_scores() {
    shared.keys_full[keys.stage()].wait(keys.phase());
    fence(scores);
    cute::warpgroup_arrive();
    constexpr int kQueryBytes = 64 * Traits::kRowBytes;
#pragma unroll
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      // Not kept for the next tile, where it is the same: registers are shorter than instructions.
      const std::uint64_t a = descriptor<Traits::kRowBytes>(shared.queries[opaque(queries.stage())].codes +
                                                            (2 * chunk + group) * kQueryBytes);
      const std::uint64_t b =
          descriptor<Traits::kRowBytes>(shared.keys[keys.stage()].codes + chunk * Traits::kKeys * Traits::kRowBytes);
#pragma unroll
      for (int step = 0; step < Traits::kRowBytes / 32; ++step) {
        multiply<typename Traits::QkAtom>(a + 2 * step, b + 2 * step, scores,
                                          chunk + step == 0 ? ScaleOut::Zero : ScaleOut::One);
      }
    }
    cute::warpgroup_commit_batch();
    coming = load(shared.scales[keys.stage()].keys, 0);
  }

  __device__ void multiply_values(ScaleOut first) {
    shared.values_full[values.stage()].wait(values.phase());
    fence(sums);
    fence(codes);
    cute::warpgroup_arrive();
    const std::uint64_t b = descriptor<Traits::kKeys>(shared.values[values.stage()].codes);
#pragma unroll
    for (int step = 0; step < Traits::kKeys / 32; ++step) {
      multiply<typename Traits::PvAtom>(codes + 4 * step, b + 2 * step, sums, step == 0 ? first : ScaleOut::One);
    }
    cute::warpgroup_commit_batch();
  }

  /// Key of score `i` within the tile.
  [[nodiscard]] __device__ int key_of(int i) const { return i / 8 * 16 + 4 * quad + i % 8 / 4 * 2 + i % 2; }
  /// Row of score `i`.
  static constexpr __device__ int row_of(int i) { return i / 2 % 2; }

  /// Scores to weights and codes; then the tile's keys are done with.
  __device__ void weigh(const Work& work, std::int32_t tile) {
    const KeyScale* key_scale = shared.scales[keys.stage()].keys;
    const std::int32_t first = tile * Traits::kKeys;
    raised_ = false;
    const bool apart = irregular_ && has_irregular(work, shared.ranges[keys.stage()]);
    if (apart || (far_ && may_leave())) {
      weigh_held(work, key_scale, first, apart);
    } else if (first < whole_begin_ || first + Traits::kKeys > whole_end_) {
      weigh_plain<Cut>(key_scale, first);
    } else {
      weigh_plain<Whole>(key_scale, first);
    }
    release(shared.keys_empty[keys.stage()]);
    keys.template advance<Traits::kStages>();
  }

  /// Scales of a thread's keys of a quarter tile, two to an entry.
  __device__ Quarter load(const KeyScale* key_scale, int quarter) const {
    Quarter out;
#pragma unroll
    for (int i = 0; i < kPart / 4; ++i) {
      out.two[i] = *reinterpret_cast<const float4*>(key_scale + key_of(quarter * kPart + 4 * i));
    }
    return out;
  }

  /// Weights by the references that there are, which seldom move: the exponentials wait for no maximum, and where one
  /// turns out too large, all are scaled by a power of two. `may_leave` sees to it that none is lost before.
  template <class Tile>
  __device__ void weigh_plain(const KeyScale* key_scale, std::int32_t first) {
    float top[2][4];
#pragma unroll
    for (int quarter = 0; quarter < kQuarters; ++quarter) {
      const Quarter now = coming;
      if (quarter + 1 < kQuarters) coming = load(key_scale, quarter + 1);
      logits<Tile>(now, first, quarter);
      if (quarter > 0) exponentials(quarter - 1);  // Beside the next logits, not after their own.
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        const int i = quarter * kPart + j;
        float& most = top[row_of(i)][i / 4 % 4];  // Chains: one alone would wait for its own latency.
        most = i < 16 && i % 2 == 0 ? logit[quarter % 2][j] : fmaxf(most, logit[quarter % 2][j]);
      }
    }
    exponentials(kQuarters - 1);
    encode();
    float most[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) most[r] = fmaxf(fmaxf(top[r][0], top[r][1]), fmaxf(top[r][2], top[r][3]));
    if (!__any_sync(0xFFFFFFFFU, most[0] > state.limit[0] || most[1] > state.limit[1])) return;
    float step[2];
    raise(most, step);
#pragma unroll
    for (int i = 0; i < Traits::kScores; ++i) scores[i] *= exact_pow2(-step[row_of(i)]);
    encode();
  }

  /// Logits of a quarter less the rows' bases. Step by step over all of them: as one chain each, every one would wait.
  template <class Tile>
  __device__ void logits(const Quarter& now, std::int32_t first, int quarter) {
    float(&out)[kPart] = logit[quarter % 2];
    float factor[kPart];
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      factor[j] = state.factor[row_of(j)] * (j % 2 == 0 ? now.two[j / 4].x : now.two[j / 4].z);
    }
#pragma unroll
    for (int j = 0; j < kPart; ++j) out[j] = (j % 2 == 0 ? now.two[j / 4].y : now.two[j / 4].w) - state.base[row_of(j)];
#pragma unroll
    for (int j = 0; j < kPart; ++j) out[j] = fmaf(scores[quarter * kPart + j], factor[j], out[j]);
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      if (!Tile::sees(state, row_of(j), first + key_of(quarter * kPart + j))) out[j] = -INFINITY;
    }
  }

  __device__ void exponentials(int quarter) {
#pragma unroll
    for (int j = 0; j < kPart; ++j) scores[quarter * kPart + j] = exp2_fast(logit[quarter % 2][j]);
  }

  /// The same, one thing after the other, where logits may leave FP32 or keys must be counted apart. A row that another
  /// one brought here has the bits of weigh_plain: the same operations wherever those would do.
  __device__ void weigh_held(const Work& work, const KeyScale* key_scale, std::int32_t first, bool apart) {
    constexpr float kFar = 1e30F;
    constexpr float kNear =
        118.0F;  // No logit that weigh_plain takes is further from its base, or else its weight is 0.
    float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < Traits::kScores; ++i) {
      const int r = row_of(i);
      const KeyScale key = key_scale[key_of(i)];
      const float exponent = fmaxf(key.value_exponent, static_cast<float>(-kE8m0Bias));
      const float factor = state.factor[r] * key.factor;
      const float logit = fmaf(scores[i], factor, exponent);
      const float x =
          fabsf(logit) > kFar ? held(logit, 1e38F) - state.base[r] : fmaf(scores[i], factor, exponent - state.base[r]);
      scores[i] = state.sees(r, first + key_of(i)) ? x : -INFINITY;
      most[r] = fmaxf(most[r], scores[i]);
    }
    float step[2];
    raise(most, step);
    if (apart) count_apart(work, key_scale, first, step);
#pragma unroll
    for (int i = 0; i < Traits::kScores; ++i) {
      const float by = step[row_of(i)];
      scores[i] = fabsf(scores[i]) <= kNear ? exp2_fast(scores[i]) * exact_pow2(-by) : exp2_fast(scores[i] - by);
    }
    encode();
  }

  /// Moves the references to the largest logits where those ask for it; `step` is by how much.
  __device__ void raise(float (&most)[2], float (&step)[2]) {
    raised_ = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = fmaxf(most[r], __shfl_xor_sync(0xFFFFFFFFU, most[r], 1));
      most[r] = fmaxf(most[r], __shfl_xor_sync(0xFFFFFFFFU, most[r], 2));
      // Whole numbers: the scale is exact, and what the row has seen before stays as it was rounded.
      const bool rises = most[r] > state.limit[r];
      const bool first = state.limit[r] < 0.0F;
      step[r] = rises ? ceilf(most[r]) - 8.0F : 0.0F;
      state.scale[r] = rises && first ? 0.0F : exact_pow2(-step[r]);
      if (rises) state.limit[r] = kLimit;
      state.base[r] += step[r];
    }
  }

  /// Whether the row sum's multipliers have this key.
  static __device__ bool counted(const Work& work, const KeyScale& key) {
    return key.value_exponent > static_cast<float>(-kE8m0Bias) &&
           key.value_exponent >= work.reference - kBelowReference &&
           key.value_exponent <= work.reference + kAboveReference;
  }
  static __device__ bool may_count_apart(const Work& work, const KeyScale& key) {
    return key.value_exponent <= work.range.most - kLightOctaves || !counted(work, key);
  }

  /// What the multipliers do not count of the row sum, in FP32; and whether the row sees a poisoned V. The scores are
  /// logits less the bases before `step` was added to these.
  __device__ void count_apart(const Work& work, const KeyScale* key_scale, std::int32_t first, const float (&step)[2]) {
#pragma unroll 1
    for (int pair = 0; pair < Traits::kScores / 2; ++pair) {
      const int i = 2 * pair;
      const bool apart = may_count_apart(work, key_scale[key_of(i)]) || may_count_apart(work, key_scale[key_of(i + 1)]);
      if (!__any_sync(0xFFFFFFFFU, apart)) continue;
      // A run-time index would move the scores to memory: the pair is picked by comparison.
      float two[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < Traits::kScores; ++j) two[j % 2] = j / 2 == pair ? scores[j] : two[j % 2];
      const int r = row_of(i);
      const float by = r == 0 ? step[0] : step[1];
      const float base = r == 0 ? state.base[0] : state.base[1];
#pragma unroll 1
      for (int b = 0; b < 2; ++b) {
        const std::int32_t key = first + key_of(i + b);
        if (!(r == 0 ? state.sees(0, key) : state.sees(1, key))) continue;
        add_apart(work, key_scale[key_of(i + b)], (b == 0 ? two[0] : two[1]) - by, {base, r});
      }
    }
  }

  struct RowAt {
    float base;
    int r;
  };

  /// One key, whose logit less the base is x. V's exponent is no part of its share of the sum, and may be far from the
  /// others': the sum has a reference of its own.
  __device__ void add_apart(const Work& work, const KeyScale& key, float x, const RowAt& row_at) {
    constexpr float kLeastNormal = 0.015625F;
    constexpr auto kNone = static_cast<float>(-kE8m0Bias);
    const int r = row_at.r;
    if (key.value_exponent == kPoisonedValue) kept(Kept::poisoned, r) = 1.0F;
    const float exponent = fmaxf(key.value_exponent, kNone);
    const auto code = static_cast<std::uint8_t>(to_e4m3(exp2_fast(x), 0.0F) & 0xFFU);
    const float rounded = decode(Format::e4m3, code);
    const bool light = (key.value_exponent <= kNone || key.value_exponent <= kept(Kept::most, r) - kLightOctaves) &&
                       rounded < kLeastNormal;
    const bool in_sum = counted(work, key);
    if (!light && in_sum) return;
    const float bare = x + (row_at.base - exponent);  // The logit without V's exponent.
    float height = kept(Kept::height, r);
    if (bare > height) {
      const float raised = ceilf(bare);
      kept(Kept::extra, r) *= exact_pow2(height - raised);
      kept(Kept::height, r) = height = raised;
    }
    const float whole = ldexpf(rounded, static_cast<int>(row_at.base - exponent - height));
    // Of a light key the weight unquantized, with which it would be lost.
    kept(Kept::extra, r) += (light ? exp2_fast(bare - height) : whole) - (in_sum ? whole : 0.0F);
  }

  /// A row's sum of weights is `value` 2^(base - unit).
  struct RowSum {
    float value;
    float unit;
  };

  /// From what the first of the row's four threads has counted and what each has apart. Nothing apart: the bits of a
  /// row that no irregular tile has met.
  __device__ RowSum row_sum(const Work& work, int r, unsigned four) const {
    const float counted = __shfl_sync(four, kept(Kept::total, r) + sums[Traits::kOutputs + 2 * r], lane / 4 * 4);
    float height = kept(Kept::height, r);
    height = fmaxf(height, __shfl_xor_sync(four, height, 1));
    height = fmaxf(height, __shfl_xor_sync(four, height, 2));
    if (height == -INFINITY) return {counted, work.reference};
    float extra = kept(Kept::extra, r) * exact_pow2(kept(Kept::height, r) - height);
    extra += __shfl_xor_sync(four, extra, 1);
    extra += __shfl_xor_sync(four, extra, 2);
    if (extra == 0.0F) return {counted, work.reference};
    const float shift = height - state.base[r] + work.reference;
    constexpr float kMostShift = 60.0F;
    if (shift <= kMostShift) return {counted + ldexpf(extra, static_cast<int>(fmaxf(shift, -300.0F))), work.reference};
    return {ldexpf(counted, -static_cast<int>(fminf(shift, 300.0F))) + extra, work.reference - shift};
  }

  /// Weights to pairs of codes, while a product still reads the last ones.
  __device__ void encode() {
#pragma unroll
    for (int i = 0; i < Traits::kScores; i += 2) pairs[i / 2] = to_e4m3(scores[i], scores[i + 1]);
  }

  /// Pairs to the operand of the next product. Only now: an operand that is written while a product runs would make the
  /// compiler wait for every product.
  __device__ void use_codes() {
#pragma unroll
    for (int a = 0; a < Traits::kScores / 8; ++a) {
#pragma unroll
      for (int r = 0; r < 2; ++r) codes[2 * a + r] = pairs[4 * a + r] | (pairs[4 * a + 2 + r] << 16);
    }
  }

  __device__ void rescale() {
    if (!raised_) return;
#pragma unroll
    for (int i = 0; i < Traits::kSums; ++i) sums[i] *= state.scale[row_of(i)];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      kept(Kept::total, r) *= state.scale[r];
      kept(Kept::moved, r) *= state.scale[r];
    }
  }

  /// Adds the accumulators to the FP32 sums, which wait in shared memory with their scale in `moved`.
  __device__ void move_sums(bool summed) {
    float4* mine = &shared.sums[group][0][thread];
    const float scale[2] = {kept(Kept::moved, 0), kept(Kept::moved, 1)};
#pragma unroll
    for (int i = 0; i < Traits::kOutputs / 4; ++i) {
      float4 sum{sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
      if (summed) {
        const float4 before = mine[i * kWarpgroup];
        sum = {fmaf(before.x, scale[0], sum.x), fmaf(before.y, scale[0], sum.y), fmaf(before.z, scale[1], sum.z),
               fmaf(before.w, scale[1], sum.w)};
      }
      mine[i * kWarpgroup] = sum;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float by = raised_ ? state.scale[r] : 1.0F;
      kept(Kept::total, r) = (kept(Kept::total, r) + sums[Traits::kOutputs + 2 * r]) * by;
      kept(Kept::moved, r) = by;
    }
  }

  __device__ void store(const Work& work, bool summed) {
    if (summed) {
      const float4* mine = &shared.sums[group][0][thread];
      const float scale[2] = {kept(Kept::moved, 0), kept(Kept::moved, 1)};
#pragma unroll
      for (int i = 0; i < Traits::kOutputs / 4; ++i) {
        const float4 before = mine[i * kWarpgroup];
        sums[4 * i] = fmaf(before.x, scale[0], sums[4 * i]);
        sums[4 * i + 1] = fmaf(before.y, scale[0], sums[4 * i + 1]);
        sums[4 * i + 2] = fmaf(before.z, scale[1], sums[4 * i + 2]);
        sums[4 * i + 3] = fmaf(before.w, scale[1], sums[4 * i + 3]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = row + 8 * r;
      if (query >= work.item.queries) continue;
      const std::int64_t place = (std::int64_t{work.item.query_row} + query) * p.sizes.heads + work.head;
      const unsigned four = 0xFU << (lane / 4 * 4);
      const RowSum sum = row_sum(work, r, four);
      const bool bad = __any_sync(four, kept(Kept::poisoned, r) != 0.0F);
      const bool empty = state.begin[r] >= state.end[r];
      const float inverse = __frcp_rn(sum.value);
      const float scale = detail::pow2(static_cast<int>(fmaxf(sum.unit, -300.0F)));
      if (quad == 0 && work.part == 0) {
        const float log2 = state.base[r] - sum.unit + log2f(sum.value);
        p.lse[place] = empty ? -INFINITY : log2 * std::numbers::ln2_v<float>;
      }
#pragma unroll
      for (int i = 0; i < Traits::kOutputs; i += 4) {
        const int dim = work.part * Traits::kValueDims + i * 2 + 2 * quad;
        if (dim >= p.sizes.value_dim) continue;
        float out[2];
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const float value = sums[i + 2 * r + b];
          // One step of refinement: a value that is the sum gives 1, not its neighbour.
          const float first = value * inverse;
          const float quotient = fmaf(fmaf(-first, sum.value, value), inverse, first);
          out[b] = empty ? 0.0F : bad ? NAN : quotient * scale;
        }
        write(place * p.sizes.value_dim + dim, out[0], out[1]);
      }
    }
  }

  __device__ void write(std::int64_t place, float low, float high) const {
    switch (p.dtype) {
      case DType::bf16:
        *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.o) + place) = __floats2bfloat162_rn(low, high);
        break;
      case DType::f16:
        *reinterpret_cast<__half2*>(static_cast<__half*>(p.o) + place) = __floats2half2_rn(low, high);
        break;
      default: *reinterpret_cast<float2*>(static_cast<float*>(p.o) + place) = {low, high};
    }
  }

  static constexpr float kLightOctaves = 3.0F;
  /// Less than log2(448): a row's reference may stay behind as long as no code saturates, since codes keep their
  /// mantissas.
  static constexpr float kLimit = 8.75F;

  const ForwardParameters& p;
  ForwardShared<Traits>& shared;
  int group;
  int thread;
  int lane;
  int row;  // Of the block, for r = 0.
  int quad;
  Place slot;
  Place queries;
  Place keys;
  Place values;
  bool irregular_ = false;
  bool far_ = false;
  std::int32_t whole_begin_ = 0;  // No row of the warp is cut within these keys.
  std::int32_t whole_end_ = 0;
  bool raised_ = false;  // By the last tile, in a row of the warp.
  RowState state;
  float scores[Traits::kScores];
  float sums[Traits::kSums];
  std::uint32_t codes[Traits::kScores / 4];
  std::uint32_t pairs[Traits::kScores / 2];
  Quarter coming;  // Read ahead.
  float logit[2][static_cast<std::size_t>(kPart)];
};

}  // namespace mxflash::cuda
