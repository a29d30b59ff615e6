// The one file that knows Python: numpy arrays to pointers and back, with the GIL released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "kernels.hpp"

namespace nb = nanobind;
using namespace pipeplan;

namespace {

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
                      bool half_duplex, int num_microbatches, int preference, Ints caps) {
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

nb::tuple py_least_sum(Cube stage_ms, Ints sizes, int num_devices, double limit_ms) {
    const std::size_t K = stage_ms.shape(0), X = stage_ms.shape(1);
    require(stage_ms.shape(2) == X && X >= 2 && sizes.shape(0) == K, "a square for each size");
    for (std::size_t k = 0; k < K; ++k) require(sizes.data()[k] >= 1, "sizes of at least 1");
    require(num_devices >= 1, "at least one device");
    LeastSum found;
    {
        nb::gil_scoped_release release;
        const StageTimes times{static_cast<int>(K), static_cast<int>(X) - 1, stage_ms.data()};
        found = least_sum(times, sizes.data(), num_devices, limit_ms);
    }
    return nb::make_tuple(found.sum_ms, nb::cast(found.end_layer), nb::cast(found.size));
}

// The arrays of an instance, as every planning kernel takes them first.
struct InstanceArrays {
    Vector forward, backward, output_bytes, gradient_bytes, parameter_bytes, speed;
    Matrix bytes_per_ms, latency_ms;
    bool half_duplex;
    int num_microbatches;
    int max_replicas;

    Instance view() const {
        const std::size_t L = forward.shape(0), V = speed.shape(0);
        require(L >= 1 && L < 32767 && V >= 1 && V < 32767, "1 to 32766 layers and devices");
        require(backward.shape(0) == L && output_bytes.shape(0) == L &&
                    gradient_bytes.shape(0) == L && parameter_bytes.shape(0) == L,
                "costs of different numbers of layers");
        require(bytes_per_ms.shape(0) == V && bytes_per_ms.shape(1) == V &&
                    latency_ms.shape(0) == V && latency_ms.shape(1) == V,
                "matrices of another number of devices");
        require(num_microbatches >= 1 && max_replicas >= 1, "at least one microbatch and replica");
        return {static_cast<int>(L),    static_cast<int>(V),     num_microbatches,
                forward.data(),         backward.data(),         output_bytes.data(),
                gradient_bytes.data(),  parameter_bytes.data(),  speed.data(),
                bytes_per_ms.data(),    latency_ms.data(),       half_duplex,
                max_replicas};
    }
};

InstanceArrays instance_arrays(const nb::tuple& t) {
    require(t.size() == 11, "an instance has eleven parts");
    return {nb::cast<Vector>(t[0]), nb::cast<Vector>(t[1]), nb::cast<Vector>(t[2]),
            nb::cast<Vector>(t[3]), nb::cast<Vector>(t[4]), nb::cast<Vector>(t[5]),
            nb::cast<Matrix>(t[6]), nb::cast<Matrix>(t[7]), nb::cast<bool>(t[8]),
            nb::cast<int>(t[9]), nb::cast<int>(t[10])};
}

std::vector<int> to_vector(const Ints& values) {
    return std::vector<int>(values.data(), values.data() + values.shape(0));
}

nb::tuple py_partition(nb::tuple instance, int max_stages, double limit_ms, int num_threads) {
    require(num_threads >= 1, "threads >= 1");
    const InstanceArrays arrays = instance_arrays(instance);
    const Instance input = arrays.view();
    require(max_stages >= 1 && max_stages <= std::min(input.num_layers, input.num_devices),
            "1 to min(layers, devices) stages");
    const std::size_t X = max_stages;
    std::vector<double> bottleneck(X);
    std::vector<int> end_layer(X * X, 0), num_replicas(X * X, 0);
    {
        nb::gil_scoped_release release;
        const std::vector<Partition> partitions = partition(input, max_stages, limit_ms, num_threads);
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

double py_plan_bound(Vector forward, Vector backward, Vector send_forward, Vector send_backward,
                     bool half_duplex, int num_microbatches, Vector all_reduce, Ints caps) {
    const PipelineCosts costs = pipeline_costs(forward, backward, send_forward, send_backward,
                                               half_duplex, num_microbatches);
    require(all_reduce.shape(0) == forward.shape(0) && caps.shape(0) == forward.shape(0),
            "one all-reduce and one cap for each stage");
    return plan_bound(costs, all_reduce.data(), caps.data());
}

nb::list plan_to_python(const PlacedPlan& plan) {
    nb::list stages;
    for (std::size_t n = 0; n < plan.devices.size(); ++n)
        stages.append(nb::make_tuple(plan.end_layer[n], nb::cast(plan.devices[n])));
    return stages;
}

PlacedPlan plan_from_python(nb::handle stages, const Instance& input) {
    PlacedPlan plan;
    for (nb::handle stage : stages) {
        plan.end_layer.push_back(nb::cast<int>(stage[0]));
        plan.devices.push_back(nb::cast<std::vector<int>>(stage[1]));
        for (int u : plan.devices.back()) require(u >= 0 && u < input.num_devices, "known devices");
    }
    require(!plan.end_layer.empty() && plan.end_layer.back() == input.num_layers, "all layers");
    return plan;
}

nb::tuple candidates_to_python(const Candidates& found) {
    nb::list plans;
    for (const PlacedPlan& plan : found.plans) plans.append(plan_to_python(plan));
    return nb::make_tuple(found.least_ms, plans);
}

void require_settings(const Instance& input, const std::vector<int>& sizes, int capacity,
                      int num_threads) {
    require(!sizes.empty() && sizes.front() >= 1 && sizes.back() <= input.num_devices &&
                std::is_sorted(sizes.begin(), sizes.end()),
            "sizes rise from 1 to the number of devices");
    require(capacity >= 1 && capacity <= 16 && num_threads >= 1, "capacity 1..16, threads >= 1");
}

nb::tuple py_plan_on_order(nb::tuple instance, Ints sizes, int capacity, double limit_ms,
                           int num_best, int num_threads) {
    const InstanceArrays arrays = instance_arrays(instance);
    const Instance input = arrays.view();
    const std::vector<int> allowed = to_vector(sizes);
    require_settings(input, allowed, capacity, num_threads);
    Candidates found;
    {
        nb::gil_scoped_release release;
        found = plan_on_order(input, allowed, capacity, limit_ms, num_best, num_threads);
    }
    return candidates_to_python(found);
}

nb::tuple py_plan_on_sets(nb::tuple instance, Ints class_of, int capacity, double limit_ms,
                          int num_best, int num_threads) {
    const InstanceArrays arrays = instance_arrays(instance);
    const Instance input = arrays.view();
    const std::vector<int> classes = to_vector(class_of);
    require(static_cast<int>(classes.size()) == input.num_devices, "a class for each device");
    require(capacity >= 1 && capacity <= 16 && num_threads >= 1, "capacity 1..16, threads >= 1");
    Candidates found;
    {
        nb::gil_scoped_release release;
        found = plan_on_sets(input, classes, capacity, limit_ms, num_best, num_threads);
    }
    return candidates_to_python(found);
}

double py_relaxed_bound(nb::tuple instance, Ints buckets, int capacity, double limit_ms,
                        int num_threads) {
    const InstanceArrays arrays = instance_arrays(instance);
    const Instance input = arrays.view();
    const std::vector<int> largest = to_vector(buckets);
    require_settings(input, largest, capacity, num_threads);
    require(largest.back() == input.num_devices, "the last bucket ends at the number of devices");
    nb::gil_scoped_release release;
    return relaxed_bound(input, largest, capacity, limit_ms, num_threads);
}

nb::list py_local_search(nb::tuple instance, nb::list starts, std::uint64_t seed, double budget,
                         double target_ms, int num_threads) {
    const InstanceArrays arrays = instance_arrays(instance);
    const Instance input = arrays.view();
    require(num_threads >= 1, "threads >= 1");
    std::vector<PlacedPlan> plans;
    for (nb::handle start : starts) plans.push_back(plan_from_python(start, input));
    std::vector<SearchResult> found;
    {
        nb::gil_scoped_release release;
        found = local_search(input, plans, seed, budget, target_ms, num_threads);
    }
    nb::list result;
    for (const SearchResult& one : found)
        result.append(nb::make_tuple(one.iteration_ms, one.rule, plan_to_python(one.plan)));
    return result;
}

}  // namespace

NB_MODULE(_kernels, m) {
    m.def("run_schedule", &py_run_schedule, nb::arg("forward_ms"), nb::arg("backward_ms"),
          nb::arg("send_forward_ms"), nb::arg("send_backward_ms"), nb::arg("half_duplex"),
          nb::arg("codes"));
    m.def("run_list", &py_run_list, nb::arg("forward_ms"), nb::arg("backward_ms"),
          nb::arg("send_forward_ms"), nb::arg("send_backward_ms"), nb::arg("half_duplex"),
          nb::arg("num_microbatches"), nb::arg("preference"), nb::arg("caps"));
    m.def("least_sum", &py_least_sum, nb::arg("stage_ms"), nb::arg("sizes"),
          nb::arg("num_devices"), nb::arg("limit_ms"));
    m.def("local_search", &py_local_search, nb::arg("instance"), nb::arg("starts"),
          nb::arg("seed"), nb::arg("budget"), nb::arg("target_ms"), nb::arg("num_threads"));
    m.def("min_cut", &py_min_cut, nb::arg("weights"));
    m.def("partition", &py_partition, nb::arg("instance"), nb::arg("max_stages"),
          nb::arg("limit_ms"), nb::arg("num_threads"));
    m.def("plan_bound", &py_plan_bound, nb::arg("forward_ms"), nb::arg("backward_ms"),
          nb::arg("send_forward_ms"), nb::arg("send_backward_ms"), nb::arg("half_duplex"),
          nb::arg("num_microbatches"), nb::arg("all_reduce_ms"), nb::arg("caps"));
    m.def("plan_on_order", &py_plan_on_order, nb::arg("instance"), nb::arg("sizes"),
          nb::arg("capacity"), nb::arg("limit_ms"), nb::arg("num_best"), nb::arg("num_threads"));
    m.def("plan_on_sets", &py_plan_on_sets, nb::arg("instance"), nb::arg("class_of"),
          nb::arg("capacity"), nb::arg("limit_ms"), nb::arg("num_best"), nb::arg("num_threads"));
    m.def("relaxed_bound", &py_relaxed_bound, nb::arg("instance"), nb::arg("buckets"),
          nb::arg("capacity"), nb::arg("limit_ms"), nb::arg("num_threads"));
}
