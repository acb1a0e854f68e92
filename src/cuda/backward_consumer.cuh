// 64 keys of a warpgroup: scores by keys, weights, gradients of scores, sums. A thread has parts of two neighbouring
// keys, `r` = 0 and 1, and of a tile's queries 16 a + 4 quad + j those with j < 4.
#pragma once

#include "cuda/backward.cuh"

namespace mxflash::cuda {

/// Which queries of a tile see a key: of one that no key's mask cuts, and of others.
struct WholeTile {
  static __device__ float seen(std::uint32_t, int, float x) { return x; }
  static __device__ std::uint32_t bytes(const KeyRows&, int, std::int32_t) { return ~0U; }
};
struct CutTile {
  /// x, or 0 where bit `i` says that the query does not see the key.
  static __device__ float seen(std::uint32_t bits, int i, float x) { return (bits & 1U << i) != 0 ? x : 0.0F; }
  /// Of the 16 queries of a thread, from the tile's first on; the second key's sixteen bits higher.
  static __device__ std::uint32_t bits(const KeyRows& rows, std::int32_t first, int quad) {
    std::uint32_t seen[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      seen[r] = own_below(rows.end[r] - first, quad) & ~own_below(rows.begin[r] - first, quad);
    }
    return seen[0] | (seen[1] << 16);
  }
  /// Of four queries, a byte each.
  static __device__ std::uint32_t bytes(const KeyRows& rows, int r, std::int32_t query) {
    return bytes_below(rows.end[r] - query) & ~bytes_below(rows.begin[r] - query);
  }

 private:
  static __device__ std::uint32_t own_below(std::int32_t query, int quad) {
    const std::int32_t queries = max(min(query, kQueryTile), 0);
    return (1U << (queries / 16 * 4 + max(min(queries % 16 - 4 * quad, 4), 0))) - 1;
  }
};

template <class Traits>
class KeyConsumer {
 public:
  __device__ KeyConsumer(const BackwardParameters& parameters, BackwardShared<Traits>& block)
      : p(parameters.a),
        shared(block),
        thread_(opaque(threadIdx.x - kWarpgroup)),
        base_(uniform(shared_place(&block))) {}

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
  using Shared = BackwardShared<Traits>;
  using Keys = typename Shared::Keys;
  using Queries = typename Shared::Queries;
  static constexpr std::size_t kScores = Traits::kScores;
  static constexpr std::size_t kCodes = kScores / 4;
  static constexpr int kStep = 16;  // Of places in shared memory.
  static constexpr int kOwnRows = 64 * Traits::kRowBytes;
  static_assert(kOwnRows == Traits::kOut / 2 * kTileRows);  // Of its dims of K, by columns.
  static constexpr int kLeastRaised = 9;                    // So that both 2^e and 2^-e are normal numbers.
  /// Whether the next tile's queries can be there while this one's are needed.
  static constexpr bool kAhead = Traits::kQueryStages > 1;

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
  [[nodiscard]] __device__ KeyRows& rows() const { return shared.rows[opaque(thread_)]; }
  [[nodiscard]] __device__ float factor(int r) const { return r == 0 ? pair_.factor.low() : pair_.factor.high(); }
  [[nodiscard]] __device__ float exponent(int r) const { return r == 0 ? pair_.exponent.low() : pair_.exponent.high(); }
  /// 2^-exponent
  [[nodiscard]] __device__ float light(int r) const { return exact_pow2(-exponent(r)); }
  [[nodiscard]] __device__ KeySums& kept() const { return shared.sums[slot()]; }

  enum class Kind : std::uint32_t { whole, cut, apart };
  /// Of KeyPair; factor times the scale of logits; weight as KeySums::weight, of a key.
  struct KeyFactors {
    float factor[2];
    float exponent[2];
    float weight[2];
  };
  /// Of the four queries of a thread among sixteen.
  struct Weighing {
    uint4 logit;
    float4 slope;
  };
  /// What a tile begins with. Loaded before a product is sent for: behind it a load takes 150 to 200 cycles.
  struct Ahead {
    KeyFactors factors;
    Weighing some;
  };

