// A plan as local search changes it, with the costs that are known of its stages and channels.
#pragma once
#include <utility>
#include <vector>

#include "bound.hpp"
#include "instance.hpp"

namespace pipeplan {

struct SearchStage {
    int first_layer, end_layer;
    std::vector<int> devices;
    StageCosts costs;
    ChannelCosts channel;      // to the next stage
    bool costs_known = false;  // of this stage
    bool channel_known = false;
};

using SearchPlan = std::vector<SearchStage>;

inline SearchPlan from_placed(const PlacedPlan& placed) {
    SearchPlan plan;
    int first = 0;
    for (int n = 0; n < placed.num_stages(); ++n) {
        SearchStage stage;
        stage.first_layer = first;
        stage.end_layer = first = placed.end_layer()[n];
        stage.devices = placed.devices()[n];
        plan.push_back(std::move(stage));
    }
    return plan;
}

inline PlacedPlan to_placed(const Instance& instance, const SearchPlan& plan) {
    std::vector<int> end_layer;
    std::vector<std::vector<int>> devices;
    for (const SearchStage& stage : plan) {
        end_layer.push_back(stage.end_layer);
        devices.push_back(stage.devices);
    }
    return PlacedPlan(instance, std::move(end_layer), std::move(devices));
}

}  // namespace pipeplan
