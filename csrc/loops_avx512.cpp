// Inner loops compiled for: avx512.
#define PYDDL_WIDTH 8
#include "loops_impl.h"

namespace pyddl {
void gram_avx512(const double* rows, const double* units, int count, std::int64_t n, double* out);
extern const Loops loops_avx512;
const Loops loops_avx512 = {"avx512", widen, gram_avx512, squares,     weighted_sum, narrow,
                            scale,    step,  encode_bf16, decode_bf16, encode_int8,  encode_int4};
}  // namespace pyddl
