// Merge of one fragment's outer gradients and the outer step, in one operation (paper, section 3.2 and App.
// D).
#pragma once

#include <cstdint>
#include <vector>

#include "both.h"
#include "element.h"
#include "loops.h"

namespace pyddl {

enum class Rule : std::uint8_t { mean = 0, rda = 1, buffer = 2 };

// How RDA is computed: through the Gram matrix, or through the mean direction, kept in theta_out meanwhile.
enum class Plan : std::uint8_t { by_number = 0, gram = 1, direction = 2 };

// What a tensor's last sweep adds up: the contributions with their weights (by rule, or since the directions
// cancel), with the factors of RDA, or the mean direction that theta_out holds.
enum class End : std::uint8_t { mean, cancelled, by_factors, by_direction };

namespace {

// Through a Gram matrix in double a mean direction can be told from zero down to this norm, not below.
constexpr double kShortestDirection = 1e-6;

// By the norm of the mean direction and the mean of the norms.
PYDDL_BOTH inline End end_of(double length, double mean_norm, Plan plan) {
    if (!(length >= kShortestDirection)) return mean_norm > 0.0 ? End::cancelled : End::mean;
    return plan == Plan::gram ? End::by_factors : End::by_direction;
}

}  // namespace

// The weights divided by their sum.
std::vector<double> shares(std::vector<double> weights);

struct MergeArguments {
    std::vector<Vector> contributions;  // M vectors of n elements
    std::vector<double> weights;        // M, each > 0 and finite
    const std::int64_t* offsets;        // num_tensors + 1, ascending, first 0, last n
    const std::uint8_t* rules;          // num_tensors values of Rule
    std::int64_t num_tensors;
    ModelBlock model;          // of n elements; outputs overlap no input
    float* wire_f32;           // null, or n elements: a copy of theta_out
    std::uint16_t* wire_bf16;  // null, or n elements: theta_out rounded
    OuterRule outer;
    Plan plan;
};

struct MergeReport {
    std::vector<bool> finite;   // M; if any is false the outputs are unspecified
    std::vector<double> norms;  // M, over the whole fragment
    double merged_norm;
    std::int64_t cancelled;  // tensors whose RDA direction cancelled
    bool theta_finite;
};

// By all threads of the pool; bit-equal for any number of them.
MergeReport merge_outer_step_cpu(const MergeArguments& arguments);

}  // namespace pyddl
