// Runs every kernel on random problems, to be compiled with a sanitizer (test_sanitizers.py).
//
// usage: sanitize SEED PROBLEMS. Besides what the sanitizer finds, it checks that bounds lie below
// simulated times and that one thread gives what three give.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>

#include "chain_bound.hpp"
#include "chain_schedule.hpp"
#include "kernels.hpp"
#include "max_min.hpp"
#include "pipeline.hpp"

using namespace pipeplan;

namespace {

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "wrong: %s\n", what);
    std::exit(1);
}

class Problem {
  public:
    explicit Problem(unsigned seed) : random_(seed) {}

    int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
    double number(double scale) {
        const int kind = below(4);
        if (kind == 0) return 0.0;
        if (kind == 1) return scale * (1 + below(3));
        return scale * std::pow(10.0, below(7) - 3) * (1 + below(1000) / 1000.0);
    }
    std::vector<double> numbers(std::size_t count, double scale) {
        std::vector<double> result(count);
        for (double& one : result) one = number(scale);
        return result;
    }

    Instance instance() {
        const std::size_t L = 1 + below(9), V = 1 + below(7);
        LayerCosts layers{numbers(L, 1), numbers(L, 2), numbers(L, 1e6), numbers(L, 1e6),
                          numbers(L, 1e6)};
        const int devices = static_cast<int>(V);
        std::vector<double> speeds(V, 1.0), rates(V * V, 1e6), latencies(V * V, 0.0);
        if (below(3) > 0) {  // else equal devices with equal links
            for (double& speed : speeds) speed = 1 + below(3);
            rates = numbers(V * V, 1e6), latencies = numbers(V * V, 0.1);
        }
        DeviceLinks links{speeds, Pairs(rates, devices, "rates"),
                          Pairs(latencies, devices, "latencies")};
        return Instance(layers, links, below(2) == 0, 1 + below(12), 1 + below(9),
                        1 + below(static_cast<int>(V)));
    }

  private:
    std::mt19937 random_;
};

std::vector<int> all_sizes(const Instance& in) {
    std::vector<int> sizes(in.num_devices);
    std::iota(sizes.begin(), sizes.end(), 1);
    return sizes;
}

double fastest(const Instance& in, const PlacedPlan& plan, Control& control) {
    double best = kInfinity;
    for (double ms : rule_times(in, plan, kInfinity, control)) best = std::min(best, ms);
    return best;
}

// The least lower bound and the least simulated time that planning finds.
void plan_everything(const Instance& in, unsigned seed, int num_threads, double& bound_ms,
                     double& best_ms) {
    Control control;
    Pool pool(num_threads, control);
    const std::vector<int> sizes = all_sizes(in);
    bound_ms = relaxed_bound(in, sizes, 5, {8, kInfinity, 0}, pool, control);
    const Candidates on_order = plan_on_order(in, sizes, 1, {4, kInfinity, 5}, pool, control);
    const std::vector<int> pairs(sizes.begin(), sizes.begin() + (sizes.size() + 1) / 2);
    plan_on_order(in, pairs, 2, {4, kInfinity, 5}, pool, control);
    const ProvedPlans proved =
        plan_on_sets(in, device_classes(in), {16, kInfinity, 5}, 1e4, pool, control);
    const Candidates& on_sets = proved.candidates;
    require(bound_ms <= on_sets.least_ms * (1 + 1e-9), "the relaxed bound is above the exact one");
    bound_ms = std::max(bound_ms, on_sets.least_ms);
    bound_ms = std::max(bound_ms, price_bound(in, bound_ms, kInfinity, 1e5, control));
    std::vector<PlacedPlan> plans = on_order.plans;
    plans.insert(plans.end(), on_sets.plans.begin(), on_sets.plans.end());
    for (Partition& one :
         partition(in, std::min(in.num_layers, in.num_devices), kInfinity, pool, control))
        plans.push_back(std::move(one.plan));
    best_ms = kInfinity;
    for (const PlacedPlan& plan : plans) best_ms = std::min(best_ms, fastest(in, plan, control));
    for (const SearchResult& found : local_search(in, plans, seed, 2e5, 0.0, kInfinity, 0.01, pool, control))
        best_ms = std::min(best_ms, found.iteration_ms);
    require(bound_ms <= best_ms * (1 + 1e-9), "a plan is faster than the bound");
}

void run_problem(unsigned seed) {
    Problem problem(seed);
    const Instance in = problem.instance();
    double bound_ms, best_ms, same_bound_ms, same_best_ms;
    plan_everything(in, seed, 1, bound_ms, best_ms);
    plan_everything(in, seed, 3, same_bound_ms, same_best_ms);
    require(bound_ms == same_bound_ms && best_ms == same_best_ms, "threads change the result");
    Control control;
    if (in.num_devices > 1) min_cut(problem.numbers(in.bytes_per_ms.table().size(), 1).data(),
                                    in.num_devices, control);
    const std::size_t row = in.num_layers + 1;
    const std::vector<double> times = problem.numbers(2 * row * row, 1);
    const int counts[2] = {1, 1 + problem.below(3)};
    least_sum({2, in.num_layers, times.data()}, counts, in.num_devices, problem.number(10), control);
    std::vector<std::vector<int>> hosts{{0, 1}, {2, 3, 4}, {5, 6, 7}};
    hosts.resize(1 + problem.below(3));
    place_groups({in.num_layers, times.data(), times.data(), 1.0, 0.5}, hosts, 1 + problem.below(2),
                 2 + problem.below(6), control);
}

