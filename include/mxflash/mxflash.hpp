// mxflash: microscaling flash attention, forward and backward, on packed documents; exactly causal; the same codes on
// every engine. This header is the whole library. A complete program is examples/attention.cpp:
//
//   Packing   = Packing::make(cu_seqlens_q, cu_seqlens_k, tokens_q, tokens_k)            which rows belong together
//   Recipe    = find_recipe("mxfp8") or recipe_from_json(text)                           how each operand is quantized
//   Quantized = quantize(view, packing, options, threads)                                codes and scales
//   Schedule  = make_schedule(packing, mask, shape)                                      tiles, longest first
//   ForwardResult  = attention_forward(problem, recipe, {q, k, v}, options)              o [Tq,Hq,Dv], lse [Tq,Hq]
//   BackwardResult = attention_backward(problem, recipe, {q, k, v, dout}, options)       dq, dk, dv
//   AuditReport    = audit(function, claims, problem, inputs, options)                   does anything leak?
//   Status         = cuda::forward(call, recipe, execution)                              on device pointers, a stream
//   Status         = cuda::backward(call, recipe, execution)                             what that forward has kept
//
// with q [Tq,Hq,D], k [Tk,Hk,D], v [Tk,Hk,Dv], dout [Tq,Hq,Dv]. Every verb gives a Result: a value, or an Error that
// names the argument, what was given and what is allowed. Nothing prints, throws or exits.
#pragma once

#include "mxflash/attention.hpp"    // IWYU pragma: export
#include "mxflash/audit.hpp"        // IWYU pragma: export
#include "mxflash/cuda.hpp"         // IWYU pragma: export
#include "mxflash/engine.hpp"       // IWYU pragma: export
#include "mxflash/formats.hpp"      // IWYU pragma: export
#include "mxflash/packing.hpp"      // IWYU pragma: export
#include "mxflash/quantize.hpp"     // IWYU pragma: export
#include "mxflash/recipe.hpp"       // IWYU pragma: export
#include "mxflash/safetensors.hpp"  // IWYU pragma: export
#include "mxflash/schedule.hpp"     // IWYU pragma: export
#include "mxflash/status.hpp"       // IWYU pragma: export
#include "mxflash/tensor.hpp"       // IWYU pragma: export
