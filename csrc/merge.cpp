// What every backend of the merge does first.
#include "merge.h"

#include <algorithm>
#include <numeric>

namespace pyddl {

std::vector<double> shares(std::vector<double> weights) {
    // By the largest first: the sum of finite weights may not be finite.
    const double largest = *std::max_element(weights.begin(), weights.end());
    for (double& weight : weights) weight /= largest;
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    for (double& weight : weights) weight /= total;
    return weights;
}

}  // namespace pyddl
