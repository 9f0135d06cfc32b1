// Inner loops compiled for: baseline.
#define PYDDL_WIDTH 2
#include "loops_impl.h"

namespace pyddl {
void gram_baseline(const double* rows, const double* units, int count, std::int64_t n, double* out);
extern const Loops loops_baseline;
const Loops loops_baseline = {"baseline", widen, gram_baseline, squares,     weighted_sum, narrow,
                              scale,      step,  encode_bf16,   decode_bf16, encode_int8,  encode_int4};
}  // namespace pyddl
