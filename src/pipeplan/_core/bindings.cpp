// With bindings_groups.cpp the only file that knows Python: classes that validate themselves, kernels that release the GIL.
//
// A kernel that cannot finish raises a Python exception: DeadlineError at its deadline,
// KeyboardInterrupt at Ctrl-C, ValueError for wrong arguments, MemoryError if memory runs out.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "kernels.hpp"
#include "pipeline.hpp"
#include "python_arrays.hpp"
#include "python_flows.hpp"

using namespace pipeplan;

namespace {

// ---------------------------------------------------------------------------- classes

void construct_costs(PipelineCosts* self, Vector forward, Vector backward, Vector send_forward,
                     Vector send_backward, Vector all_reduce, bool half_duplex,
                     std::vector<int> caps, std::shared_ptr<PlanFlows> flows) {
    new (self) PipelineCosts(to_vector(forward), to_vector(backward), to_vector(send_forward),
                             to_vector(send_backward), to_vector(all_reduce), half_duplex,
                             std::move(caps), std::move(flows));
}

void construct_flows(PlanFlows* self, const Instance& instance, const std::vector<int>& end_layer,
                     std::vector<std::vector<int>> devices,
                     std::vector<std::vector<double>> shares) {
    new (self) PlanFlows(instance, end_layer, {std::move(devices), std::move(shares)});
}

void construct_instance(Instance* self, Vector forward, Vector backward, Vector output_bytes,
                        Vector gradient_bytes, Vector parameter_bytes, Vector speed,
                        Matrix bytes_per_ms, Matrix latency_ms, bool half_duplex,
                        int num_microbatches, int microbatch_size, int max_replicas,
                        std::vector<int> host_of, std::vector<double> inside_bytes_per_ms,
                        std::vector<double> activation_bytes, const PlanLimits* limits,
                        std::shared_ptr<SharedLinks> shared, std::vector<double> sizes,
                        std::vector<double> forward_at, std::vector<double> backward_at) {
    LayerCosts layers{to_vector(forward), to_vector(backward), to_vector(output_bytes),
                      to_vector(gradient_bytes), to_vector(parameter_bytes),
                      std::move(activation_bytes), std::move(sizes), std::move(forward_at),
                      std::move(backward_at)};
    const std::size_t V = speed.shape(0);
    require(V <= 32766, "devices: are more than 32766");
    const std::vector<int> one_host(V, 0);
    // A full matrix, or the number between hosts; without hosts one number for all.
    const auto pairs = [&](const Matrix& matrix, const std::vector<int>& hosts,
                           std::vector<double> inside, const char* name) {
        if (hosts.empty() && matrix.shape(0) == V && matrix.shape(1) == V)
            return Pairs(to_vector(matrix), static_cast<int>(V), name);
        require(matrix.size() == 1, "links: a row and a column a device, or one number");
        const double number = *matrix.data();
        if (hosts.empty()) return Pairs(one_host, {number}, number, name);
        require(hosts.size() == V, "host_of: one for each device");
        return Pairs(hosts, std::move(inside), number, name);
    };
    DeviceLinks links{to_vector(speed),
                      pairs(bytes_per_ms, host_of, inside_bytes_per_ms, "bytes_per_ms"),
                      pairs(latency_ms, {}, {}, "latency_ms"), std::move(shared)};
    new (self) Instance(std::move(layers), std::move(links), half_duplex, num_microbatches,
                        microbatch_size, max_replicas, limits ? *limits : PlanLimits());
}

void construct_limits(PlanLimits* self, bool whole_samples, bool may_recompute,
                      std::vector<double> memory_bytes, double state_bytes_per_parameter_byte,
                      double input_bytes, int min_stages, int max_stages, int first_device,
                      int last_device, bool any_shares) {
    new (self) PlanLimits{whole_samples, may_recompute, any_shares, std::move(memory_bytes),
                          state_bytes_per_parameter_byte, input_bytes, min_stages,
                          max_stages, first_device, last_device};
}

Instance py_with_layers(const Instance& instance, Vector forward, Vector backward,
                        Vector output_bytes, Vector gradient_bytes, Vector parameter_bytes,
                        std::vector<double> activation_bytes, std::vector<double> sizes,
                        std::vector<double> forward_at, std::vector<double> backward_at) {
    return instance.with_layers({to_vector(forward), to_vector(backward), to_vector(output_bytes),
                                 to_vector(gradient_bytes), to_vector(parameter_bytes),
                                 std::move(activation_bytes), std::move(sizes),
                                 std::move(forward_at), std::move(backward_at)});
}

void construct_plan(PlacedPlan* self, const Instance& instance, std::vector<int> end_layer,
                    std::vector<std::vector<int>> devices, std::vector<int> modes) {
    new (self) PlacedPlan(instance, std::move(end_layer), std::move(devices), std::move(modes));
}

void require_devices(const Instance& instance, const std::vector<int>& devices) {
    require(!devices.empty(), "devices: are none");
    for (int u : devices) require(u >= 0 && u < instance.num_devices, "devices: one is unknown");
}

std::vector<double> py_shares(const Instance& instance, const std::vector<int>& devices,
                              int first_layer, int end_layer, int mode) {
    require_devices(instance, devices);
    require(first_layer >= 0 && first_layer < end_layer && end_layer <= instance.num_layers,
            "layers: are none of the model's");
    return shares_of_stage(instance, first_layer, end_layer, devices, mode);
}

std::vector<int> py_caps(const Instance& instance, const PlacedPlan& plan) {
    require(plan.fits(instance), "plan: was made for another instance");
    return caps_of(instance, plan);
}

// ---------------------------------------------------------------------------- simulation

nb::tuple trace_to_python(Trace&& trace, const CostsView& costs) {
    const std::size_t S = costs.num_stages, M = costs.num_microbatches;
    return nb::make_tuple(to_numpy(std::move(trace.order), {S, 2 * M}),
                          to_numpy(std::move(trace.block_start_ms), {S, 2 * M}),
                          to_numpy(std::move(trace.sent), {S - 1, 2, M}),
                          to_numpy(std::move(trace.transfer_start_ms), {S - 1, 2, M}),
                          to_numpy(std::move(trace.blocks_done), {S}),
                          to_numpy(std::move(trace.stage_end_ms), {S}),
                          costs.flows ? nb::cast(to_numpy(std::move(trace.transfer_end_ms),
                                                          {S - 1, 2, M}))
                                      : nb::none(),
                          costs.flows
                              ? nb::cast(to_numpy(std::move(trace.all_reduce_end_ms), {S}))
                              : nb::none());
}

nb::tuple py_run_schedule(const PipelineCosts& costs, Codes codes, double deadline) {
    require(codes.shape(1) % 2 == 0, "codes: a forward and a backward for each microbatch");
    const CostsView view = costs.view(static_cast<long>(codes.shape(1) / 2));
    require(codes.shape(0) == static_cast<std::size_t>(view.num_stages), "codes: a row a stage");
    return trace_to_python(run_kernel(deadline,
                                      [&](Control& control) {
                                          require_complete(view, codes.data());
                                          return run_schedule(view, codes.data(), control);
                                      }),
                           view);
}

// When each group of flows changes its rate, in the order of time.
nb::tuple py_rate_changes(const PipelineCosts& costs, Codes codes) {
    require(codes.shape(1) % 2 == 0, "codes: a forward and a backward for each microbatch");
    CostsView view = costs.view(static_cast<long>(codes.shape(1) / 2));
    require(codes.shape(0) == static_cast<std::size_t>(view.num_stages), "codes: a row a stage");
    require(view.flows, "costs: no link is shared");
    view.records_rates = true;
    const Trace trace = run_kernel(kInfinity, [&](Control& control) {
        require_complete(view, codes.data());
        return run_schedule(view, codes.data(), control);
    });
    return rates_to_python(trace.rate_changes);
}

void require_caps(const CostsView& costs, const Ints& caps) {
    require(caps.shape(0) == static_cast<std::size_t>(costs.num_stages), "caps: one for each stage");
    for (std::size_t n = 0; n < caps.shape(0); ++n)
        require(caps.data()[n] >= 1, "caps: are at least 1");
}

nb::tuple py_run_list(const PipelineCosts& costs, long num_microbatches, int preference, Ints caps) {
    const CostsView view = costs.view(num_microbatches);
    require(preference >= 0 && preference <= 2, "preference: is 0, 1 or 2");
    require_caps(view, caps);
    return trace_to_python(
        run_kernel(kInfinity,
                   [&](Control& control) {
                       return run_list(view, static_cast<Preference>(preference), caps.data(),
                                       control);
                   }),
        view);
}

double py_plan_bound(const PipelineCosts& costs, long num_microbatches, Ints caps) {
    const CostsView view = costs.view(num_microbatches);
    require_caps(view, caps);
    return plan_bound(view, caps.data());
}

nb::tuple py_best_schedule(const PipelineCosts& costs, long num_microbatches, double limit_ms,
                           int num_deadlines, double deadline) {
    const CostsView view = costs.view(num_microbatches);
    require_not_nan(limit_ms, "limit_ms: is not a number");
    double proved_ms = 0.0;
    Schedule found = run_kernel(deadline, [&](Control& control) {
        return best_schedule(view, limit_ms, num_deadlines, proved_ms, control);
    });
    const std::size_t S = found.codes.empty() ? 0 : view.num_stages, M = view.num_microbatches;
    return nb::make_tuple(proved_ms, found.iteration_ms,
                          to_numpy(std::move(found.codes), {S, 2 * M}));
}

// ---------------------------------------------------------------------------- planning

nb::tuple py_min_cut(Matrix weights, double deadline) {
    const std::size_t V = weights.shape(0);
    require(weights.shape(1) == V && V >= 2 && V <= 32766, "weights: a square matrix >= 2");
    for (std::size_t k = 0; k < weights.size(); ++k)
        require(weights.data()[k] >= 0 && weights.data()[k] <= 1e100, "weights: finite and >= 0");
    Cut cut = run_kernel(deadline, [&](Control& control) {
        return min_cut(weights.data(), static_cast<int>(V), control);
    });
    return nb::make_tuple(cut.weight, to_numpy(std::move(cut.side), {V}));
}

nb::tuple py_least_sum(Cube stage_ms, Ints sizes, int num_devices, double limit_ms,
                       double deadline) {
    const std::size_t K = stage_ms.shape(0), X = stage_ms.shape(1);
    require(stage_ms.shape(2) == X && X >= 2 && X <= 1'000'000 && sizes.shape(0) == K,
            "stage_ms: a square for each size");
    for (std::size_t k = 0; k < K; ++k) require(sizes.data()[k] >= 1, "sizes: are at least 1");
    require(num_devices >= 1 && num_devices <= 32766, "num_devices: is not within 1..32766");
    require_not_nan(limit_ms, "limit_ms: is not a number");
    LeastSum found = run_kernel(deadline, [&](Control& control) {
        const StageTimes times{static_cast<int>(K), static_cast<int>(X) - 1, stage_ms.data()};
        return least_sum(times, sizes.data(), num_devices, limit_ms, control);
    });
    return nb::make_tuple(found.sum_ms, nb::cast(found.end_layer), nb::cast(found.size));
}

std::vector<int> rising_sizes(const Instance& instance, const Ints& sizes) {
    const std::vector<int> result = to_vector(sizes);
    require(!result.empty() && result.front() >= 1 && result.back() <= instance.num_devices,
            "sizes: are not within 1 and the number of devices");
    require(std::adjacent_find(result.begin(), result.end(), std::greater_equal<int>()) ==
                result.end(),
            "sizes: do not rise");
    return result;
}

// Kernels that read links by index.
void require_full_links(const Instance& instance) {
    require(instance.has_full_links(), "instance: this kernel needs links as full matrices");
}

DpLimits dp_limits(int capacity, double limit_ms, int num_best) {
    require(capacity >= 1 && capacity <= 16, "capacity: is not within 1..16");
    require_not_nan(limit_ms, "limit_ms: is not a number");
    require(num_best >= 0, "num_best: is negative");
    return {capacity, limit_ms, num_best};
}

nb::list py_partition(const Instance& instance, int max_stages, double limit_ms, int num_threads,
                      double deadline) {
    require(max_stages >= 1 && max_stages <= std::min(instance.num_layers, instance.num_devices),
            "max_stages: is not within 1 and the number of layers and devices");
    require_not_nan(limit_ms, "limit_ms: is not a number");
    std::vector<Partition> found =
        run_kernel(deadline, num_threads, [&](Pool& pool, Control& control) {
            return partition(instance, max_stages, limit_ms, pool, control);
        });
    nb::list result;
    for (Partition& one : found)
        result.append(nb::make_tuple(one.bottleneck_ms, nb::cast(std::move(one.plan))));
    return result;
}

nb::tuple candidates_to_python(Candidates&& found) {
    nb::list plans;
    for (PlacedPlan& plan : found.plans) plans.append(nb::cast(std::move(plan)));
    return nb::make_tuple(found.least_ms, plans);
}

nb::tuple py_plan_on_order(const Instance& instance, Ints sizes, int capacity, double limit_ms,
                           int num_best, int num_threads, double deadline, int unit) {
    require(unit >= 1 && unit <= instance.num_devices, "unit: is not within 1 and the devices");
    const std::vector<int> allowed = rising_sizes(instance, sizes);
    require(allowed.back() <= (instance.num_devices + unit - 1) / unit, "sizes: are too large");
    const DpLimits limits = dp_limits(capacity, limit_ms, num_best);
    return candidates_to_python(
        run_kernel(deadline, num_threads, [&](Pool& pool, Control& control) {
            return plan_on_order(instance, allowed, unit, limits, pool, control);
        }));
}

bool py_fits_on_order(const Instance& instance, Ints sizes, double deadline) {
    const std::vector<int> allowed = rising_sizes(instance, sizes);
    return run_kernel(deadline, 1, [&](Pool&, Control& control) {
        return fits_on_order(instance, allowed, control);
    });
}

nb::tuple proved_to_python(ProvedPlans&& proved, std::size_t num_microbatches) {
    nb::list found;
    if (!proved.found.codes.empty()) {
        const std::size_t S = proved.found.plan.num_stages();
        found.append(nb::make_tuple(proved.found.iteration_ms,
                                    nb::cast(std::move(proved.found.plan)),
                                    to_numpy(std::move(proved.found.codes), {S, 2 * num_microbatches})));
    }
    nb::tuple plans = candidates_to_python(std::move(proved.candidates));
    return nb::make_tuple(plans[0], plans[1], found);
}

nb::tuple py_prove_on_sets(const Instance& instance, std::vector<int> class_of, int capacity,
                           double limit_ms, int num_best, double steps, int num_threads,
                           double deadline) {
    const DpLimits limits = dp_limits(capacity, limit_ms, num_best);
    require(steps >= 0 && steps < 1e18, "steps: is not within 0..1e18");
    require_full_links(instance);
    ProvedPlans proved = run_kernel(deadline, num_threads, [&](Pool& pool, Control& control) {
        return plan_on_sets(instance, class_of, limits, steps, pool, control);
    });
    return proved_to_python(std::move(proved), instance.num_microbatches);
}

nb::tuple py_prove_on_near_sets(const Instance& instance, int capacity, double proved_ms,
                                double limit_ms, double dp_steps, double steps, int num_threads,
                                double deadline) {
    const DpLimits limits = dp_limits(capacity, limit_ms, 0);
    require_not_nan(proved_ms, "proved_ms: is not a number");
    require_not_nan(dp_steps, "dp_steps: is not a number");
    require(steps >= 0 && steps < 1e18, "steps: is not within 0..1e18");
    require_full_links(instance);
    ProvedPlans proved = run_kernel(deadline, num_threads, [&](Pool& pool, Control& control) {
        return prove_on_near_sets(instance, limits, proved_ms, dp_steps, steps, pool, control);
    });
    return proved_to_python(std::move(proved), instance.num_microbatches);
}

nb::tuple py_plan_on_sets(const Instance& instance, std::vector<int> class_of, int capacity,
                          double limit_ms, int num_best, int num_threads, double deadline) {
    nb::tuple proved = py_prove_on_sets(instance, std::move(class_of), capacity, limit_ms, num_best,
                                        0.0, num_threads, deadline);
    return nb::make_tuple(proved[0], proved[1]);
}

double py_relaxed_bound(const Instance& instance, Ints buckets, int capacity, double limit_ms,
                        int num_threads, double deadline, int max_levels) {
    require(max_levels >= 1, "max_levels: is not at least 1");
    const std::vector<int> largest = rising_sizes(instance, buckets);
    require(largest.back() == instance.num_devices, "buckets: end before the number of devices");
    const DpLimits limits = dp_limits(capacity, limit_ms, 0);
    require_full_links(instance);
    return run_kernel(deadline, num_threads, [&](Pool& pool, Control& control) {
        return relaxed_bound(instance, largest, max_levels, limits, pool, control);
    });
}

double py_price_bound(const Instance& instance, double proved_ms, double limit_ms, double steps,
                      double deadline) {
    require(!std::isnan(proved_ms) && !std::isnan(limit_ms) && steps >= 0, "price_bound: a number is wrong");
    require_full_links(instance);
    return run_kernel(deadline, [&](Control& control) {
        return price_bound(instance, proved_ms, limit_ms, steps, control);
    });
}

std::vector<double> py_rule_times(const Instance& instance, const PlacedPlan& plan,
                                  double worth_ms) {
    require(plan.fits(instance), "plan: was made for another instance");
    return run_kernel(kInfinity, [&](Control& control) {
        return rule_times(instance, plan, worth_ms, control);
    });
}

nb::tuple py_judge_plan(const Instance& instance, const PlacedPlan& plan, double best_ms,
                        double worth_ms, double deadline) {
    require(plan.fits(instance), "plan: was made for another instance");
    const Judgement found = run_kernel(deadline, [&](Control& control) {
        return judge_plan(instance, plan, best_ms, worth_ms, control);
    });
    return nb::make_tuple(found.rank_ms, nb::cast(found.times_ms));
}

nb::list py_local_search(const Instance& instance, std::vector<PlacedPlan> starts,
                         std::uint64_t seed, double budget, double target_ms, int num_threads,
                         double deadline, double known_ms, double hottest, double overflow_price) {
    for (const PlacedPlan& start : starts)
        require(start.fits(instance), "starts: a plan was made for another instance");
    require(budget >= 0 && budget < 1e18, "budget: is not within 0..1e18");
    require_not_nan(target_ms, "target_ms: is not a number");
    require_not_nan(known_ms, "known_ms: is not a number");
    require(hottest > 0 && hottest <= 1, "hottest: is not above 0 and at most 1");
    require(overflow_price >= 0 && overflow_price <= 1e3, "overflow_price: is not within 0..1e3");
    std::vector<SearchResult> found =
        run_kernel(deadline, num_threads, [&](Pool& pool, Control& control) {
            return local_search(instance, starts, seed, budget, target_ms, known_ms, hottest, pool,
                                control, overflow_price);
        });
    nb::list result;
    for (SearchResult& one : found)
        result.append(nb::make_tuple(one.iteration_ms, one.rule, nb::cast(std::move(one.plan))));
    return result;
}

void bind_classes(nb::module_& m) {
    nb::exception<DeadlinePassed>(m, "DeadlineError");

    nb::class_<PipelineCosts>(m, "PipelineCosts")
        .def("__init__", &construct_costs, "forward_ms"_a, "backward_ms"_a, "send_forward_ms"_a,
             "send_backward_ms"_a, "all_reduce_ms"_a, "half_duplex"_a,
             "caps"_a = std::vector<int>(), "flows"_a.none() = nb::none())
        .def_prop_ro("num_stages", &PipelineCosts::num_stages);

    nb::class_<SharedLinks>(m, "SharedLinks")
        .def(nb::init<std::vector<std::vector<int>>, const std::vector<double>&,
                      const std::vector<double>&, std::vector<int>, const std::vector<double>&,
                      const std::vector<double>&>(),
             nb::kw_only(), "members"_a, "out_bytes_per_ms"_a, "in_bytes_per_ms"_a, "host_of"_a,
             "out_latency_ms"_a = std::vector<double>(), "in_latency_ms"_a = std::vector<double>());

    nb::class_<PlanFlows>(m, "PlanFlows")
        .def("__init__", &construct_flows, nb::kw_only(), "instance"_a, "end_layer"_a, "devices"_a,
             "shares"_a)
        .def("groups", [](const PlanFlows& flows) { return flows_to_python(flows.table()); })
        .def("num_simulated", [](const PlanFlows& flows) { return flows.merged().groups().size(); })
        .def("longest_ms", &PlanFlows::longest_ms, "half_duplex"_a);

    nb::class_<PlanLimits>(m, "PlanLimits")
        .def("__init__", &construct_limits, nb::kw_only(), "whole_samples"_a = false,
             "may_recompute"_a = false, "memory_bytes"_a = std::vector<double>(),
             "state_bytes_per_parameter_byte"_a = 1.0, "input_bytes"_a = 0.0, "min_stages"_a = 1,
             "max_stages"_a = std::numeric_limits<int>::max(), "first_device"_a = -1,
             "last_device"_a = -1, "any_shares"_a = false);

    nb::class_<Instance>(m, "Instance")
        .def("__init__", &construct_instance, nb::kw_only(), "forward_ms"_a, "backward_ms"_a,
             "output_bytes"_a, "gradient_bytes"_a, "parameter_bytes"_a, "speed"_a,
             "bytes_per_ms"_a, "latency_ms"_a, "half_duplex"_a, "num_microbatches"_a,
             "microbatch_size"_a, "max_replicas"_a, "host_of"_a = std::vector<int>(),
             "inside_bytes_per_ms"_a = std::vector<double>(),
             "activation_bytes"_a = std::vector<double>(), "limits"_a.none() = nb::none(),
             "shared"_a.none() = nb::none(), "sizes"_a = std::vector<double>(),
             "forward_at"_a = std::vector<double>(), "backward_at"_a = std::vector<double>())
        .def("on_devices", &Instance::on_devices, "order"_a)
        .def("shares", &py_shares, "devices"_a, "first_layer"_a, "end_layer"_a, "mode"_a = 0)
        .def("with_layers", &py_with_layers, nb::kw_only(), "forward_ms"_a, "backward_ms"_a,
             "output_bytes"_a, "gradient_bytes"_a, "parameter_bytes"_a,
             "activation_bytes"_a = std::vector<double>(), "sizes"_a = std::vector<double>(),
             "forward_at"_a = std::vector<double>(), "backward_at"_a = std::vector<double>())
        .def_prop_ro("has_equal_devices", &Instance::has_equal_devices)
        .def_prop_ro("any_shares", [](const Instance& in) { return in.limits.any_shares; })
        .def_ro("num_layers", &Instance::num_layers)
        .def_ro("num_devices", &Instance::num_devices);

    nb::class_<PlacedPlan>(m, "PlacedPlan")
        .def("__init__", &construct_plan, "instance"_a, "end_layer"_a, "devices"_a,
             "modes"_a = std::vector<int>())
        .def_prop_ro("end_layer", &PlacedPlan::end_layer)
        .def_prop_ro("devices", &PlacedPlan::devices)
        .def_prop_ro("modes", &PlacedPlan::modes);
}

}  // namespace

