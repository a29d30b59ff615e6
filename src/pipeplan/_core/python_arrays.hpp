// What the files share that know Python: arrays in, arrays out, kernels without the GIL.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "control.hpp"
#include "pipeline.hpp"
#include "pool.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace pipeplan {

using Vector = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Cube = nb::ndarray<const double, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<const Code, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<nb::numpy, T>;

template <class T>
Out<T> to_numpy(std::vector<T>&& values, std::initializer_list<std::size_t> shape) {
    auto* owned = new std::vector<T>(std::move(values));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return Out<T>(owned->data(), shape, owner);
}

template <class Array>
auto to_vector(const Array& values) {
    return std::vector<std::remove_const_t<typename Array::Scalar>>(values.data(),
                                                                   values.data() + values.size());
}

inline void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

inline void require_not_nan(double number, const char* message) { require(!std::isnan(number), message); }

// Whether Ctrl-C has been pressed. Python's error indicator then holds the exception.
inline bool signalled() {
    nb::gil_scoped_acquire acquire;
    return PyErr_CheckSignals() != 0;
}

// Runs a kernel without the GIL. If it stops early, the reason becomes a Python exception.
template <class Kernel>
auto run_kernel(double deadline_s, Kernel&& kernel) {
    require_not_nan(deadline_s, "deadline: is not a number");
    try {
        nb::gil_scoped_release release;
        Control control(deadline_s, &signalled);
        return kernel(control);
    } catch (const Interrupted&) {
        throw nb::python_error();
    }
}

template <class Kernel>
auto run_kernel(double deadline_s, int num_threads, Kernel&& kernel) {
    require(num_threads >= 1 && num_threads <= 1024, "num_threads: is not within 1..1024");
    return run_kernel(deadline_s, [&](Control& control) {
        Pool pool(num_threads, control);
        return kernel(pool, control);
    });
}

// bindings_groups.cpp: plans with several stages a group.
void bind_groups(nb::module_& m);
// bindings_chains.cpp: planning on groups.
void bind_chains(nb::module_& m);

}  // namespace pipeplan
