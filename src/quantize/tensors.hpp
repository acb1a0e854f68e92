// A quantized tensor as the three that files and arrays hold.
#pragma once

#include "mxflash/quantize.hpp"

namespace mxflash {

struct QuantizedTensors {
  Tensor codes;        ///< U8 [tokens, heads, dims], one code an element.
  Tensor scales;       ///< U8 E8M0 or UE4M3 codes [scale_rows, heads, scale_columns]; of a tensor-wide block F32 [1].
  Tensor dequantized;  ///< F32 [tokens, heads, dims]
};
QuantizedTensors tensors_of(const Quantized& quantized, const Operand& operand);

}  // namespace mxflash
