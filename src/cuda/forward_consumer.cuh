// 64 queries of a warpgroup: scores, weights, sums, output. A thread has parts of two rows, `r` = 0 and 1 (eight apart).
#pragma once

#include <numbers>

#include "cuda/forward.cuh"

namespace mxflash::cuda {

/// What a thread knows of its two rows. Three of them change with the tiles.
struct RowState {
  std::int64_t begin[2];  ///< Visible keys of the document.
  std::int64_t end[2];
  float factor[2];     ///< Multiplies scores, before the key's.
  float most[2];       ///< Largest exponent of V that the row sees; filled where a tile is irregular.
  float reference[2];  ///< m, an integer, or -inf.
  float rescale[2];    ///< 2^(m before - m), by the last tile.
  float extra[2];      ///< Of the row sum: what the multipliers do not count.
  bool poisoned[2];    ///< The row sees a poisoned V.

  [[nodiscard]] __device__ bool sees(int r, std::int64_t key) const { return begin[r] <= key && key < end[r]; }
  /// Subtracted from logits: weights are at most 256.
  [[nodiscard]] __device__ float base(int r) const { return reference[r] == -INFINITY ? 0.0F : reference[r] - 8.0F; }
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
    if (group == 1) take_turn_end(0);  // The first turn is the first group's.
    for (;;) {
      shared.work_full[slot.stage].wait(slot.phase);
      const Work& work = shared.work[slot.stage];
      const bool last = work.head < 0;
      if (!last) attend(work);
      release(shared.work_empty[slot.stage]);
      slot.template advance<2>();
      if (last) break;
    }
    if (group == 0) turn_wait();  // Leaves no thread waiting at a barrier of a block that has gone.
  }

 private:
  // The groups issue their products in turns, so that one's exponentials run beside the other's products.
  __device__ void turn_wait() const { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
  __device__ void take_turn_end(int next) const { asm volatile("bar.arrive %0, 256;" ::"r"(1 + next) : "memory"); }
  __device__ void turn_end() const { take_turn_end(1 - group); }

  __device__ void release(Barrier& barrier) const {
    __syncwarp();
    if (lane == 0) barrier.arrive();
  }

  __device__ void attend(const Work& work) {
    prepare(work);
    const std::int32_t tiles = work.tiles.end - work.tiles.first;
    if (tiles <= 0) {
      store(work, false);
      return;
    }
    irregular_ = has_irregular(work, work.range);
    if (irregular_) largest_exponents(work);
    shared.queries_full.wait(queries_phase);
    queries_phase ^= 1;

    std::int32_t tile = work.tiles.end - 1;
    shared.keys_full[keys.stage].wait(keys.phase);
    turn_wait();
    multiply_scores();
    turn_end();
    cute::warpgroup_wait<0>();
    fence(scores);
    weigh(work, tile);
    pack();
    bool summed = false;
    auto fresh = ScaleOut::Zero;
    for (--tile; tile >= work.tiles.first; --tile) {
      shared.keys_full[keys.stage].wait(keys.phase);
      turn_wait();
      multiply_scores();
      shared.values_full[values.stage].wait(values.phase);
      multiply_values(fresh);
      turn_end();
      cute::warpgroup_wait<1>();
      fence(scores);
      weigh(work, tile);
      cute::warpgroup_wait<0>();
      fence(sums);
      release(shared.values_empty[values.stage]);
      values.template advance<Traits::kStages>();
      fresh = ScaleOut::One;
      // The tile that has just been added is the one after this. By its place, not by a count: a document that goes on
      // must round its first rows as before.
      if ((tile + 1) % kTilesBetweenSums == 0) {
        move_sums(summed);
        summed = true;
        fresh = ScaleOut::Zero;
      } else {
        rescale();
      }
      pack();
    }
    release(shared.queries_empty);
    shared.values_full[values.stage].wait(values.phase);
    multiply_values(fresh);
    cute::warpgroup_wait<0>();
    fence(sums);
    release(shared.values_empty[values.stage]);
    values.template advance<Traits::kStages>();
    store(work, summed);
  }

  __device__ void prepare(const Work& work) {
    const Item& item = work.item;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = row + 8 * r;
      const bool inside = query < item.queries;
      const KeySpan span = visible_keys(item.first_position + query, item.keys, p.band);
      state.begin[r] = inside ? span.begin : 0;
      state.end[r] = inside ? span.end : 0;
      const float factor =
          inside ? p.workspace.query_factor[work.head * p.sizes.rows_q() + item.query_row + query] : 0.0F;
      state.factor[r] = factor * p.logit_scale;
      state.reference[r] = -INFINITY;
      state.rescale[r] = 1.0F;
      state.extra[r] = 0.0F;
      state.poisoned[r] = false;
      state.most[r] = -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < Traits::kSums; ++i) sums[i] = 0.0F;
    total[0] = total[1] = 0.0F;
  }

