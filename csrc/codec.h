// Codecs of the wire, with error feedback (element.h says how they lie in memory).
#pragma once

#include <cstdint>

#include "element.h"

namespace pyddl {

// x = values + residual; out = bf16(x), to nearest even; residual = x - out, or 0 where out is not finite.
// residual may be null: then x = values. No two arrays may overlap.
void encode_bf16_cpu(const float* values, float* residual, std::uint16_t* out, std::int64_t n);

// out = bits as float32, exact.
void decode_bf16_cpu(const std::uint16_t* bits, float* out, std::int64_t n);

// The same with blocks: int8 to nearest even, int4 to the nearest, upwards from the middle between two. Where
// a block holds a NaN or Inf its residual is 0. By all threads of the pool.
void encode_blocks_cpu(Element element, const float* values, float* residual, std::uint8_t* out,
                       std::int64_t n);
void decode_blocks_cpu(Element element, const std::uint8_t* blocks, float* out, std::int64_t n);

}  // namespace pyddl
