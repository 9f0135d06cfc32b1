// The inner loops but the Gram matrix. Included by one file per instruction set; see lanes.h.
//
// Sums over elements go by lanes; all else is elementwise, plain loops that the compiler vectorises, so that
// the width of a vector changes no bit.
#pragma once

#include <cstdint>

#include "bits.h"
#include "lanes.h"

namespace pyddl {
namespace {

constexpr int kGroup = kWidth == 8 ? 8 : 4;  // vectors that one sweep of a loop reads side by side
constexpr std::int64_t kAheadBytes = 256;    // of each vector, fetched while what lies before is worked on

template <class T>
void fetch_ahead(const T* at) {
    __builtin_prefetch(reinterpret_cast<const char*>(at) + kAheadBytes);
}

// The codes of the block of a vector that element `first` lies in, and its scale.
inline const std::uint8_t* block_of(Vector v, std::int64_t first, double* unit) {
    const std::int64_t bytes = v.element == Element::int8 ? kInt8BlockBytes : kInt4BlockBytes;
    const std::uint8_t* block = static_cast<const std::uint8_t*>(v.data) + first / kCodecBlock * bytes;
    float scale;
    __builtin_memcpy(&scale, block, sizeof scale);
    *unit = static_cast<double>(scale);
    return block + sizeof scale;
}

// Element `first` of a vector in blocks: its code and those behind it, and the scale. `room` takes what is
// unpacked.
struct Codes {
    const std::int8_t* values;
    double unit;

    Codes(Vector v, std::int64_t first, std::int8_t* room) {
        const std::uint8_t* codes = block_of(v, first, &unit);
        if (v.element == Element::int8) {
            values = reinterpret_cast<const std::int8_t*>(codes);
        } else {
            unpack_int4(codes, room);
            values = room;
        }
        values += first % kCodecBlock;
    }
};

template <class T>
void widen_one(const T* from, std::int64_t n, double* to) {
    const std::int64_t whole = n / kLanes * kLanes;
    for (std::int64_t k = 0; k < whole; k += kLanes) {
        fetch_ahead(from + k);
        for (int part = 0; part < kParts; ++part) {
            store(to + k + part * kWidth, load_wide(from + k + part * kWidth));
        }
    }
    if (whole < n) {
        T rest[kLanes] = {};
        for (std::int64_t k = whole; k < n; ++k) rest[k - whole] = from[k];
        for (int part = 0; part < kParts; ++part) {
            store(to + whole + part * kWidth, load_wide(rest + part * kWidth));
        }
    }
}

// The sums of count vectors' squares by lanes, added to squares; where with_sum, sum = c_0 v_0 + ... added to
// what is there unless fresh.
template <class T, int count, bool with_sum, bool with_squares>
struct Terms {
    const T* from[count];
    double factor[count];
    Doubles partial[count][kParts];

    void row(const T* const* at, bool fresh, double* sum) {
        for (int part = 0; part < kParts; ++part) {
            Doubles total = {};
            if (with_sum && !fresh) total = load(sum + part * kWidth);
            for (int i = 0; i < count; ++i) {
                const Doubles x = load_wide(at[i] + part * kWidth);
                if (with_sum) total += factor[i] * x;
                if (with_squares) partial[i][part] = add_exact_product(x, x, partial[i][part]);
            }
            if (with_sum) store(sum + part * kWidth, total);
        }
    }