NB_MODULE(_kernels, m) {
    bind_classes(m);
    bind_groups(m);
    bind_chains(m);
    const double never = kInfinity;
    m.def("device_classes", &device_classes, "instance"_a);
    m.def("caps", &py_caps, "instance"_a, "plan"_a);
    m.def("run_schedule", &py_run_schedule, "costs"_a, "codes"_a, "deadline"_a = never);
    m.def("rate_changes", &py_rate_changes, "costs"_a, "codes"_a);
    m.def("run_list", &py_run_list, "costs"_a, "num_microbatches"_a, "preference"_a, "caps"_a);
    m.def("plan_bound", &py_plan_bound, "costs"_a, "num_microbatches"_a, "caps"_a);
    m.def("best_schedule", &py_best_schedule, "costs"_a, "num_microbatches"_a, "limit_ms"_a,
          "num_deadlines"_a, "deadline"_a = never);
    m.def("min_cut", &py_min_cut, "weights"_a, "deadline"_a = never);
    m.def("least_sum", &py_least_sum, "stage_ms"_a, "sizes"_a, "num_devices"_a, "limit_ms"_a,
          "deadline"_a = never);
    m.def("partition", &py_partition, "instance"_a, "max_stages"_a, "limit_ms"_a, "num_threads"_a,
          "deadline"_a = never);
    m.def("plan_on_order", &py_plan_on_order, "instance"_a, "sizes"_a, "capacity"_a, "limit_ms"_a,
          "num_best"_a, "num_threads"_a, "deadline"_a = never, "unit"_a = 1);
    m.def("fits_on_order", &py_fits_on_order, "instance"_a, "sizes"_a, "deadline"_a = never);
    m.def("plan_on_sets", &py_plan_on_sets, "instance"_a, "class_of"_a, "capacity"_a, "limit_ms"_a,
          "num_best"_a, "num_threads"_a, "deadline"_a = never);
    m.def("prove_on_sets", &py_prove_on_sets, "instance"_a, "class_of"_a, "capacity"_a,
          "limit_ms"_a, "num_best"_a, "steps"_a, "num_threads"_a, "deadline"_a = never);
    m.def("prove_on_near_sets", &py_prove_on_near_sets, "instance"_a, "capacity"_a, "proved_ms"_a, "limit_ms"_a,
          "dp_steps"_a, "steps"_a, "num_threads"_a, "deadline"_a = never);
    m.def("relaxed_bound", &py_relaxed_bound, "instance"_a, "buckets"_a, "capacity"_a,
          "limit_ms"_a, "num_threads"_a, "deadline"_a = never, "max_levels"_a = 1024);
    m.def("price_bound", &py_price_bound, "instance"_a, "proved_ms"_a, "limit_ms"_a, "steps"_a,
          "deadline"_a = never);
    m.def("rule_times", &py_rule_times, "instance"_a, "plan"_a, "worth_ms"_a);
    m.def("judge_plan", &py_judge_plan, "instance"_a, "plan"_a, "best_ms"_a, "worth_ms"_a,
          "deadline"_a = never);
    m.def("local_search", &py_local_search, "instance"_a, "starts"_a, "seed"_a, "budget"_a,
          "target_ms"_a, "num_threads"_a, "deadline"_a = never, "known_ms"_a = kInfinity,
          "hottest"_a = 0.01, "overflow_price"_a = 0.0);
}
