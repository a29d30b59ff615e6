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

bool cost_chain(const ChainModel& model, const ChainPlan& plan, int num_microbatches, Chain& chain) {
    const Instance& in = model.in;
    const int P = plan.num_stages(), G = plan.num_groups();
    if (P < in.limits.min_stages || P > in.limits.max_stages) return false;
    if (!has(plan.devices[plan.group.front()], in.limits.first_device)) return false;
    if (!has(plan.devices[plan.group.back()], in.limits.last_device)) return false;
    chain.num_stages = P, chain.num_groups = G, chain.num_microbatches = num_microbatches;
    chain.half_duplex = in.half_duplex;
    chain.group = plan.group;
    for (auto* values : {&chain.forward_ms, &chain.backward_ms, &chain.weight_ms, &chain.there_ms,
                         &chain.back_ms, &chain.reduce_ms, &chain.early_ms, &chain.last_part_ms,
                         &chain.held_bytes, &chain.kept_bytes})
        values->assign(P, 0.0);
    chain.num_parts.assign(P, 1);
    chain.is_split.assign(P, 0);
    chain.room_bytes.assign(G, kInfinity);
    std::vector<double> state_bytes(G, 0.0), held_bytes(G, 0.0), rate(G);
    std::vector<Ring> rings;
    std::vector<SetShares> shares;
    std::vector<int> num_positions(G, 0);
    rings.reserve(G);
    for (int g = 0; g < G; ++g) {
        const SetLinks links = links_of_set(in, plan.devices[g]);
        if (links.num_devices > in.max_replicas) return false;
        rings.push_back(make_ring(in, links.num_devices, links.slowest_bytes_per_ms, links.latency_ms));
        if (!rings.back().connected) return false;
        shares.push_back(shares_of_set(in, plan.devices[g], links.slowest_speed));
        rate[g] = shares[g].rate;
    }
    for (int p = 0; p < P; ++p) {
        const int g = plan.group[p], first = plan.first_layer(p), end = plan.end_layer[p];
        if (end <= first || ++num_positions[g] > model.max_positions) return false;
        ForwardBackward work{rate[g] * in.forward_ms(first, end), rate[g] * in.backward_ms(first, end)};
        if (in.has_measured()) work = measured_work(in, shares[g].paces, first, end, false);
        chain.forward_ms[p] = work.forward;
        const double weight = plan.is_split ? rate[g] * model.cut_ms(plan.devices[g], first, end) : 0;
        chain.is_split[p] = weight > 0;
        chain.backward_ms[p] = weight > 0 ? rate[g] * model.input_ms(first, end) : work.backward;
        chain.weight_ms[p] = weight;
        const double parameters = in.parameter_bytes(first, end);
        if (plan.devices[g].size() > 1) cut_all_reduce(rings[g], parameters, p, chain);
        chain.held_bytes[p] = in.activation_bytes(first, end);
        chain.kept_bytes[p] = weight > 0 ? model.kept_bytes(first, end) : 0.0;
        held_bytes[g] += chain.reserved_bytes(p);
        state_bytes[g] += model.state_factor(static_cast<int>(plan.devices[g].size())) * parameters;
        if (p + 1 == P || plan.group[p + 1] == g) continue;
        ChannelCosts channel;
        if (!cost_channel(in, end, {plan.devices[g]}, {plan.devices[plan.group[p + 1]]}, channel))
            return false;
        chain.there_ms[p] = channel.there, chain.back_ms[p] = channel.back;
    }
    if (!in.has_memory()) return true;
    for (int g = 0; g < G; ++g) {
        chain.room_bytes[g] = room_of(shares[g].room, state_bytes[g]);
        if (!(chain.room_bytes[g] >= held_bytes[g])) return false;
    }
    return true;
}

}  // namespace pipeplan
