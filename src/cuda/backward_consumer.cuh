// 64 keys of a warpgroup: scores by keys, weights, gradients of scores, sums. A thread has parts of two neighbouring
// keys, `r` = 0 and 1, and of a tile's queries 16 a + 4 quad + j those with j < 4.
#pragma once

#include "cuda/backward.cuh"

namespace mxflash::cuda {

/// Which queries of a tile see a key: of one that no key's mask cuts, and of others.
struct WholeTile {
  static __device__ float seen(const KeyRows&, int, std::int32_t, float x) { return x; }
  static __device__ std::uint32_t bytes(const KeyRows&, int, std::int32_t) { return ~0U; }
};
struct CutTile {
  /// x, or 0.
  static __device__ float seen(const KeyRows& rows, int r, std::int32_t query, float x) {
    return rows.seen(r, query) ? x : 0.0F;
  }
  /// Of four queries, a byte each.
  static __device__ std::uint32_t bytes(const KeyRows& rows, int r, std::int32_t query) {
    return bytes_below(rows.end[r] - query) & ~bytes_below(rows.begin[r] - query);
  }
};

template <class Traits>
class KeyConsumer {
 public:
  __device__ KeyConsumer(const BackwardParameters& parameters, BackwardShared<Traits>& block)
      : p(parameters.a), shared(block), thread_(threadIdx.x - kWarpgroup) {}

  __device__ void run() {
    for (;;) {
      shared.keys_full[keys.stage()].wait(keys.phase());
      const KeyWork& work = shared.work[keys.stage()];
      const bool last = work.kv_head < 0;
      if (!last) attend(work);
      release(shared.keys_empty[keys.stage()]);
      keys.template advance<Traits::kKeyStages>();
      if (last) return;
    }
  }

 private:
  static constexpr std::size_t kScores = Traits::kScores;
  static constexpr std::size_t kCodes = kScores / 4;
  static constexpr int kConsumers = 2 * kWarpgroup;
  static constexpr int kLeastRaised = 9;  // So that both 2^e and 2^-e are normal numbers.

  /// A raised exponent e + 135: the least e with most <= 448 2^e.
  static __device__ int raised_of(float most) {
    return max(static_cast<int>((__float_as_uint(most) + 0x1FFFFFU) >> 23), kLeastRaised);
  }
  static __device__ float scale_of(int raised) { return __int_as_float((raised - 8) << 23); }
  static __device__ float inverse_of(int raised) { return __int_as_float((262 - raised) << 23); }

  /// Of scales, for a token far larger than those that see it: a pair that is not seen has dS 0, and 0 inf is NaN.
  static __device__ float finite_product(float a, float b) { return fminf(a * b, 3e38F); }

  [[nodiscard]] __device__ std::uint32_t stage() const { return tile_ % Traits::kQueryStages; }

  /// Of the warp, among the consumers', and in the warp. Opaque: what follows from them is made again where it is used,
  /// not kept, since registers are short.
  [[nodiscard]] __device__ int slot() const { return static_cast<int>(opaque(thread_) / 32); }
  [[nodiscard]] __device__ int lane() const { return static_cast<int>(opaque(thread_) % 32); }
  [[nodiscard]] __device__ int group() const { return slot() / 4; }
  [[nodiscard]] __device__ int warp() const { return slot() % 4; }
  [[nodiscard]] __device__ int quad() const { return lane() % 4; }
  /// Of the tile, for r = 0.
  [[nodiscard]] __device__ int key() const { return slot() * 16 + lane() / 4 * 2; }
  /// Registers are short: what is seldom used lies in shared memory.
  [[nodiscard]] __device__ KeyRows& rows() const { return shared.rows[thread_]; }
  [[nodiscard]] __device__ KeySums& kept() const { return shared.sums[slot()]; }

  __device__ void release(Barrier& barrier) const {
    __syncwarp();
    if (lane() == 0) barrier.arrive();
  }

  /// All consumers: what they wrote before, all of them see.
  static __device__ void meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

