// Random numbers that are the same on every machine.
#pragma once
#include <cstdint>

namespace pipeplan {

// xoshiro-style generators differ between standard libraries; this one is the same everywhere.
class Random {
  public:
    explicit Random(std::uint64_t seed) : state_(seed) {}
    std::uint64_t next() {  // splitmix64
        std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
        return z ^ (z >> 31);
    }
    int below(int n) {  // by a product: a division takes longer than all the rest
        return static_cast<int>(((next() >> 32) * static_cast<std::uint64_t>(n)) >> 32);
    }
    double unit() { return (static_cast<double>(next() >> 11) + 0.5) * 0x1.0p-53; }

  private:
    std::uint64_t state_;
};

}  // namespace pipeplan