    void run(std::int64_t n, bool fresh, double* sum, double* squares) {
        const std::int64_t whole = n / kLanes * kLanes;
        const T* at[count];
        for (int i = 0; i < count; ++i) {
            at[i] = from[i];
            for (int part = 0; with_squares && part < kParts; ++part)
                partial[i][part] = load(squares + i * kLanes + part * kWidth);
        }
        for (std::int64_t k = 0; k < whole; k += kLanes) {
            for (int i = 0; i < count; ++i) fetch_ahead(at[i]);
            row(at, fresh, sum + k);
            for (int i = 0; i < count; ++i) at[i] += kLanes;
        }
        if (whole < n) {
            T rest[count][kLanes] = {};
            for (int i = 0; i < count; ++i) {
                for (std::int64_t k = whole; k < n; ++k) rest[i][k - whole] = from[i][k];
                at[i] = rest[i];
            }
            row(at, fresh, sum + whole);
        }
        for (int i = 0; with_squares && i < count; ++i) {
            for (int part = 0; part < kParts; ++part)
                store(squares + i * kLanes + part * kWidth, partial[i][part]);
        }
    }
};

// Neighbours of one element type.
struct Group {
    const void* from[kGroup];
    double factor[kGroup];
};

template <class T, int count, bool with_sum, bool with_squares>
void add_terms(const Group& group, std::int64_t n, bool fresh, double* sum, double* squares) {
    Terms<T, count, with_sum, with_squares> terms;
    for (int i = 0; i < count; ++i) {
        terms.from[i] = static_cast<const T*>(group.from[i]);
        terms.factor[i] = group.factor[i];
    }
    terms.run(n, fresh, sum, squares);
}

template <class T, int count>
void add_terms(const Group& group, std::int64_t n, bool fresh, double* sum, double* squares) {
    if (sum == nullptr)
        add_terms<T, count, false, true>(group, n, fresh, sum, squares);
    else if (squares == nullptr)
        add_terms<T, count, true, false>(group, n, fresh, sum, squares);
    else
        add_terms<T, count, true, true>(group, n, fresh, sum, squares);
}

template <class T>
void add_group(int count, const Group& group, std::int64_t n, bool fresh, double* sum, double* squares) {
    switch (count) {
        case 1:
            return add_terms<T, 1>(group, n, fresh, sum, squares);
        case 2:
            return add_terms<T, 2>(group, n, fresh, sum, squares);
        case 3:
            return add_terms<T, 3>(group, n, fresh, sum, squares);
        case 4:
            return add_terms<T, 4>(group, n, fresh, sum, squares);
#if PYDDL_WIDTH == 8
        case 5:
            return add_terms<T, 5>(group, n, fresh, sum, squares);
        case 6:
            return add_terms<T, 6>(group, n, fresh, sum, squares);
        case 7:
            return add_terms<T, 7>(group, n, fresh, sum, squares);
        default:
            return add_terms<T, 8>(group, n, fresh, sum, squares);
#endif
    }
}

#if PYDDL_WIDTH == 8

// The same sums of whole blocks of int4: a factor times a code is one of 16 products, looked up.
template <int count>
void add_packed_terms(const Group& group, bool fresh, double* sum) {
    Products products[count];
    const std::uint8_t* at[count];
    for (int i = 0; i < count; ++i) {
        products[i] = Products(group.factor[i]);
        at[i] = static_cast<const std::uint8_t*>(group.from[i]);
    }
    for (std::int64_t j = 0; j < kCodecBlock / 2; j += kLanes) {
        double* low_sum = sum + j;
        double* high_sum = sum + kCodecBlock / 2 + j;
        Doubles low = {}, high = {};
        if (!fresh) {
            low = load(low_sum);
            high = load(high_sum);
        }
        for (int i = 0; i < count; ++i) products[i].add(at[i] + j, &low, &high);
        store(low_sum, low);
        store(high_sum, high);
    }
}

void add_packed(const Vector* v, const double* c, int count, std::int64_t first, bool fresh, double* sum,
                double* squares) {
    Group group;
    for (int i = 0; i < count; ++i) {
        double unit;
        const std::uint8_t* codes = block_of(v[i], first, &unit);
        fetch_ahead(codes);
        fetch_ahead(codes + 64);
        if (squares != nullptr) squares[i * kLanes] += unit * unit * sum_of_squares_int4(codes);
        group.from[i] = codes;
        group.factor[i] = c == nullptr ? 0.0 : c[i] * unit;
    }
    if (sum == nullptr) return;
    switch (count) {
        case 1:
            return add_packed_terms<1>(group, fresh, sum);
        case 2:
            return add_packed_terms<2>(group, fresh, sum);
        case 3:
            return add_packed_terms<3>(group, fresh, sum);
        case 4:
            return add_packed_terms<4>(group, fresh, sum);
        case 5:
            return add_packed_terms<5>(group, fresh, sum);
        case 6:
            return add_packed_terms<6>(group, fresh, sum);
        case 7:
            return add_packed_terms<7>(group, fresh, sum);
        default:
            return add_packed_terms<8>(group, fresh, sum);
    }
}

#endif

// Groups of neighbours of one element type, in order; sum null: squares only.
void add_all(const Vector* v, const double* c, int count, std::int64_t first, std::int64_t n, double* sum,
             double* squares) {
    std::int8_t room[kGroup][kCodecBlock];
    for (int i = 0; i < count;) {
        int size = 1;
        while (size < kGroup && i + size < count && v[i + size].element == v[i].element) ++size;
        const Element element = v[i].element;
        double* into = squares == nullptr ? nullptr : squares + i * kLanes;
#if PYDDL_WIDTH == 8
        if (element == Element::int4 && n == kCodecBlock) {
            add_packed(v + i, c == nullptr ? nullptr : c + i, size, first, i == 0, sum, into);
            i += size;
            continue;
        }
#endif
        Group group;
        for (int j = 0; j < size; ++j) {
            const Vector& vector = v[i + j];
            double unit = 1.0;
            if (element == Element::f32) {
                group.from[j] = static_cast<const float*>(vector.data) + first;
            } else if (element == Element::bf16) {
                group.from[j] = static_cast<const std::uint16_t*>(vector.data) + first;
            } else {
                const Codes codes(vector, first, room[j]);
                group.from[j] = codes.values;
                unit = codes.unit;
                if (into != nullptr) into[j * kLanes] += unit * unit * sum_of_squares(codes.values, n);
            }
            group.factor[j] = c == nullptr ? 0.0 : c[i + j] * unit;
        }
        if (element == Element::f32)
            add_group<float>(size, group, n, i == 0, sum, into);
        else if (element == Element::bf16)
            add_group<std::uint16_t>(size, group, n, i == 0, sum, into);
        else if (sum != nullptr)
            add_group<std::int8_t>(size, group, n, i == 0, sum, nullptr);
        i += size;
    }
}

void widen(const Vector* v, int count, std::int64_t first, std::int64_t n, double* rows, double* units) {
    std::int8_t room[kCodecBlock];
    for (int i = 0; i < count; ++i) {
        double* to = rows + i * kStride;
        units[i] = 1.0;
        if (v[i].element == Element::f32) {
            widen_one(static_cast<const float*>(v[i].data) + first, n, to);
        } else if (v[i].element == Element::bf16) {
            widen_one(static_cast<const std::uint16_t*>(v[i].data) + first, n, to);
        } else {
            const Codes codes(v[i], first, room);
            widen_one(codes.values, n, to);
            units[i] = codes.unit;
        }
    }
}

void squares(const Vector* v, int count, std::int64_t first, std::int64_t n, double* out) {
    add_all(v, nullptr, count, first, n, nullptr, out);
}

void weighted_sum(const Vector* v, const double* c, int count, std::int64_t first, std::int64_t n,
                  double* sum, double* out) {
    add_all(v, c, count, first, n, sum, out);
}

// The squares of a vector that comes a row of lanes at a time. Not exact products: never fused.
struct Squares {
    Doubles partial[kParts];
    double* into;

