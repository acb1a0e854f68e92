// Scores to weights, dP to dS, both to codes.
#pragma once

#include "cuda/backward_consumer.cuh"

namespace mxflash::cuda {

template <class Traits>
template <class Tile>
__device__ void KeyConsumer<Traits>::weigh(const Ahead& ahead) {
  const std::int32_t first = shared.tiles[stage()].first;
  const KeyFactors& factors = ahead.factors;
  const KeyRows& rows = this->rows();
  const int column = 4 * quad();
#pragma unroll
  for (int a = 0; a < kQueryTile / 16; ++a) {
    const int query = 16 * a + column;
    const Weighing of = a == 0 ? ahead.some : weighing(a);
    const std::uint32_t logit[] = {of.logit.x, of.logit.y, of.logit.z, of.logit.w};
    const float slope[] = {of.slope.x, of.slope.y, of.slope.z, of.slope.w};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        w[j] = exp2_fast(fmaf(scores[at(a, r, j)], factor_of(logit[j]) * factors.factor[r],
                              factors.exponent[r] - base_of(logit[j])));
      }
      const std::uint32_t seen = Tile::bytes(rows, r, first + query);
      const std::uint32_t codes = to_e4m3(w[0], w[1], w[2], w[3]) & seen;
      const float2 low = from_e4m3(codes & 0xFFFFU);
      const float2 high = from_e4m3(codes >> 16);
      const float of_code[] = {low.x, low.y, high.x, high.y};
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[at(a, r, j)] = of_code[j] * slope[j];
      const float by = factors.weight[r];
      weights[code_at(a, r)] = to_e4m3(scores[at(a, r, 0)] * by, scores[at(a, r, 1)] * by, scores[at(a, r, 2)] * by,
                                       scores[at(a, r, 3)] * by) &
                               seen;
    }
  }
}

template <class Traits>
template <class Tile>
__device__ void KeyConsumer<Traits>::differentiate(const Differences& by) {
  most[0] = most[1] = 0;
#pragma unroll
  for (int a = 0; a < kQueryTile / 16; ++a) {
    const float offset[] = {by.offset[a].x, by.offset[a].y, by.offset[a].z, by.offset[a].w};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = at(a, r, j);
        // The exponent of V, which dP lacks, and the weight has too much.
        const float ds = scores[i] * fmaf(-offset[j], by.light[r], gradients[i]);
        gradients[i] = Tile::seen(by.seen, 16 * r + 4 * a + j, ds);
        most[a / 2] = fmaxf(most[a / 2], fabsf(gradients[i]));
      }
    }
  }
}

template <class Traits>
__device__ void KeyConsumer<Traits>::weigh_apart(const KeyWork& work) {
  const KeyRows rows = this->rows();
  constexpr auto kNone = static_cast<float>(-kE8m0Bias);
  const QueryTile& of = shared.tiles[stage()];
  const std::int32_t first = of.first;
  const std::int32_t row = of.head * static_cast<std::int32_t>(p.sizes.forward.rows_q()) + work.item.query_row + first;
#pragma unroll
  for (int a = 0; a < kQueryTile / 16; ++a) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float by[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        asm volatile("" ::: "memory");  // Or all records are read at once, into registers that there are not.
        const int query = 16 * a + 4 * quad() + j;
        float& w = scores[at(a, r, j)];
        if (!rows.seen(r, first + query)) {
          w = by[j] = 0;
          continue;
        }
        const RowRecord record = p.saved.rows[row + query];
        const float own = fmaxf(exponent(r), kNone);
        const float by_both = factor_of(of.logit[query]) * p.logit_scale * factor(r);
        const float logit = fmaf(w, by_both, own);
        const float x =
            fabsf(logit) > kPlainLogit ? held(logit, 1e38F) - record.base : fmaf(w, by_both, own - record.base);
        const float code = from_e4m3(to_e4m3(exp2_fast(x), 0.0F)).x;
        const bool light = (exponent(r) <= kNone || exponent(r) <= record.most - kLightOctaves) && code < kLeastNormal;
        const auto unit = static_cast<int>(record.unit - own);
        w = light ? exp2_fast(x - own + record.unit) * record.inverse : ldexpf(code * record.inverse, unit);
        const float dout = p.workspace.dout_records[row + query].factor;
        by[j] = dout > 0 ? ldexpf(w * dout, 8 - kept().base) : dout;
      }
      weights[code_at(a, r)] = to_e4m3(by[0], by[1], by[2], by[3]);
    }
  }
}