  /// All lanes: what each has done is done before. The arrival alone does not tell the compiler.
  static __device__ void release(Barrier& barrier) {
    asm volatile("" ::: "memory");
    barrier.arrive();
    __syncwarp();
  }

  __device__ void attend(const KeyWork& work) {
    const KeyItem& item = work.item;
    if (item.end_tile <= item.first_tile) return store_nothing(work);
    prepare(work);
    clear_sums();
    left_ = heads() * item.tiles();
    keys_ = uniform(shared_place(&shared.keys[keys.stage()]) + static_cast<std::uint32_t>(group() * kOwnRows / kStep));
    wait_for_queries(tile_);
    multiply_scores(queries_of(tile_));
    cute::warpgroup_wait<0>();
    fence(scores);
    Kind kind = kind_of();
    next_base_ = kSameBase;
    do {
      const bool enters = next_base_ != kSameBase;
      const bool full = left_ % kQueryTilesBetweenSums == 0 && left_ != heads() * work_now().item.tiles();
      if (full || (enters && is_far())) move_sums();
      --left_;
      if (enters) enter();
      walk(kind);
      ++tile_;
    } while (left_ > 0);
    store(work);
  }

  /// Of a key/value head.
  [[nodiscard]] __device__ std::int32_t heads() const { return p.sizes.forward.heads / p.sizes.forward.kv_heads; }
  /// By its place, which is one register.
  [[nodiscard]] __device__ const KeyWork& work_now() const { return shared.work[opaque(keys.stage())]; }

  /// One tile of queries, whose scores are there; makes those of the next, and looks ahead at it.
  __device__ void walk(Kind& kind) {
    weigh_tile(kind);
    differentiate_tile(kind);
    float scale[2];  // Of the thread's rows of dQ.
    encode(scale);
    const std::int32_t row = work_now().item.query_row;
    // Asked before it is needed: the answer takes 50 cycles.
    const bool given = shared.dq_empty.test_wait((tile_ + 1) % 2);
    const bool last = left_ == 0;
    const bool there = kAhead && (last || queries_there(tile_ + 1));
    multiply_keys();
    cutlass::arch::fence_view_async_shared();
    release(shared.ds_full);
    multiply_queries();
    if constexpr (kAhead) {
      if (!there) wait_for_queries(tile_ + 1);
      multiply_scores(next_queries());
    }
    cute::warpgroup_wait<kAhead ? 1 : 0>();
    fence(dk);
    fence(dq);
    release(shared.queries_empty[stage()]);
    if (!given) shared.dq_empty.wait((tile_ + 1) % 2);
    give_queries(row, scale);
    if constexpr (!kAhead) {
      if (!last) wait_for_queries(tile_ + 1);
      multiply_scores(next_queries());
    }
    if (!last) {
      ++tile_;
      kind = kind_of();
      next_base_ = shared.bases[stage()];
      --tile_;
    }
    cutlass::arch::fence_view_async_shared();
    release(shared.dq_full[tile_ % kAdders]);
    // Not in the next turn of the loop: the compiler makes them wait where it cannot follow.
    cute::warpgroup_wait<0>();
    fence(scores);
  }

  /// Sends for dP on the way.
  __device__ void weigh_tile(Kind kind) {
    const Ahead ahead{factors(), weighing(0)};
    multiply_dout();
    switch (kind) {
      case Kind::whole: return weigh<WholeTile>(ahead);
      case Kind::cut: return weigh<CutTile>(ahead);
      default: return weigh_apart(work_now());
    }
  }

  /// Sends for dV first.
  __device__ void differentiate_tile(Kind kind) {
    const Differences differences = this->differences(kind);
    multiply_values();
    cute::warpgroup_wait<1>();
    fence(gradients);
    switch (kind) {
      case Kind::whole: differentiate<WholeTile>(differences); break;
      case Kind::cut: differentiate<CutTile>(differences); break;
      default: differentiate_apart(work_now());
    }
    cute::warpgroup_wait<0>();  // Of dV, long there: its operands' registers are free.
    fence(dv);
  }

