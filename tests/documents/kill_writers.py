"""Kills a writer at random moments; a separate program, because it forks.

For each kill a forked child writes two documents in turn to one path until it is killed. Then the
path holds one of the two, whole, and the next write leaves no other file beside it.
"""

import random
import sys
from pathlib import Path

from killing import kill_while
from pipeplan import zoo
from pipeplan.documents import files
from pipeplan.planning.door import plan


def writers() -> dict:
    """For each kind of file, two ways to fill it."""
    models = [zoo.model("vgg19"), zoo.model("bert-large")]
    clusters = [zoo.cluster("4x2-10g"), zoo.cluster("8x8-100g")]
    plans = [plan(models[1], clusters[0], m, "spp", num_threads=1) for m in (4, 64)]
    return {
        "model": [lambda path, made=made: files.write_model(made, path) for made in models],
        "cluster": [lambda path, made=made: files.write_cluster(made, path) for made in clusters],
        "plan": [lambda path, made=made: files.write_plan(made, path) for made in plans],
    }


def main(folder: Path, num_kills: int) -> None:
    rng = random.Random(0)
    num_parts = 0
    for kind, write in writers().items():
        path = folder / f"{kind}.json"

        def write_all(write=write, path=path) -> None:
            for each in write:
                each(path)

        whole = []
        for each in write:
            each(path)
            whole.append(path.read_bytes())
        for _ in range(num_kills):
            kill_while(write_all, rng.uniform(0, 0.01))
            assert path.read_bytes() in whole, kind
            num_parts += len(list(folder.glob(".*.part")))
            write[0](path)
            assert not list(folder.glob(".*.part")), kind
        path.unlink()
    print(num_parts)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