    explicit Squares(double* squares) : into(squares) {
        for (int part = 0; part < kParts; ++part) partial[part] = load(into + part * kWidth);
    }
    void add(const double* row) {
        for (int part = 0; part < kParts; ++part) {
            const Doubles x = load(row + part * kWidth);
            partial[part] += x * x;
        }
    }
    void end() const {
        for (int part = 0; part < kParts; ++part) store(into + part * kWidth, partial[part]);
    }
};

void narrow(const double* __restrict g, std::int64_t n, float* __restrict out, double* __restrict into) {
    Squares squares(into);
    std::int64_t k = 0;
    for (; k + kLanes <= n; k += kLanes) {
        squares.add(g + k);
        for (int part = 0; part < kLanes; part += kWidth) store_narrow(out + k + part, load(g + k + part));
    }
    if (k < n) squares.add(g + k);
    for (; k < n; ++k) out[k] = static_cast<float>(g[k]);
    squares.end();
}

void scale(const float* __restrict values, double factor, std::int64_t n, double* __restrict g) {
    std::int64_t k = 0;
    for (; k + kWidth <= n; k += kWidth) store(g + k, factor * load_wide(values + k));
    for (; k < n; ++k) g[k] = factor * static_cast<double>(values[k]);
    for (; k % kLanes != 0; ++k) g[k] = 0.0;
}

// All ones in the exponent of one of them.
inline bool has_nonfinite(const float* values, std::int64_t n) {
    std::uint32_t bad = 0;
    for (std::int64_t k = 0; k < n; ++k) bad |= (bits_of(values[k]) & kExponent) == kExponent ? 1u : 0u;
    return bad != 0;
}

bool step(const double* __restrict g, ModelBlock model, std::int64_t n, OuterRule rule,
          double* __restrict into) {
    const double lr = rule.lr;
    const double mu = rule.momentum;
    const float* __restrict theta = model.theta;
    float* __restrict theta_out = model.theta_out;
    Squares squares(into);
    std::int64_t k = 0;
    if (rule.nesterov) {
        const float* __restrict momentum = model.momentum;
        float* __restrict momentum_out = model.momentum_out;
        for (; k + kLanes <= n; k += kLanes) {
            squares.add(g + k);
            for (std::int64_t j = k; j < k + kLanes; j += kWidth) {
                const Doubles gradient = load(g + j);
                const Doubles b = mu * load_wide(momentum + j) + gradient;
                store_narrow(momentum_out + j, b);
                store_narrow(theta_out + j, load_wide(theta + j) - lr * (gradient + mu * b));
            }
        }
        if (k < n) squares.add(g + k);
        for (; k < n; ++k) {
            const double b = mu * static_cast<double>(momentum[k]) + g[k];
            momentum_out[k] = static_cast<float>(b);
            theta_out[k] = static_cast<float>(static_cast<double>(theta[k]) - lr * (g[k] + mu * b));
        }
    } else {
        for (; k + kLanes <= n; k += kLanes) {
            squares.add(g + k);
            for (std::int64_t j = k; j < k + kLanes; j += kWidth)
                store_narrow(theta_out + j, load_wide(theta + j) - lr * load(g + j));
        }
        if (k < n) squares.add(g + k);
        for (; k < n; ++k) theta_out[k] = static_cast<float>(static_cast<double>(theta[k]) - lr * g[k]);
        if (model.momentum_out != nullptr) {  // without momentum the buffer passes through unchanged
            __builtin_memcpy(model.momentum_out, model.momentum, static_cast<std::size_t>(n) * sizeof(float));
        }
    }
    squares.end();
    return !has_nonfinite(theta_out, n);
}

void encode_bf16(const float* __restrict values, float* __restrict residual, std::uint16_t* __restrict out,
                 std::int64_t n) {
    if (residual == nullptr) {
        for (std::int64_t k = 0; k < n; ++k) {
            out[k] = static_cast<std::uint16_t>(bf16_of(bits_of(values[k])));
        }
        return;
    }
    for (std::int64_t k = 0; k < n; ++k) {
        const float x = values[k] + residual[k];
        const std::uint32_t code = bf16_of(bits_of(x));
        out[k] = static_cast<std::uint16_t>(code);
        residual[k] = lost_in_bf16(x, code);
    }
}

void decode_bf16(const std::uint16_t* __restrict bits, float* __restrict out, std::int64_t n) {
    for (std::int64_t k = 0; k < n; ++k) {
        out[k] = float_of(static_cast<std::uint32_t>(bits[k]) << 16);
    }
}

// The largest magnitude of a block as the bits of a float32; from kExponent on something in it is not finite.
inline std::uint32_t largest_of(const float* x, std::int64_t n) {
    std::uint32_t largest = 0;
    for (std::int64_t k = 0; k < n; ++k) {
        const std::uint32_t magnitude = bits_of(x[k]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

// A block of x = values + residual, zeros behind.
struct BlockIn {
    float x[kCodecBlock];

    BlockIn(const float* values, const float* residual, std::int64_t n) {
        for (std::int64_t k = 0; k < n; ++k) x[k] = values[k];
        if (residual != nullptr) {
            for (std::int64_t k = 0; k < n; ++k) x[k] += residual[k];
        }
        for (std::int64_t k = n; k < kCodecBlock; ++k) x[k] = 0.0f;
    }
};

void encode_int8(const float* values, float* residual, std::int64_t n, std::uint8_t* block) {
    const BlockIn in(values, residual, n);
    const BlockScale scale(largest_of(in.x, kCodecBlock), kMostInt8);
    std::int8_t codes[kCodecBlock];
    for (std::int64_t k = 0; k < kCodecBlock; ++k)
        codes[k] = static_cast<std::int8_t>(int8_code(in.x[k], scale));
    for (std::int64_t k = 0; residual != nullptr && k < n; ++k) residual[k] = scale.lost(in.x[k], codes[k]);
    __builtin_memcpy(block, &scale.scale, sizeof scale.scale);
    __builtin_memcpy(block + sizeof scale.scale, codes, sizeof codes);
}

void encode_int4(const float* values, float* residual, std::int64_t n, std::uint8_t* block) {
    const BlockIn in(values, residual, n);
    const BlockScale scale(largest_of(in.x, kCodecBlock), kMostInt4);
    std::uint8_t nibbles[kCodecBlock];
    for (std::int64_t k = 0; k < kCodecBlock; ++k)
        nibbles[k] = static_cast<std::uint8_t>(int4_code(in.x[k], scale));
    std::uint8_t packed[kCodecBlock / 2];
    for (std::int64_t j = 0; j < kCodecBlock / 2; ++j) {
        packed[j] = static_cast<std::uint8_t>(nibbles[j] | nibbles[j + kCodecBlock / 2] << 4);
    }
    if (residual != nullptr) {
        std::int8_t codes[kCodecBlock];
        unpack_int4(packed, codes);
        for (std::int64_t k = 0; k < n; ++k) residual[k] = scale.lost(in.x[k], codes[k]);
    }
    __builtin_memcpy(block, &scale.scale, sizeof scale.scale);
    __builtin_memcpy(block + sizeof scale.scale, packed, sizeof packed);
}

}  // namespace
}  // namespace pyddl
