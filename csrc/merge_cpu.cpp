// Merge and outer step on the CPU.
//
// A tensor is cut into chunks, always the same ones, and each chunk into blocks that stay in the first-level
// cache. What a chunk adds to a sum (a norm, a Gram matrix) is kept for itself and added up in order, so that
// the number of threads changes no bit. All sums are in double.
//
// A mean takes one sweep over the inputs. RDA needs every norm and the norm of the mean direction before its
// first element can be written:
//
//     gram       sweep 1: the Gram matrix of the contributions, from which both follow; sweep 2: weighted sum
//     and step.
//                M (M + 1) / 2 products an element: for a small number of contributions
//     direction  sweep 1: the norms; sweep 2: the mean direction, into theta_out for the time being, and its
//     norm;
//                sweep 3, over that alone: scaling and step. 2 M products an element
//
// A tensor that is small enough is done by one thread from end to end while its contributions are in that
// thread's second-level cache; the sweeps over a large one are shared.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "copy.h"
#include "merge.h"
#include "pool.h"

namespace pyddl {
namespace {

constexpr std::int64_t kChunk = 64 * kBlock;       // elements whose sums are kept for themselves
constexpr std::int64_t kCacheBytes = 512 << 10;    // of contributions that one thread keeps in its cache
constexpr std::int64_t kStreamElements = 1 << 18;  // a fragment from which outputs go past the caches
constexpr int kMostForGram =
    3;  // measured: above, the products of the Gram matrix cost more than another sweep

struct Chunk {
    std::int64_t tensor;
    std::int64_t begin;
    std::int64_t end;
};

// What a thread works with.
struct Desk {
    std::vector<double> rows;   // one block of every contributor, widened
    std::vector<double> units;  // of the rows
    std::vector<double> sum;    // one block of the merged outer gradient
    std::vector<double> lanes;  // of each contributor, and one more of the merged outer gradient: squares
    std::vector<float> theta, momentum;  // one block of what is stored past the caches
};

class Merge {
  public:
    explicit Merge(const MergeArguments& arguments)
        : arguments_(arguments),
          loops_(loops()),
          num_(static_cast<int>(arguments.contributions.size())),
          size_(static_cast<std::size_t>(num_)),
          plan_(arguments.plan != Plan::by_number ? arguments.plan
                : num_ <= kMostForGram            ? Plan::gram
                                                  : Plan::direction),
          streams_(arguments.offsets[arguments.num_tensors] >= kStreamElements),
          weights_(shares(arguments.weights)),
          desks_(static_cast<std::size_t>(num_threads())) {
        for (Desk& desk : desks_) {
            desk.sum.resize(kStride);
            desk.units.resize(size_);
            desk.lanes.resize((size_ + 1) * kLanes);
            desk.theta.resize(kBlock);
            desk.momentum.resize(kBlock);
            if (plan_ == Plan::gram) desk.rows.resize(size_ * kStride);
        }
        cut();
    }

    MergeReport run() {
        const auto do_small = [this](std::int64_t job, int worker) {
            for (std::int64_t t = jobs_[idx(job)]; t < jobs_[idx(job + 1)]; ++t) {
                if (!is_large_[idx(t)]) do_tensor(t, desk(worker));
            }
        };
        for_each_task(static_cast<std::int64_t>(jobs_.size()) - 1, num_workers(), do_small);
        if (!large_.empty()) do_large();
        return report();
    }

  private:
    static std::size_t idx(std::int64_t i) { return static_cast<std::size_t>(i); }
    // Blocks end at multiples of kBlock, where those of the codecs do.
    static std::int64_t to_block_end(std::int64_t first, std::int64_t end) {
        return std::min(kBlock - first % kBlock, end - first);
    }
    static std::int64_t padded(std::int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }
    Rule rule(std::int64_t tensor) const { return static_cast<Rule>(arguments_.rules[tensor]); }
    // One contributor: RDA is the identity, as the mean is, and the mean is exact.
    bool is_radial(std::int64_t tensor) const { return rule(tensor) == Rule::rda && num_ > 1; }
    double* squares(std::int64_t chunk) { return squares_.data() + idx(chunk) * size_; }
    double* grams(std::int64_t chunk) { return grams_.data() + idx(chunk) * size_ * size_; }
    double* coefficients(std::int64_t tensor) { return coefficients_.data() + idx(tensor) * size_; }

