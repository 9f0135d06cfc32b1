// Codecs of the wire: bf16 with error feedback.
#pragma once

#include <cstdint>

namespace pyddl {

// x = values + residual; out = bf16(x), to nearest even; residual = x - out, or 0 where out is not finite.
// residual may be null: then x = values. No two arrays may overlap.
void encode_bf16_cpu(const float* values, float* residual, std::uint16_t* out, std::int64_t n);

// out = bits as float32, exact.
void decode_bf16_cpu(const std::uint16_t* bits, float* out, std::int64_t n);

}  // namespace pyddl