  /// Whether something in these keys needs more than the plain loop: values that the row sum's multipliers do not reach,
  /// light keys, poisoned values, logits beyond FP32. What it decides does not show in rows that have nothing of it.
  __device__ bool has_irregular(const Work& work, const Range& range) const {
    constexpr float kMostScore = 448.0F * 448.0F * Traits::kKeyDims;
    float factor = fmaxf(fabsf(state.factor[0]), fabsf(state.factor[1]));
    for (int half = 4; half < 32; half *= 2) factor = fmaxf(factor, __shfl_xor_sync(0xFFFFFFFFU, factor, half));
    return range.least <= static_cast<float>(-kE8m0Bias) || range.least <= work.range.most - kLightOctaves ||
           range.least < work.reference - kBelowReference || range.most > work.reference + kAboveReference ||
           !(factor * range.key_factor < 1e37F / kMostScore);
  }

  [[nodiscard]] __device__ std::int64_t kv_head(const Work& work) const {
    return work.head / (p.sizes.heads / p.sizes.kv_heads);
  }

  /// Of V, over the keys that each row sees.
  __device__ void largest_exponents(const Work& work) {
    const KeyScale* key_scale = p.workspace.key_scale + kv_head(work) * p.sizes.rows_k() + work.item.key_row;
    const Range* ranges = p.workspace.ranges + kv_head(work) * p.sizes.tile_slots() + work.item.first_tile;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = -INFINITY;
      for (std::int64_t tile = state.begin[r] / Traits::kKeys; tile * Traits::kKeys < state.end[r]; ++tile) {
        const std::int64_t begin = tile * Traits::kKeys;
        const std::int64_t end = min(begin + Traits::kKeys, std::int64_t{work.item.keys});
        if (state.begin[r] <= begin && end <= state.end[r]) {
          most = fmaxf(most, ranges[tile].most);
          continue;
        }
        for (std::int64_t key = begin + quad; key < end; key += 4) {
          if (state.sees(r, key)) most = fmaxf(most, key_scale[key].value_exponent);
        }
      }
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFU, most, 1));
      state.most[r] = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFU, most, 2));
    }
  }

  __device__ void multiply_scores() {
    fence(scores);
    cute::warpgroup_arrive();
    constexpr int kQueryBytes = 64 * Traits::kRowBytes;
#pragma unroll
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      const std::uint64_t a = descriptor<Traits::kRowBytes>(shared.queries.codes + chunk * 2 * kQueryBytes +
                                                            group * kQueryBytes);
      const std::uint64_t b = descriptor<Traits::kRowBytes>(shared.keys[keys.stage].codes +
                                                            chunk * Traits::kKeys * Traits::kRowBytes);
#pragma unroll
      for (int step = 0; step < Traits::kRowBytes / 32; ++step) {
        multiply<typename Traits::QkAtom>(a + 2 * step, b + 2 * step, scores,
                                          chunk + step == 0 ? ScaleOut::Zero : ScaleOut::One);
      }
    }
    cute::warpgroup_commit_batch();
  }

  __device__ void multiply_values(ScaleOut first) {
    fence(sums);
    fence(codes);
    cute::warpgroup_arrive();
    const std::uint64_t b = descriptor<Traits::kKeys>(shared.values[values.stage].codes);
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

  /// Scores to weights, 256 at most; then the tile's keys are done with.
  __device__ void weigh(const Work& work, std::int32_t tile) {
    const KeyScale* key_scale = shared.scales[keys.stage].keys;
    const std::int64_t first = std::int64_t{tile} * Traits::kKeys;
    const bool irregular = irregular_ && has_irregular(work, shared.ranges[keys.stage]);
    if (irregular) {
      logits<true>(key_scale);
    } else {
      logits<false>(key_scale);
    }
    const bool cut = state.begin[0] > first || state.begin[1] > first || state.end[0] < first + Traits::kKeys ||
                     state.end[1] < first + Traits::kKeys;
    if (__any_sync(0xFFFFFFFFU, cut)) mask(first);
    float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < Traits::kScores; ++i) most[row_of(i)] = fmaxf(most[row_of(i)], scores[i]);
    float base[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = fmaxf(most[r], __shfl_xor_sync(0xFFFFFFFFU, most[r], 1));
      most[r] = fmaxf(most[r], __shfl_xor_sync(0xFFFFFFFFU, most[r], 2));
      const float before = state.reference[r];
      state.reference[r] = fmaxf(before, ceilf(most[r]));
      state.rescale[r] = before == state.reference[r] ? 1.0F : exact_pow2(before - state.reference[r]);
      state.extra[r] *= state.rescale[r];
      base[r] = state.base(r);
    }
#pragma unroll
    for (int i = 0; i < Traits::kScores; ++i) scores[i] = exp2_fast(scores[i] - base[row_of(i)]);
    if (irregular) count_apart(work, key_scale, first);
    release(shared.keys_empty[keys.stage]);
    keys.template advance<Traits::kStages>();
  }

  template <bool kIrregular>
  __device__ void logits(const KeyScale* key_scale) {
#pragma unroll
    for (int i = 0; i < Traits::kScores; i += 4) {
      const float4 two = *reinterpret_cast<const float4*>(key_scale + key_of(i));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float factor = state.factor[row_of(j)] * (j % 2 == 0 ? two.x : two.z);
        const float exponent = j % 2 == 0 ? two.y : two.w;
        if (kIrregular) {
          scores[i + j] = held(fmaf(scores[i + j], factor, fmaxf(exponent, static_cast<float>(-kE8m0Bias))), 1e38F);
        } else {
          scores[i + j] = fmaf(scores[i + j], factor, exponent);
        }
      }
    }
  }

  __device__ void mask(std::int64_t first) {
    std::int32_t begin[2];
    std::uint32_t length[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      begin[r] = static_cast<std::int32_t>(max(min(state.begin[r] - first, std::int64_t{Traits::kKeys}), std::int64_t{0}));
      const auto end = static_cast<std::int32_t>(max(min(state.end[r] - first, std::int64_t{Traits::kKeys}), std::int64_t{0}));
      length[r] = static_cast<std::uint32_t>(max(end - begin[r], 0));
    }
#pragma unroll
    for (int i = 0; i < Traits::kScores; ++i) {
      const bool seen = static_cast<std::uint32_t>(key_of(i) - begin[row_of(i)]) < length[row_of(i)];
      scores[i] = seen ? scores[i] : -INFINITY;
    }
  }

  /// Whether the row sum's multipliers have this key.
  static __device__ bool counted(const Work& work, const KeyScale& key) {
    return key.value_exponent > static_cast<float>(-kE8m0Bias) &&
           key.value_exponent >= work.reference - kBelowReference && key.value_exponent <= work.reference + kAboveReference;
  }
  static __device__ bool may_count_apart(const Work& work, const KeyScale& key) {
    return key.value_exponent <= work.range.most - kLightOctaves || !counted(work, key);
  }

  /// What the multipliers do not count of the row sum, in FP32; and whether the row sees a poisoned V.
  __device__ void count_apart(const Work& work, const KeyScale* key_scale, std::int64_t first) {
    constexpr float kLeastNormal = 0.015625F;
#pragma unroll 1
    for (int pair = 0; pair < Traits::kScores / 2; ++pair) {
      const int i = 2 * pair;
      const bool apart = may_count_apart(work, key_scale[key_of(i)]) || may_count_apart(work, key_scale[key_of(i + 1)]);
      if (!__any_sync(0xFFFFFFFFU, apart)) continue;
      // A run-time index would move the scores to memory: the pair is picked by comparison.
      float weights[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < Traits::kScores; ++j) weights[j % 2] = j / 2 == pair ? scores[j] : weights[j % 2];
      const int r = row_of(i);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int key = key_of(i + b);
        if (!(r == 0 ? state.sees(0, first + key) : state.sees(1, first + key))) continue;
        const float given = key_scale[key].value_exponent;
        const float exponent = fmaxf(given, static_cast<float>(-kE8m0Bias));
        const std::uint32_t code = to_e4m3(weights[b], 0.0F) & 0xFFU;
        const float rounded = decode(Format::e4m3, static_cast<std::uint8_t>(code));
        const float most = r == 0 ? state.most[0] : state.most[1];
        const bool light = (given <= static_cast<float>(-kE8m0Bias) || given <= most - kLightOctaves) &&
                           rounded < kLeastNormal;
        const float weight = (light ? weights[b] : rounded) - (counted(work, key_scale[key]) ? rounded : 0.0F);
        const float part = weight == 0.0F ? 0.0F : ldexpf(weight, static_cast<int>(work.reference - exponent));
        if (r == 0) {
          state.extra[0] += part;
          state.poisoned[0] = state.poisoned[0] || given == kPoisonedValue;
        } else {
          state.extra[1] += part;
          state.poisoned[1] = state.poisoned[1] || given == kPoisonedValue;
        }
      }
    }
  }

  /// Weights to codes, in place of the last tile's.
  __device__ void pack() {
#pragma unroll
    for (int a = 0; a < Traits::kScores / 8; ++a) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* low = scores + 8 * a + 2 * r;
        codes[2 * a + r] = to_e4m3(low[0], low[1]) | (to_e4m3(low[4], low[5]) << 16);
      }
    }
  }

  __device__ void rescale() {
    // References are integers and seldom move: most tiles leave the sums as they are.
    if (!__any_sync(0xFFFFFFFFU, state.rescale[0] != 1.0F || state.rescale[1] != 1.0F)) return;
#pragma unroll
    for (int i = 0; i < Traits::kSums; ++i) sums[i] *= state.rescale[row_of(i)];
    total[0] *= state.rescale[0];
    total[1] *= state.rescale[1];
    moved[0] *= state.rescale[0];
    moved[1] *= state.rescale[1];
  }

  /// Adds the accumulators to the FP32 sums, which wait in shared memory with their scale in `moved`.
  __device__ void move_sums(bool summed) {
    float* mine = &shared.sums[group][0][thread];
#pragma unroll
    for (int i = 0; i < Traits::kOutputs; ++i) {
      const float before = summed ? mine[i * kWarpgroup] * moved[row_of(i)] : 0.0F;
      mine[i * kWarpgroup] = before + sums[i];
    }
    total[0] += sums[Traits::kOutputs];
    total[1] += sums[Traits::kOutputs + 2];
    moved[0] = moved[1] = 1.0F;
#pragma unroll
    for (int i = 0; i < Traits::kSums; ++i) sums[i] = 0.0F;
    rescale();
  }

  __device__ void store(const Work& work, bool summed) {
    const float* mine = &shared.sums[group][0][thread];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = row + 8 * r;
      if (query >= work.item.queries) continue;
      const std::int64_t place = (std::int64_t{work.item.query_row} + query) * p.sizes.heads + work.head;
      // Only the first thread of a row holds its sum; `extra` is in parts.
      float extra = state.extra[r];
      const unsigned four = 0xFU << (lane / 4 * 4);
      extra += __shfl_xor_sync(four, extra, 1);
      extra += __shfl_xor_sync(four, extra, 2);
      const float counted = __shfl_sync(four, total[r] + sums[Traits::kOutputs + 2 * r], lane / 4 * 4);
      const bool bad = __any_sync(four, state.poisoned[r]);
      const float sum = counted + extra;
      const bool empty = state.begin[r] >= state.end[r];
      const float unit = detail::pow2(static_cast<int>(work.reference));
      float* lse = p.lse + place;
      if (quad == 0 && work.part == 0) {
        const float log2 = state.reference[r] - 8.0F - work.reference + log2f(sum);
        *lse = empty ? -INFINITY : log2 * std::numbers::ln2_v<float>;
      }
#pragma unroll
      for (int i = 0; i < Traits::kOutputs; i += 4) {
        const int dim = work.part * Traits::kValueDims + i * 2 + 2 * quad;
        if (dim >= p.sizes.value_dim) continue;
        float out[2];
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          float value = sums[i + 2 * r + b];
          if (summed) value += mine[(i + 2 * r + b) * kWarpgroup] * moved[r];
          out[b] = empty ? 0.0F : bad ? NAN : __fdiv_rn(value, sum) * unit;
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

  const ForwardParameters& p;
  ForwardShared<Traits>& shared;
  int group;
  int thread;
  int lane;
  int row;  // Of the block, for r = 0.
  int quad;
  Place slot;
  Place keys;
  Place values;
  std::uint32_t queries_phase = 0;
  bool irregular_ = false;
  RowState state;
  float moved[2] = {1, 1};
  float total[2] = {0, 0};  // Row sums that have been moved.
  float scores[Traits::kScores];
  float sums[Traits::kSums];
  std::uint32_t codes[Traits::kScores / 4];
};

}  // namespace mxflash::cuda
