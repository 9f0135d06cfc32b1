// Merge and outer step on the CPU, one thread.
//
// Tensor by tensor, so that a small tensor is still in the cache when its second sweep starts. RDA takes two
// sweeps over the inputs: the Gram matrix, from which every norm and the norm of the mean direction follow,
// then the weighted sum fused with the outer step. A mean takes one. All sums are in double, block by block
// in a fixed order.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "codec.h"
#include "merge.h"

namespace pyddl {
namespace {

// Through a Gram matrix in double a mean direction can be told from zero down to this norm, not below.
constexpr double kShortestDirection = 1e-6;

class Merge {
  public:
    explicit Merge(const MergeArguments& arguments)
        : arguments_(arguments),
          loops_(loops()),
          num_(static_cast<int>(arguments.contributions.size())),
          rows_(static_cast<std::size_t>(num_) * kBlock),
          sum_(kBlock),
          gram_(static_cast<std::size_t>(num_) * static_cast<std::size_t>(num_)),
          weights_(arguments.weights),
          coefficients_(static_cast<std::size_t>(num_)),
          squares_(static_cast<std::size_t>(num_), 0.0),
          finite_(static_cast<std::size_t>(num_), true) {
        // Divided by the largest first: the sum of finite weights may not be finite.
        const double largest = *std::max_element(weights_.begin(), weights_.end());
        for (double& weight : weights_) weight /= largest;
        const double total = std::accumulate(weights_.begin(), weights_.end(), 0.0);
        for (double& weight : weights_) weight /= total;
    }

    MergeReport run() {
        for (std::int64_t t = 0; t < arguments_.num_tensors; ++t) {
            const std::int64_t begin = arguments_.offsets[t];
            const std::int64_t end = arguments_.offsets[t + 1];
            const Rule rule = static_cast<Rule>(arguments_.rules[t]);
            // One contributor: RDA is the identity, as the mean is, and the mean is exact.
            if (rule == Rule::rda && num_ > 1) {
                sweep_gram(begin, end);
                if (all_finite_) {
                    choose_coefficients();
                    sweep_step(begin, end, rule, false);
                }
            } else {
                coefficients_ = weights_;
                sweep_step(begin, end, rule, true);
            }
        }
        MergeReport report;
        report.finite = finite_;
        report.norms.reserve(squares_.size());
        for (const double square : squares_) report.norms.push_back(std::sqrt(square));
        report.merged_norm = std::sqrt(merged_square_);
        report.cancelled = cancelled_;
        report.theta_finite = theta_finite_;
        return report;
    }

