// Improving the orders of a chain's groups, block by block.
#pragma once
#include <utility>
#include <vector>

#include "chain.hpp"
#include "chain_rings.hpp"
#include "control.hpp"
#include "random.hpp"

namespace pipeplan {

class ChainSwaps {
  public:
    // The chain has to live as long as this; its links carry both directions at once.
    explicit ChainSwaps(const Chain& chain);

    // The iteration time of an order (blocks in the order of decisions); infinite if it deadlocks,
    // needs more room than there is, or is seen to take longer than the limit.
    double time_of(const std::vector<int>& order, double limit_ms = kInfinity);

    // Walks from this order (blocks in the order of decisions) for so many steps, and leaves the best
    // one in it. Returns its iteration time. Ends early at `enough_ms`, and at the deadline.
    double improve(std::vector<int>& order, long num_steps, double enough_ms, Random& random,
                   Control& control);

  private:
    // A block in a group's sequence: stage and kind; the microbatch is how often that came before.
    using Token = int;
    struct Place {
        int group, index;
    };
    struct Result {  // where a block's result goes
        int receiver, channel;  // -1: nowhere; inside the group
        double ms;
    };

    double length(Token token) const;
    Result result_of(Token token, int microbatch) const;
    int first_over(int g) const;
    bool make_room(int g);
    double run(double limit_ms);
    bool run_group(int g);
    double finish();
    void follow_back(Random& random);
    bool change(Random& random);
    bool move_one(Random& random);
    bool shift_way(Random& random);
    void push_later(int block, double start_ms);
    void pull_earlier(int block, double start_ms);
    bool sort_groups();
    void undo();

    const Chain& chain_;
    std::vector<int> channel_there_, channel_back_;  // [P], -1 inside a group
    int num_channels_ = 0;
    std::vector<std::vector<int>> stages_;           // [G]
    std::vector<std::vector<Token>> sequence_;       // [G]
    std::vector<double> load_ms_;                    // [G], of a microbatch

    // Of the last run.
    std::vector<int> next_;           // [G], how far each sequence has come
    std::vector<int> count_;          // [tokens]
    std::vector<double> free_ms_, idle_ms_;  // [G]
    std::vector<int> group_block_;    // [G], what it ran last
    std::vector<double> channel_ms_;  // [channels]
    std::vector<int> channel_block_;  // [channels], whose result it carried last
    std::vector<double> there_ms_, start_ms_;  // [blocks]; when the input is there, infinite: not known
    std::vector<int> sender_;         // [blocks], whose result came over a channel; -1: none
    std::vector<int> before_;         // [blocks], what ran before on the group
    std::vector<int> waited_for_;     // [blocks], whose result its own one waited for; -1: none
    std::vector<int> index_;          // [blocks], its place in the sequence
    std::vector<double> end_ms_;      // [P], of the stage's last block
    std::vector<int> last_of_stage_;  // [P]
    ChainRings rings_;
    std::vector<int> order_, order_now_, waiting_;
    int last_block_ = -1;             // the iteration ends with it, or with its all-reduce

    std::vector<Place> critical_;  // blocks of the longest path that wait for the one before them
    std::vector<int> changed_;             // groups
    std::vector<std::vector<Token>> kept_;  // [G], the sequences of these groups before the change
    double length_ms_ = 0.0;       // of a block, in the mean
    std::vector<double> now_ms_, wanted_ms_;  // [blocks], starts of the current order; where a shift wants them
    std::vector<char> is_shifted_;  // [G]
    std::vector<std::pair<double, Token>> sorted_;
};

}  // namespace pipeplan