  /// dS to the operands of both its products.
  __device__ void encode(float (&scale)[2]) {
    const typename Traits::Sums::Powers powers(p.workspace, [&] { return row_of_sums(); });
    share_most();
    if (p.ds_scale == ScoreScale::query) share_by_query();
    release(shared.most_full);
    encode_for_keys();
    shared.most_full.wait(tile_ % 2);
    if (p.ds_scale == ScoreScale::query) {
      encode_by_query(scale);
    } else {
      encode_by_square(scale);
    }
    powers.raise(scale);
  }
  /// In the tables, the first of the thread's rows of dQ.
  [[nodiscard]] __device__ std::int64_t row_of_sums() const {
    const KeyWork& work = work_now();
    const QueryTile& of = shared.tiles[stage()];
    return std::int64_t{of.head} * work.rows_q + work.item.query_row + of.first + 16 * warp() + lane() / 4;
  }

  static __device__ float factor_of(std::uint32_t logit) { return __uint_as_float(logit & 0xFFFF0000U); }
  static __device__ float base_of(std::uint32_t logit) {
    return __half2float(__ushort_as_half(static_cast<std::uint16_t>(logit)));
  }

  /// Of the warp's part of a tile, whose record is there. All is read before anything is decided.
  [[nodiscard]] __device__ Kind kind_of() const {
    const QueryTile& of = shared.tiles[stage()];
    const KeySums& own = kept();
    const int plain = static_cast<int>(of.irregular == 0) & static_cast<int>(of.most < own.most_below) &
                      static_cast<int>(of.norm < own.norm_below);
    const int whole =
        static_cast<int>(of.first >= own.whole_begin) & static_cast<int>(of.first + kQueryTile <= own.whole_end);
    return static_cast<Kind>(uniform(plain == 0 ? 2U : whole != 0 ? 0U : 1U));
  }

  /// Whether in the next head's unit sums of the one before might leave FP32; those that wait are in none.
  [[nodiscard]] __device__ bool is_far() const {
    constexpr int kSafe = 64;
    return abs(kept().base - next_base_) > kSafe;
  }
  /// The next head of the group: dO's exponents have another base there.
  __device__ void enter();
  [[nodiscard]] __device__ float weight_of(int base) const { return ldexpf(1.0F / p.scale, 8 - base); }

  /// What does not change while the keys walk.
  __device__ void prepare(const KeyWork& work);

  [[nodiscard]] __device__ bool queries_there(std::uint32_t tile) const {
    return shared.queries_full[tile % Traits::kQueryStages].test_wait(tile / Traits::kQueryStages % 2);
  }
  __device__ void wait_for_queries(std::uint32_t tile) const {
    shared.queries_full[tile % Traits::kQueryStages].wait(tile / Traits::kQueryStages % 2);
  }

  /// As `queries_`, of a tile.
  [[nodiscard]] __device__ std::uint32_t queries_of(std::uint32_t tile) const {
    return base_ + static_cast<std::uint32_t>(offsetof(Shared, queries) / kStep) +
           tile % Traits::kQueryStages * static_cast<std::uint32_t>(sizeof(Queries) / kStep);
  }

  /// Where the next tile's lie; after the last anything, so that what the compiler sees is always the same.
  [[nodiscard]] __device__ std::uint32_t next_queries() const { return left_ == 0 ? keys_ : queries_of(tile_ + 1); }

  /// Of queries that are there, where they lie.
  __device__ void multiply_scores(std::uint32_t where) {
    queries_ = uniform(where);
    forget(scores);
    cute::warpgroup_arrive();
    multiply_rows(keys_ + offsetof(Keys, keys) / kStep, queries_ + offsetof(Queries, queries) / kStep, scores);
    cute::warpgroup_commit_batch();
  }

