"""Models and clusters by a name from the zoo or by the path of a file."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from pipeplan import zoo
from pipeplan.cluster import Cluster
from pipeplan.documents.files import read_cluster, read_model
from pipeplan.documents.text import excerpt, nearest
from pipeplan.documents.writing import STANDARD_STREAM
from pipeplan.errors import InputError
from pipeplan.planning.same_file import are_same_file
from pipeplan.profile import ModelProfile

__all__ = ["input_files", "resolve_beside", "resolve_cluster", "resolve_model"]


FILE_SUFFIXES = (".json", ".yaml", ".yml")


def input_files(model: str, cluster: str) -> dict[str, str]:
    """The names that are files, not names of the zoo, as help texts call them: MODEL, CLUSTER."""
    names = {"MODEL": (model, zoo.MODEL_NAMES), "CLUSTER": (cluster, zoo.CLUSTER_NAMES)}
    return {kind: name for kind, (name, known) in names.items() if name not in known}


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
    folder: Path, outputs: Sequence[Path] = ()
) -> tuple[Callable[[str], ModelProfile], Callable[[str, int], Cluster]]:
    """The two functions above, for names in a file that lies in `folder`.

    A name that is not in the zoo is a path that starts at the folder, or else at the working
    directory. Each file is read once, and none of the outputs may be among them.
    """

    def path_of(name: str, kind: str) -> str:
        if name == STANDARD_STREAM:
            raise InputError(
                f"{kind}: '-' is standard input, which a sweep cannot use; name a file"
            )
        beside = folder / name
        path = beside if _exists(beside) else Path(name)
        for output in outputs:
            if are_same_file(path, output):
                raise InputError(
                    f"output: {excerpt(str(output))} is the same file as the {kind}"
                    f" {excerpt(name)}; choose another output"
                )
        return str(path)

    read_cluster_once = cache(resolve_cluster)

    def model_of(name: str) -> ModelProfile:
        return resolve_model(name if name in zoo.MODEL_NAMES else path_of(name, "model"))

    def cluster_of(name: str, seed: int) -> Cluster:
        if name in zoo.CLUSTER_NAMES:
            return resolve_cluster(name, seed)
        return read_cluster_once(path_of(name, "cluster"), 0)

    return model_of, cluster_of


def _require_file(name: str, kind: str, known: Iterable[str]) -> None:
    if name != STANDARD_STREAM and not _looks_like_path(name) and not _exists(Path(name)):
        near = nearest(name, known)
        raise InputError(f"{kind}: {excerpt(name)} is neither a file nor in the zoo{near}")


def _looks_like_path(name: str) -> bool:
    """Whether only a file can be meant; if it is missing, the reader says so."""
    return "/" in name or "\\" in name or Path(name).suffix.lower() in FILE_SUFFIXES


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long a name, or one with a NUL
        return False