  __device__ void attend(const KeyWork& work) {
    const KeyItem& item = work.item;
    if (item.end_tile <= item.first_tile) return store_nothing(work);
    const std::int32_t heads = p.sizes.forward.heads / p.sizes.forward.kv_heads;
    prepare(work);
    product_ = ScaleOut::Zero;
    std::int32_t count = 0;
    for (std::int32_t head = work.kv_head * heads; head < (work.kv_head + 1) * heads; ++head) {
      for (std::int32_t tile = item.end_tile - 1; tile >= item.first_tile; --tile) {
        const bool enters = tile == item.end_tile - 1;
        if (++count % kQueryTilesBetweenSums == 0 || (enters && is_far(work, head))) move_sums();
        if (enters) enter(work, head);
        walk({head, tile * kQueryTile});
        ++tile_;
      }
    }
    store(work);
  }

  /// Head, and the first query of the tile, in its document.
  struct Spot {
    std::int32_t head;
    std::int32_t first;
  };

  /// By its place, which is one register.
  [[nodiscard]] __device__ const KeyWork& work_now() const { return shared.work[opaque(keys.stage())]; }

  /// One tile of queries.
  __device__ void walk(const Spot& spot) {
    shared.queries_full[stage()].wait(tile_ / Traits::kQueryStages % 2);
    multiply_scores(stages_now());
    const Kind kind = kind_of(work_now(), spot.first);
    cute::warpgroup_wait<1>();
    fence(scores);
    switch (kind) {
      case Kind::whole: weigh<WholeTile>(spot); break;
      case Kind::cut: weigh<CutTile>(spot); break;
      default: weigh_apart(work_now(), spot);
    }
    multiply_values(stages_now());
    cute::warpgroup_wait<1>();
    fence(gradients);
    switch (kind) {
      case Kind::whole: differentiate<WholeTile>(spot); break;
      case Kind::cut: differentiate<CutTile>(spot); break;
      default: differentiate_apart(work_now(), spot);
    }
    float scale[2];  // Of the thread's rows of dQ.
    encode(scale);
    multiply_gradients(stages_now());
    cute::warpgroup_wait<0>();
    fence(dk);
    fence(dv);
    fence(dq);
    product_ = ScaleOut::One;
    release(shared.queries_empty[stage()]);
    give_queries(work_now(), scale);
  }

  /// dS to the operands of both its products.
  __device__ void encode(float (&scale)[2]) {
    encode_for_keys();
    if (p.ds_scale == ScoreScale::query) share_by_query();
    meet();
    if (p.ds_scale == ScoreScale::query) {
      encode_by_query(scale);
    } else {
      encode_by_square(scale);
    }
    cutlass::arch::fence_view_async_shared();
    meet();
  }

  enum class Kind : std::uint8_t { whole, cut, apart };

  /// Of the warp's part of a tile, whose record is there. All is read before anything is decided.
  [[nodiscard]] __device__ Kind kind_of(const KeyWork& work, std::int32_t first) const {
    const QueryTile& of = shared.tiles[stage()];
    const Range range = work.range;
    constexpr float kSafe = 60.0F;
    const bool heavy = range.least > of.most - kLightOctaves;
    const bool near = fabsf(p.logit_scale) * of.norm * range.key_norm < kPlainLogit;
    const bool safe = fabsf(range.least) <= kSafe && fabsf(range.most) <= kSafe;
    const int plain =
        static_cast<int>(of.irregular == 0) & static_cast<int>(heavy) & static_cast<int>(near) & static_cast<int>(safe);
    const int whole =
        static_cast<int>(first >= kept().whole_begin) & static_cast<int>(first + kQueryTile <= kept().whole_end);
    return plain == 0 ? Kind::apart : whole != 0 ? Kind::whole : Kind::cut;
  }

  /// What does not change while the keys walk.
  __device__ void prepare(const KeyWork& work);
  /// Largest exponent of dO; of a head without any, that of the head before.
  [[nodiscard]] __device__ int base_of(const KeyWork& work, std::int32_t head) const;
  /// Whether in a head's unit sums of the one before might leave FP32; those that wait are in none.
  [[nodiscard]] __device__ bool is_far(const KeyWork& work, std::int32_t head) const {
    constexpr int kSafe = 64;
    return product_ == ScaleOut::One && abs(kept().base - base_of(work, head)) > kSafe;
  }
  /// The next head of the group: dO's exponents have another base there.
  __device__ void enter(const KeyWork& work, std::int32_t head);

