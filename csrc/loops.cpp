// Choice of the table of inner loops at run time.
#include "loops.h"

#include <atomic>
#include <cstring>

namespace pyddl {

extern const Loops loops_baseline;
#ifdef PYDDL_HAVE_X86_LOOPS
extern const Loops loops_avx2;
extern const Loops loops_avx512;
#endif

namespace {

bool has_avx2() {
#ifdef PYDDL_HAVE_X86_LOOPS
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

bool has_avx512() {
#ifdef PYDDL_HAVE_X86_LOOPS
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
    return false;
#endif
}

// The best table that this processor can run, or the one of that name if it can.
const Loops* find(const char* name) {
    const auto wanted = [name](const Loops& table) {
        return name == nullptr || std::strcmp(name, table.name) == 0;
    };
#ifdef PYDDL_HAVE_X86_LOOPS
    if (has_avx512() && wanted(loops_avx512)) return &loops_avx512;
    if (has_avx2() && wanted(loops_avx2)) return &loops_avx2;
#endif
    return wanted(loops_baseline) ? &loops_baseline : nullptr;
}

std::atomic<const Loops*> chosen{nullptr};

}  // namespace

const Loops& loops() {
    const Loops* table = chosen.load(std::memory_order_acquire);
    if (table == nullptr) {
        table = find(nullptr);
        chosen.store(table, std::memory_order_release);
    }
    return *table;
}

bool select_loops(const char* name) {
    const Loops* table = find(name);
    if (table == nullptr) {
        return false;
    }
    chosen.store(table, std::memory_order_release);
    return true;
}

}  // namespace pyddl