    Desk& desk(int worker) { return desks_[static_cast<std::size_t>(worker)]; }
    int num_workers() const { return static_cast<int>(desks_.size()); }

    // Chunks, which of the tensors are large, and jobs: runs of tensors that are one thread's work.
    void cut() {
        const std::int64_t num_tensors = arguments_.num_tensors;
        is_large_.resize(idx(num_tensors));
        first_chunk_.push_back(0);
        jobs_.push_back(0);
        std::int64_t in_job = 0;
        for (std::int64_t t = 0; t < num_tensors; ++t) {
            const std::int64_t begin = arguments_.offsets[t];
            const std::int64_t end = arguments_.offsets[t + 1];
            for (std::int64_t at = begin, next; at < end; at = next) {
                next = std::min((at / kChunk + 1) * kChunk, end);
                chunks_.push_back({t, at, next});
            }
            first_chunk_.push_back(static_cast<std::int64_t>(chunks_.size()));
            const std::int64_t fits = is_radial(t) ? kCacheBytes / (4 * num_) : kChunk;
            is_large_[idx(t)] = end - begin > std::max<std::int64_t>(fits, kBlock);
            if (is_large_[idx(t)]) {
                for (std::int64_t c = first_chunk_[idx(t)]; c < first_chunk_[idx(t + 1)]; ++c)
                    large_.push_back(c);
            } else {
                in_job += end - begin;
            }
            if (in_job >= kChunk || t + 1 == num_tensors) {
                jobs_.push_back(t + 1);
                in_job = 0;
            }
        }
        squares_.assign(chunks_.size() * size_, 0.0);
        merged_squares_.assign(chunks_.size(), 0.0);
        lengths_.assign(chunks_.size(), 0.0);
        theta_finite_.assign(chunks_.size(), true);
        ends_.assign(idx(num_tensors), End::mean);
        coefficients_.resize(idx(num_tensors) * size_);
        if (plan_ == Plan::gram) grams_.assign(chunks_.size() * size_ * size_, 0.0);
    }

    void clear_lanes(Desk& mine) const { std::fill(mine.lanes.begin(), mine.lanes.end(), 0.0); }
    void keep_squares(const Desk& mine, std::int64_t c) {
        for (int i = 0; i < num_; ++i) squares(c)[i] = sum_of_lanes(mine.lanes.data() + i * kLanes);
    }
    double* merged_lanes(Desk& mine) const { return mine.lanes.data() + size_ * kLanes; }

    void do_tensor(std::int64_t t, Desk& mine) {
        const std::int64_t first = first_chunk_[idx(t)];
        const std::int64_t last = first_chunk_[idx(t + 1)];
        if (is_radial(t)) {
            for (std::int64_t c = first; c < last; ++c) measure(c, mine);
            choose(t);
            if (plan_ == Plan::direction) {
                for (std::int64_t c = first; c < last; ++c) direct(c, mine);
                scale(t);
            }
        }
        for (std::int64_t c = first; c < last; ++c) finish(c, mine);
    }

    void do_large() {
        const auto count = static_cast<std::int64_t>(large_.size());
        const auto for_chunks = [&](void (Merge::*sweep)(std::int64_t, Desk&), bool only_radial) {
            for_each_task(count, num_workers(), [&](std::int64_t task, int worker) {
                const std::int64_t c = large_[idx(task)];
                if (!only_radial || is_radial(chunks_[idx(c)].tensor)) (this->*sweep)(c, desk(worker));
            });
        };
        const auto for_tensors = [&](void (Merge::*decide)(std::int64_t)) {
            for (std::int64_t t = 0; t < arguments_.num_tensors; ++t) {
                if (is_large_[idx(t)] && is_radial(t)) (this->*decide)(t);
            }
        };
        for_chunks(&Merge::measure, true);
        for_tensors(&Merge::choose);
        if (plan_ == Plan::direction) {
            for_chunks(&Merge::direct, true);
            for_tensors(&Merge::scale);
        }
        for_chunks(&Merge::finish, false);
    }

