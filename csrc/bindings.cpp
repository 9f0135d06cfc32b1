// pyddl._C: conversion between Python and the kernels, and the checks that memory safety needs.
//
// Not here: any arithmetic. Messages for users come from pyddl/core/kernels.py, which checks everything
// first.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "alarm.h"
#include "checksum.h"
#include "codec.h"
#include "copy.h"
#include "loops.h"
#include "merge.h"
#include "pool.h"
#include "words.h"

namespace py = pybind11;

namespace {

// Below this a kernel is done before another thread could have taken the lock.
constexpr std::size_t kReleaseBytes = 16384;

[[noreturn]] void fail(const std::string& message) {
    const py::object error = py::module_::import("pyddl.errors").attr("ShapeError");
    PyErr_SetString(error.ptr(), message.c_str());
    throw py::error_already_set();
}

// A contiguous buffer of any object, held as long as this lives.
class Buffer {
  public:
    Buffer(const py::handle& object, const char* name, bool writable) {
        if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
            PyErr_Clear();
            fail(std::string(name) + " must be a C-contiguous " + (writable ? "writable " : "") +
                 "buffer; this object gives none; pass a numpy array, bytes or a memoryview of that kind");
        }
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { PyBuffer_Release(&view_); }

    template <class T>
    T* as(std::int64_t count, const char* name) const {
        if (static_cast<std::size_t>(view_.len) != static_cast<std::size_t>(count) * sizeof(T)) {
            fail(std::string(name) + " must have " +
                 std::to_string(count * static_cast<std::int64_t>(sizeof(T))) + " bytes; got " +
                 std::to_string(view_.len) + "; pass an array of the right length and dtype");
        }
        return static_cast<T*>(view_.buf);
    }
    pyddl::Vector vector(pyddl::Element element, std::int64_t n, const char* name) const {
        return {as<std::uint8_t>(pyddl::encoded_bytes(element, n), name), element};
    }
    void* data() const { return view_.buf; }
    std::size_t num_bytes() const { return static_cast<std::size_t>(view_.len); }

    // The address of an aligned word, or an error.
    void* word(std::int64_t offset) const {
        const auto address =
            reinterpret_cast<std::uintptr_t>(view_.buf) + static_cast<std::uintptr_t>(offset);
        if (offset < 0 || view_.len < 8 || offset > static_cast<std::int64_t>(view_.len) - 8) {
            fail("a word's offset must lie within the buffer, 0 to " +
                 std::to_string(static_cast<std::int64_t>(view_.len) - 8) + "; got " +
                 std::to_string(offset) + "; pass the offset in bytes");
        }
        if (address % 8 != 0) {
            fail("a word must lie at a multiple of 8 bytes in memory; got offset " + std::to_string(offset) +
                 " in a buffer at " + std::to_string(reinterpret_cast<std::uintptr_t>(view_.buf) % 8) +
                 " modulo 8; pass an aligned offset and buffer");
        }
        return reinterpret_cast<void*>(address);
    }

  private:
    Py_buffer view_;
};

pyddl::Element element_of(int number) {
    if (number < 0 || number > 3)
        fail("an element type must be 0 to 3; got " + std::to_string(number) + "; pass one");
    return static_cast<pyddl::Element>(number);
}

pyddl::Element block_element_of(int number) {
    if (number < 2) fail("a codec of blocks must be 2 or 3; got " + std::to_string(number) + "; pass one");
    return element_of(number);
}

// A buffer that may be None.
class OptionalBuffer {
  public:
    OptionalBuffer(const py::object& object, const char* name, bool writable) {
        if (!object.is_none()) buffer_.emplace(object, name, writable);
    }
    template <class T>
    T* as(std::int64_t count, const char* name) const {
        return buffer_ ? buffer_->as<T>(count, name) : nullptr;
    }

