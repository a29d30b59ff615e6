// The kernels of chains for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "chain_bound.hpp"
#include "chain_schedule.hpp"
#include "chain_search.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace pipeplan {
namespace {

void construct_chain(Chain* self, int num_microbatches, std::vector<int> group,
                     std::vector<double> forward_ms, std::vector<double> backward_ms,
                     std::vector<double> weight_ms, std::vector<double> there_ms,
                     std::vector<double> back_ms, std::vector<double> reduce_ms,
                     const std::vector<bool>& is_split, std::vector<double> held_bytes,
                     std::vector<double> kept_bytes, std::vector<double> room_bytes,
                     bool half_duplex) {
    Chain chain;
    chain.num_stages = static_cast<int>(group.size());
    chain.num_groups = static_cast<int>(room_bytes.size());
    chain.num_microbatches = num_microbatches;
    chain.half_duplex = half_duplex;
    chain.group = std::move(group);
    chain.forward_ms = std::move(forward_ms), chain.backward_ms = std::move(backward_ms);
    chain.weight_ms = std::move(weight_ms);
    chain.there_ms = std::move(there_ms), chain.back_ms = std::move(back_ms);
    chain.reduce_ms = std::move(reduce_ms);
    chain.is_split.assign(is_split.begin(), is_split.end());
    chain.held_bytes = std::move(held_bytes), chain.kept_bytes = std::move(kept_bytes);
    chain.room_bytes = std::move(room_bytes);
    chain.check();
    new (self) Chain(std::move(chain));
}

nb::tuple py_search(const Chain& chain, int num_tries, double enough_ms, std::uint64_t seed) {
    ChainScheduler scheduler;
    Control control;
    Random random(seed);
    {
        nb::gil_scoped_release release;
        scheduler.take(chain);
        scheduler.search(num_tries, enough_ms, random, control);
    }
    return nb::make_tuple(scheduler.best_ms(), nb::cast(scheduler.best_order()), scheduler.num_runs());
}

void construct_model(ChainModel* self, const Instance& instance, std::vector<double> weight_ms,
                     std::vector<double> input_ms, std::vector<double> kept_bytes,
                     int max_positions, bool shards_optimizer) {
    new (self) ChainModel(instance, weight_ms, input_ms, kept_bytes, max_positions, shards_optimizer);
}

void construct_plan(ChainPlan* self, std::vector<std::vector<int>> devices, std::vector<int> group,
                    std::vector<int> end_layer, bool is_split) {
    ChainPlan plan{std::move(devices), std::move(group), std::move(end_layer), is_split};
    plan.normalise();
    new (self) ChainPlan(std::move(plan));
}

nb::object py_cost_chain(const ChainModel& model, const ChainPlan& plan) {
    Chain chain;
    if (!cost_chain(model, plan, model.in.num_microbatches, chain)) return nb::none();
    return nb::cast(std::move(chain));
}

std::vector<double> py_settings_times(const Chain& chain, const std::vector<std::vector<double>>& settings) {
    ChainScheduler scheduler;
    scheduler.take(chain);
    std::vector<double> result;
    for (const auto& each : settings)
        result.push_back(scheduler.run({each.at(0), each.at(1), each.at(2), each.at(3), each.at(4)}));
    return result;
}

nb::list py_search_chains(const ChainModel& model, std::vector<ChainPlan> starts,
                          std::uint64_t seed, int num_starts, double anneal, int num_tries, int num_best,
                          int num_threads) {
    std::vector<ChainResult> found;
    {
        nb::gil_scoped_release release;
        Control control;
        Pool pool(num_threads, control);
        found = search_chains(model, std::move(starts), seed, {num_starts, anneal, num_tries, num_best}, pool, control);
    }
    nb::list result;
    for (ChainResult& each : found)
        result.append(nb::make_tuple(each.iteration_ms, each.bound_ms, nb::cast(std::move(each.plan)), nb::cast(each.order)));
    return result;
}

}  // namespace

void bind_chains(nb::module_& m) {
    nb::class_<Chain>(m, "Chain")
        .def("__init__", &construct_chain, nb::kw_only(), "num_microbatches"_a, "group"_a,
             "forward_ms"_a, "backward_ms"_a, "weight_ms"_a, "there_ms"_a, "back_ms"_a,
             "reduce_ms"_a, "is_split"_a, "held_bytes"_a, "kept_bytes"_a, "room_bytes"_a,
             "half_duplex"_a = false);
    nb::class_<ChainModel>(m, "ChainModel")
        .def("__init__", &construct_model, nb::kw_only(), "instance"_a, "weight_ms"_a, "input_ms"_a,
             "kept_bytes"_a, "max_positions"_a, "shards_optimizer"_a = false);
    nb::class_<ChainPlan>(m, "ChainPlan")
        .def("__init__", &construct_plan, nb::kw_only(), "devices"_a, "group"_a, "end_layer"_a,
             "is_split"_a)
        .def_ro("devices", &ChainPlan::devices)
        .def_ro("group", &ChainPlan::group)
        .def_ro("end_layer", &ChainPlan::end_layer)
        .def_ro("is_split", &ChainPlan::is_split);
    m.def("chain_bound", &chain_bound, "chain"_a);
    m.def("cost_chain", &py_cost_chain, "model"_a, "plan"_a);
    m.def("chain_settings_times", &py_settings_times, "chain"_a, "settings"_a);
    m.def("search_chains", &py_search_chains, "model"_a, "starts"_a, "seed"_a, "num_starts"_a, "anneal"_a,
          "num_tries"_a, "num_best"_a, "num_threads"_a);
    m.def("search_chain_schedule", &py_search, "chain"_a, "num_tries"_a, "enough_ms"_a, "seed"_a);
}

}  // namespace pipeplan