  private:
    double* row(int i) { return rows_.data() + static_cast<std::ptrdiff_t>(i) * kBlock; }
    double& gram(int i, int j) {
        return gram_[static_cast<std::size_t>(i) * static_cast<std::size_t>(num_) +
                     static_cast<std::size_t>(j)];
    }
    static std::int64_t padded(std::int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

    // A sum of squares of float32 in double cannot overflow: it is finite if and only if every element is.
    void add_square(int i, double square) {
        squares_[static_cast<std::size_t>(i)] += square;
        if (!std::isfinite(square)) {
            finite_[static_cast<std::size_t>(i)] = false;
            all_finite_ = false;
        }
    }

    void sweep_gram(std::int64_t begin, std::int64_t end) {
        std::fill(gram_.begin(), gram_.end(), 0.0);
        const double* partners[kMaxDots];
        double products[kMaxDots];
        for (std::int64_t first = begin; first < end; first += kBlock) {
            const std::int64_t n = std::min<std::int64_t>(kBlock, end - first);
            for (int i = 0; i < num_; ++i) {
                loops_.widen(arguments_.contributions[static_cast<std::size_t>(i)], first, n, row(i));
            }
            for (int i = 0; i < num_; ++i) {
                for (int j = i; j < num_; j += kMaxDots) {
                    const int count = std::min(kMaxDots, num_ - j);
                    for (int k = 0; k < count; ++k) partners[k] = row(j + k);
                    loops_.dots(row(i), partners, count, padded(n), products);
                    for (int k = 0; k < count; ++k) gram(i, j + k) += products[k];
                }
            }
        }
        for (int i = 0; i < num_; ++i) add_square(i, gram(i, i));
    }

    // RDA as one weighted sum: merged = sum_i c_i v_i with c_i = (mean norm / norm of the mean direction) *
    // w_i / |v_i|.
    void choose_coefficients() {
        double mean_norm = 0.0;
        std::vector<double>& direction = coefficients_;  // of v_i in the mean direction; phi(0) = 0
        for (int i = 0; i < num_; ++i) {
            const double norm = std::sqrt(gram(i, i));
            const double weight = weights_[static_cast<std::size_t>(i)];
            mean_norm += weight * norm;
            direction[static_cast<std::size_t>(i)] = norm > 0.0 ? weight / norm : 0.0;
        }
        double square = 0.0;
        for (int i = 0; i < num_; ++i) {
            for (int j = i; j < num_; ++j) {
                const double term = direction[static_cast<std::size_t>(i)] *
                                    direction[static_cast<std::size_t>(j)] * gram(i, j);
                square += i == j ? term : 2.0 * term;
            }
        }
        // Where the directions cancel exactly, rounding leaves squares on both sides of zero.
        const double length = std::sqrt(std::max(square, 0.0));
        if (!(length >= kShortestDirection)) {
            coefficients_ = weights_;
            cancelled_ += mean_norm > 0.0 ? 1 : 0;
            return;
        }
        for (double& coefficient : coefficients_) coefficient *= mean_norm / length;
    }

    void sweep_step(std::int64_t begin, std::int64_t end, Rule rule, bool with_squares) {
        OuterRule outer = arguments_.outer;
        if (rule == Rule::buffer) outer = OuterRule{1.0, 0.0, false};
        const ModelBlock& model = arguments_.model;
        const double* partner[1];
        double product;
        for (std::int64_t first = begin; first < end; first += kBlock) {
            const std::int64_t n = std::min<std::int64_t>(kBlock, end - first);
            std::fill(sum_.begin(), sum_.end(), 0.0);
            for (int i = 0; i < num_; ++i) {
                loops_.widen(arguments_.contributions[static_cast<std::size_t>(i)], first, n, row(0));
                if (with_squares) {
                    partner[0] = row(0);
                    loops_.dots(row(0), partner, 1, padded(n), &product);
                    add_square(i, product);
                }
                loops_.add_scaled(coefficients_[static_cast<std::size_t>(i)], row(0), n, sum_.data());
            }
            if (!all_finite_) continue;  // only the other contributors' finiteness is still of interest
            square_of_sum(n);
            const ModelBlock block{model.theta + first,
                                   model.momentum == nullptr ? nullptr : model.momentum + first,
                                   model.theta_out + first,
                                   model.momentum_out == nullptr ? nullptr : model.momentum_out + first};
            theta_finite_ = loops_.step(sum_.data(), block, n, outer) && theta_finite_;
            if (arguments_.wire_f32 != nullptr) {
                std::memcpy(arguments_.wire_f32 + first, block.theta_out,
                            static_cast<std::size_t>(n) * sizeof(float));
            }
            if (arguments_.wire_bf16 != nullptr) {
                encode_bf16_cpu(block.theta_out, nullptr, arguments_.wire_bf16 + first, n);
            }
        }
    }

    // Not through dots(): the merged gradient is a double, its square is not exact, and FMA would change
    // bits.
    void square_of_sum(std::int64_t n) {
        double lanes[kLanes] = {};
        for (std::int64_t k = 0; k < padded(n); k += kLanes) {
            for (int lane = 0; lane < kLanes; ++lane) {
                const double g = sum_[static_cast<std::size_t>(k + lane)];
                lanes[lane] += g * g;
            }
        }
        merged_square_ +=
            ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
    }

    const MergeArguments& arguments_;
    const Loops& loops_;
    const int num_;
    std::vector<double> rows_;  // one block of every contributor, widened
    std::vector<double> sum_;   // one block of the merged outer gradient
    std::vector<double> gram_;  // upper triangle, of one tensor
    std::vector<double> weights_;
    std::vector<double> coefficients_;
    std::vector<double> squares_;
    std::vector<bool> finite_;
    bool all_finite_ = true;
    double merged_square_ = 0.0;
    std::int64_t cancelled_ = 0;
    bool theta_finite_ = true;
};

}  // namespace

MergeReport merge_outer_step_cpu(const MergeArguments& arguments) { return Merge(arguments).run(); }

}  // namespace pyddl
