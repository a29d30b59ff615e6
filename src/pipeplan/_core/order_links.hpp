// The slowest links between neighbouring intervals of an order, for every boundary at once.
//
// The devices of the order stand in units of one or more neighbours, and intervals hold whole units.
// At a boundary j the last sizes[a] units before it send to the first sizes[b] units behind it. The
// slowest pair is the least value of a rectangle whose corner lies at j. For each size a the rows of
// these rectangles are a window that slides down with j. Its column minima come from the minima of
// two blocks (van Herk 1992, Gil and Werman 1993): O(units * largest size) for each size, instead of
// its square for each boundary.
//
// Latencies that differ are taken at their largest, apart from the rates: a rectangle's link is then
// no better than any of its pairs, and often a little worse.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "instance.hpp"
#include "links.hpp"
#include "pool.hpp"

namespace pipeplan {

class OrderLinks {
  public:
    // Unit k holds the devices [start[k], start[k + 1]); sizes count units and rise. Rates count by
    // the weights of their devices; those inside intervals are only for even weights.
    OrderLinks(const Instance& in, const std::vector<int>& start, const std::vector<int>& sizes,
               const Weights& weights, Pool& pool, Control& control)
        : U_(static_cast<int>(start.size()) - 1), K_(static_cast<int>(sizes.size())), sizes_(sizes),
          control_(control) {
        const auto rate_of = [&](const Weights& weight) {
            return [&in, weight](int u, int v) { return in.bytes_per_ms(u, v) / weight.of(in, u, v); };
        };
        const Table rate = tabulate(start, rate_of(weights));
        if (weights.are_even()) inside_rate_ = fold(rate);
        find_corners(rate, weights.are_even() ? rate : tabulate(start, rate_of(weights.turned())), pool,
                     forward_rate_, backward_rate_);
        if (in.latency_ms.is_one_number()) {
            one_latency_ms_ = in.latency_ms.one_number();
            return;
        }
        // Latencies count negative, so that for both the least value matters.
        const Table latency = tabulate(start, [&](int u, int v) { return -in.latency_ms(u, v); });
        inside_latency_ = fold(latency);
        find_corners(latency, latency, pool, forward_latency_, backward_latency_);
    }

    Link forward(int boundary, int a, int b) const {
        return link(boundary, a, b, forward_rate_, backward_rates(), forward_latency_);
    }
    Link backward(int boundary, int a, int b) const {
        return link(boundary, a, b, backward_rates(), forward_rate_, backward_latencies());
    }
    // The least rate between the devices of sizes[a] units from `first` on, in either direction;
    // infinite for a single device. And the largest latency.
    double inside_rate(int first, int a) const { return inside_rate_[row(first, a)]; }
    double inside_latency_ms(int first, int a) const {
        return inside_latency_.empty() ? one_latency_ms_ : -inside_latency_[row(first, a)];
    }

  private:
    using Table = std::vector<double>;  // [units][units], the least value of each block of pairs
    static constexpr int kRowsBetweenChecks = 64;

    std::size_t at(int u, int v) const { return static_cast<std::size_t>(u) * U_ + v; }
    std::size_t row(int first, int a) const { return static_cast<std::size_t>(first) * K_ + a; }
    std::size_t cell(int boundary, int a, int b) const { return row(boundary, a) * K_ + b; }

    const Table& backward_rates() const {
        return backward_rate_.empty() ? forward_rate_ : backward_rate_;
    }
    const Table& backward_latencies() const {
        return backward_latency_.empty() ? forward_latency_ : backward_latency_;
    }

    Link link(int boundary, int a, int b, const Table& rates, const Table& rates_back,
              const Table& latencies) const {
        const std::size_t k = cell(boundary, a, b);
        if (!(rates[k] > 0 && rates_back[k] > 0)) return {kInfinity, 0.0};
        return {latencies.empty() ? one_latency_ms_ : -latencies[k], 1.0 / rates[k]};
    }