  __device__ void multiply_dout() {
    forget(gradients);
    cute::warpgroup_arrive();
    multiply_rows(keys_ + offsetof(Keys, values) / kStep, queries_ + offsetof(Queries, dout) / kStep, gradients);
    cute::warpgroup_commit_batch();
  }

  __device__ void multiply_rows(std::uint32_t left, std::uint32_t right, float (&out)[kScores]) const {
#pragma unroll
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      const std::uint64_t a = descriptor<Traits::kRowBytes>(left + chunk * kTileRows * Traits::kRowBytes / kStep);
      const std::uint64_t b = descriptor<Traits::kRowBytes>(right + chunk * kQueryTile * Traits::kRowBytes / kStep);
#pragma unroll
      for (int step = 0; step < Traits::kRowBytes / 32; ++step) {
        multiply<typename Traits::ScoreAtom>(a + 2 * step, b + 2 * step, out,
                                             chunk + step == 0 ? ScaleOut::Zero : ScaleOut::One);
      }
    }
  }

  __device__ void multiply_values() {
    fence(dv);
    fence(weights);
    cute::warpgroup_arrive();
    multiply_columns(weights, queries_ + offsetof(Queries, dout_columns) / kStep, dv);
    cute::warpgroup_commit_batch();
  }

  __device__ void multiply_keys() {
    fence(dk);
    fence(slopes);
    cute::warpgroup_arrive();
    multiply_columns(slopes, queries_ + offsetof(Queries, query_columns) / kStep, dk);
    cute::warpgroup_commit_batch();
  }

  /// Once all of the tile's dS is there.
  __device__ void multiply_queries() {
    shared.ds_full.wait(tile_ % 2);
    forget(dq);
    cute::warpgroup_arrive();
    const std::uint64_t a = descriptor<kTileRows>(uniform(base_) + offsetof(Shared, ds) / kStep);
    const std::uint64_t b = descriptor<kTileRows>(keys_ + offsetof(Keys, columns) / kStep);
#pragma unroll
    for (int step = 0; step < kTileRows / 32; ++step) {
      multiply<typename Traits::DqAtom>(a + 2 * step, b + 2 * step, dq, step == 0 ? ScaleOut::Zero : ScaleOut::One);
    }
    cute::warpgroup_commit_batch();
  }

  __device__ void multiply_columns(const std::uint32_t* codes, std::uint32_t columns,
                                   float (&sums)[Traits::kSums]) const {
    const std::uint64_t b = descriptor<kQueryTile>(columns);
#pragma unroll
    for (int step = 0; step < kQueryTile / 32; ++step) {
      multiply<typename Traits::OutAtom>(codes + 4 * step, b + 2 * step, sums, ScaleOut::One);
    }
  }

  /// Register of the score of row r and query 16 a + 4 quad + j.
  static constexpr __device__ int at(int a, int r, int j) { return 8 * a + 4 * (j / 2) + 2 * r + j % 2; }
  /// Register of the four codes of row r and queries 16 a + 4 quad.
  static constexpr __device__ int code_at(int a, int r) { return a / 2 * 4 + a % 2 * 2 + r; }

  /// Of the four queries of a thread from `query` on.
  static __device__ float4 four(const float* of, int query) { return *reinterpret_cast<const float4*>(of + query); }

  [[nodiscard]] __device__ KeyFactors factors() const {
    const float weight = kept().weight;
    return {{pair_.factor.low() * p.logit_scale, pair_.factor.high() * p.logit_scale},
            {pair_.exponent.low(), pair_.exponent.high()},
            {finite_product(light(0), weight), finite_product(light(1), weight)}};
  }
  [[nodiscard]] __device__ Weighing weighing(int a) const {
    const QueryTile& of = shared.tiles[stage()];
    const int query = 16 * a + 4 * quad();
    return {*reinterpret_cast<const uint4*>(of.logit + query), four(of.slope, query)};
  }

