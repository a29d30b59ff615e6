"""Safetensors files: what the package `safetensors` writes is read, and the other way round."""

import io
import json
import os

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from pipeplan.errors import CheckpointError  # noqa: E402
from pipeplan.runtime.checkpoints import tensor_files  # noqa: E402
from pipeplan.runtime.checkpoints.tensor_bytes import DTYPES, read_tensor, source_of  # noqa: E402
from pipeplan.runtime.checkpoints.tensor_files import TensorFile, write_tensor_file  # noqa: E402


def all_kinds():
    """A tensor of each type; shapes of no, one and several elements; not all contiguous."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, dtype in DTYPES.items():
        raw = torch.randint(0, 2, (3, 5), generator=generator).to(torch.float32)
        tensors[f"{name} matrix"] = raw.to(dtype).t()
        tensors[f"{name} scalar"] = torch.ones((), dtype=torch.float32).to(dtype)
        tensors[f"{name} empty"] = torch.empty((0, 4), dtype=dtype)
    tensors["tricky \"'\\ \n é"] = torch.arange(3)
    tensors["conjugate"] = torch.ones(2, dtype=torch.complex64).mul(1j).conj()
    return tensors


def same(first, second):
    first, second = (t.resolve_conj().contiguous() for t in (first, second))
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and first.reshape(-1).view(torch.uint8).tolist()
        == second.reshape(-1).view(torch.uint8).tolist()
        if first.numel()
        else first.shape == second.shape and first.dtype == second.dtype
    )


def test_the_package_reads_what_is_written_here(tmp_path):
    tensors, path = all_kinds(), tmp_path / "ours.safetensors"
    with open(path, "wb") as file:
        sources = [source_of(name, tensor) for name, tensor in tensors.items()]
        written = write_tensor_file(file, sources, {"format": "pt"})
    assert written.num_bytes == path.stat().st_size
    read = safetensors_torch.load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same(read[name], tensor), name


def test_what_the_package_writes_is_read_here(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", 7)  # pieces that end inside elements
    tensors = {name: tensor.resolve_conj().contiguous() for name, tensor in all_kinds().items()}
    path = tmp_path / "theirs.safetensors"
    safetensors_torch.save_file(tensors, path, {"format": "pt"})
    with TensorFile(path) as file:
        assert file.entries.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert same(read_tensor(file, name, None), tensor), name


def document(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


HOSTILE = {
    "nothing": (b"", "ends inside its header"),
    "short length": (b"\1\0\0", "ends inside its header"),
    "length beyond the end": (document({}, length=1 << 40), "ends inside its header"),
    "length of all bits": (document({}, length=(1 << 64) - 1), "ends inside its header"),
    "no JSON": (document(b"{"), "is not JSON"),
    "no UTF-8": (document(b'{"\xff": 1}'), "is not UTF-8"),
    "a list": (document([]), "is no object"),
    "too deep": (document(b"[" * 100_000), "is nested too deeply"),
    "brackets without end": (
        document(b'{"a": [' + b"[]," * 2_000_001 + b"]}"),
        "objects and lists",
    ),
    "a key twice": (
        document(b'{"a": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}, "a": 1}', bytes(8)),
        "'a': stands twice",
    ),
    "digits without end": (document(b'{"a": ' + b"9" * 100_000 + b"}"), "too many digits"),
    "NaN": (document(b'{"a": NaN}'), "holds NaN"),
    "no entry": (document({"a": 3}), "'a' needs exactly the fields"),
    "a field too many": (document({"a": entry(code="x")}, bytes(8)), "needs exactly the fields"),
    "unknown type": (document({"a": entry("F99")}, bytes(8)), "the type 'F99'"),
    "type of an object": (document({"a": entry({})}, bytes(8)), "the type {}"),
    "negative shape": (document({"a": entry(shape=(-2,))}, bytes(8)), "'a' has the shape"),
    "huge shape": (document({"a": entry(shape=(2**63, 0))}, b""), "'a' has the shape"),
    "true as a size": (document({"a": entry(shape=(True, 2))}, bytes(8)), "'a' has the shape"),
    "fraction": (document({"a": entry(shape=(2.0,))}, bytes(8)), "'a' has the shape"),
    "product that overflows 64 bits": (
        document({"a": entry(shape=(2**62, 2**62))}, bytes(8)),
        "'a' has 8 bytes; its shape",
    ),
    "shape against bytes": (document({"a": entry(shape=(3,))}, bytes(8)), "'a' has 8 bytes"),
    "offsets backwards": (document({"a": entry(offsets=(8, 0))}, bytes(8)), "data_offsets"),
    "three offsets": (document({"a": entry(offsets=(0, 4, 8))}, bytes(8)), "data_offsets"),
    "offset below 0": (document({"a": entry(offsets=(-8, 0))}, bytes(8)), "data_offsets"),
    "overlap": (
        document({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
        "'b' overlaps another tensor",
    ),
    "hole": (document({"a": entry(offsets=(4, 12))}, bytes(12)), "'a' begins behind a hole"),
    "truncated": (document({"a": entry()}, bytes(7)), "is truncated: tensors need 8 bytes"),
    "bytes behind": (document({"a": entry()}, bytes(9)), "holds bytes of no tensor"),
    "metadata": (document({"__metadata__": {"a": 1}}), "__metadata__ is not made of texts"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_in_one_line(tmp_path, case):
    data, reason = HOSTILE[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        TensorFile(path)
    message = str(caught.value)
    assert reason in message
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < 700


def test_a_header_of_a_gigabyte_is_refused_unread(tmp_path):
    path = tmp_path / "sparse.safetensors"
    with open(path, "wb") as file:
        file.write((10**9).to_bytes(8, "little"))
        file.truncate(2 * 10**9)  # holes take no space
    with pytest.raises(CheckpointError, match=r"a header of 1,000,000,000 bytes"):
        TensorFile(path)


def test_only_regular_files_are_opened(tmp_path):
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    real.write_bytes(document({"a": entry()}, bytes(8)))
    link.symlink_to(real)
    os.mkfifo(pipe)  # opening it would wait for ever
    with pytest.raises(CheckpointError, match="link: is a link"):
        TensorFile(link)
    with TensorFile(link, follow_links=True) as file:
        assert file.entries.keys() == {"a"}
    for path in (pipe, tmp_path, "/dev/zero"):
        with pytest.raises(CheckpointError, match="is not a regular file"):
            TensorFile(tmp_path / path, follow_links=True)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        TensorFile(tmp_path / "none")


def test_tensors_that_no_file_holds_are_refused_by_name():
    for tensor, reason in (
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (torch.eye(2).to_sparse(), "no dense tensor"),
        (torch.empty(2, device="meta"), "no dense tensor"),
    ):
        with pytest.raises(CheckpointError, match=f"'w': .*{reason}"):
            source_of("w", tensor)
    with pytest.raises(CheckpointError, match="'__metadata__' cannot be the name"):
        write_tensor_file(io.BytesIO(), [source_of("__metadata__", torch.ones(1))])
