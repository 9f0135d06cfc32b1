// The hot inner loops, one table per instruction set, chosen once at run time.
//
// Here: loops over at most a block of contiguous elements. Not here: anything that knows of tensors, weights
// or rules. Every table gives the same bits: sums have kLanes fixed lanes, and nothing is contracted into FMA
// but exact products.
#pragma once

#include <cstdint>

#include "element.h"

namespace pyddl {

constexpr int kLanes = 8;    // partial sums of a dot product
constexpr int kMaxDots = 4;  // dot products with one common factor in a single sweep
constexpr int kBlock = 256;  // elements of a block; a multiple of kLanes; a row of doubles takes 2 KiB of L1

struct OuterRule {
    double lr;
    double momentum;
    bool nesterov;
};

// Pieces of the model that one step reads and writes; momentum and momentum_out are both null or both not.
struct ModelBlock {
    const float* theta;
    const float* momentum;
    float* theta_out;
    float* momentum_out;
};

struct Loops {
    const char* name;
    // dst[k] = src[first + k] for k < n; zeros follow up to a multiple of kLanes.
    void (*widen)(Vector src, std::int64_t first, std::int64_t n, double* dst);
    // out[j] = sum_k a[k] * b[j][k], j < count <= kMaxDots; n is a multiple of kLanes.
    void (*dots)(const double* a, const double* const* b, int count, std::int64_t n, double* out);
    // sum[k] += c * row[k].
    void (*add_scaled)(double c, const double* row, std::int64_t n, double* sum);
    // One outer step with the merged outer gradient g; true if every element of theta_out is finite.
    bool (*step)(const double* g, ModelBlock model, std::int64_t n, OuterRule rule);
    void (*encode_bf16)(const float* values, float* residual, std::uint16_t* out, std::int64_t n);
    void (*decode_bf16)(const std::uint16_t* bits, float* out, std::int64_t n);
};

// The table in use: the best that this processor can run, unless select_loops named another.
const Loops& loops();

// Choose a table by name; false (and no change) if it is not built or this processor cannot run it.
bool select_loops(const char* name);

}  // namespace pyddl