    template <class Value>
    Table tabulate(const std::vector<int>& start, const Value& value) const {
        Table table(static_cast<std::size_t>(U_) * U_, kInfinity);
        for (int a = 0; a < U_; ++a) {
            if (a % kRowsBetweenChecks == 0) control_.check();
            for (int u = start[a]; u < start[a + 1]; ++u)
                for (int b = 0; b < U_; ++b) {
                    double least = table[at(a, b)];
                    for (int v = start[b]; v < start[b + 1]; ++v)
                        if (v != u) least = std::min(least, value(u, v));
                    table[at(a, b)] = least;
                }
        }
        return table;
    }

    // The least value inside the intervals of sizes[a] units: that of the two intervals that are one
    // shorter, and of the two units at the ends.
    Table fold(const Table& table) const {
        Table result(static_cast<std::size_t>(U_) * K_, kInfinity), least(U_);
        for (int i = 0; i < U_; ++i) least[i] = table[at(i, i)];
        for (int length = 1, a = 0; a < K_; ++length) {
            if (length % kRowsBetweenChecks == 0) control_.check();
            for (int i = 0; length > 1 && i + length <= U_; ++i) {
                const int last = i + length - 1;
                least[i] = std::min({least[i], least[i + 1], table[at(i, last)], table[at(last, i)]});
            }
            if (length < sizes_[a]) continue;
            for (int i = 0; i + length <= U_; ++i) result[row(i, a)] = least[i];
            ++a;
        }
        return result;
    }

    // Both directions, from the table of each; `backward` stays empty if they are alike.
    void find_corners(const Table& table, const Table& back, Pool& pool, Table& forward,
                      Table& backward) {
        forward.assign(static_cast<std::size_t>(U_ + 1) * K_ * K_, kInfinity);
        pool.run(K_, [&](int a, int) { slide(table, a, forward); }, Tasks::kShort);
        Table turned(back.size());
        for (int u = 0; u < U_; ++u)
            for (int v = 0; v < U_; ++v) turned[at(v, u)] = back[at(u, v)];
        if (turned == table) return;
        backward.assign(forward.size(), kInfinity);
        pool.run(K_, [&](int a, int) { slide(turned, a, backward); }, Tasks::kShort);
    }

    // The rectangles with the rows [j - sizes[a], j), for every j.
    void slide(const Table& table, int a, Table& corners) const {
        const int w = sizes_[a], most = sizes_.back();
        std::vector<double> older, newer;
        for (int block = 0; block + w < U_; block += w) {
            // Windows that start in this block: [j - w, j) with j - w in [block, block + rows).
            const int rows = std::min(w, U_ - w - block);
            const int first = block + w, end = std::min(U_, block + w + rows + most), width = end - first;
            older.assign(static_cast<std::size_t>(rows) * width, kInfinity);
            newer.assign(width, kInfinity);
            for (int i = w; i-- > 0;) {  // from the end of the block: the least from row i on
                if (i % kRowsBetweenChecks == 0) control_.check();
                const double* values = table.data() + at(block + i, first);
                for (int v = 0; v < width; ++v) newer[v] = std::min(newer[v], values[v]);
                if (i < rows) std::copy(newer.begin(), newer.end(), older.begin() + static_cast<std::size_t>(i) * width);
            }
            newer.assign(width, kInfinity);
            for (int i = 0; i < rows; ++i) {
                const int j = first + i;
                const double* from = older.data() + static_cast<std::size_t>(i) * width;
                if (i > 0) {  // the row before the boundary
                    const double* values = table.data() + at(j - 1, first);
                    for (int v = i; v < width; ++v) newer[v] = std::min(newer[v], values[v]);
                }
                double least = kInfinity;
                for (int b = 0, v = i; b < K_ && j + sizes_[b] <= U_; ++b) {
                    for (; v < i + sizes_[b]; ++v) least = std::min({least, from[v], newer[v]});
                    corners[cell(j, a, b)] = least;
                }
            }
        }
    }

    const int U_, K_;
    const std::vector<int> sizes_;
    Control& control_;
    double one_latency_ms_ = 0.0;
    Table inside_rate_, inside_latency_;            // [first unit][size]
    Table forward_rate_, backward_rate_;            // [boundary][size before][size behind]
    Table forward_latency_, backward_latency_;      // the same, negative
};

}  // namespace pipeplan
