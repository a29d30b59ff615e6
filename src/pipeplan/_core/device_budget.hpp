// Devices as something that stages use up: a fast stage needs fast devices, and each serves once.
//
// Devices of about one speed form a class. A stage demands a number of devices that are at least as
// fast as a class. A node says what all stages so far have used. There are two ways to count:
//
// - by class: how many devices of each class are in use. A demand takes the slowest devices that
//   will do. Only few classes are possible, so different speeds may have to share one.
// - by price: each device has a price, and only their sum counts. No device has a lower price than
//   a slower one, so each device of a demand costs at least what its class costs. Any such prices
//   give a bound.
//
// Both only forget: whatever real stages do is possible here too. See docs/theory.md.
//
// Where devices share by speed, a stage is as fast as its devices are together. Then a stage takes
// the very devices that it has, and prices need not rise with speed.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <cstddef>
#include <utility>
#include <vector>

namespace pipeplan {

struct SpeedClass {
    double fastest;   // speed in the class
    int num_devices;  // in the class
    int price;        // the least in the class, where prices count
};

struct Demand {
    int speed_class;  // of this class or of a faster one; 0 is the fastest
    int count;
};

class DeviceBudget {
  public:
    // As many classes as can be with at most `max_nodes` nodes.
    static DeviceBudget by_class(const std::vector<double>& speeds, double max_nodes) {
        std::vector<SpeedClass> classes = classes_of(speeds);
        const std::size_t num_speeds = classes.size();
        const auto num_nodes = [&] {
            double num = 1.0;
            for (const SpeedClass& one : classes) num *= one.num_devices + 1;
            return num;
        };
        while (classes.size() > 1 && num_nodes() > max_nodes) merge_nearest(classes);
        const bool exact = classes.size() == num_speeds;
        const int num = static_cast<int>(num_nodes());
        return DeviceBudget(std::move(classes), false, exact, num);
    }

    // Prices in proportion to speeds, rounded to at least 1; together about `total`.
    static DeviceBudget by_price(const std::vector<double>& speeds, int total, int max_classes) {
        std::vector<SpeedClass> classes = classes_of(speeds);
        double sum = 0.0;
        for (double speed : speeds) sum += speed;
        int spent = 0;
        for (SpeedClass& one : classes) {
            one.price = std::max(1, static_cast<int>(one.fastest / sum * total));
            spent += one.price * one.num_devices;
        }
        while (static_cast<int>(classes.size()) > max_classes) merge_nearest(classes);
        return DeviceBudget(std::move(classes), true, false, spent + 1);
    }

    // For stages that take the very devices that they have: prices nearly in proportion to speeds, with at
    // most `max_nodes` nodes. All devices together buy hardly more speed than they have.
    static DeviceBudget by_fair_price(const std::vector<double>& speeds, int max_nodes) {
        std::vector<SpeedClass> classes = classes_of(speeds), best;
        double sum = 0.0, least = 1e300;
        for (double speed : speeds) sum += speed;
        int best_total = 0;
        for (int whole = static_cast<int>(speeds.size()); whole < max_nodes; ++whole) {
            const double unit = sum / whole;
            double dearest = 0.0;
            int total = 0;
            for (SpeedClass& one : classes) {
                one.price = std::max(1, static_cast<int>(std::lround(one.fastest / unit)));
                total += one.price * one.num_devices;
                dearest = std::max(dearest, one.fastest / one.price);
            }
            const double bought = dearest * total / sum;
            if (total < max_nodes && bought < least * (1 - 1e-9))
                least = bought, best = classes, best_total = total;
        }
        if (best.empty()) return by_price(speeds, 1, 1);  // one each
        return DeviceBudget(std::move(best), true, false, best_total + 1);
    }

    // What a stage may take: a number of devices and their speeds, and what they cost.
    struct Crew {
        int size;
        std::vector<double> speeds;  // by_price: only the sum is right
        double speed;                // summed
        int cost;                    // added to a node
    };
    // All of them; by price the fastest of each size and price.
    std::vector<Crew> crews(int max_size) const {
        return by_price_ ? crews_by_price(max_size) : crews_by_class(max_size);
    }
    // The node after a stage with this crew, or -1 if the devices are not there.
    int take(int node, const Crew& crew) const {
        if (by_price_) return node + crew.cost < num_nodes_ ? node + crew.cost : -1;
        for (std::size_t c = 0; c < classes_.size(); ++c)
            if (in_use(node, c) + in_use(crew.cost, c) > classes_[c].num_devices) return -1;
        return node + crew.cost;
    }

