// Global minimum cut of a weighted undirected graph.
//
// Stoer and Wagner, "A simple min-cut algorithm", J. ACM 44 (1997). There are V - 1 phases. A phase
// adds the vertices one by one, always the one most tightly connected to those added before. The
// last vertex of a phase gives a cut that separates it from all others. Then it is merged into the
// vertex before it. O(V^3), ties by lowest index.
#include <vector>

#include "kernels.hpp"

namespace pipeplan {

Cut min_cut(const double* weights, int num_vertices, Control& control) {
    const int V = num_vertices;
    std::vector<double> weight(weights, weights + static_cast<std::size_t>(V) * V);
    for (int v = 0; v < V; ++v) weight[static_cast<std::size_t>(v) * V + v] = 0.0;  // no loops
    std::vector<std::vector<int>> members(V);  // the vertices merged into each
    std::vector<int> alive(V);
    for (int v = 0; v < V; ++v) {
        members[v] = {v};
        alive[v] = v;
    }
    Cut best{kInfinity, std::vector<std::uint8_t>(V, 0)};
    std::vector<double> tightness(V);
    std::vector<std::uint8_t> added(V);
    while (alive.size() > 1) {
        for (int v : alive) tightness[v] = 0.0, added[v] = 0;
        int before = -1, last = -1;
        for (std::size_t step = 0; step < alive.size(); ++step) {
            if (step % 64 == 0) control.check();
            int next = -1;
            for (int v : alive)
                if (!added[v] && (next < 0 || tightness[v] > tightness[next])) next = v;
            added[next] = 1;
            before = last;
            last = next;
            const double* row = &weight[static_cast<std::size_t>(next) * V];
            for (int v : alive) tightness[v] += row[v];
        }
        const double cut = tightness[last];  // the diagonal is zero, so only edges count
        if (cut < best.weight) {
            best.weight = cut;
            best.side.assign(V, 0);
            for (int v : members[last]) best.side[v] = 1;
        }
        for (int v : alive) {
            if (v == before || v == last) continue;
            const double merged = weight[static_cast<std::size_t>(before) * V + v] +
                                  weight[static_cast<std::size_t>(last) * V + v];
            weight[static_cast<std::size_t>(before) * V + v] = merged;
            weight[static_cast<std::size_t>(v) * V + before] = merged;
        }
        weight[static_cast<std::size_t>(before) * V + before] = 0.0;
        members[before].insert(members[before].end(), members[last].begin(), members[last].end());
        std::vector<int> rest;
        for (int v : alive)
            if (v != last) rest.push_back(v);
        alive = rest;
    }
    return best;
}

}  // namespace pipeplan
