// A lower bound on every plan: Bellman's recursion on the fixed-plan bound, with links as good as
// sizes allow (best_links.hpp) and with devices that cost a price.
//
// Which devices a stage gets is forgotten. But devices have prices, and fast ones have higher ones: a stage that
// computes at a given speed pays for devices that are fast enough, and all stages together pay no
// more than all devices cost. This holds for any prices. See docs/theory.md.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

#include "best_links.hpp"
#include "front.hpp"
#include "kernels.hpp"
#include "links.hpp"

namespace pipeplan {
namespace {

// Devices of about one speed.
struct SpeedClass {
    double fastest;  // of the class
    int price;       // the least of its devices
    int num_devices; // in this class and in faster ones
};

struct Prices {
    std::vector<SpeedClass> classes;  // fastest first
    int total;
};

Prices make_prices(std::vector<double> speeds, int max_classes, int target, double exponent) {
    std::sort(speeds.begin(), speeds.end(), std::greater<double>());
    const int V = static_cast<int>(speeds.size());
    Prices prices{{}, 0};
    if (speeds.front() == speeds.back()) return {{{speeds[0], 1, V}}, V};
    std::vector<double> worth;
    double sum = 0.0;
    for (double s : speeds) worth.push_back(std::pow(s / speeds[0], exponent)), sum += worth.back();
    std::vector<double> distinct = speeds;
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    const bool grouped = static_cast<int>(distinct.size()) > max_classes;
    const double step = std::log(speeds.front() / speeds.back()) / max_classes;
    int previous = -1;
    for (int u = 0; u < V; ++u) {
        const int price = static_cast<int>(worth[u] / sum * target);
        prices.total += price;
        const int group = grouped ? std::min(max_classes - 1, static_cast<int>(std::log(speeds[0] / speeds[u]) / step)) : -2;
        const bool same = u > 0 && (grouped ? group == previous : speeds[u] == speeds[u - 1]);
        if (!same) prices.classes.push_back({speeds[u], price, 0});
        prices.classes.back().price = std::min(prices.classes.back().price, price);
        prices.classes.back().num_devices = u + 1;
        previous = group;
    }
    return prices;
}

// A way to staff a stage of a given size.
struct Demand {
    int cls, count;
};
struct Choice {
    int price;
    Demand first, second;
    double rate;  // no such stage computes in less than its work times this
    Ring ring;
};

class RelaxedBound {
  public:
    RelaxedBound(const Instance& in, const std::vector<int>& buckets, int max_levels,
                 const DpLimits& limits, const BestLinks& best, Prices prices, Pool& pool, Control& control)
        : in_(in), limits_(limits), pool_(pool), control_(control), L_(in.num_layers),
          M_(in.num_microbatches), limit_ms_(limits.limit_ms * (1 + 1e-9)), prices_(std::move(prices)),
          largest_(buckets), K_(static_cast<int>(buckets.size())) {
        least_latency_ms_ = kInfinity;
        for (int u = 0; u < in.num_devices; ++u)
            for (int v = 0; v < in.num_devices; ++v)
                if (u != v) least_latency_ms_ = std::min(least_latency_ms_, in.latency_ms[in.at(u, v)]);
        for (int k = 0; k < K_; ++k) add_size(k, best);
        list_nodes();
        tabulate_links(best);
        tabulate_heads();
    }

    double run() {
        const int num_nodes = static_cast<int>(units_.size());
        behind_.resize(static_cast<std::size_t>(num_nodes) * K_);
        std::vector<std::unique_ptr<Work>> work(pool_.num_workers());
        least_ms_.assign(K_, limits_.limit_ms);
        std::vector<Rows<Suffix>> rows(K_);
        for (int node = 1; node < num_nodes; ++node) {
            const auto each = [&](const Pool::Task& task) {
                if (K_ < kWorthThreads) {
                    for (int k = 0; k < K_; ++k) task(k, 0);
                } else {
                    pool_.run(K_, task);
                }
            };
            each([&](int k, int worker) {
                if (!work[worker]) work[worker] = std::make_unique<Work>(L_);
                fill_front(node, k, *work[worker], rows[k]);
            });
            if (std::none_of(rows.begin(), rows.end(), [](const Rows<Suffix>& r) { return r.alive(); })) continue;
            each([&](int k, int worker) {
                if (!work[worker]) work[worker] = std::make_unique<Work>(L_);
                fill_behind(node, k, rows, *work[worker]);
            });
        }
        return *std::min_element(least_ms_.begin(), least_ms_.end());
    }