  /// Stages and the warpgroup: together made uniform, so that descriptors are.
  [[nodiscard]] __device__ std::uint32_t stages_now() const {
    return uniform(static_cast<std::uint32_t>(group()) << 16 | keys.stage() << 8 | stage());
  }
  static __device__ int group_of(std::uint32_t stages) { return static_cast<int>(stages >> 16); }
  [[nodiscard]] __device__ auto& keys_at(std::uint32_t stages) const { return shared.keys[stages >> 8 & 0xFFU]; }
  [[nodiscard]] __device__ auto& queries_at(std::uint32_t stages) const { return shared.queries[stages & 0xFFU]; }

  __device__ void multiply_scores(std::uint32_t stages) {
    fence(scores);
    fence(gradients);
    cute::warpgroup_arrive();
    multiply_rows(own_rows(keys_at(stages).keys, stages), queries_at(stages).queries, scores);
    cute::warpgroup_commit_batch();
    multiply_rows(own_rows(keys_at(stages).values, stages), queries_at(stages).dout, gradients);
    cute::warpgroup_commit_batch();
  }

  /// Of the warpgroup, the first chunk.
  static __device__ const std::uint8_t* own_rows(const std::uint8_t* rows, std::uint32_t stages) {
    return rows + group_of(stages) * 64 * Traits::kRowBytes;
  }

  __device__ void multiply_rows(const std::uint8_t* left, const std::uint8_t* right, float (&out)[kScores]) const {
#pragma unroll
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      const std::uint64_t a = descriptor<Traits::kRowBytes>(left + chunk * kTileRows * Traits::kRowBytes);
      const std::uint64_t b = descriptor<Traits::kRowBytes>(right + chunk * kQueryTile * Traits::kRowBytes);
#pragma unroll
      for (int step = 0; step < Traits::kRowBytes / 32; ++step) {
        multiply<typename Traits::ScoreAtom>(a + 2 * step, b + 2 * step, out,
                                             chunk + step == 0 ? ScaleOut::Zero : ScaleOut::One);
      }
    }
  }

  __device__ void multiply_values(std::uint32_t stages) {
    fence(dv);
    fence(weights);
    cute::warpgroup_arrive();
    multiply_columns(weights, queries_at(stages).dout_columns, dv);
    cute::warpgroup_commit_batch();
  }

  __device__ void multiply_gradients(std::uint32_t stages) {
    fence(dk);
    fence(slopes);
    fence(dq);
    cute::warpgroup_arrive();
    multiply_columns(slopes, queries_at(stages).query_columns, dk);
    const std::uint64_t a = descriptor<kTileRows>(shared.ds.codes);
    const std::uint64_t b =
        descriptor<kTileRows>(keys_at(stages).columns + group_of(stages) * (Traits::kOut / 2) * kTileRows);
#pragma unroll
    for (int step = 0; step < kTileRows / 32; ++step) {
      multiply<typename Traits::DqAtom>(a + 2 * step, b + 2 * step, dq, step == 0 ? ScaleOut::Zero : ScaleOut::One);
    }
    cute::warpgroup_commit_batch();
  }

  __device__ void multiply_columns(const std::uint32_t* codes, const std::uint8_t* columns,
                                   float (&sums)[Traits::kSums]) const {
    const std::uint64_t b = descriptor<kQueryTile>(columns);
#pragma unroll
    for (int step = 0; step < kQueryTile / 32; ++step) {
      multiply<typename Traits::OutAtom>(codes + 4 * step, b + 2 * step, sums, step == 0 ? product_ : ScaleOut::One);
    }
  }

  /// Register of the score of row r and query 16 a + 4 quad + j.
  static constexpr __device__ int at(int a, int r, int j) { return 8 * a + 4 * (j / 2) + 2 * r + j % 2; }
  /// Register of the four codes of row r and queries 16 a + 4 quad.
  static constexpr __device__ int code_at(int a, int r) { return a / 2 * 4 + a % 2 * 2 + r; }

