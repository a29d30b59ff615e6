// The kernels that plan and schedule several stages a group, for Python.
#include <algorithm>

#include "chain_bound.hpp"
#include "chain_schedule.hpp"
#include "chain_search.hpp"
#include "python_arrays.hpp"

namespace pipeplan {
namespace {

constexpr int kMostRuns = 100'000'000;

void construct_chain(Chain* self, int num_microbatches, std::vector<int> group,
                     std::vector<double> forward_ms, std::vector<double> backward_ms,
                     std::vector<double> weight_ms, std::vector<double> there_ms,
                     std::vector<double> back_ms, std::vector<double> reduce_ms,
                     const std::vector<bool>& is_split, std::vector<double> held_bytes,
                     std::vector<double> kept_bytes, std::vector<double> room_bytes,
                     bool half_duplex, std::vector<double> early_ms,
                     std::vector<double> last_part_ms) {
    Chain chain;
    chain.num_stages = static_cast<int>(group.size());
    chain.num_groups = static_cast<int>(room_bytes.size());
    chain.num_microbatches = num_microbatches;
    chain.half_duplex = half_duplex;
    chain.group = std::move(group);
    chain.forward_ms = std::move(forward_ms), chain.backward_ms = std::move(backward_ms);
    chain.weight_ms = std::move(weight_ms);
    chain.there_ms = std::move(there_ms), chain.back_ms = std::move(back_ms);
    // An all-reduce in one part, after the last block, unless said otherwise.
    chain.early_ms = early_ms.empty() ? std::vector<double>(reduce_ms.size(), 0.0) : std::move(early_ms);
    chain.last_part_ms = last_part_ms.empty() ? reduce_ms : std::move(last_part_ms);
    chain.reduce_ms = std::move(reduce_ms);
    chain.is_split.assign(is_split.begin(), is_split.end());
    chain.held_bytes = std::move(held_bytes), chain.kept_bytes = std::move(kept_bytes);
    chain.room_bytes = std::move(room_bytes);
    chain.check();
    new (self) Chain(std::move(chain));
}

void construct_model(ChainModel* self, const Instance& instance,
                     const std::vector<double>& weight_ms, const std::vector<double>& input_ms,
                     const std::vector<double>& kept_bytes, int max_positions,
                     bool shards_optimizer) {
    for (const auto* values : {&weight_ms, &input_ms, &kept_bytes})
        for (double value : *values)
            require(std::isfinite(value) && value >= 0, "layers: numbers are finite and not negative");
    new (self) ChainModel(instance, weight_ms, input_ms, kept_bytes, max_positions, shards_optimizer);
}

void construct_plan(ChainPlan* self, const ChainModel& model, std::vector<std::vector<int>> devices,
                    std::vector<int> group, std::vector<int> end_layer, bool is_split) {
    require(!group.empty() && group.size() == end_layer.size(), "group: one for each stage");
    require(end_layer.back() == model.in.num_layers, "end_layer: does not end with the last layer");
    require(end_layer.front() >= 1 && std::adjacent_find(end_layer.begin(), end_layer.end(),
                                                         std::greater_equal<int>()) == end_layer.end(),
            "end_layer: does not rise from 1");
    require(!is_split || model.may_split, "is_split: the model does not say how to split backwards");
    std::vector<char> is_used(model.in.num_devices, 0);
    for (std::vector<int>& set : devices) {
        require(!set.empty(), "devices: a group has none");
        for (int device : set) {
            require(device >= 0 && device < model.in.num_devices, "devices: unknown device");
            require(!is_used[device], "devices: one stands twice");
            is_used[device] = 1;
        }
        std::sort(set.begin(), set.end());
    }
    for (int g : group)
        require(g >= 0 && g < static_cast<int>(devices.size()), "group: unknown group");
    ChainPlan plan{std::move(devices), std::move(group), std::move(end_layer), is_split};
    plan.number_groups();
    new (self) ChainPlan(std::move(plan));
}

nb::object py_cost_chain(const ChainModel& model, const ChainPlan& plan) {
    Chain chain;
    if (!cost_chain(model, plan, model.in.num_microbatches, chain)) return nb::none();
    return nb::cast(std::move(chain));
}

nb::tuple py_schedule_chain(const Chain& chain, int num_runs, std::uint64_t seed,
                            double deadline) {
    require(num_runs >= 0 && num_runs <= kMostRuns, "num_runs: is not within 0..1e8");
    ChainScheduler scheduler;
    run_kernel(deadline, [&](Control& control) {
        Random random(seed);
        scheduler.take(chain);
        return scheduler.search(num_runs, chain_bound(chain), random, control);
    });
    return nb::make_tuple(scheduler.best_ms(), nb::cast(scheduler.best_order()),
                          scheduler.num_runs());
}

std::vector<ChainPlan> py_rank_chains(const ChainModel& model, std::vector<ChainPlan> starts, int most,
                                      int num_threads, double deadline) {
    require(most >= 1, "most: is at least 1");
    std::vector<ChainPlan> ranked = run_kernel(deadline, num_threads, [&](Pool& pool, Control& control) {
        return rank_chains(model, std::move(starts), pool, control);
    });
    if (static_cast<int>(ranked.size()) > most) ranked.resize(most);
    return ranked;
}

nb::list py_search_chains(const ChainModel& model, std::vector<ChainPlan> starts,
                          std::uint64_t seed, int num_starts, double anneal, double polish,
                          int num_best, int num_threads, double deadline) {
    require(num_starts >= 1 && num_best >= 1, "num_starts, num_best: are at least 1");
    require(anneal >= 0 && anneal < 1e18, "anneal: is not within 0..1e18");
    require(polish >= 0 && polish < 1e18, "polish: is not within 0..1e18");
    std::vector<ChainResult> found =
        run_kernel(deadline, num_threads, [&](Pool& pool, Control& control) {
            const ChainBudget budget{num_starts, anneal, polish, num_best};
            return search_chains(model, std::move(starts), seed, budget, pool, control);
        });
    nb::list result;
    for (ChainResult& each : found) {
        if (each.order.empty()) continue;
        result.append(nb::make_tuple(each.iteration_ms, each.num_parts, nb::cast(std::move(each.plan)),
                                     nb::cast(each.order)));
    }
    return result;
}

}  // namespace

void bind_chains(nb::module_& m) {
    nb::class_<Chain>(m, "Chain")
        .def("__init__", &construct_chain, nb::kw_only(), "num_microbatches"_a, "group"_a,
             "forward_ms"_a, "backward_ms"_a, "weight_ms"_a, "there_ms"_a, "back_ms"_a,
             "reduce_ms"_a, "is_split"_a, "held_bytes"_a, "kept_bytes"_a, "room_bytes"_a,
             "half_duplex"_a = false, "early_ms"_a = std::vector<double>(),
             "last_part_ms"_a = std::vector<double>());
    nb::class_<ChainModel>(m, "ChainModel")
        .def("__init__", &construct_model, nb::kw_only(), "instance"_a, "weight_ms"_a, "input_ms"_a,
             "kept_bytes"_a, "max_positions"_a, "shards_optimizer"_a = false);
    nb::class_<ChainPlan>(m, "ChainPlan")
        .def("__init__", &construct_plan, "model"_a, nb::kw_only(), "devices"_a, "group"_a,
             "end_layer"_a, "is_split"_a)
        .def_ro("devices", &ChainPlan::devices)
        .def_ro("group", &ChainPlan::group)
        .def_ro("end_layer", &ChainPlan::end_layer)
        .def_ro("is_split", &ChainPlan::is_split);
    m.def("chain_bound", &chain_bound, "chain"_a);
    m.def("cost_chain", &py_cost_chain, "model"_a, "plan"_a);
    m.def("schedule_chain", &py_schedule_chain, "chain"_a, "num_runs"_a, "seed"_a,
          "deadline"_a = kInfinity);
    m.def("rank_chains", &py_rank_chains, "model"_a, "starts"_a, "most"_a, "num_threads"_a,
          "deadline"_a = kInfinity);
    m.def("search_chains", &py_search_chains, "model"_a, "starts"_a, "seed"_a, "num_starts"_a,
          "anneal"_a, "polish"_a, "num_best"_a, "num_threads"_a, "deadline"_a = kInfinity);
}

}  // namespace pipeplan