  private:
    template <class Value>
    struct Rows {
        std::vector<Value> points;
        std::vector<int> begin;
        bool alive() const { return !points.empty(); }
    };
    struct Work {
        explicit Work(int num_layers) : behind(num_layers + 1), fronts(num_layers) {}
        std::vector<Front<Beyond>> behind;
        std::vector<Front<Suffix>> fronts;
    };
    static constexpr int kWorthThreads = 16;
    static constexpr int kLayersBetweenChecks = 16;

    int index(const SpeedClass& c) const { return static_cast<int>(&c - prices_.classes.data()); }

    // All ways to use up devices of the classes, and which choice leads from which to which.
    void list_nodes() {
        const int C = static_cast<int>(prices_.classes.size());
        std::vector<int> have(C);
        std::size_t num = 1;
        for (int c = 0; c < C; ++c) {
            have[c] = prices_.classes[c].num_devices - (c ? prices_.classes[c - 1].num_devices : 0);
            num *= have[c] + 1;
            if (num > 5000000) break;
        }
        into_.clear();
        if (num <= kMaxCountNodes) {
            std::vector<std::vector<int>> nodes;
            std::vector<int> used(C, 0);
            for (;;) {
                nodes.push_back(used);
                int c = 0;
                while (c < C && ++used[c] > have[c]) used[c++] = 0;
                if (c == C) break;
            }
            std::stable_sort(nodes.begin(), nodes.end(), [](const auto& a, const auto& b) {
                return std::accumulate(a.begin(), a.end(), 0) < std::accumulate(b.begin(), b.end(), 0);
            });
            std::vector<int> index_of(num);
            const auto code = [&](const std::vector<int>& u) {
                std::size_t x = 0;
                for (int c = 0; c < C; ++c) x = x * (have[c] + 1) + u[c];
                return x;
            };
            for (std::size_t n = 0; n < num; ++n) index_of[code(nodes[n])] = static_cast<int>(n);
            units_.assign(num, 0);
            into_.assign(num * K_, {});
            for (std::size_t n = 0; n < num; ++n) {
                for (int c = 0; c < C; ++c) units_[n] += nodes[n][c] * prices_.classes[c].price;
                for (int k = 0; k < K_; ++k) {
                    for (const Choice& choice : choices_[k]) {
                        std::vector<int> u = nodes[n];
                        bool fits = true;
                        for (Demand d : {choice.first, choice.second}) {
                            for (int c = d.cls; c >= 0 && d.count > 0; --c) {
                                const int take = std::min(d.count, have[c] - u[c]);
                                u[c] += take, d.count -= take;
                            }
                            fits = fits && d.count == 0;
                        }
                        if (fits) into_[static_cast<std::size_t>(index_of[code(u)]) * K_ + k].push_back({static_cast<int>(n), &choice});
                    }
                }
            }
            return;
        }
        num = prices_.total + 1;
        units_.resize(num);
        std::iota(units_.begin(), units_.end(), 0);
        into_.assign(num * K_, {});
        for (int n = 0; n <= prices_.total; ++n)
            for (int k = 0; k < K_; ++k)
                for (const Choice& choice : choices_[k])
                    if (n + choice.price <= prices_.total) into_[static_cast<std::size_t>(n + choice.price) * K_ + k].push_back({n, &choice});
    }
    struct Step { int from; const Choice* choice; };
    std::vector<std::vector<Step>> into_;
    std::vector<int> units_;
    std::size_t kMaxCountNodes = std::getenv("PP_N") ? std::atoi(std::getenv("PP_N")) : 1000;

