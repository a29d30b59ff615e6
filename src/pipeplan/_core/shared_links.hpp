// Links that several devices share (docs/formats.md, rules 8-12): a host's card, a switch, a spine.
//
// A shared link has an outward and an inward side, each with its capacity. Side 2l is the outward one
// of link l, 2l + 1 its inward one. A flow from u to v uses the outward side of the links that have u
// and not v among their members, and the inward side of those that have v and not u.
#pragma once
#include <map>
#include <utility>
#include <vector>

namespace pipeplan {

class SharedLinks {
  public:
    // `host_of` has the host of each device, whose numbers follow the order of the cluster. Latencies
    // are the least of any flow that uses a side; none given: 0.
    // Throws std::invalid_argument where a member or a host is unknown, a capacity is not above 0, or a
    // latency below 0.
    SharedLinks(std::vector<std::vector<int>> members, const std::vector<double>& out_bytes_per_ms,
                const std::vector<double>& in_bytes_per_ms, std::vector<int> host_of,
                const std::vector<double>& out_latency_ms = {},
                const std::vector<double>& in_latency_ms = {});

    // The same with these devices only, in this order.
    SharedLinks on_devices(const std::vector<int>& order) const;

    int num_devices() const { return static_cast<int>(host_of_.size()); }
    int num_links() const { return static_cast<int>(capacity_.size()) / 2; }
    const std::vector<int>& links_of(int device) const { return links_of_class_[class_of_[device]]; }
    double out(int link) const { return capacity_[2 * link]; }  // bytes per ms
    double in(int link) const { return capacity_[2 * link + 1]; }
    int num_sides() const { return static_cast<int>(capacity_.size()); }
    double capacity(int side) const { return capacity_[side]; }
    // No flow that uses the side starts earlier after its transfer begins.
    double latency_ms(int side) const { return latency_ms_[side]; }
    // Devices of one class are members of the same links. Flows inside a class use no shared link.
    int class_of(int device) const { return class_of_[device]; }
    // Whether two devices are members of the same links, and of one host.
    bool are_alike(int u, int v) const {
        return class_of_[u] == class_of_[v] && host_of_[u] == host_of_[v];
    }
    // The sides that a flow from a device of one class to a device of another one uses.
    std::vector<int> sides_between(int class_from, int class_to) const;
    // The closed form: no transfer between two sets of devices takes less time, whatever else is sent.
    // Shares say which part of a microbatch a device has.
    struct LeastTimes {
        double there_ms, back_ms;
    };
    // With even shares: from the numbers of members alone.
    LeastTimes least_times(const std::vector<int>& devices, const std::vector<int>& next_devices,
                           double there_bytes, double back_bytes) const;
    LeastTimes least_times(const std::vector<int>& devices, const std::vector<double>& shares,
                           const std::vector<int>& next_devices,
                           const std::vector<double>& next_shares, double there_bytes,
                           double back_bytes) const;
    // No flow of a ring over these devices is always faster than this.
    double ring_rate(const std::vector<int>& devices) const;
    // The order of a ring over these devices: as in the cluster, the devices of a host together,
    // hosts by their first device.
    std::vector<int> ring(std::vector<int> devices) const;

  private:
    SharedLinks() = default;
    void count(LeastTimes& least, int link, double leaves_there, double enters_there,
               double leaves_back, double enters_back) const;
    std::vector<double> capacity_;                   // [sides], bytes per ms
    std::vector<double> latency_ms_;                 // [sides]
    std::vector<std::vector<int>> links_of_class_;   // rising
    bool are_whole_hosts_ = true;                    // whether each link's members are a host's devices
    std::vector<int> class_of_, host_of_, position_; // [devices]; the position in the cluster
};

}  // namespace pipeplan
