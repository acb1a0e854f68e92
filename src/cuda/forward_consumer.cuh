// 64 queries of a warpgroup: scores, weights, sums, output. A thread has parts of two rows, `r` = 0 and 1 (eight
// apart).
#pragma once

#include "cuda/forward.cuh"
#include "cuda/range.cuh"

namespace mxflash::cuda {

/// What a thread knows of its two rows.
struct RowState {
  float factor[2];  ///< Multiplies scores, before the key's.
  float base[2];    ///< An integer: weights are 2^(logit - base), less than 432. Before a key is seen: 0.
};

/// Keys [begin, end) of the document that a thread's rows see.
struct Spans {
  std::int32_t begin[2];
  std::int32_t end[2];

  [[nodiscard]] __device__ bool sees(int r, std::int32_t key) const { return begin[r] <= key && key < end[r]; }
};

/// Which keys of a tile a row sees: of one that no row's mask cuts, and of others.
struct Whole {
  static constexpr bool kCuts = false;
  static __device__ std::uint32_t bytes(const Spans&, int, std::int32_t) { return ~0U; }
};
struct Cut {
  static constexpr bool kCuts = true;
  /// Of four keys, a byte each.
  static __device__ std::uint32_t bytes(const Spans& spans, int r, std::int32_t key) {
    return bytes_below(spans.end[r] - key) & ~bytes_below(spans.begin[r] - key);
  }
};

/// Of four keys, two to an entry.
struct Scales {
  float4 two[2];
};

/// A tile where some keys are counted apart or logits may leave FP32.
struct Held {
  const KeyScale* key_scale;
  std::int32_t first;
  bool apart;
};

/// Of a row's base, and what the row's sums are multiplied by.
struct Move {
  float step;
  float scale;
};

struct RowAt {
  float base;
  int r;
};

/// A row's sum of weights is `value` 2^(base - unit).
struct RowSum {
  float value;
  float unit;
};

/// What a row comes to.
struct RowEnd {
  RowSum sum;
  float inverse = 0;
  bool empty = false;     ///< It sees no key.
  bool poisoned = false;  ///< It sees a poisoned V.
};

template <class Traits>
class Consumer {
 public:
  __device__ Consumer(const ForwardParameters& parameters, ForwardShared<Traits>& block)
      : p(parameters),
        shared(block),
        group(static_cast<int>(uniform(threadIdx.x / kWarpgroup)) - 1),
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
      shared.work_empty[slot.stage()].arrive();  // Every lane, as where the work is taken.
      __syncwarp();
      slot.template advance<kWorkStages>();
      if (last) break;
    }
    // Until the last rows are written: then the block's shared memory may be another's.
    if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }

 private:
  static constexpr std::size_t kScores = Traits::kKeys / 2;  // Registers of a thread.
  static constexpr std::size_t kCodes = kScores / 4;
  /// No logit that weigh_plain takes is further from its base, or else its weight is 0.
  static constexpr float kNear = 118.0F;
  /// The least weight that the largest code stands for: then the reference must rise. Until then it may stay behind,
  /// since codes keep their mantissas.
  static constexpr float kFullWeight = 432.0F;
  static constexpr float kLeastNormalWeight = 0x1p-126F;  ///< Exponentials below are 0.
  /// As FP32 has it, of the weight that a base is raised by: then the power of two is a normal number. None is less,
  /// see kNear.
  static constexpr int kLeastExponent = 8;
  /// Adding this sets the highest bit of the bytes that are that code or NaN.
  static constexpr std::uint32_t kToFull = 0x02020202U;
  static constexpr std::uint32_t kFull = 0x80808080U;

  /// Bits of `flags_`.
  static constexpr std::uint32_t kUnset = 1;      ///< And 2: the row has seen no key yet, but will.
  static constexpr std::uint32_t kIrregular = 4;  ///< A tile of the item may have keys that are counted apart.
  static constexpr std::uint32_t kFarOff = 8;     ///< Logits of the item may leave FP32.
  static constexpr std::uint32_t kMoved = 16;     ///< Sums wait in shared memory.
  static constexpr std::uint32_t kRaised = 32;    ///< The last tile has raised a reference of a row of the warp.

  __device__ float& kept(Kept what, int r) const { return shared.kept[group][2 * static_cast<int>(what) + r][thread]; }

  __device__ void release(Barrier& barrier) const {
    __syncwarp();
    if (lane == 0) barrier.arrive();
  }

  /// Key tiles, from the last to the first. While one's scores become weights, the outputs of the one before are
  /// multiplied.
  __device__ void attend(const Work& work) {
    const TileSpan mine{as_uniform(work.own[group].first), as_uniform(work.own[group].end)};
    const TileSpan all{as_uniform(work.tiles.first), as_uniform(work.tiles.end)};
    for (std::int32_t tile = all.end - 1; tile >= max(mine.end, all.first); --tile) pass_over();
    if (mine.end <= mine.first) {
      if (all.end > all.first) {
        // The item's keys may be there before its queries: who goes on without these takes the last ones for the
        // next's.
        shared.queries_full[queries.stage()].wait(queries.phase());
        leave_queries();
      }
      store_nothing(work);
      return;
    }
    shared.queries_full[queries.stage()].wait(queries.phase());
    prepare(work);
    plain_ = plain_of();
    auto product = ScaleOut::Zero;  // The next product overwrites the accumulators.
    bool keys_there = false;
    const std::uint32_t query_stage = uniform(queries.stage());
    for (std::int32_t tile = mine.end - 1; tile >= mine.first; --tile) {
      const bool first = tile + 1 == mine.end;
      if (!keys_there) shared.keys_full[keys.stage()].wait(keys.phase());
      load_scales();
      multiply_scores(query_stage);
      // Not of the first tile, whose product nobody wants.
      if (!first) shared.values_full[values.stage()].wait(values.phase());
      // Without a condition, which would make the compiler wait for every product: of an item's first tile the result,
      // made from anything, is overwritten.
      multiply_values(product);
      // What need not be done before the products are issued is done while they run.
      const Place multiplied = values;
      values = keys;
      keys.template advance<Traits::kStages>();
      // After the last tile these are another item's, for which nobody waits here.
      keys_there = shared.keys_full[keys.stage()].test_wait(keys.phase());
      cute::warpgroup_wait<1>();
      fence(scores);
      weigh(work, tile, values);
      leave_keys(values);
      // By its place, not by a count: a document that goes on must round its first rows as before.
      const bool moves = (tile + 1) % kTilesBetweenSums == 0;
      const bool changes = !first && (moves || (flags_ & kRaised) != 0);
      cute::warpgroup_wait<0>();
      fence(sums);
      product = first ? ScaleOut::Zero : ScaleOut::One;
      if (changes) {
        if (moves) {
          move_sums();
          flags_ |= kMoved;
          product = ScaleOut::Zero;
        } else {
          rescale();
        }
      }
      use_codes();
      if (!first) leave_values(multiplied);
    }
    shared.values_full[values.stage()].wait(values.phase());
    multiply_values(product);
    cute::warpgroup_wait<0>();
    fence(sums);
    leave_values(values);
    values = keys;
    leave_queries();
    for (std::int32_t tile = mine.first - 1; tile >= all.first; --tile) pass_over();
    store(work);
  }

  static __device__ std::int32_t as_uniform(std::int32_t x) {
    return static_cast<std::int32_t>(uniform(static_cast<std::uint32_t>(x)));
  }

  /// A tile that the other group alone sees. Only once it is there: else the arrival would count for the one before.
  __device__ void pass_over() {
    shared.keys_full[keys.stage()].wait(keys.phase());
    __syncwarp();
    leave_keys(keys);
    shared.values_full[values.stage()].wait(values.phase());
    __syncwarp();
    leave_values(values);
    keys.template advance<Traits::kStages>();
    values = keys;
  }

  __device__ void leave_queries() {
    release(shared.queries_empty[queries.stage()]);
    queries.template advance<Traits::kQueryStages>();
  }
  /// All of the warp have come past what they read them for.
  __device__ void leave_keys(const Place& place) {
    if (lane == 0) shared.keys_empty[place.stage()].arrive();
  }
  /// The wait for their product was all lanes'.
  __device__ void leave_values(const Place& place) {
    if (lane == 0) shared.values_empty[place.stage()].arrive();
  }

  __device__ void prepare(const Work& work);

  /// Whether some of these keys must be counted apart: values that the row sum's multipliers do not reach, light keys,
  /// poisoned values. What it decides does not show in rows that see none of them.
  static __device__ bool has_irregular(const Work& work, const Range& range);

  /// Tiles of which no row of the warp sees a part, where nothing else asks for care.
  __device__ TileSpan plain_of() const;

  [[nodiscard]] __device__ const QueryRow& row_of_item(int r) const { return shared.rows[slot.stage()][row + 8 * r]; }
  __device__ Spans spans() const {
    const QueryRow& first = row_of_item(0);
    const QueryRow& second = row_of_item(1);
    return {{first.begin, second.begin}, {first.end, second.end}};
  }

  /// Whether 2^(logit - base) may leave FP32. Before a row has seen a key its base is 0: then on the lower side as
  /// well.
  [[nodiscard]] __device__ bool may_leave() const;

  /// Of V, over the keys that each row sees.
  __device__ void largest_exponents(const Work& work);

  __device__ void multiply_scores(std::uint32_t query_stage) {
    fence(scores);
    cute::warpgroup_arrive();
    const std::uint8_t* rows = shared.keys[uniform(keys.stage())].codes;
    const std::uint8_t* query_rows = shared.queries[query_stage].codes;
#pragma unroll
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      const std::uint64_t a = descriptor<Traits::kRowBytes>(query_rows + (2 * chunk + group) * 64 * Traits::kRowBytes);
      const std::uint64_t b = descriptor<Traits::kRowBytes>(rows + chunk * Traits::kKeys * Traits::kRowBytes);
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
    const std::uint64_t b = descriptor<Traits::kKeys>(shared.values[uniform(values.stage())].codes);
#pragma unroll
    for (int step = 0; step < Traits::kKeys / 32; ++step) {
      multiply<typename Traits::PvAtom>(codes + 4 * step, b + 2 * step, sums, step == 0 ? first : ScaleOut::One);
    }
    cute::warpgroup_commit_batch();
  }

  /// Codes to the operand of the next product. Only now: an operand that is written while a product runs would make the
  /// compiler wait for every product.
  __device__ void use_codes() {
    const std::uint32_t same = opaque(0x3210U);  // A plain copy the compiler would take for the same register.
#pragma unroll
    for (int i = 0; i < kCodes; ++i) {
      codes[i] = __byte_perm(fresh[i], 0, same);
    }
  }

  /// Key of score `i` within the tile.
  [[nodiscard]] __device__ int key_of(int i) const { return i / 8 * 16 + 4 * quad + i % 8 / 4 * 2 + i % 2; }
  /// Row of score `i`.
  static constexpr __device__ int row_of(int i) { return i / 2 % 2; }

  /// Scores of a tile, whose keys are at `place`, to codes.
  __device__ void weigh(const Work& work, std::int32_t tile, const Place& place);

  [[nodiscard]] __device__ Scales scales_at(const KeyScale* key_scale, int i) const;
  /// Not before the codes of both rows, `made`, are there. Without that the compiler has all logits made first, and the
  /// exponentials, which take longest, wait until the end.
  static __device__ Scales scales_after(std::uint32_t key_scale, int i, const std::uint32_t* made);
  /// The tile's first, while its scores are multiplied.
  __device__ void load_scales();

  /// Weights by the references that there are, which seldom move: the exponentials wait for no maximum, and where a
  /// code is the largest, all are scaled by a power of two. `may_leave` sees to it that no weight is lost before.
  template <class Tile>
  __device__ void weigh_plain(const KeyScale* key_scale, std::int32_t first, const Spans& seen);

  /// The same of a cut tile in which a row sees its first key: of that one no base is known that codes could be made
  /// by.
  __device__ void weigh_first(const KeyScale* key_scale, std::int32_t first, const Spans& seen);

  /// Weights of keys that a row does not see are 0.
  __device__ void hide(const Spans& seen, std::int32_t first);
  /// A bit for each of a thread's 32 keys of a tile that is below this one.
  [[nodiscard]] __device__ std::uint32_t own_below(std::int32_t key) const;

  /// A row's, by the largest of its weights, which then become codes.
  __device__ void raise_base(int r);

  /// Of four keys of both rows, less the rows' bases.
  __device__ void logits(const Scales& scales, int first);

  /// Of the four threads that share a row.
  static __device__ float largest_of_row(float x);

  /// The same, one thing after the other, where logits may leave FP32 or keys must be counted apart. A row that another
  /// one brought here has the bits of weigh_plain: the same operations wherever those would do.
  __device__ void weigh_held(const Work& work, const Held& at);

  /// Of a row whose scores are logits less the base: not the largest one's, since the exponential need not be
  /// monotonic.
  [[nodiscard]] __device__ float largest_weight(int r) const;

  /// Moves the reference if the row's largest weight by the last one asks for it; by how much. Whole numbers: the scale
  /// is exact, and what the row has seen before stays as it was rounded.
  __device__ int raise(int r, float most);
  /// By the largest logit less the base.
  __device__ float raise_far(int r, float most);
  [[nodiscard]] __device__ bool is_unset(int r) const { return (flags_ & kUnset << r) != 0; }
  __device__ void move(int r, bool rises, const Move& by);

  /// Whether the row sum's multipliers have this key.
  static __device__ bool counted(const Work& work, const KeyScale& key);
  static __device__ bool may_count_apart(const Work& work, const KeyScale& key);

  /// What the multipliers do not count of the row sum, in FP32; and whether the row sees a poisoned V. The scores are
  /// logits less the bases before `step` was added to these.
  __device__ void count_apart(const Work& work, const Held& at, const float (&step)[2]);

  /// One key, whose logit less the base is x. V's exponent is no part of its share of the sum, and may be far from the
  /// others': the sum has a reference of its own.
  __device__ void add_apart(const Work& work, const KeyScale& key, float x, const RowAt& row_at);

  /// Of the row sum what the products have counted: the first of its four threads has it.
  [[nodiscard]] __device__ float counted_sum(int r) const;

  /// Of an item with irregular tiles.
  __device__ void add_what_is_apart(RowEnd (&end)[2]) const;

  /// With what each of the row's threads has apart. Nothing apart: the bits of a row that no irregular tile has met.
  [[nodiscard]] __device__ RowSum row_sum(const RowSum& counted, int r, unsigned four) const;

  /// Weights of eight scores to codes; those of keys that a row does not see are 0. `full` of a row gets bits of kFull
  /// where a code is the largest or NaN.
  template <class Tile>
  __device__ void encode(const Spans& seen, std::int32_t first, int a, std::uint32_t (&full)[2]);
  [[nodiscard]] __device__ std::uint32_t codes_of(int a, int r) const;

  /// All of a row's, where none is hidden.
  __device__ void encode_row(int r);

  __device__ void rescale();

  /// Adds the accumulators to the FP32 sums, which wait in shared memory with their scale in `moved`.
  __device__ void move_sums();

  /// To the accumulators what waits in shared memory.
  __device__ void add_moved();

  /// Of rows that see no key.
  __device__ void store_nothing(const Work& work) const;

  __device__ void store(const Work& work);

  /// A row's outputs by its sum, times 2^unit.
  __device__ void divide(int r, const RowEnd& end, float unit);

  /// LSE and, where a backward follows, the rows' records.
  __device__ void record(const Work& work, const RowEnd (&end)[2]);

  /// The sums to o and, where a backward follows, what rounding takes from them to its own place.
  template <class Pair>
  __device__ void write(const Work& work);

  /// Through shared memory, where the warp's sums have been.
  struct Rows {
    void* to;
    const CUtensorMap* map;  ///< Of `to`.
    int place;               ///< Of the warp's two, of which the copy engine may still read the other.
  };
  template <class Pair>
  __device__ void write_rows(const Work& work, const Rows& rows);
  /// The same of FP32.
  __device__ void write_floats(const Work& work);

  /// What a warp has of o: bytes of a row.
  template <class Pair>
  static constexpr int kBytesOf = Traits::kValueDims / 2 * static_cast<int>(sizeof(Pair));

  /// Of the warp's rows, those of the item; the first one's first byte.
  struct Destination {
    std::byte* to;
    std::int64_t pitch;
    int rows;
    int bytes;
  };
  template <class Pair>
  [[nodiscard]] __device__ Destination destination(const Work& work, void* rows) const;

  [[nodiscard]] __device__ int own_slot() const { return group * 4 + thread / 32; }

  /// Of a query of the item.
  [[nodiscard]] __device__ RowRecord* record_of(const Work& work, int query) const;

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
  Place values;  // That are multiplied next.
  std::uint32_t flags_ = 0;
  TileSpan plain_{0, 0};
  RowState state;
  float scores[kScores];
  float sums[Traits::kSums];
  std::uint32_t codes[kCodes];    // Operand of the product with V.
  Scales coming[2];               // Read ahead.
  std::uint32_t fresh[kCodes]{};  // Of the tile that is being weighed.
};

}  // namespace mxflash::cuda

#include "cuda/forward_apart.cuh"
#include "cuda/forward_rows.cuh"
#include "cuda/forward_store.cuh"
#include "cuda/forward_weights.cuh"
