#include "quantize/tensors.hpp"

#include <cstring>
#include <utility>

namespace mxflash {

namespace {

Tensor bytes_tensor(std::vector<std::int64_t> shape, const std::vector<std::uint8_t>& bytes) {
  Tensor tensor = Tensor::uninitialized(DType::u8, std::move(shape));
  if (!bytes.empty()) std::memcpy(tensor.data.data(), bytes.data(), bytes.size());
  return tensor;
}

Tensor dequantized_tensor(const Quantized& quantized) {
  Tensor tensor = Tensor::uninitialized(DType::f32, quantized.shape);
  std::int64_t index = 0;
  for (std::int64_t token = 0; token < quantized.shape[0]; ++token) {
    for (std::int64_t head = 0; head < quantized.shape[1]; ++head) {
      for (std::int64_t dim = 0; dim < quantized.shape[2]; ++dim) {
        tensor.set(index++, quantized.dequantized(token, head, dim));
      }
    }
  }
  return tensor;
}

}  // namespace

QuantizedTensors tensors_of(const Quantized& quantized, const Operand& operand) {
  return {bytes_tensor(quantized.shape, quantized.codes),
          operand.block == Block::tensor() ? Tensor::from_floats(DType::f32, {1}, {quantized.tensor_scale})
                                           : bytes_tensor(quantized.scale_shape, quantized.scales),
          dequantized_tensor(quantized)};
}

}  // namespace mxflash
