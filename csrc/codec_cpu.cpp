// Codecs on the CPU.
#include "codec.h"
#include "loops.h"

namespace pyddl {

void encode_bf16_cpu(const float* values, float* residual, std::uint16_t* out, std::int64_t n) {
    loops().encode_bf16(values, residual, out, n);
}

void decode_bf16_cpu(const std::uint16_t* bits, float* out, std::int64_t n) {
    loops().decode_bf16(bits, out, n);
}

}  // namespace pyddl