  private:
    std::optional<Buffer> buffer_;
};

// Releases the interpreter's lock for work on at least kReleaseBytes.
template <class Work>
auto without_lock(std::size_t num_bytes, Work work) {
    if (num_bytes < kReleaseBytes) return work();
    const py::gil_scoped_release release;
    return work();
}

py::tuple merge_outer_step(const py::list& contributions, const std::vector<int>& elements,
                           const std::vector<double>& weights, std::int64_t n, const py::object& offsets,
                           const py::object& rules, const py::object& theta, const py::object& momentum,
                           const py::object& theta_out, const py::object& momentum_out,
                           const py::object& wire_out, bool wire_is_bf16, bool nesterov, double lr, double mu,
                           int plan) {
    if (contributions.empty() || contributions.size() != weights.size() ||
        weights.size() != elements.size()) {
        fail(
            "contributions, weights and formats must have the same length, at least 1; got others; pass one "
            "each");
    }
    pyddl::MergeArguments arguments;
    std::vector<std::unique_ptr<Buffer>> held;
    for (std::size_t i = 0; i < contributions.size(); ++i) {
        held.push_back(std::make_unique<Buffer>(contributions[i], "a contribution", false));
        arguments.contributions.push_back(held.back()->vector(element_of(elements[i]), n, "a contribution"));
    }
    const Buffer rules_buffer(rules, "rules", false);
    const auto num_tensors = static_cast<std::int64_t>(rules_buffer.num_bytes());
    const Buffer offsets_buffer(offsets, "segments", false);
    const Buffer theta_buffer(theta, "theta", false);
    const Buffer theta_out_buffer(theta_out, "theta_out", true);
    const OptionalBuffer momentum_buffer(momentum, "momentum", false);
    const OptionalBuffer momentum_out_buffer(momentum_out, "momentum_out", true);
    const OptionalBuffer wire_buffer(wire_out, "wire_out", true);

    arguments.weights = weights;
    arguments.offsets = offsets_buffer.as<std::int64_t>(num_tensors + 1, "segments");
    arguments.rules = rules_buffer.as<std::uint8_t>(num_tensors, "rules");
    arguments.num_tensors = num_tensors;
    arguments.model = {theta_buffer.as<float>(n, "theta"), momentum_buffer.as<float>(n, "momentum"),
                       theta_out_buffer.as<float>(n, "theta_out"),
                       momentum_out_buffer.as<float>(n, "momentum_out")};
    if ((arguments.model.momentum == nullptr) != (arguments.model.momentum_out == nullptr) ||
        (nesterov && arguments.model.momentum == nullptr)) {
        fail("momentum and momentum_out must both be given, or with sgd both be None; got one; pass both");
    }
    arguments.wire_f32 = wire_is_bf16 ? nullptr : wire_buffer.as<float>(n, "wire_out");
    arguments.wire_bf16 = wire_is_bf16 ? wire_buffer.as<std::uint16_t>(n, "wire_out") : nullptr;
    arguments.outer = {lr, mu, nesterov};
    if (plan < 0 || plan > 2) fail("a plan must be 0, 1 or 2; got " + std::to_string(plan) + "; pass 0");
    arguments.plan = static_cast<pyddl::Plan>(plan);
    bool ascending = arguments.offsets[0] == 0 && arguments.offsets[num_tensors] == n;
    for (std::int64_t t = 0; t < num_tensors; ++t) {
        ascending = ascending && arguments.offsets[t] <= arguments.offsets[t + 1];
    }
    if (!ascending)
        fail("segments must ascend from 0 to n; got others; pass the offsets of the fragment's tensors");

    const std::size_t num_bytes = static_cast<std::size_t>(n) * 4 * (contributions.size() + 2);
    const pyddl::MergeReport report =
        without_lock(num_bytes, [&] { return pyddl::merge_outer_step_cpu(arguments); });
    return py::make_tuple(report.finite, report.norms, report.merged_norm, report.cancelled,
                          report.theta_finite);
}

void encode_bf16(const py::object& values, const py::object& residual, const py::object& out) {
    const Buffer in(values, "values", false);
    const auto n = static_cast<std::int64_t>(in.num_bytes() / sizeof(float));
    const OptionalBuffer carried(residual, "residual", true);
    const Buffer bits(out, "out_bits", true);
    const float* from = in.as<float>(n, "values");
    float* left = carried.as<float>(n, "residual");
    std::uint16_t* to = bits.as<std::uint16_t>(n, "out_bits");
    without_lock(in.num_bytes(), [&] { pyddl::encode_bf16_cpu(from, left, to, n); });
}

void decode_bf16(const py::object& bits, const py::object& out) {
    const Buffer in(bits, "bits", false);
    const auto n = static_cast<std::int64_t>(in.num_bytes() / sizeof(std::uint16_t));
    const Buffer values(out, "out", true);
    const std::uint16_t* from = in.as<std::uint16_t>(n, "bits");
    float* to = values.as<float>(n, "out");
    without_lock(in.num_bytes(), [&] { pyddl::decode_bf16_cpu(from, to, n); });
}

void encode_blocks(int number, const py::object& values, const py::object& residual, const py::object& out) {
    const pyddl::Element element = block_element_of(number);
    const Buffer in(values, "values", false);
    const auto n = static_cast<std::int64_t>(in.num_bytes() / sizeof(float));
    const OptionalBuffer carried(residual, "residual", true);
    const Buffer blocks(out, "out", true);
    const float* from = in.as<float>(n, "values");
    float* left = carried.as<float>(n, "residual");
    auto* to = blocks.as<std::uint8_t>(pyddl::encoded_bytes(element, n), "out");
    without_lock(in.num_bytes(), [&] { pyddl::encode_blocks_cpu(element, from, left, to, n); });
}

void decode_blocks(int number, const py::object& blocks, const py::object& out) {
    const pyddl::Element element = block_element_of(number);
    const Buffer values(out, "out", true);
    const auto n = static_cast<std::int64_t>(values.num_bytes() / sizeof(float));
    const Buffer in(blocks, "blocks", false);
    const auto* from = in.as<std::uint8_t>(pyddl::encoded_bytes(element, n), "blocks");
    float* to = values.as<float>(n, "out");
    without_lock(values.num_bytes(), [&] { pyddl::decode_blocks_cpu(element, from, to, n); });
}

std::uint32_t checksum(const py::object& buffer, std::uint32_t value, bool by_tables) {
    const Buffer in(buffer, "buffer", false);
    return without_lock(in.num_bytes(), [&] {
        return by_tables ? pyddl::checksum_by_tables(in.data(), in.num_bytes(), value)
                         : pyddl::checksum_cpu(in.data(), in.num_bytes(), value);
    });
}

std::uint32_t copy_checksum(const py::object& from, const py::object& to, std::uint32_t value) {
    const Buffer in(from, "source", false);
    const Buffer out(to, "target", true);
    auto* target = out.as<std::uint8_t>(static_cast<std::int64_t>(in.num_bytes()), "target");
    return without_lock(in.num_bytes(),
                        [&] { return pyddl::copy_checksum_cpu(target, in.data(), in.num_bytes(), value); });
}

void copy(const py::object& from, const py::object& to) {
    const Buffer in(from, "source", false);
    const Buffer out(to, "target", true);
    const auto n = static_cast<std::int64_t>(in.num_bytes());
    const auto source = reinterpret_cast<std::uintptr_t>(in.data());
    const auto target = reinterpret_cast<std::uintptr_t>(out.as<std::uint8_t>(n, "target"));
    if (source < target + in.num_bytes() && target < source + in.num_bytes())
        fail("target must not overlap source; got shared memory; pass a buffer of its own");
    without_lock(in.num_bytes(), [&] { pyddl::copy_cpu(out.data(), in.data(), in.num_bytes()); });
}

void load_words(const py::object& buffer, const py::object& offsets, const py::object& out) {
    const Buffer memory(buffer, "buffer", false);
    const Buffer at(offsets, "offsets", false);
    const Buffer to(out, "out", true);
    const auto count = static_cast<std::int64_t>(at.num_bytes() / sizeof(std::int64_t));
    const std::int64_t* offset = at.as<std::int64_t>(count, "offsets");
    std::uint64_t* words = to.as<std::uint64_t>(count, "out");
    for (std::int64_t k = 0; k < count; ++k) words[k] = pyddl::load_word(memory.word(offset[k]));
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() =
        "Kernels of pyddl in C++, for pyddl.core.kernels, and Alarm, for pyddl.link.alarm; nobody else "
        "imports this.";
    m.def("merge_outer_step", &merge_outer_step, py::arg("contributions"), py::arg("elements"),
          py::arg("weights"), py::arg("n"), py::arg("segments"), py::arg("rules"), py::arg("theta"),
          py::arg("momentum"), py::arg("theta_out"), py::arg("momentum_out"), py::arg("wire_out"),
          py::arg("wire_is_bf16"), py::arg("nesterov"), py::arg("lr"), py::arg("mu"), py::arg("plan") = 0);
    m.def("encode_bf16", &encode_bf16, py::arg("values"), py::arg("residual"), py::arg("out_bits"));
    m.def("decode_bf16", &decode_bf16, py::arg("bits"), py::arg("out"));
    m.def("encode_blocks", &encode_blocks, py::arg("element"), py::arg("values"), py::arg("residual"),
          py::arg("out"));
    m.def("decode_blocks", &decode_blocks, py::arg("element"), py::arg("blocks"), py::arg("out"));
    m.def("checksum", &checksum, py::arg("buffer"), py::arg("value"), py::arg("by_tables") = false);
    m.def("copy", &copy, py::arg("source"), py::arg("target"));
    m.def("copy_checksum", &copy_checksum, py::arg("source"), py::arg("target"), py::arg("value"));
    m.def(
        "load_word",
        [](const py::object& buffer, std::int64_t offset) {
            return pyddl::load_word(Buffer(buffer, "buffer", false).word(offset));
        },
        py::arg("buffer"), py::arg("offset_bytes"));
    m.def(
        "store_word",
        [](const py::object& buffer, std::int64_t offset, std::uint64_t value) {
            pyddl::store_word(Buffer(buffer, "buffer", true).word(offset), value);
        },
        py::arg("buffer"), py::arg("offset_bytes"), py::arg("value"));
    m.def("load_words", &load_words, py::arg("buffer"), py::arg("offsets"), py::arg("out"));
    m.def("num_threads", &pyddl::num_threads);
    m.def("set_num_threads", &pyddl::set_num_threads, py::arg("count"));
    m.def("instruction_set", [] { return std::string(pyddl::loops().name); });
    m.def("select_instruction_set",
          [](const std::string& name) { return pyddl::select_loops(name.c_str()); });
    py::class_<pyddl::Alarm>(m, "Alarm")
        .def(py::init([](double seconds, std::string message) {
                 return std::make_unique<pyddl::Alarm>(seconds, std::move(message));
             }),
             py::arg("seconds"), py::arg("message"))
        .def("cancel", &pyddl::Alarm::cancel);
    m.def("checksum_in_hardware", &pyddl::checksum_in_hardware);
}
