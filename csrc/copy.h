// Copies of whole fragments.
#pragma once

#include <cstddef>

namespace pyddl {

// memcpy; what is large goes past the caches. They would hold little of it, and what is stored around them
// need not be read from memory first.
void copy_cpu(void* to, const void* from, std::size_t num_bytes);

// Stores what lies in the first-level cache past the caches. Others may see it after finish_streams().
void stream_cpu(void* to, const void* from, std::size_t num_bytes);
void finish_streams();

}  // namespace pyddl
