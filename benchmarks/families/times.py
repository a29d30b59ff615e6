"""How long a default plan takes: several stages a device and cut backwards included.

Zoo models on clusters of 8, 16 and 64 devices, with shared network cards and without, within the
memory of the devices and without limits. Wall time with all processors, and processor time.
"""

import argparse
import time

from pipeplan import zoo
from pipeplan.planning.door import plan

CLUSTERS = {
    8: ("1x8-pcie", "4x2-10g", "4x2-10g-no-shared-card", "random-8"),
    16: ("2x8-100g", "2x8-100g-no-shared-card"),
    64: ("8x8-100g", "8x8-100g-no-shared-card"),
}
MODELS = ("bert-large", "gpt2-xl", "resnet152", "vgg19")
GOALS_S = {8: 0.5, 16: 1.0, 64: 5.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="*", default=list(CLUSTERS))
    parser.add_argument("-m", type=int, nargs="*", default=[8, 32])
    given = parser.parse_args()
    plan(zoo.model("vgg19"), zoo.cluster("4x2-10g"), 4)  # imports
    for size in given.devices:
        times = []
        for model in MODELS:
            for cluster in CLUSTERS[size]:
                for microbatches in given.m:
                    for limits in ({}, {"ignore_memory": True}):
                        profile, where = zoo.model(model), zoo.cluster(cluster)
                        begin, began = time.perf_counter(), time.process_time()
                        plan(profile, where, microbatches, **limits)
                        wall_s = time.perf_counter() - begin
                        processor_s = time.process_time() - began
                        name = f"{model} {cluster} M {microbatches} {' '.join(limits)}"
                        times.append((wall_s, processor_s, name))
        times.sort(reverse=True)
        wall_s, processor_s, name = times[0]
        num_over = sum(wall > GOALS_S[size] for wall, _, _ in times)
        print(
            f"{size} devices, {len(times)} plans: mean {sum(t[0] for t in times) / len(times):.2f}"
            f" s, longest {wall_s:.2f} s ({processor_s:.2f} of processor, {name});"
            f" {num_over} above {GOALS_S[size]:g} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
