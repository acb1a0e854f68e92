// The scalar reference engine: the numerics contract (docs/numerics.md) as straight loops. Every product is summed in
// double over dequantized codes, so that nothing but the quantization separates it from exact attention; other engines
// are compared with it, codes bit for bit.
//
// Of one query i and the keys j it sees:
//   t_ij = scale log2(e) q_i . k_j + e_j            e_j: V's exponent, where V has one per token
//   m_i  = ceil(max_j t_ij)                         an integer: every rescaling is exact
//   P_ij = quantize(2^(t_ij - m_i))                 after the mask, in groups where the recipe says so
//   l_i  = sum_j 2^-e_j P_ij                        from the quantized P; unquantized where a V_j far smaller than the
//                                                   others took P_ij out of its normal range
//   O_i  = sum_j P_ij v_j / l_i                     v: V without e_j
//   LSE_i = ln 2 (m_i + log2 l_i)
// and backwards, with w_ij = 2^-e_j P_ij / l_i:
//   dP_ij = dO_i . V_j,  D_i = sum_j w_ij dP_ij,  dS_ij = scale w_ij (dP_ij - D_i + dLSE_i)
//   dV_j = sum_i quantize(w_ij) dO_i,  dQ_i = sum_j quantize(dS_ij) K_j,  dK_j = sum_i quantize(dS_ij) Q_i
#pragma once

#include "mxflash/attention.hpp"

namespace mxflash::reference {

/// The arguments have been checked.
Result<ForwardResult> forward(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                              const Options& options);
Result<BackwardResult> backward(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                                const Options& options);

}  // namespace mxflash::reference