    void add_size(int k, const BestLinks& best) {
        const int first = k ? largest_[k - 1] + 1 : 1;
        smallest_.push_back(first);
        std::vector<Choice> found;
        Shares shares{1.0 / largest_[k], 1.0, 0.0};
        for (int r = first; r <= largest_[k]; ++r) {
            const Ring ring = make_ring(in_, r, best.ring_rate(r), least_latency_ms_);
            if (!ring.connected) continue;
            shares.least = std::min(shares.least, 1.0 / r);
            for (const SpeedClass& c : prices_.classes)
                if (r <= c.num_devices) found.push_back({r * c.price, {index(c), r}, {0, 0}, 1.0 / r / c.fastest, ring});
            const int samples = in_.microbatch_size / r, more = in_.microbatch_size % r;
            if (samples == 0 || more == 0) continue;
            const double B = in_.microbatch_size;
            shares.least = std::min(shares.least, samples / B);
            for (const SpeedClass& c : prices_.classes)
                for (const SpeedClass& d : prices_.classes)
                    if (r <= std::max(c.num_devices, d.num_devices) && more <= d.num_devices)
                        found.push_back({(r - more) * c.price + more * d.price, {index(c), r - more}, {index(d), more},
                                         std::max(samples / B / c.fastest, (samples + 1) / B / d.fastest), ring});
        }
        std::vector<Choice> kept;
        for (const Choice& a : found) {
            if (a.price > prices_.total) continue;
            bool needed = true;
            for (const Choice& b : found) {
                const bool as_good = b.price <= a.price && b.rate <= a.rate && a.first.cls == b.first.cls && (!a.second.count || a.second.cls == b.second.cls) &&
                                     b.ring.fixed_ms <= a.ring.fixed_ms && b.ring.ms_per_byte <= a.ring.ms_per_byte;
                const bool same = b.price == a.price && b.rate == a.rate && b.ring.fixed_ms == a.ring.fixed_ms && b.ring.ms_per_byte == a.ring.ms_per_byte;
                if (as_good && (!same || &b < &a)) needed = false;
            }
            if (needed) kept.push_back(a);
        }
        choices_.push_back(kept);
        shares_.push_back(shares);
    }

    void tabulate_links(const BestLinks& best) {
        const double best_rate = best.best_rate();
        links_.resize(static_cast<std::size_t>(K_) * K_);
        for (int a = 0; a < K_; ++a) {
            for (int b = 0; b < K_; ++b) {
                const double rate = best.transfer_rate(smallest_[a], smallest_[b]);
                LinkSet& set = links_[static_cast<std::size_t>(a) * K_ + b];
                set.insert(rate > 0 ? Link{least_latency_ms_, 1.0 / rate} : Link{kInfinity, 0.0});
                if (best_rate > 0) set.insert_best({least_latency_ms_, 1.0 / best_rate});
            }
        }
    }

