// Validation of costs and orders, before the event loop runs on them.
#include "pipeline.hpp"

#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "sizes.hpp"

namespace pipeplan {
namespace {

void require_times(const std::vector<double>& times, std::size_t size, const char* name) {
    if (times.size() != size)
        throw std::invalid_argument(std::string(name) + ": has " + std::to_string(times.size()) +
                                    " values, not " + std::to_string(size));
    for (double ms : times)
        if (!(ms >= 0 && ms <= kMostMs))
            throw std::invalid_argument(std::string(name) + ": " + std::to_string(ms) +
                                        " is no finite time >= 0");
}

}  // namespace

PipelineCosts::PipelineCosts(std::vector<double> forward_ms, std::vector<double> backward_ms,
                             std::vector<double> send_forward_ms,
                             std::vector<double> send_backward_ms,
                             std::vector<double> all_reduce_ms, bool half_duplex,
                             std::vector<int> caps, std::shared_ptr<const PlanFlows> flows)
    : forward_ms_(std::move(forward_ms)), backward_ms_(std::move(backward_ms)),
      send_forward_ms_(std::move(send_forward_ms)), send_backward_ms_(std::move(send_backward_ms)),
      all_reduce_ms_(std::move(all_reduce_ms)), half_duplex_(half_duplex), caps_(std::move(caps)),
      flows_(std::move(flows)) {
    const std::size_t S = forward_ms_.size();
    if (S < 1 || S > static_cast<std::size_t>(std::numeric_limits<int>::max() / 8))
        throw std::invalid_argument("forward_ms: a pipeline has at least one stage");
    require_times(forward_ms_, S, "forward_ms");
    require_times(backward_ms_, S, "backward_ms");
    require_times(send_forward_ms_, S - 1, "send_forward_ms");
    require_times(send_backward_ms_, S - 1, "send_backward_ms");
    require_times(all_reduce_ms_, S, "all_reduce_ms");
    if (!caps_.empty() && caps_.size() != S) throw std::invalid_argument("caps: one for each stage");
    for (int cap : caps_)
        if (cap < 1) throw std::invalid_argument("caps: are at least 1");
    if (flows_ && flows_->num_stages() != num_stages())
        throw std::invalid_argument("flows: are of a plan with another number of stages");
}

CostsView PipelineCosts::view(long num_microbatches) const {
    if (num_microbatches < 1 || num_microbatches > kMaxMicrobatches ||
        forward_ms_.size() * num_microbatches > kMaxBlocks)
        throw std::invalid_argument("num_microbatches: " + std::to_string(num_microbatches) +
                                    " is not at least 1, or too many for the stages");
    return {num_stages(),
            static_cast<int>(num_microbatches),
            forward_ms_.data(),
            backward_ms_.data(),
            send_forward_ms_.data(),
            send_backward_ms_.data(),
            all_reduce_ms_.data(),
            half_duplex_,
            caps_.empty() ? nullptr : caps_.data(),
            flows_.get()};
}

void require_complete(const CostsView& costs, const Code* codes) {
    const long M = costs.num_microbatches;
    std::vector<std::uint8_t> seen(2 * M);
    for (int n = 0; n < costs.num_stages; ++n) {
        std::fill(seen.begin(), seen.end(), 0);
        for (long k = 0; k < 2 * M; ++k) {
            const long code = codes[n * 2 * M + k];
            if (code < -M || code >= M || seen[code + M])
                throw std::invalid_argument("codes: stage " + std::to_string(n) + " has " +
                                            std::to_string(code) + " twice or out of range");
            seen[code + M] = 1;
        }
    }
}

}  // namespace pipeplan
