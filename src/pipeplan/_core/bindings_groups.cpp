// The kernels of plans with several stages a group, for Python.
#include "groups.hpp"
#include "python_arrays.hpp"
#include "python_flows.hpp"

namespace pipeplan {
namespace {

using GroupCodes = nb::ndarray<const GroupCode, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void construct_group_costs(GroupCosts* self, std::vector<int> group_of, Vector length_ms,
                           Vector recompute_ms, Vector send_ms, std::vector<int> num_parts,
                           bool half_duplex, std::shared_ptr<GroupFlows> flows) {
    new (self) GroupCosts(std::move(group_of), to_vector(length_ms), to_vector(recompute_ms),
                          to_vector(send_ms), std::move(num_parts), half_duplex, std::move(flows));
}

void construct_group_flows(GroupFlows* self, const Instance& instance,
                           const std::vector<int>& end_layer, std::vector<std::vector<int>> devices,
                           std::vector<std::vector<double>> shares, const std::vector<int>& group_of,
                           const std::vector<int>& num_parts) {
    new (self) GroupFlows(instance, end_layer, {std::move(devices), std::move(shares)}, group_of,
                          num_parts);
}

// Where the blocks of each group begin among `codes`, from how many each group has.
std::vector<std::size_t> first_blocks(const GroupCosts& costs, const GroupCodes& codes,
                                      const std::vector<int>& sizes) {
    require(sizes.size() == static_cast<std::size_t>(costs.num_groups()), "sizes: one for each group");
    std::vector<std::size_t> first{0};
    for (int size : sizes) {
        require(size >= 0, "sizes: are at least 0");
        first.push_back(first.back() + size);
    }
    require(first.back() == codes.size(), "sizes: add up to the number of codes");
    return first;
}

nb::tuple py_run_groups(const GroupCosts& costs, long num_microbatches, GroupCodes codes,
                        const std::vector<int>& sizes) {
    const std::vector<std::size_t> first = first_blocks(costs, codes, sizes);
    const GroupOrders orders{codes.data(), first.data()};
    const GroupCostsView view = costs.view(num_microbatches);
    GroupTrace trace = run_kernel(kInfinity, [&](Control& control) {
        require_complete(view, orders);
        return run_groups(view, orders, control);
    });
    const std::size_t N = codes.size(), T = trace.sent.size(), P = trace.part_stage.size();
    const std::size_t G = trace.blocks_done.size();
    return nb::make_tuple(to_numpy(std::move(trace.block_start_ms), {N}),
                          to_numpy(std::move(trace.block_end_ms), {N}),
                          to_numpy(std::move(trace.sent), {T}),
                          to_numpy(std::move(trace.transfer_start_ms), {T}),
                          to_numpy(std::move(trace.transfer_end_ms), {T}),
                          to_numpy(std::move(trace.part_stage), {P}),
                          to_numpy(std::move(trace.part_number), {P}),
                          to_numpy(std::move(trace.part_start_ms), {P}),
                          to_numpy(std::move(trace.part_end_ms), {P}),
                          to_numpy(std::move(trace.blocks_done), {G}));
}

nb::tuple py_group_rate_changes(const GroupCosts& costs, long num_microbatches, GroupCodes codes,
                                const std::vector<int>& sizes) {
    const std::vector<std::size_t> first = first_blocks(costs, codes, sizes);
    const GroupOrders orders{codes.data(), first.data()};
    GroupCostsView view = costs.view(num_microbatches);
    require(view.flows, "costs: no link is shared");
    std::vector<RateChange> changes;
    view.rate_changes = &changes;
    run_kernel(kInfinity, [&](Control& control) {
        require_complete(view, orders);
        return run_groups(view, orders, control);
    });
    return rates_to_python(changes);
}

double py_group_time(const GroupCosts& costs, long num_microbatches, GroupCodes codes,
                     const std::vector<int>& sizes) {
    const std::vector<std::size_t> first = first_blocks(costs, codes, sizes);
    const GroupOrders orders{codes.data(), first.data()};
    const GroupCostsView view = costs.view(num_microbatches);
    return run_kernel(kInfinity, [&](Control& control) {
        require_complete(view, orders);
        return GroupTimer()(view, orders, control);
    });
}

}  // namespace

void bind_groups(nb::module_& m) {
    nb::class_<GroupFlows>(m, "GroupFlows")
        .def("__init__", &construct_group_flows, nb::kw_only(), "instance"_a, "end_layer"_a,
             "devices"_a, "shares"_a, "group_of"_a, "num_parts"_a)
        .def("groups", [](const GroupFlows& flows) { return flows_to_python(flows.table()); });
    nb::class_<GroupCosts>(m, "GroupCosts")
        .def("__init__", &construct_group_costs, nb::kw_only(), "group_of"_a, "length_ms"_a,
             "recompute_ms"_a, "send_ms"_a, "num_parts"_a, "half_duplex"_a,
             "flows"_a.none() = nb::none())
        .def_prop_ro("num_groups", &GroupCosts::num_groups)
        .def_prop_ro("num_stages", &GroupCosts::num_stages);
    m.def("run_groups", &py_run_groups, "costs"_a, "num_microbatches"_a, "codes"_a, "sizes"_a);
    m.def("group_rate_changes", &py_group_rate_changes, "costs"_a, "num_microbatches"_a, "codes"_a,
          "sizes"_a);
    m.def("group_time", &py_group_time, "costs"_a, "num_microbatches"_a, "codes"_a, "sizes"_a);
}

}  // namespace pipeplan