    // First sweep of RDA: squares of the norms, and with them the Gram matrix.
    void measure(std::int64_t c, Desk& mine) {
        const Chunk chunk = chunks_[idx(c)];
        const Vector* inputs = arguments_.contributions.data();
        clear_lanes(mine);
        for (std::int64_t first = chunk.begin, n; first < chunk.end; first += n) {
            n = to_block_end(first, chunk.end);
            if (plan_ == Plan::gram) {
                loops_.widen(inputs, num_, first, n, mine.rows.data(), mine.units.data());
                loops_.gram(mine.rows.data(), mine.units.data(), num_, padded(n), grams(c));
            } else {
                loops_.squares(inputs, num_, first, n, mine.lanes.data());
            }
        }
        if (plan_ == Plan::gram) {
            for (int i = 0; i < num_; ++i) squares(c)[i] = grams(c)[i * num_ + i];
        } else {
            keep_squares(mine, c);
        }
    }

    // RDA as one weighted sum: merged = sum_i c_i v_i with c_i = (mean norm / norm of the mean direction) *
    // w_i / |v_i|. Without a Gram matrix the norm of the mean direction is not known yet: c_i = w_i / |v_i|.
    void choose(std::int64_t t) {
        double* factors = coefficients(t);
        for (int i = 0; i < num_; ++i) {
            const double norm = std::sqrt(sum_over_chunks(t, squares_.data() + i, size_));
            factors[i] = norm > 0.0 ? weights_[idx(i)] / norm : 0.0;  // phi(0) = 0
        }
        if (plan_ == Plan::direction) return;
        double square = 0.0;
        for (int i = 0; i < num_; ++i) {
            for (int j = i; j < num_; ++j) {
                const std::size_t at = static_cast<std::size_t>(i * num_ + j);
                const double term =
                    factors[i] * factors[j] * sum_over_chunks(t, grams_.data() + at, size_ * size_);
                square += i == j ? term : 2.0 * term;
            }
        }
        set_length(t, square);
    }

    // Second sweep without a Gram matrix: the mean direction and the square of its norm.
    void direct(std::int64_t c, Desk& mine) {
        const Chunk chunk = chunks_[idx(c)];
        clear_lanes(mine);
        for (std::int64_t first = chunk.begin, n; first < chunk.end; first += n) {
            n = to_block_end(first, chunk.end);
            loops_.weighted_sum(arguments_.contributions.data(), coefficients(chunk.tensor), num_, first, n,
                                mine.sum.data(), nullptr);
            float* out = arguments_.model.theta_out + first;
            const bool streams = streams_ && is_large_[idx(chunk.tensor)];
            loops_.narrow(mine.sum.data(), n, streams ? mine.theta.data() : out, merged_lanes(mine));
            if (streams) stream_cpu(out, mine.theta.data(), idx(n) * sizeof(float));
        }
        lengths_[idx(c)] = sum_of_lanes(merged_lanes(mine));
        if (streams_) finish_streams();
    }

    void scale(std::int64_t t) { set_length(t, sum_over_chunks(t, lengths_.data(), 1)); }

    // The factors for the last sweep from the square of the norm of the mean direction. That is not negative
    // but for rounding: where the directions cancel, squares come out on both sides of zero.
    void set_length(std::int64_t t, double square) {
        double* factors = coefficients(t);
        double mean_norm = 0.0;
        for (int i = 0; i < num_; ++i) {
            mean_norm += weights_[idx(i)] * std::sqrt(sum_over_chunks(t, squares_.data() + i, size_));
        }
        const double length = std::sqrt(std::max(square, 0.0));
        const End end = ends_[idx(t)] = end_of(length, mean_norm, plan_);
        if (end == End::by_factors) {
            for (int i = 0; i < num_; ++i) factors[i] *= mean_norm / length;
        } else if (end == End::by_direction) {
            factors[0] = mean_norm / length;
        }
    }

    // Last sweep: the merged outer gradient and the outer step.
    void finish(std::int64_t c, Desk& mine) {
        const Chunk chunk = chunks_[idx(c)];
        const End end = ends_[idx(chunk.tensor)];
        const double* factors =
            end == End::mean || end == End::cancelled ? weights_.data() : coefficients(chunk.tensor);
        double* norms = is_radial(chunk.tensor) ? nullptr : mine.lanes.data();  // else they are known
        OuterRule outer = arguments_.outer;
        if (rule(chunk.tensor) == Rule::buffer) outer = OuterRule{1.0, 0.0, false};
        double* sum = mine.sum.data();
        clear_lanes(mine);
        for (std::int64_t first = chunk.begin, n; first < chunk.end; first += n) {
            n = to_block_end(first, chunk.end);
            if (end == End::by_direction)
                loops_.scale(arguments_.model.theta_out + first, factors[0], n, sum);
            else
                loops_.weighted_sum(arguments_.contributions.data(), factors, num_, first, n, sum, norms);
            const ModelBlock block = block_at(first, mine);
            if (!loops_.step(sum, block, n, outer, merged_lanes(mine))) theta_finite_[idx(c)] = false;
            put(block, first, n);
        }
        if (norms != nullptr) keep_squares(mine, c);
        // theta_out held the direction rounded to float32: its norm is known better.
        merged_squares_[idx(c)] = end == End::by_direction ? factors[0] * factors[0] * lengths_[idx(c)]
                                                           : sum_of_lanes(merged_lanes(mine));
        if (streams_) finish_streams();
    }