    const std::vector<SpeedClass>& classes() const { return classes_; }  // fastest first
    int num_nodes() const { return num_nodes_; }                         // node 0: nothing is used
    bool is_exact() const { return exact_; }  // whether it forgets nothing about speeds

    // The node after this demand, or -1 if the devices are not there. It is a later one.
    int use(int node, const Demand& demand) const {
        int left = demand.count;
        if (by_price_) {
            const int after = node + classes_[demand.speed_class].price * left;
            return after < num_nodes_ ? after : -1;
        }
        for (int c = demand.speed_class; c >= 0 && left > 0; --c) {
            const int used = node / stride_[c] % (classes_[c].num_devices + 1);
            const int more = std::min(left, classes_[c].num_devices - used);
            node += more * stride_[c];
            left -= more;
        }
        return left == 0 ? node : -1;
    }

  private:
    int in_use(int node, std::size_t c) const {
        return node / stride_[c] % (classes_[c].num_devices + 1);
    }

    std::vector<Crew> crews_by_class(int max_size) const {
        std::vector<Crew> result;
        for (int node = 1; node < num_nodes_; ++node) {
            Crew crew{0, {}, 0.0, node};
            for (std::size_t c = 0; c < classes_.size(); ++c) {
                const int count = in_use(node, c);
                crew.size += count, crew.speed += count * classes_[c].fastest;
                if (crew.size <= max_size)
                    crew.speeds.insert(crew.speeds.end(), count, classes_[c].fastest);
            }
            if (crew.size <= max_size) result.push_back(std::move(crew));
        }
        return result;
    }

    // Knapsack over the devices.
    std::vector<Crew> crews_by_price(int max_size) const {
        const std::size_t row = num_nodes_;
        std::vector<double> fastest((max_size + 1) * row, -1.0);
        fastest[0] = 0.0;
        for (const SpeedClass& one : classes_)
            for (int device = 0; device < one.num_devices; ++device)
                for (int size = max_size; size-- > 0;)
                    for (int price = num_nodes_ - 1 - one.price; price >= 0; --price) {
                        const double speed = fastest[size * row + price];
                        double& more = fastest[(size + 1) * row + price + one.price];
                        if (speed >= 0) more = std::max(more, speed + one.fastest);
                    }
        std::vector<Crew> result;
        for (int size = 1; size <= max_size; ++size) {
            double best = 0.0;
            for (int price = 0; price < num_nodes_; ++price) {
                const double speed = fastest[size * row + price];
                if (!(speed > best)) continue;  // no faster than a cheaper one
                best = speed;
                result.push_back({size, {}, speed, price});
            }
        }
        return result;
    }

    DeviceBudget(std::vector<SpeedClass> classes, bool by_price, bool exact, int num_nodes)
        : classes_(std::move(classes)), by_price_(by_price), exact_(exact), num_nodes_(num_nodes) {
        int stride = 1;
        for (const SpeedClass& one : classes_) {
            stride_.push_back(stride);
            if (!by_price_) stride *= one.num_devices + 1;
        }
    }

    // One for each speed, fastest first.
    static std::vector<SpeedClass> classes_of(std::vector<double> speeds) {
        std::sort(speeds.begin(), speeds.end(), std::greater<double>());
        std::vector<SpeedClass> classes;
        for (double speed : speeds) {
            if (classes.empty() || speed < classes.back().fastest) classes.push_back({speed, 0, 1});
            ++classes.back().num_devices;
        }
        return classes;
    }

    // Of two neighbouring classes makes one, where the least speed is made up.
    static void merge_nearest(std::vector<SpeedClass>& classes) {
        std::size_t best = 1;
        double least = 1e300;
        for (std::size_t c = 1; c < classes.size(); ++c) {
            const double gift =
                classes[c].num_devices * std::log(classes[c - 1].fastest / classes[c].fastest);
            if (gift < least) least = gift, best = c;
        }
        classes[best - 1].num_devices += classes[best].num_devices;
        classes[best - 1].price = classes[best].price;
        classes.erase(classes.begin() + best);
    }

    std::vector<SpeedClass> classes_;
    std::vector<int> stride_;
    bool by_price_, exact_;
    int num_nodes_;
};

}  // namespace pipeplan
