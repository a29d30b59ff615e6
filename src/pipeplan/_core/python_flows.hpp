// Flows and their rates for Python.
#pragma once
#include <utility>
#include <vector>

#include "flow_rates.hpp"
#include "flow_table.hpp"
#include "python_arrays.hpp"

namespace pipeplan {

// For each group of flows: its transfer, flows, limit and bytes of each, sides of shared links.
inline nb::list flows_to_python(const FlowTable& table) {
    nb::list result;
    for (std::size_t t = 0; t < table.transfers().size(); ++t) {
        const FlowTransfer& transfer = table.transfers()[t];
        for (int g = transfer.first_group; g < transfer.end_group; ++g) {
            const FlowGroup& group = table.groups()[g];
            const FlowClass& its = table.classes()[group.flow_class];
            const std::vector<int> sides(table.sides().begin() + its.first_side,
                                         table.sides().begin() + its.end_side);
            result.append(nb::make_tuple(t, group.count, its.limit, group.bytes, sides));
        }
    }
    return result;
}

// When each group of flows changes its rate, in the order of time.
inline nb::tuple rates_to_python(const std::vector<RateChange>& changes) {
    std::vector<double> ms, rate;
    std::vector<int> group;
    for (const RateChange& change : changes)
        ms.push_back(change.ms), group.push_back(change.group), rate.push_back(change.rate);
    const std::size_t num = ms.size();
    return nb::make_tuple(to_numpy(std::move(ms), {num}), to_numpy(std::move(group), {num}),
                          to_numpy(std::move(rate), {num}));
}

}  // namespace pipeplan
