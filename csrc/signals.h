// Threads that no signal reaches.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace pyddl {

// While it lives this thread has all signals blocked, and so has, for good, a thread that is born meanwhile:
// signals are for the threads that know of them.
class WithoutSignals {
  public:
    WithoutSignals() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    WithoutSignals(const WithoutSignals&) = delete;
    WithoutSignals& operator=(const WithoutSignals&) = delete;
    ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  private:
    sigset_t before_;
};

}  // namespace pyddl
