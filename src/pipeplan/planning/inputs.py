"""Models and clusters by the name that a person gives: of the zoo, or of a file."""

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from pipeplan import zoo
from pipeplan.cluster import Cluster
from pipeplan.documents.files import read_cluster, read_model
from pipeplan.documents.text import excerpt, nearest
from pipeplan.documents.writing import STANDARD_STREAM
from pipeplan.errors import InputError
from pipeplan.profile import ModelProfile

__all__ = ["resolve_beside", "resolve_cluster", "resolve_model"]


def resolve_model(name: str) -> ModelProfile:
    """The model of that name in the zoo, or in that file."""
    if name in zoo.MODEL_NAMES:
        return zoo.model(name)
    _require_file(name, "model", zoo.MODEL_NAMES)
    return read_model(name)


def resolve_cluster(name: str, seed: int) -> Cluster:
    """The cluster of that name in the zoo, or in that file; the seed is for random clusters."""
    if name in zoo.CLUSTER_NAMES:
        return zoo.cluster(name, seed=seed)
    _require_file(name, "cluster", zoo.CLUSTER_NAMES)
    return read_cluster(name)


def resolve_beside(
    folder: Path,
) -> tuple[Callable[[str], ModelProfile], Callable[[str, int], Cluster]]:
    """The two functions above, for names in a file that lies in `folder`.

    A name that is not in the zoo is a path that starts at the folder, or else at the working
    directory. Each file is read once.
    """

    def path_of(name: str, kind: str) -> str:
        if name == STANDARD_STREAM:
            raise InputError(
                f"{kind}: '-' is standard input, which a sweep cannot use; name a file"
            )
        beside = folder / name
        return str(beside) if _exists(beside) else name

    read_cluster_once = cache(resolve_cluster)

    def model_of(name: str) -> ModelProfile:
        return resolve_model(name if name in zoo.MODEL_NAMES else path_of(name, "model"))

    def cluster_of(name: str, seed: int) -> Cluster:
        if name in zoo.CLUSTER_NAMES:
            return resolve_cluster(name, seed)
        return read_cluster_once(path_of(name, "cluster"), 0)

    return model_of, cluster_of


def _require_file(name: str, kind: str, known: Iterable[str]) -> None:
    if name != STANDARD_STREAM and not _exists(Path(name)):
        near = nearest(name, known)
        raise InputError(f"{kind}: {excerpt(name)} is neither a file nor in the zoo{near}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long a name, or one with a NUL
        return False