// A chain that goes down the groups and up, with little room and all-reduces in parts.
void run_chain(unsigned seed) {
    Problem problem(seed);
    const int groups = 1 + problem.below(4), stages = 2 * groups;
    Chain chain;
    chain.num_stages = stages, chain.num_groups = groups, chain.num_microbatches = 1 + problem.below(6);
    for (int p = 0; p < stages; ++p) chain.group.push_back(p < groups ? p : stages - 1 - p);
    for (auto* values : {&chain.forward_ms, &chain.backward_ms, &chain.weight_ms, &chain.there_ms,
                         &chain.back_ms, &chain.last_part_ms, &chain.early_ms, &chain.held_bytes})
        *values = problem.numbers(stages, 10);
    for (const int p : {groups - 1, stages - 1}) chain.there_ms[p] = chain.back_ms[p] = 0.0;
    chain.reduce_ms = chain.last_part_ms;
    for (double& ms : chain.reduce_ms) ms *= 2;
    chain.kept_bytes = chain.held_bytes;
    chain.is_split.assign(stages, 1);
    for (int g = 0; g < groups; ++g)
        chain.room_bytes.push_back(1.5 * (chain.held_bytes[g] + chain.held_bytes[stages - 1 - g]));
    chain.check();
    Control control;
    Random random(seed);
    ChainScheduler scheduler;
    scheduler.take(chain);
    const double found_ms = scheduler.search(200, 0.0, random, control);
    require(chain_bound(chain) <= found_ms * (1 + 1e-9), "a schedule is faster than the chain's bound");
}

// Rates that are kept up to date, against those that are filled from nothing at every change.
void run_rates(unsigned seed) {
    Problem problem(seed);
    const int devices = 2 + problem.below(12), num_links = 1 + problem.below(8);
    std::vector<std::vector<int>> members(num_links);
    std::vector<double> out, in;
    const int many_kinds = problem.below(2);  // else many sides are full at the same level
    const auto some_rate = [&] { return many_kinds ? 1 + problem.number(1e3) : 1.0 + problem.below(2); };
    for (std::vector<int>& link : members) {
        for (int u = 0; u < devices; ++u)
            if (problem.below(2)) link.push_back(u);
        if (link.empty()) link.push_back(0);
        out.push_back(some_rate()), in.push_back(some_rate());
    }
    std::vector<int> hosts(devices);
    std::iota(hosts.begin(), hosts.end(), 0);
    std::vector<double> rates(devices * devices);
    for (double& rate : rates) rate = some_rate();
    const DeviceLinks links{std::vector<double>(devices, 1.0), Pairs(rates, devices, "rates"),
                            Pairs(std::vector<double>(rates.size(), 0.0), devices, "latencies"),
                            std::make_shared<SharedLinks>(members, out, in, hosts)};
    const Instance instance({{1}, {1}, {1}, {1}, {1}}, links, false, 1, 1, devices);
    FlowTable table(instance);
    const std::vector<double> whole{1.0};
    for (int u = 0; u < devices; ++u)
        for (int v = 0; v < devices; ++v)
            if (u != v) table.add_transfer(instance, {{u}, whole}, {{v}, whole}, 1.0);
    const int num_classes = static_cast<int>(table.classes().size());
    if (num_classes == 0) return;
    MaxMinRates kept(table), filled(table, 0);
    std::vector<int> num_flows(num_classes, 0);
    for (int change = 0; change < 60; ++change) {
        for (int k = problem.below(4); k >= 0; --k) {
            const int index = problem.below(num_classes);
            const bool goes = num_flows[index] > 0 && problem.below(2);
            const int more = goes ? -1 - problem.below(num_flows[index]) : 1 + problem.below(3);
            num_flows[index] += more;
            kept.add(index, more), filled.add(index, more);
        }
        kept.update(), filled.update();
        kept.clear_changes(), filled.clear_changes();
        for (int c = 0; c < num_classes; ++c)
            require(std::abs(kept.rate(c) - filled.rate(c)) <= 1e-9 * filled.rate(c) &&
                        (filled.rate(c) > 0) == (num_flows[c] > 0),
                    "rates depend on how they are found");
    }
}

// What ends kernels early: an exception of a worker thread, and a deadline.
void stop_early() {
    Problem problem(1);
    const Instance in = problem.instance();
    Control control;
    Pool pool(3, control);
    try {
        pool.run(64, [&](int index, int) {
            if (index == 20) throw std::bad_alloc();
            control.check();
        });
        require(false, "an exception of a thread was lost");
    } catch (const std::bad_alloc&) {
    }
    Control late(0.0);
    Pool late_pool(3, late);
    try {
        plan_on_order(in, all_sizes(in), 1, {4, kInfinity, 5}, late_pool, late);
        require(false, "a deadline was ignored");
    } catch (const DeadlinePassed&) {
    }
}

}  // namespace

int main(int argc, char** argv) {
    require(argc == 3, "usage: sanitize SEED PROBLEMS");
    const unsigned seed = std::strtoul(argv[1], nullptr, 10);
    const int problems = std::atoi(argv[2]);
    for (int k = 0; k < problems; ++k) run_problem(seed + k), run_chain(seed + k), run_rates(seed + k);
    stop_early();
    std::printf("%d problems\n", problems);
}
