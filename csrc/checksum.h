// CRC32C (Castagnoli, reflected polynomial 0x82F63B78, as in iSCSI), chainable.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyddl {

// The checksum of what `value` is the checksum of, followed by these bytes; value 0 starts anew.
std::uint32_t checksum_cpu(const void* data, std::size_t num_bytes, std::uint32_t value);

// The same of a copy that is made meanwhile; the two may not overlap.
std::uint32_t copy_checksum_cpu(void* to, const void* from, std::size_t num_bytes, std::uint32_t value);

// The same by tables alone, whatever the processor can do.
std::uint32_t checksum_by_tables(const void* data, std::size_t num_bytes, std::uint32_t value);

bool checksum_in_hardware();

}  // namespace pyddl