  /// Of all queries of a thread.
  struct Differences {
    std::uint32_t seen = ~0U;  ///< As CutTile::bits.
    float4 offset[kQueryTile / 16];
    float light[2];
  };
  [[nodiscard]] __device__ Differences differences(Kind kind) const {
    Differences out;
    if (kind == Kind::cut) out.seen = CutTile::bits(rows(), shared.tiles[stage()].first, quad());
#pragma unroll
    for (int a = 0; a < kQueryTile / 16; ++a) out.offset[a] = four(shared.tiles[stage()].offset, 16 * a + 4 * quad());
    out.light[0] = light(0);
    out.light[1] = light(1);
    return out;
  }

  /// Scores to weights as the forward made them, and to operands of dV, in `weights`; in `scores`, those times the
  /// query's slope.
  template <class Tile>
  __device__ void weigh(const Ahead& ahead);
  /// dP to dS, in `gradients`, and its largest magnitude.
  template <class Tile>
  __device__ void differentiate(const Differences& by);

  /// The same, one thing after the other, where numbers are far apart or keys are light.
  __device__ void weigh_apart(const KeyWork& work);
  __device__ void differentiate_apart(const KeyWork& work);

  /// Tells the other warps the largest of these keys.
  __device__ void share_most();
  /// dS to operands of dK, in `slopes`, relative to the largest that the warp's keys have met.
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
    return {fmaxf(pair_.factor.low(), 0.0F), fmaxf(pair_.factor.high(), 0.0F)};
  }

  /// dQ of the tile to shared memory, for QueryAdder.
  __device__ void give_queries(std::int32_t first_row, const float (&scale)[2]);

  __device__ void scale_sums(float (&sums)[Traits::kSums], float by) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(Traits::kSums); ++i) sums[i] *= by;
  }
  __device__ void clear_sums() {
#pragma unroll
    for (int i = 0; i < static_cast<int>(Traits::kSums); ++i) dk[i] = dv[i] = 0.0F;
  }
  /// Adds the accumulators to the sums in FP32, which wait in global memory.
  __device__ void move_sums();
  /// Those of dK or dV, which are in units of `by`.
  static __device__ void move(const float (&sums)[Traits::kSums], float4* to, float by, bool add);
  /// A thread's own part of the scratch, in steps of kConsumerThreads.
  [[nodiscard]] __device__ float4* waiting() const;
  /// Of keys that no query sees.
  __device__ void store_nothing(const KeyWork& work);
  __device__ void store(const KeyWork& work);
  /// In the units of `of`.
  __device__ void write(const KeyWork& work, const KeySums& of);
  /// Sums in units of `by`, with those that wait, if any do.
  static __device__ void complete(float (&sums)[Traits::kSums], const float4* waits, float by);
  /// dK as finish.cu does, where all of a key's dims are here.
  __device__ void rotate_back();
  /// Sums of dK, which lack other dims.
  __device__ void write_sums(const KeyWork& work) const;
  template <class Pair>
  __device__ void write_all(const KeyWork& work);
  /// Of dk or dv.
  struct Rows {
    void* to;
    std::int32_t dims;
  };
  /// Eight of a warp's rows at a time go through shared memory, so that sixteen bytes a lane leave side by side.
  template <class Pair>
  __device__ void write_rows(const float (&sums)[Traits::kSums], const KeyWork& work, const Rows& rows);

  const BackwardArguments& p;
  BackwardShared<Traits>& shared;
  std::uint32_t thread_;  // Among the consumers.
  Place keys;
  std::uint32_t tile_ = 0;  // Of all that the block meets: it says where each lies.
  // Of shared memory, of the warpgroup's part of the keys and of the queries whose scores are on their way: as
  // shared_place.
  std::uint32_t base_;
  std::uint32_t keys_ = 0;
  std::uint32_t queries_ = 0;
  std::int32_t left_ = 0;               // Tiles that the key tile meets after this one.
  std::int32_t next_base_ = kSameBase;  // As BackwardShared::bases, of the next tile.
  KeyPair pair_;
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
