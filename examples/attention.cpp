// Two documents of 3 and 5 tokens, one head, head_dim 8: forward and backward in MXFP8.
#include <cstdio>
#include <mxflash/mxflash.hpp>
#include <vector>

namespace mx = mxflash;

int main() {
  const std::vector<std::int32_t> cu_seqlens{0, 3, 8};
  const mx::Result<mx::Packing> packing = mx::Packing::make(cu_seqlens, cu_seqlens, 8, 8);
  if (!packing) return std::puts(packing.error().message.c_str()), 1;

  std::vector<float> values(64);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.01F * static_cast<float>(i % 37) - 0.2F;
  const mx::Tensor x = mx::Tensor::from_floats(mx::DType::bf16, {8, 1, 8}, values);
  const mx::TensorView view = *x.view("x");

  const mx::Problem problem{*packing, mx::Mask::causal(), {}};
  const mx::Inputs inputs{view, view, view, view};
  const mx::Result<mx::Recipe> recipe = mx::find_recipe("mxfp8");
  const mx::Result<mx::ForwardResult> forward = mx::attention_forward(problem, *recipe, inputs, {});
  if (!forward) return std::puts(forward.error().message.c_str()), 1;
  const mx::Result<mx::BackwardResult> backward = mx::attention_backward(problem, *recipe, inputs, {});
  if (!backward) return std::puts(backward.error().message.c_str()), 1;
  std::printf("o[7] starts with %g, dq[7] with %g\n", static_cast<double>(forward->o.at(7L * 8)),
              static_cast<double>(backward->dq.at(7L * 8)));
}