    // Of the model; what is to be stored past the caches is written to the desk first.
    ModelBlock block_at(std::int64_t first, Desk& mine) const {
        const ModelBlock& model = arguments_.model;
        const bool has_momentum = model.momentum != nullptr;
        const float* momentum = has_momentum ? model.momentum + first : nullptr;
        if (streams_)
            return {model.theta + first, momentum, mine.theta.data(),
                    has_momentum ? mine.momentum.data() : nullptr};
        return {model.theta + first, momentum, model.theta_out + first,
                has_momentum ? model.momentum_out + first : nullptr};
    }

    // A finished block to where it belongs, and its copy for the wire.
    void put(const ModelBlock& block, std::int64_t first, std::int64_t n) const {
        const std::size_t num_bytes = idx(n) * sizeof(float);
        const auto store = streams_ ? stream_cpu : copy_cpu;
        if (streams_) {
            stream_cpu(arguments_.model.theta_out + first, block.theta_out, num_bytes);
            if (block.momentum_out != nullptr)
                stream_cpu(arguments_.model.momentum_out + first, block.momentum_out, num_bytes);
        }
        if (arguments_.wire_f32 != nullptr) store(arguments_.wire_f32 + first, block.theta_out, num_bytes);
        if (arguments_.wire_bf16 != nullptr)
            loops_.encode_bf16(block.theta_out, nullptr, arguments_.wire_bf16 + first, n);
    }

    // Of one tensor; the values of its chunks lie `stride` apart.
    double sum_over_chunks(std::int64_t t, const double* of_chunk_0, std::size_t stride) const {
        double sum = 0.0;
        for (std::int64_t c = first_chunk_[idx(t)]; c < first_chunk_[idx(t + 1)]; ++c)
            sum += of_chunk_0[idx(c) * stride];
        return sum;
    }

    MergeReport report() const {
        MergeReport found;
        for (std::size_t i = 0; i < size_; ++i) {
            double square = 0.0;
            for (std::size_t c = 0; c < chunks_.size(); ++c) square += squares_[c * size_ + i];
            // A sum of squares of float32 in double cannot overflow: it is finite if and only if every
            // element is.
            found.finite.push_back(std::isfinite(square));
            found.norms.push_back(std::sqrt(square));
        }
        found.merged_norm = std::sqrt(std::accumulate(merged_squares_.begin(), merged_squares_.end(), 0.0));
        found.cancelled = std::count(ends_.begin(), ends_.end(), End::cancelled);
        found.theta_finite = std::count(theta_finite_.begin(), theta_finite_.end(), false) == 0;
        return found;
    }

    const MergeArguments& arguments_;
    const Loops& loops_;
    const int num_;
    const std::size_t size_;
    const Plan plan_;
    const bool streams_;  // outputs are stored past the caches, which would hold little of them
    std::vector<double> weights_;
    std::vector<Desk> desks_;
    std::vector<Chunk> chunks_;
    std::vector<std::int64_t> first_chunk_;  // of each tensor, and one past the last
    std::vector<std::int64_t> jobs_;         // first tensor of each job, and one past the last
    std::vector<std::uint8_t> is_large_;
    std::vector<std::int64_t> large_;   // chunks of the large tensors
    std::vector<double> coefficients_;  // [tensors, M]
    std::vector<End> ends_;             // of tensors
    std::vector<double> squares_;       // [chunks, M]
    std::vector<double> grams_;         // [chunks, M, M]
    std::vector<double> lengths_;       // of chunks: what they add to the square of the mean direction's norm
    std::vector<double> merged_squares_;      // of chunks
    std::vector<std::uint8_t> theta_finite_;  // of chunks
};

}  // namespace

MergeReport merge_outer_step_cpu(const MergeArguments& arguments) { return Merge(arguments).run(); }

}  // namespace pyddl