    // What the layers in front of a cut take at least, by what the stages behind it use.
    void tabulate_heads() {
        least_channel_.assign(L_, {0.0, 0.0});
        for (int cut = 1; cut < L_; ++cut) {
            ChannelCosts least{kInfinity, kInfinity};
            for (int a = 0; a < K_; ++a) {
                for (int b = 0; b < K_; ++b) {
                    if (choices_[a].empty() || choices_[b].empty()) continue;
                    if (!link(a, b).connected() || !link(b, a).connected()) continue;
                    const ChannelCosts c = channel(a, b, cut);
                    least.there = std::min(least.there, c.there), least.back = std::min(least.back, c.back);
                }
            }
            least_channel_[cut] = least;
        }
        const int num = static_cast<int>(units_.size());
        head_.assign(static_cast<std::size_t>(L_) * num, kInfinity);
        head_forward_.assign(head_.size(), kInfinity);
        // sums over layers [first, l), by l and by l - first, as far as they are needed
        std::vector<std::vector<Step>> from(num);  // here `from` is where it leads
        for (int n = 0; n < num; ++n)
            for (int k = 0; k < K_; ++k)
                for (const Step& step : into_[static_cast<std::size_t>(n) * K_ + k])
                    from[step.from].push_back({n, step.choice});
        for (int n = num; n-- > 0;) {
            control_.check();
            double* head = &head_[static_cast<std::size_t>(n) * L_];
            double* head_forward = &head_forward_[static_cast<std::size_t>(n) * L_];
            head[0] = head_forward[0] = 0.0;
            // Stages of the same target and size differ in speed only.
            for (const Step& step : from[n]) {
                const Choice& choice = *step.choice;
                const double* before = &head_[static_cast<std::size_t>(step.from) * L_];
                const double* before_forward = &head_forward_[static_cast<std::size_t>(step.from) * L_];
                for (int l = 1; l < L_; ++l) {
                    double forward_ms = 0.0, backward_ms = 0.0, parameter_bytes = 0.0;
                    for (int first = l - 1; first >= 0; --first) {
                        forward_ms += in_.forward_ms.value(first), backward_ms += in_.backward_ms.value(first);
                        parameter_bytes += in_.parameter_bytes.value(first);
                        const double f = choice.rate * forward_ms, b = choice.rate * backward_ms;
                        if (M_ * (f + b) + choice.ring.fixed_ms + choice.ring.ms_per_byte * parameter_bytes > limit_ms_) break;
                        const ChannelCosts& c = least_channel_[first];
                        head[l] = std::min(head[l], before[first] + (f + b + c.there + c.back));
                        head_forward[l] = std::min(head_forward[l], before_forward[first] + (f + c.there));
                    }
                }
            }
        }
    }

    const LinkSet& link(int a, int b) const { return links_[static_cast<std::size_t>(a) * K_ + b]; }
    ChannelCosts channel(int a, int b, int cut) const {
        const double least = shares_[a].least * shares_[b].least, even = shares_[a].even * shares_[b].even;
        const double output = in_.output_bytes[cut - 1], gradient = in_.gradient_bytes[cut - 1];
        return {link(a, b).transfer_ms(least * output, even * output), link(b, a).transfer_ms(least * gradient, even * gradient)};
    }

    void fill_front(int node, int k, Work& work, Rows<Suffix>& rows) {
        rows.points.clear();
        for (Front<Suffix>& front : work.fronts) front.clear();
        for (const Step& step : into_[static_cast<std::size_t>(node) * K_ + k]) {
            const Choice& choice = *step.choice;
            const int before_node = step.from;
            const Rows<Beyond>& behind = behind_[static_cast<std::size_t>(before_node) * K_ + k];
            const bool may_end = before_node == 0;
            if (!may_end && !behind.alive()) continue;
            for (int l = 0; l < L_; ++l) {
                if (l % kLayersBetweenChecks == 0) control_.check();
                double head_forward = head_forward_[static_cast<std::size_t>(node) * L_ + l], head = head_[static_cast<std::size_t>(node) * L_ + l];
                if (head == kInfinity) continue;
                if (l) head_forward += least_channel_[l].there, head += least_channel_[l].there + least_channel_[l].back;
                Front<Suffix>& front = work.fronts[l];
                const auto keep = [&](Suffix value) {
                    if (three_) value.forward = value.backward = value.behind = 0.0;
                    if (value.last_backward + head > limit_ms_ || value.last_reduce + head_forward > limit_ms_) return;
                    front.insert(value, {}, limits_.capacity, Overflow::kMerge);
                };
                double forward_ms = 0.0, backward_ms = 0.0, parameter_bytes = 0.0;
                for (int cut = l + 1; cut <= L_; ++cut) {
                    forward_ms += in_.forward_ms.value(cut - 1);
                    backward_ms += in_.backward_ms.value(cut - 1);
                    parameter_bytes += in_.parameter_bytes.value(cut - 1);
                    const StageCosts stage{choice.rate * forward_ms, choice.rate * backward_ms,
                                           choice.ring.fixed_ms + choice.ring.ms_per_byte * parameter_bytes};
                    if (M_ * (stage.forward + stage.backward) + stage.all_reduce + head_forward > limit_ms_) break;
                    if (M_ * (stage.forward + stage.backward) + head > limit_ms_) break;
                    if (cut == L_) {
                        if (may_end) keep(last_stage(stage, M_));
                        break;
                    }
                    if (!behind.alive()) continue;
                    for (int p = behind.begin[cut]; p < behind.begin[cut + 1]; ++p)
                        keep(before(stage, behind.points[p], M_));
                }
            }
        }
        rows.begin.assign(L_ + 1, 0);
        for (int l = 0; l < L_; ++l) {
            rows.begin[l] = static_cast<int>(rows.points.size());
            for (int p = 0; p < work.fronts[l].size(); ++p) rows.points.push_back(work.fronts[l][p].value);
        }
        rows.begin[L_] = static_cast<int>(rows.points.size());
        for (int p = rows.begin[0]; p < rows.begin[1]; ++p) least_ms_[k] = std::min(least_ms_[k], rows.points[p].last_reduce);
    }