  /// Of the four queries of a thread from `query` on.
  static __device__ float4 four(const float* of, int query) { return *reinterpret_cast<const float4*>(of + query); }

  /// Scores to weights as the forward made them, in `scores`, and to operands of dV, in `weights`.
  template <class Tile>
  __device__ void weigh(const Spot& spot);
  /// dP to dS, in `gradients`, and its largest magnitude.
  template <class Tile>
  __device__ void differentiate(const Spot& spot);

  /// The same, one thing after the other, where numbers are far apart or keys are light.
  __device__ void weigh_apart(const KeyWork& work, const Spot& spot);
  __device__ void differentiate_apart(const KeyWork& work, const Spot& spot);

  /// dS to operands of dK, in `slopes`, relative to the largest that the warp's keys have met; and tells the other
  /// warps the largest of these keys.
  __device__ void encode_for_keys();
  /// Of |dS| times K's factors, over the tile's keys and 32 queries.
  [[nodiscard]] __device__ float most_of_all(int half) const;
  /// dS to operands of dQ, in shared memory, relative to the largest of 32 queries and the tile's keys.
  __device__ void encode_by_square(float (&scale)[2]);
  /// The same relative to the largest of each query, which has to be found first. The two turns' largest are apart:
  /// those of one are cleared while the other's are read.
  __device__ void share_by_query();
  /// The larger of this lane's and another's, of `kLeft` queries; the other goes on with the rest.
  template <int kLeft>
  __device__ void halve(float (&largest)[kQueryTile / 4]) const;
  __device__ void encode_by_query(float (&scale)[2]);
  /// Four registers of codes, 32 queries from `32 half` on, to their rows.
  __device__ void store_codes(int half, const std::uint32_t (&pairs)[4]) const;
  /// K's factors where nothing may come of keys that are not seen: a poisoned one has made dS NaN wherever it is.
  [[nodiscard]] __device__ float2 fold() const {
    return {fmaxf(rows().factor[0], 0.0F), fmaxf(rows().factor[1], 0.0F)};
  }

  /// dQ of the tile to shared memory, for QueryAdder.
  __device__ void give_queries(const KeyWork& work, const float (&scale)[2]);

  __device__ void scale_sums(float (&sums)[Traits::kSums], float by) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(Traits::kSums); ++i) sums[i] *= by;
  }
  /// Adds the accumulators to the sums in FP32, which wait in global memory.
  __device__ void move_sums();
  /// Those of dK or dV, which are in units of `by`.
  static __device__ void move(const float (&sums)[Traits::kSums], float4* to, float by, bool add);
  /// A thread's own part of the scratch, in steps of kConsumers.
  [[nodiscard]] __device__ float4* waiting() const;
  /// Of keys that no query sees.
  __device__ void store_nothing(const KeyWork& work);
  __device__ void store(const KeyWork& work);
  /// In the units of `of`.
  __device__ void write(const KeyWork& work, const KeySums& of);
  /// The sums of eight dims and both keys, with those that wait.
  static __device__ float4 total(const float (&sums)[Traits::kSums], int i, const float4* waits, float by);
  /// Two numbers of dV.
  __device__ void write_pair(std::int64_t at, float low, float high) const;

  const BackwardArguments& p;
  BackwardShared<Traits>& shared;
  std::uint32_t thread_;  // Among the consumers.
  Place keys;
  std::uint32_t tile_ = 0;  // Of all that the block meets: it says where each lies.
  ScaleOut product_ = ScaleOut::Zero;
  float most[2];  // Of |dS|, by 32 queries.
  float dk[Traits::kSums];
  float dv[Traits::kSums];
  float scores[kScores];
  float gradients[kScores];
  float dq[Traits::kDqSums];
  std::uint32_t weights[kCodes];
  std::uint32_t slopes[kCodes];
};

}  // namespace mxflash::cuda

#include "cuda/backward_store.cuh"
#include "cuda/backward_weights.cuh"
