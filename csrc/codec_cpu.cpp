// Codecs on the CPU.
#include <algorithm>

#include "codec.h"
#include "loops.h"
#include "pool.h"

namespace pyddl {
namespace {

constexpr std::int64_t kPiece = 64 * kCodecBlock;  // elements that are one task

std::int64_t block_bytes(Element element) {
    return element == Element::int8 ? kInt8BlockBytes : kInt4BlockBytes;
}

// work(first element, elements of the block, offset of its bytes) for every block.
template <class Work>
void for_each_block(Element element, std::int64_t n, Work work) {
    for_each_task((n + kPiece - 1) / kPiece, num_threads(), [&](std::int64_t task, int) {
        const std::int64_t end = std::min((task + 1) * kPiece, n);
        for (std::int64_t first = task * kPiece; first < end; first += kCodecBlock) {
            work(first, std::min(kCodecBlock, end - first), first / kCodecBlock * block_bytes(element));
        }
    });
}

}  // namespace

void encode_bf16_cpu(const float* values, float* residual, std::uint16_t* out, std::int64_t n) {
    loops().encode_bf16(values, residual, out, n);
}

void decode_bf16_cpu(const std::uint16_t* bits, float* out, std::int64_t n) {
    loops().decode_bf16(bits, out, n);
}

void encode_blocks_cpu(Element element, const float* values, float* residual, std::uint8_t* out,
                       std::int64_t n) {
    const Loops& table = loops();
    const auto encode = element == Element::int8 ? table.encode_int8 : table.encode_int4;
    for_each_block(element, n, [&](std::int64_t first, std::int64_t count, std::int64_t at) {
        encode(values + first, residual == nullptr ? nullptr : residual + first, count, out + at);
    });
}

void decode_blocks_cpu(Element element, const std::uint8_t* blocks, float* out, std::int64_t n) {
    const Loops& table = loops();
    const Vector vector{blocks, element};
    for_each_block(element, n, [&](std::int64_t first, std::int64_t count, std::int64_t) {
        double row[kStride];
        double unit;
        table.widen(&vector, 1, first, count, row, &unit);
        for (std::int64_t k = 0; k < count; ++k) out[first + k] = static_cast<float>(unit * row[k]);
    });
}

}  // namespace pyddl
