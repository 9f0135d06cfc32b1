// Threads that share the work of one kernel call.
#pragma once

#include <cstdint>
#include <functional>

namespace pyddl {

// What OMP_NUM_THREADS says, else the processors that this process may run on; at least 1.
int num_threads();

// Another number from now on, for measurements and tests; 0: what num_threads() finds by itself.
void set_num_threads(int count);

// Calls work(task, worker) once for each task, 0 <= task < num_tasks, from this and other threads; returns
// when all are done. Calls of one worker, 0 <= worker < num_workers, do not overlap. Which worker gets
// which task is left to chance: results must not depend on it. Where another call has the threads already,
// this thread does all itself.
void for_each_task(std::int64_t num_tasks, int num_workers,
                   const std::function<void(std::int64_t task, int worker)>& work);

}  // namespace pyddl
