// The Gram matrix of a block of rows. Included by one file per instruction set; see lanes.h and
// CMakeLists.txt.
#pragma once

#include "lanes.h"

namespace pyddl {
namespace {

// Rows i and i + 1 with columns j to j + columns - 1: each value that is loaded is used several times.
template <int rows, int columns>
void tile(const double* a, const double* b, const double* units_a, const double* units_b, std::int64_t n,
          int count, double* out) {
    Doubles sums[rows][columns][kParts];
    for (int part = 0; part < kParts; ++part) {
        Doubles partial[rows][columns] = {};
        for (std::int64_t k = part * kWidth; k < n; k += kLanes) {
            Doubles left[rows];
            for (int r = 0; r < rows; ++r) left[r] = load(a + r * kStride + k);
            for (int c = 0; c < columns; ++c) {
                const Doubles right = load(b + c * kStride + k);
                // Both factors are widened float32 or small integers: the product is exact, and fusing it
                // changes no bit.
                for (int r = 0; r < rows; ++r) partial[r][c] += left[r] * right;
            }
        }
        for (int r = 0; r < rows; ++r) {
            for (int c = 0; c < columns; ++c) sums[r][c][part] = partial[r][c];
        }
    }
    for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < columns; ++c)
            out[r * count + c] += units_a[r] * units_b[c] * sum_of_lanes(sums[r][c]);
    }
}

template <int rows>
void strip(const double* a, const double* b, const double* units_a, const double* units_b, std::int64_t n,
           int columns, int count, double* out) {
    switch (columns) {
        case 1:
            return tile<rows, 1>(a, b, units_a, units_b, n, count, out);
        case 2:
            return tile<rows, 2>(a, b, units_a, units_b, n, count, out);
        case 3:
            return tile<rows, 3>(a, b, units_a, units_b, n, count, out);
        default:
            return tile<rows, 4>(a, b, units_a, units_b, n, count, out);
    }
}

void gram(const double* rows, const double* units, int count, std::int64_t n, double* out) {
    for (int i = 0; i < count; i += 2) {
        for (int j = i; j < count; j += 4) {
            const double* a = rows + i * kStride;
            const double* b = rows + j * kStride;
            double* corner = out + i * count + j;
            const int columns = count - j < 4 ? count - j : 4;
            if (i + 1 < count)
                strip<2>(a, b, units + i, units + j, n, columns, count, corner);
            else
                strip<1>(a, b, units + i, units + j, n, columns, count, corner);
        }
    }
}

}  // namespace
}  // namespace pyddl
