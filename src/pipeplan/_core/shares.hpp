// How the devices of a stage divide the samples of a microbatch.
#pragma once
#include <cstdint>
#include <vector>

namespace pipeplan {

enum class Split : std::uint8_t {
    kEven,      // as even as can be; where samples are whole, the fastest devices take one more
    kByMemory,  // the same, but the devices with the most memory take one more
    kBySpeed    // in proportion to the devices' speeds; of whole samples nearly so
};

// Files hold no share below this.
constexpr double kLeastShare = 1e-6;
// Shares of a file add up to 1 within 1e-9. So a stage may do that much less than its work.
constexpr double kShareRounding = 2e-9;

// Whole numbers of samples for devices of these speeds, at least one each, such that the device that
// takes the longest takes as little time as can be. Needs at least one sample for each device.
//
// Giving sample by sample to the device that is done first with it is optimal: exchange two samples.
// So is taking samples away from the device that takes the longest. The shares in proportion, rounded
// down, are off by less than one sample a device. Complexity: O(k^2) for k devices.
std::vector<int> samples_by_speed(const std::vector<double>& speeds, int num_samples);

// The time of the slowest device, where one of speed 1 takes 1 for the whole microbatch.
double rate_of_samples(const std::vector<double>& speeds, const std::vector<int>& samples,
                       int num_samples);

}  // namespace pipeplan