template <class Traits>
__device__ void KeyConsumer<Traits>::differentiate_apart(const KeyWork& work) {
  const KeyRows rows = this->rows();
  const QueryTile& of = shared.tiles[stage()];
  const std::int32_t first = of.first;
  const DoutRecord* douts = p.workspace.dout_records + of.head * p.sizes.forward.rows_q() + work.item.query_row + first;
  most[0] = most[1] = 0;
#pragma unroll
  for (int a = 0; a < kQueryTile / 16; ++a) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        asm volatile("" ::: "memory");
        const int query = 16 * a + 4 * quad() + j;
        const int i = at(a, r, j);
        if (!rows.seen(r, first + query)) {
          gradients[i] = 0;
          continue;
        }
        const DoutRecord dout = douts[query];
        const auto own = static_cast<int>(fmaxf(exponent(r), static_cast<float>(-kE8m0Bias)));
        const float dp = held(ldexpf(gradients[i] * dout.factor, own), 1e38F);
        gradients[i] = held(scores[i] * (dp - held(dout.delta, 1e38F)) * p.scale, 1e30F);
        most[a / 2] = fmaxf(most[a / 2], fabsf(gradients[i]));
      }
    }
  }
}

template <class Traits>
__device__ void KeyConsumer<Traits>::share_most() {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    most[half] = __uint_as_float(__reduce_max_sync(0xFFFFFFFFU, __float_as_uint(most[half])));
    if (lane() == 0) shared.most[half][slot()] = most[half] * kept().key_most;
  }
}

template <class Traits>
__device__ void KeyConsumer<Traits>::encode_for_keys() {
  // So that no query's scale, seen or not, leaves FP32 with the inverse of the unit.
  constexpr int kRoom = 118;
  const QueryTile& of = shared.tiles[stage()];
  const int before = kept().raised;
  int raised = before;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scale = of.scale_most[half];
    raised = max(raised, max(raised_of(most[half] * scale), static_cast<int>(__float_as_uint(scale) >> 23) - kRoom));
  }
  if (raised > before) {
    scale_sums(dk, exact_pow2(static_cast<float>(before - raised)));
    __syncwarp();  // All lanes have read it.
    kept().raised = raised;
    __syncwarp();
  }
  const float inverse = inverse_of(raised);
  const int column = 4 * quad();
#pragma unroll
  for (int a = 0; a < kQueryTile / 16; ++a) {
    const float4 scale = four(of.scale, 16 * a + column);
    const float by[] = {scale.x * inverse, scale.y * inverse, scale.z * inverse, scale.w * inverse};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      slopes[code_at(a, r)] = to_e4m3(gradients[at(a, r, 0)] * by[0], gradients[at(a, r, 1)] * by[1],
                                      gradients[at(a, r, 2)] * by[2], gradients[at(a, r, 3)] * by[3]);
    }
  }
}

template <class Traits>
__device__ float KeyConsumer<Traits>::most_of_all(int half) const {
  const float4 low = four(shared.most[half], 0);
  const float4 high = four(shared.most[half], 4);
  return fmaxf(fmaxf(fmaxf(low.x, low.y), fmaxf(low.z, low.w)), fmaxf(fmaxf(high.x, high.y), fmaxf(high.z, high.w)));
}

template <class Traits>
__device__ void KeyConsumer<Traits>::encode_by_square(float (&scale)[2]) {
  const int raised[2] = {raised_of(most_of_all(0)), raised_of(most_of_all(1))};
  scale[0] = scale[1] = scale_of(warp() < 2 ? raised[0] : raised[1]);
  const float2 factor = fold();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float low = finite_product(factor.x, inverse_of(raised[half]));
    const float high = finite_product(factor.y, inverse_of(raised[half]));
    std::uint32_t pairs[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int a = 2 * half + m / 2;
      const int j = m % 2 * 2;
      pairs[m] = to_e4m3(gradients[at(a, 0, j)] * low, gradients[at(a, 1, j)] * high, gradients[at(a, 0, j + 1)] * low,
                         gradients[at(a, 1, j + 1)] * high);
    }
    store_codes(half, pairs);
  }
}

