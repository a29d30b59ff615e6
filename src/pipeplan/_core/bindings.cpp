// The one file that knows Python: numpy arrays to pointers and back, with the GIL released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <stdexcept>
#include <tuple>
#include <utility>

#include "kernels.hpp"

namespace nb = nanobind;
using namespace pipeplan;

namespace {

using Vector = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Caps = nb::ndarray<const int, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<const Code, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<nb::numpy, T>;

template <class T>
Out<T> to_numpy(std::vector<T>&& values, std::initializer_list<std::size_t> shape) {
    auto* owned = new std::vector<T>(std::move(values));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return Out<T>(owned->data(), shape, owner);
}

void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

PipelineCosts pipeline_costs(const Vector& forward, const Vector& backward,
                             const Vector& send_forward, const Vector& send_backward,
                             bool half_duplex, int num_microbatches) {
    const std::size_t S = forward.shape(0);
    require(S >= 1 && backward.shape(0) == S && send_forward.shape(0) == S - 1 &&
                send_backward.shape(0) == S - 1 && num_microbatches >= 1,
            "costs of different numbers of stages");
    return {static_cast<int>(S),  num_microbatches,     forward.data(), backward.data(),
            send_forward.data(), send_backward.data(), half_duplex};
}

nb::tuple trace_to_python(Trace&& trace, const PipelineCosts& costs) {
    const std::size_t S = costs.num_stages, M = costs.num_microbatches;
    return nb::make_tuple(to_numpy(std::move(trace.order), {S, 2 * M}),
                          to_numpy(std::move(trace.block_start_ms), {S, 2 * M}),
                          to_numpy(std::move(trace.sent), {S - 1, 2, M}),
                          to_numpy(std::move(trace.transfer_start_ms), {S - 1, 2, M}),
                          to_numpy(std::move(trace.blocks_done), {S}),
                          to_numpy(std::move(trace.stage_end_ms), {S}));
}

nb::tuple py_run_schedule(Vector forward, Vector backward, Vector send_forward,
                          Vector send_backward, bool half_duplex, Codes codes) {
    const PipelineCosts costs = pipeline_costs(forward, backward, send_forward, send_backward,
                                               half_duplex, static_cast<int>(codes.shape(1) / 2));
    require(codes.shape(0) == forward.shape(0), "one order of blocks for each stage");
    Trace trace;
    {
        nb::gil_scoped_release release;
        trace = run_schedule(costs, codes.data());
    }
    return trace_to_python(std::move(trace), costs);
}

nb::tuple py_run_list(Vector forward, Vector backward, Vector send_forward, Vector send_backward,
                      bool half_duplex, int num_microbatches, int preference, Caps caps) {
    const PipelineCosts costs = pipeline_costs(forward, backward, send_forward, send_backward,
                                               half_duplex, num_microbatches);
    require(preference >= 0 && preference <= 2, "preference is 0, 1 or 2");
    require(caps.shape(0) == forward.shape(0), "one cap for each stage");
    for (std::size_t n = 0; n < caps.shape(0); ++n) require(caps(n) >= 1, "caps are at least 1");
    Trace trace;
    {
        nb::gil_scoped_release release;
        trace = run_list(costs, static_cast<Preference>(preference), caps.data());
    }
    return trace_to_python(std::move(trace), costs);
}

nb::tuple py_min_cut(Matrix weights) {
    require(weights.shape(0) == weights.shape(1) && weights.shape(0) >= 2, "a square matrix >= 2");
    Cut cut;
    {
        nb::gil_scoped_release release;
        cut = min_cut(weights.data(), static_cast<int>(weights.shape(0)));
    }
    const std::size_t V = cut.side.size();
    return nb::make_tuple(cut.weight, to_numpy(std::move(cut.side), {V}));
}

nb::tuple py_partition(Vector work, Vector output_bytes, Vector gradient_bytes,
                       Vector parameter_bytes, Vector speed, Matrix bytes_per_ms,
                       Matrix latency_ms, bool half_duplex, int num_microbatches, int max_stages,
                       double limit_ms) {
    const std::size_t L = work.shape(0), V = speed.shape(0);
    require(L >= 1 && L < 32767 && V >= 1 && V < 32767, "1 to 32766 layers and devices");
    require(output_bytes.shape(0) == L && gradient_bytes.shape(0) == L &&
                parameter_bytes.shape(0) == L,
            "costs of different numbers of layers");
    require(bytes_per_ms.shape(0) == V && bytes_per_ms.shape(1) == V && latency_ms.shape(0) == V &&
                latency_ms.shape(1) == V,
            "matrices of another number of devices");
    require(max_stages >= 1 && static_cast<std::size_t>(max_stages) <= std::min(L, V),
            "1 to min(layers, devices) stages");
    const PartitionInput input{static_cast<int>(L),    static_cast<int>(V),
                               num_microbatches,       work.data(),
                               output_bytes.data(),    gradient_bytes.data(),
                               parameter_bytes.data(), speed.data(),
                               bytes_per_ms.data(),    latency_ms.data(),
                               half_duplex};
    const std::size_t X = max_stages;
    std::vector<double> bottleneck(X);
    std::vector<int> end_layer(X * X, 0), num_replicas(X * X, 0);
    {
        nb::gil_scoped_release release;
        const std::vector<Partition> partitions = partition(input, max_stages, limit_ms);
        for (std::size_t x = 0; x < X; ++x) {
            bottleneck[x] = partitions[x].bottleneck_ms;
            std::copy(partitions[x].end_layer.begin(), partitions[x].end_layer.end(),
                      end_layer.begin() + x * X);
            std::copy(partitions[x].num_replicas.begin(), partitions[x].num_replicas.end(),
                      num_replicas.begin() + x * X);
        }
    }
    return nb::make_tuple(to_numpy(std::move(bottleneck), {X}),
                          to_numpy(std::move(end_layer), {X, X}),
                          to_numpy(std::move(num_replicas), {X, X}));
}

}  // namespace

NB_MODULE(_kernels, m) {
    m.def("run_schedule", &py_run_schedule, nb::arg("forward_ms"), nb::arg("backward_ms"),
          nb::arg("send_forward_ms"), nb::arg("send_backward_ms"), nb::arg("half_duplex"),
          nb::arg("codes"));
    m.def("run_list", &py_run_list, nb::arg("forward_ms"), nb::arg("backward_ms"),
          nb::arg("send_forward_ms"), nb::arg("send_backward_ms"), nb::arg("half_duplex"),
          nb::arg("num_microbatches"), nb::arg("preference"), nb::arg("caps"));
    m.def("min_cut", &py_min_cut, nb::arg("weights"));
    m.def("partition", &py_partition, nb::arg("work_ms"), nb::arg("output_bytes"),
          nb::arg("gradient_bytes"), nb::arg("parameter_bytes"), nb::arg("speed"),
          nb::arg("bytes_per_ms"), nb::arg("latency_ms"), nb::arg("half_duplex"),
          nb::arg("num_microbatches"), nb::arg("max_stages"), nb::arg("limit_ms"));
}
