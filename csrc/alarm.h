// A limit on calls that may hold Python's lock for ever, such as MPI_Init where a rank does not come.
#pragma once

#include <memory>
#include <string>

namespace pyddl {

// Unless it is cancelled within that time, the process writes the message to stderr and ends with status 1.
class Alarm {
  public:
    Alarm(double seconds, std::string message);
    Alarm(const Alarm&) = delete;
    Alarm& operator=(const Alarm&) = delete;
    ~Alarm() { cancel(); }
    void cancel();

  private:
    struct State;
    std::shared_ptr<State> state_;  // shared with the thread, which may outlive this object for a moment
};

}  // namespace pyddl