template <class Traits>
__device__ void KeyConsumer<Traits>::store_codes(int half, const std::uint32_t (&pairs)[4]) const {
  // Lane l has the address of row l % 8 of matrix l / 8: query 16 a + 4 (row / 2) + 2 c + row % 2 of a = matrix / 2 and
  // c = matrix % 2. A row holds the warp's 16 keys.
  const int mine = lane();
  const int own = 16 * (mine / 16) + 4 * (mine % 8 / 2) + 2 * (mine / 8 % 2) + mine % 2;
  const int chunk = slot() ^ (own % 8);
  const std::uint32_t to = cute::cast_smem_ptr_to_uint(shared.ds.codes + (32 * half + own) * kTileRows + chunk * 16);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pairs[0]),
               "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

template <class Traits>
template <int kLeft>
__device__ void KeyConsumer<Traits>::halve(float (&largest)[kQueryTile / 4]) const {
  constexpr int kOther = kLeft * 2;
  const bool upper = (lane() & kOther) != 0;
#pragma unroll
  for (int i = 0; i < kLeft; ++i) {
    const float given = __shfl_xor_sync(0xFFFFFFFFU, upper ? largest[i] : largest[i + kLeft], kOther);
    largest[i] = fmaxf(upper ? largest[i + kLeft] : largest[i], given);
  }
}

template <class Traits>
__device__ void KeyConsumer<Traits>::share_by_query() {
  constexpr int kOwn = kQueryTile / 4;
  const float2 factor = fold();
  float largest[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    largest[i] =
        fmaxf(fabsf(gradients[at(i / 4, 0, i % 4)] * factor.x), fabsf(gradients[at(i / 4, 1, i % 4)] * factor.y));
  }
  // Eight lanes have the same queries.
  halve<kOwn / 2>(largest);
  halve<kOwn / 4>(largest);
  halve<kOwn / 8>(largest);
  // Of index i, bit 3 came from bit 4 of the lane, bit 2 from bit 3, bit 1 from bit 2.
  const int mine = lane();
  const int first = mine / 16 * 8 + mine / 8 % 2 * 4 + mine / 4 % 2 * 2;
  const int column = 4 * quad();
#pragma unroll
  for (int i = 0; i < kOwn / 8; ++i) {
    atomicMax(&shared.most_of_query[tile_ % 2][(first + i) / 4 * 16 + column + (first + i) % 4],
              __float_as_uint(largest[i]));
  }
}

template <class Traits>
__device__ void KeyConsumer<Traits>::encode_by_query(float (&scale)[2]) {
  const auto* largest = reinterpret_cast<const float*>(shared.most_of_query[tile_ % 2]);
  const int row = 16 * warp() + lane() / 4;
  scale[0] = scale_of(raised_of(largest[row]));
  scale[1] = scale_of(raised_of(largest[row + 8]));
  if (threadIdx.x < kWarpgroup + kQueryTile) shared.most_of_query[(tile_ + 1) % 2][threadIdx.x - kWarpgroup] = 0;
  const float2 factor = fold();
  const int column = 4 * quad();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint32_t pairs[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int a = 2 * half + m / 2;
      const int j = m % 2 * 2;
      const auto* two = reinterpret_cast<const float2*>(largest + 16 * a + column + j);
      const float by[2] = {inverse_of(raised_of(two->x)), inverse_of(raised_of(two->y))};
      pairs[m] = to_e4m3(gradients[at(a, 0, j)] * factor.x * by[0], gradients[at(a, 1, j)] * factor.y * by[0],
                         gradients[at(a, 0, j + 1)] * factor.x * by[1], gradients[at(a, 1, j + 1)] * factor.y * by[1]);
    }
    store_codes(half, pairs);
  }
}

}  // namespace mxflash::cuda
