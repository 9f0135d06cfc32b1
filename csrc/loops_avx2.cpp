// Inner loops compiled for: avx2.
#define PYDDL_WIDTH 4
#include "loops_impl.h"

namespace pyddl {
void gram_avx2(const double* rows, const double* units, int count, std::int64_t n, double* out);
extern const Loops loops_avx2;
const Loops loops_avx2 = {"avx2", widen, gram_avx2,   squares,     weighted_sum, narrow,
                          scale,  step,  encode_bf16, decode_bf16, encode_int8,  encode_int4};
}  // namespace pyddl
