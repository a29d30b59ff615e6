// The costs of a plan on groups of devices; the formulas are those of plan_costs.hpp.
#include "chain_plan.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "plan_costs.hpp"

namespace pipeplan {

namespace {

std::vector<double> or_zeros(const std::vector<double>& values, int count) {
    if (values.empty()) return std::vector<double>(count, 0.0);
    if (static_cast<int>(values.size()) != count)
        throw std::invalid_argument("chain model: one number for each layer");
    return values;
}

bool has(const std::vector<int>& devices, int device) {
    return device < 0 || std::find(devices.begin(), devices.end(), device) != devices.end();
}

// Cuts the all-reduce so that the least is left of it when the stage's last block ends. Each part pays
// the latency in full.
void cut_all_reduce(const Ring& ring, double parameter_bytes, int p, Chain& chain) {
    const double block_ms = chain.is_split[p] ? chain.weight_ms[p] : chain.backward_ms[p];
    double least = kInfinity;
    for (const int num_parts : {1, 2, 4, 8, 16}) {
        const double part_ms = ring.fixed_ms + ring.ms_per_byte * parameter_bytes / num_parts;
        const double early_ms = block_ms * (1.0 - 1.0 / num_parts);
        const double left = std::max(part_ms, part_ms * num_parts - early_ms);
        if (left >= least * (1 - 1e-9)) continue;
        least = left;
        chain.num_parts[p] = num_parts, chain.early_ms[p] = early_ms;
        chain.last_part_ms[p] = part_ms, chain.reduce_ms[p] = part_ms * num_parts;
    }
}

// What the stages of a group may hold at once, counted for a whole microbatch.
double room_of(const Room& room, double state_bytes) {
    double least = kInfinity;
    for (const Holding& holding : room)
        least = std::min(least, (holding.bytes * (1 + kMemoryRounding) - state_bytes) / holding.share);
    return least;
}

}  // namespace

ChainModel::ChainModel(Instance instance, const std::vector<double>& weight,
                       const std::vector<double>& input, const std::vector<double>& kept,
                       int most, bool shards)
    : in(std::move(instance)), may_split(!weight.empty()), max_positions(most),
      shards_optimizer(shards), weight_ms(or_zeros(weight, in.num_layers)),
      input_ms(or_zeros(input, in.num_layers)), kept_bytes(or_zeros(kept, in.num_layers)) {
    if (max_positions < 1) throw std::invalid_argument("max_positions: is not at least 1");
}

void ChainPlan::join_neighbours() {
    int count = 0;
    for (int p = 0; p < num_stages(); ++p) {
        if (count == 0 || group[count - 1] != group[p]) group[count++] = group[p];
        end_layer[count - 1] = end_layer[p];
    }
    group.resize(count), end_layer.resize(count);
}

void ChainPlan::number_groups() {
    std::vector<int> number(devices.size(), -1);
    std::vector<std::vector<int>> new_devices;
    for (int& g : group) {
        if (number[g] < 0) {
            number[g] = static_cast<int>(new_devices.size());
            new_devices.push_back(std::move(devices[g]));
        }
        g = number[g];
    }
    devices = std::move(new_devices);
}

bool ChainCosts::take_groups(const ChainPlan& plan) {
    const Instance& in = model_.in;
    const int G = plan.num_groups();
    rings_.clear(), shares_.clear();
    for (int g = 0; g < G; ++g) {
        const SetLinks links = links_of_set(in, plan.devices[g]);
        if (links.num_devices > in.max_replicas) return false;
        rings_.push_back(make_ring(in, links.num_devices, links.slowest_bytes_per_ms, links.latency_ms));
        if (!rings_.back().connected) return false;
        shares_.push_back(shares_of_set(in, plan.devices[g], links.slowest_speed));
    }
    return true;
}

void ChainCosts::take_stage(const ChainPlan& plan, int p) {
    const Instance& in = model_.in;
    const int g = plan.group[p], first = plan.first_layer(p), end = plan.end_layer[p];
    const double rate = shares_[g].rate;
    ForwardBackward work{rate * in.forward_ms(first, end), rate * in.backward_ms(first, end)};
    if (in.has_measured()) work = measured_work(in, shares_[g].paces, first, end, false);
    chain_.forward_ms[p] = work.forward;
    const double weight = plan.is_split ? rate * model_.cut_ms(plan.devices[g], first, end) : 0;
    chain_.is_split[p] = weight > 0;
    chain_.backward_ms[p] = weight > 0 ? rate * model_.input_ms(first, end) : work.backward;
    chain_.weight_ms[p] = weight;
    const double parameters = in.parameter_bytes(first, end);
    if (plan.devices[g].size() > 1) cut_all_reduce(rings_[g], parameters, p, chain_);
    chain_.held_bytes[p] = in.activation_bytes(first, end);
    chain_.kept_bytes[p] = weight > 0 ? model_.kept_bytes(first, end) : 0.0;
    state_bytes_[p] = model_.state_factor(static_cast<int>(plan.devices[g].size())) * parameters;
}

bool ChainCosts::take_cut(const ChainPlan& plan, int p) {
    const int g = plan.group[p], h = plan.group[p + 1];
    if (g == h) return true;
    ChannelCosts channel;
    if (!cost_channel(model_.in, plan.end_layer[p], {plan.devices[g]}, {plan.devices[h]}, channel)) return false;
    chain_.there_ms[p] = channel.there, chain_.back_ms[p] = channel.back;
    return true;
}

// Adds up what the group's stages need, always in the order of the chain.
void ChainCosts::find_room(int g) {
    double state_bytes = 0.0, held_bytes = 0.0;
    for (int p = 0; p < chain_.num_stages; ++p) {
        if (chain_.group[p] != g) continue;
        state_bytes += state_bytes_[p];
        held_bytes += chain_.reserved_bytes(p);
    }
    chain_.room_bytes[g] = room_of(shares_[g].room, state_bytes);
    held_bytes_[g] = held_bytes;
}

double ChainCosts::missing_bytes() const {
    double missing = 0.0;
    for (int g = 0; model_.in.has_memory() && g < chain_.num_groups; ++g)
        missing += std::max(0.0, missing_bytes(g));
    return missing;
}

int ChainCosts::fullest() const {
    int fullest = 0;
    for (int g = 1; g < chain_.num_groups; ++g)
        if (missing_bytes(g) > missing_bytes(fullest)) fullest = g;
    return fullest;
}

// Whether the plan keeps what does not depend on costs.
bool ChainCosts::may_be(const ChainPlan& plan) {
    const PlanLimits& limits = model_.in.limits;
    const int P = plan.num_stages();
    if (P < limits.min_stages || P > limits.max_stages) return false;
    if (!has(plan.devices[plan.group.front()], limits.first_device)) return false;
    if (!has(plan.devices[plan.group.back()], limits.last_device)) return false;
    num_positions_.assign(plan.num_groups(), 0);
    for (int p = 0; p < P; ++p) {
        const bool is_empty = plan.end_layer[p] <= plan.first_layer(p);
        if (is_empty || ++num_positions_[plan.group[p]] > model_.max_positions) return false;
    }
    return true;
}

void ChainCosts::clear(const ChainPlan& plan, int num_microbatches) {
    const int P = plan.num_stages(), G = plan.num_groups();
    chain_.num_stages = P, chain_.num_groups = G, chain_.num_microbatches = num_microbatches;
    chain_.half_duplex = model_.in.half_duplex;
    chain_.group = plan.group;
    for (auto* values : {&chain_.forward_ms, &chain_.backward_ms, &chain_.weight_ms, &chain_.there_ms,
                         &chain_.back_ms, &chain_.reduce_ms, &chain_.early_ms, &chain_.last_part_ms,
                         &chain_.held_bytes, &chain_.kept_bytes, &state_bytes_})
        values->assign(P, 0.0);
    chain_.num_parts.assign(P, 1);
    chain_.is_split.assign(P, 0);
    chain_.room_bytes.assign(G, kInfinity);
    held_bytes_.assign(G, 0.0);
}

bool ChainCosts::take(const ChainPlan& plan, int num_microbatches) {
    if (!may_be(plan) || !take_groups(plan)) return false;
    clear(plan, num_microbatches);
    for (int p = 0; p < plan.num_stages(); ++p) {
        take_stage(plan, p);
        if (p + 1 < plan.num_stages() && !take_cut(plan, p)) return false;
    }
    for (int g = 0; model_.in.has_memory() && g < plan.num_groups(); ++g) find_room(g);
    return true;
}

void ChainCosts::shift_cuts(const ChainPlan& plan, int first, int last) {
    for (int p = first; p <= last; ++p) {
        take_stage(plan, p);
        if (p < last) take_cut(plan, p);
    }
    for (int p = first; model_.in.has_memory() && p <= last; ++p) find_room(plan.group[p]);
}

bool cost_chain(const ChainModel& model, const ChainPlan& plan, int num_microbatches, Chain& chain) {
    ChainCosts costs(model);
    if (!costs.take(plan, num_microbatches) || !costs.fits()) return false;
    chain = std::move(costs.chain());
    return true;
}

}  // namespace pipeplan