    void fill_behind(int node, int k, const std::vector<Rows<Suffix>>& rows, Work& work) {
        for (Front<Beyond>& front : work.behind) front.clear();
        if (choices_[k].empty()) return;
        bool any = false;
        for (int next = 0; next < K_; ++next) {
            const Rows<Suffix>& rest = rows[next];
            if (!rest.alive() || !link(k, next).connected() || !link(next, k).connected()) continue;
            control_.check();
            for (int cut = 1; cut < L_; ++cut) {
                if (rest.begin[cut] == rest.begin[cut + 1]) continue;
                const ChannelCosts c = channel(k, next, cut);
                if (M_ * channel_busy_ms(c, in_.half_duplex) > limit_ms_) continue;
                const std::size_t index = static_cast<std::size_t>(node) * L_ + cut;
                for (int p = rest.begin[cut]; p < rest.begin[cut + 1]; ++p) {
                    const Beyond value = behind_channel(rest.points[p], c, M_, in_.half_duplex);
                    if (value.busy + head_[index] > limit_ms_ || value.last_reduce + head_forward_[index] > limit_ms_) continue;
                    work.behind[cut].insert(value, {}, limits_.capacity, Overflow::kMerge);
                    any = true;
                }
            }
        }
        if (!any) return;
        Rows<Beyond>& result = behind_[static_cast<std::size_t>(node) * K_ + k];
        result.begin.resize(L_ + 2);
        for (int cut = 0; cut <= L_; ++cut) {
            result.begin[cut] = static_cast<int>(result.points.size());
            for (int p = 0; p < work.behind[cut].size(); ++p) result.points.push_back(work.behind[cut][p].value);
        }
        result.begin[L_ + 1] = static_cast<int>(result.points.size());
    }

    const bool three_ = std::getenv("PP_3") != nullptr;
    const Instance& in_;
    const DpLimits limits_;
    Pool& pool_;
    Control& control_;
    const int L_;
    const double M_;
    const double limit_ms_;
    const Prices prices_;
    const std::vector<int> largest_;
    const int K_;
    std::vector<int> smallest_;
    double least_latency_ms_;
    std::vector<std::vector<Choice>> choices_;  // [size]
    std::vector<Shares> shares_;                // [size]
    std::vector<LinkSet> links_;                // [size][size]
    std::vector<ChannelCosts> least_channel_;   // [cut]
    std::vector<double> head_, head_forward_;   // [cut][price]
    std::vector<Rows<Beyond>> behind_;          // [node][size]
    std::vector<double> least_ms_;              // [size]
};

double env(const char* name, double otherwise) {
    const char* value = std::getenv(name);
    return value ? std::atof(value) : otherwise;
}

}  // namespace

double relaxed_bound(const Instance& instance, const std::vector<int>& buckets, int max_levels,
                     const DpLimits& limits, Pool& pool, Control& control) {
    const BestLinks best(instance, max_levels, control);
    Prices prices = make_prices(instance.speed, env("PP_C", 16), env("PP_P", 96), env("PP_G", 1.0));
    RelaxedBound bound(instance, buckets, max_levels, limits, best, std::move(prices), pool, control);
    return bound.run();
}

}  // namespace pipeplan
