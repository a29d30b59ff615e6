// List scheduling on chains of stages, some of which share a group of devices.
#pragma once
#include <vector>

#include "chain.hpp"
#include "chain_rings.hpp"
#include "control.hpp"
#include "random.hpp"

namespace pipeplan {

// How a list schedule is made: its keys, how many microbatches a stage may hold, and whether groups
// wait for blocks whose input is on its way.
struct ChainSettings {
    double ratio = 1.7;     // how much earlier a microbatch's way counts than the microbatches before it;
                            // negative: keys of a pattern that repeats, with so much slack
    double delay = 3.0;     // rounds by which weight gradients wait
    double window = 0.0;    // a stage holds so many times what its way takes; 0: as many as fit
    double extra = 0.0;     // and so many microbatches more
    double patience = 1.0;  // 0: a group takes what is there, 1: it waits for what comes soon
    double bend[4] = {1.0, 1.0, 1.0, 1.0};  // of the ratio: forwards of the first half of the stages, of
                                            // the second one, backwards of the second one, of the first
};

// A pattern that every microbatch repeats a round after the one before it.
struct ChainRound {
    double slack = 0.0;              // of a round
    double waits = 0.0;              // the probability that a block waits for a later place in the round
    double stretch[2] = {1.0, 1.0};  // of the way through the first half of the stages and the second
};

// Settings drawn at random, anew or near others.
ChainSettings random_settings(Random& random);
ChainSettings near_settings(const ChainSettings& settings, Random& random);

// Runs list schedules of one chain after the other. It keeps its arrays, because a planner makes tens
// of thousands of schedules.
class ChainScheduler {
  public:
    ChainScheduler() = default;

    // Takes another chain, which has to live as long as it is used.
    void take(const Chain& chain);

    // One list schedule. Of the blocks that could start before the first of them would end, the one
    // with the least key runs; `patience` 0 looks only at those that are there already, 1 at all.
    // No stage holds more microbatches than its entry of `most`; empty: as many as memory allows.
    // Returns the iteration time; infinite if a group cannot hold one microbatch of all its stages, or
    // as soon as the time is seen to be above `limit_ms`.
    double run(const std::vector<double>& keys, double patience, const std::vector<int>& most,
               double limit_ms = kInfinity);

    // The same with these settings.
    double run(const ChainSettings& settings, double limit_ms = kInfinity);

    // The latest starts of the last run's blocks that do not make it longer.
    void latest_starts(std::vector<double>& keys);
    // The best of about so many schedules: under settings that did well elsewhere, under settings near
    // the best of these, with keys from the latest starts of the best schedule so far, and by exchanging
    // single blocks (ChainSwaps).
    double search(int num_runs, double enough_ms, Random& random, Control& control);

    // Of the last run, or of the best one of the last search.
    const std::vector<int>& order() const { return order_; }  // blocks, in the order of decisions
    const std::vector<int>& best_order() const { return best_order_; }
    double best_ms() const { return best_ms_; }
    long num_runs() const { return num_runs_; }
    double round_ms() const { return round_ms_; }

  private:
    struct Choice {
        double start_ms;
        int stage, kind, block;
    };
    // Keys: [stages][kinds][microbatches].
    // The way of one microbatch, stretched, once in every round.
    void path_keys(const ChainSettings& settings, std::vector<double>& keys) const;
    // A pattern that repeats in every round without two blocks of a group at once, as far as it goes;
    // blocks wait for another place at random.
    void round_keys(const ChainRound& settings, std::vector<double>& keys, Random* random = nullptr) const;
    // The best order of some such patterns, kept to the letter; it may be better than all before.
    void try_rounds(int num_tries, Random& random, Control& control);
    void windows(const ChainSettings& settings, std::vector<int>& most) const;
    bool admits(int p) const;
    void promise(int g);
    // Lists what the group could run next, and returns the first end of any of it.
    double look(int g);
    Choice choose(int g, const std::vector<double>& keys, double patience) const;
    int commit(int g, const Choice& choice);
    double finish();

    // Where a search stands: the schedule that it goes on from.
    struct Walk {
        double ms = kInfinity, patience = 1.0;
        std::vector<double> keys, starts;  // latest and actual starts
        std::vector<int> most, critical;   // critical: blocks that cannot start later
    };
    void take_step(Walk& walk, double patience, const std::vector<int>& most);
    void shift_keys(const Walk& walk, Random& random, std::vector<double>& keys) const;

    const Chain* chain_ = nullptr;
    std::vector<int> stage_begin_, stages_;      // the stages of each group, in the order of the chain
    std::vector<int> channel_there_, channel_back_;  // [P], -1 inside a group
    int num_channels_ = 0;
    double round_ms_ = 0.0;                      // the least time between two microbatches
    std::vector<double> way_forward_, way_backward_;  // [P], when one microbatch gets there alone
    std::vector<double> reserved_, group_bytes_, limit_bytes_;  // [P], [G], [G]

    std::vector<double> free_ms_, end_ms_, used_bytes_;   // [G]
    std::vector<double> promised_bytes_, first_start_ms_, idle_ms_, load_ms_;  // [G]
    std::vector<Choice> choices_;                         // of each group, at three times its stages
    std::vector<int> num_choices_;                        // [G]
    std::vector<double> channel_ms_;                      // [channels]
    std::vector<double> forward_there_ms_, backward_there_ms_;  // [P][M], infinite: not known
    std::vector<int> num_forward_, num_backward_, num_weight_;  // [P]
    std::vector<double> last_end_ms_;                     // [P]
    std::vector<int> order_, best_order_;
    std::vector<double> start_ms_;                        // [blocks]
    std::vector<double> latest_, keys_, trial_;
    ChainRings rings_;
    const std::vector<int>* most_ = nullptr;
    std::vector<int> own_most_, trial_most_;
    double best_ms_ = kInfinity, last_ms_ = kInfinity;
    long num_runs_ = 0;
};

}  // namespace pipeplan
