"""A fuzzer of artifacts: takes good ones and makes hostile ones, most with hashes that are right.

Each attack gets a copy of a good artifact as a folder, or as a single file, and spoils it. All must be refused, except
those of ``MAY_BE_GOOD``: what they make may be another good artifact.

Run as a script, it loads artifacts under a limit of memory and with an audit hook that ends the process if code is run:
``python -m tests.integration.hostile_artifacts FOLDER`` prints what became of each as a line of JSON.
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import random
import resource
import shutil
import stat
import struct
import sys
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

import knowable as kn
from knowable.core.storage import tensor_file
from knowable.core.storage.files import Files, pack
from tests.core.artifacts import put_tensors, rewrite, seal_outside, sealed, tensor_bytes

MEMORY = 1536 * 1024 * 1024  # bytes more than the process has when it begins
SECONDS = 10.0  # of CPU, for one artifact
RAN = "knowable-was-fooled"  # the name of a file that hostile code would make

# --- attacks on a folder ---------------------------------------------------------------------------------------------


def _any_file(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted(each for each in folder.rglob("*") if each.is_file()))


def _manifest(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted(folder.rglob("manifest.json")))


def truncated(rng: random.Random, folder: Path) -> None:
    file = _any_file(rng, folder)
    file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])


def flipped(rng: random.Random, folder: Path) -> None:
    file = rng.choice(sorted(folder.rglob("*.safetensors")))
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 1, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if bytes(data) == file.read_bytes():
        data[0] ^= 1
    file.write_bytes(data)


def removed(rng: random.Random, folder: Path) -> None:
    _any_file(rng, folder).unlink()


def appended(rng: random.Random, folder: Path) -> None:
    file = _any_file(rng, folder)
    file.write_bytes(file.read_bytes() + rng.randbytes(rng.randrange(1, 100)))


class _Payload:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {RAN}",)


def _pickles(rng: random.Random) -> bytes:
    stream = io.BytesIO()
    torch.save({"weight": _Payload()}, stream)
    return rng.choice([pickle.dumps(_Payload()), stream.getvalue()])


def pickled(rng: random.Random, folder: Path) -> None:
    """A pickle in the place of a file; where it is that of tensors, with a hash that is right."""
    file = _any_file(rng, folder)
    if file.suffix == ".safetensors" and rng.random() < 0.7:
        put_tensors(file.parent, _pickles(rng))
    else:
        file.write_bytes(_pickles(rng))


def linked(rng: random.Random, folder: Path) -> None:
    """A file, or a folder inside, that is a link to a good one."""
    inside = [each for each in sorted(folder.rglob("*")) if each.is_file() or each.is_dir()]
    chosen, moved = rng.choice(inside), folder.parent / f"{folder.name}-moved"
    shutil.move(chosen, moved)
    chosen.symlink_to(rng.choice([moved, Path("/dev/zero"), Path("/etc/passwd"), chosen]))


def piped(rng: random.Random, folder: Path) -> None:
    file = _any_file(rng, folder)
    file.unlink()
    if rng.random() < 0.5:
        os.mkfifo(file)
    else:
        file.mkdir()


# --- attacks on the tensors: size and hashes in the manifest are right -----------------------------------------------

_NO_COUNTS = [10**15, -1, 2**63, 2**64 + 3, 1.5, "3", None, True, [], float("nan"), float("inf"), 10**4000]


def _tensors(rng: random.Random, folder: Path) -> tuple[Path, dict[str, Any], bytes]:
    file = rng.choice(sorted(folder.rglob("*.safetensors")))
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + length])
    head.pop("__metadata__", None)
    return file.parent, head, data[8 + length :]


def _full(head: dict[str, Any], rng: random.Random) -> str:
    """The name of a tensor with some numbers in it."""
    return rng.choice([name for name, about in head.items() if about["data_offsets"][0] < about["data_offsets"][1]])


def wrong_head(rng: random.Random, folder: Path) -> None:
    """One entry of the head of a file of tensors is wrong."""
    place, head, data = _tensors(rng, folder)
    about = head[_full(head, rng)]
    first, last = about["data_offsets"]
    kind = rng.randrange(9)
    if kind == 0:
        about["shape"] = [*about["shape"], rng.choice([value for value in _NO_COUNTS if value is not True])]
    elif kind == 1:
        about["data_offsets"] = rng.choice([[first, rng.choice(_NO_COUNTS)], [rng.choice(_NO_COUNTS), last], [last]])
    elif kind == 2:
        about["dtype"] = rng.choice(["F64" if about["dtype"] != "F64" else "F32", "object", 3, None, "U4", "BOOL"])
    elif kind == 3:
        about["data_offsets"] = [first + 8, last + 8] if rng.random() < 0.5 else [first - 8, last - 8]
    elif kind == 4:
        about["shape"] = rng.choice([[10**15], [2**40, 2**40], [10**15, 0], "abc", None, [[3]], [1] * 10_000])
    elif kind == 5:
        head["x"] = {"dtype": about["dtype"], "shape": about["shape"], "data_offsets": [first, last]}  # overlap
    elif kind == 6:
        del about[rng.choice(["dtype", "shape", "data_offsets"])]
    elif kind == 7:
        data = data + bytes(rng.randrange(1, 100))
    else:
        head["x"] = rng.choice([3, None, [], "F32", {}])
    put_tensors(place, tensor_bytes(head, data))


def no_head(rng: random.Random, folder: Path) -> None:
    place, _, data = _tensors(rng, folder)
    deep = b"[" * 200_000 + b"]" * 200_000
    texts = [b"", b"{", b"[]", b"null", b"\xff\xfe", deep, b'{"a":' * 5000, b"[" + b"0," * 5_000_000 + b"0]"]
    whole = tensor_bytes(rng.choice(texts), data)
    if rng.random() < 0.4:
        whole = struct.pack("<Q", rng.choice([2**63, 2**64 - 1, 10**15, len(data) + 10**6])) + data
    put_tensors(place, whole)


def other_values(rng: random.Random, folder: Path) -> None:
    """A tensor has another shape, another dtype, is not there, or is not finite."""
    names = [
        each
        for each in sorted(folder.rglob("*.safetensors"))
        if "certificate" not in str(each) or each.parent != folder
    ]
    file = rng.choice(names)
    tensors = load_file(file)
    own = [name for name in tensors if name.startswith("posterior.") and tensors[name].dim()]
    name = rng.choice([name for name in own if name != "posterior.log_weights"])  # a chain has no use for them
    kind = rng.randrange(4)
    if kind == 0 and tensors[name].is_floating_point():
        tensors[name] = torch.full_like(tensors[name], rng.choice([torch.nan, torch.inf]))
    elif kind == 1:
        del tensors[name]
    elif kind == 2:
        tensors[name] = tensors[name].repeat(*[3] * tensors[name].dim())
    else:
        tensors[name] = torch.cat([tensors[name].flatten(), torch.zeros(1)])
    put_tensors(file.parent, save(tensors))


# --- attacks on the manifest: its hash is right ----------------------------------------------------------------------

_NASTY = [
    *(10**15, -1, 2**70, 0, 1.5, "", "x" * 100_000, "../../etc/passwd", None, True, [], {}, [[]], float("nan")),
    *(
        float("inf"),
        -1e308,
        "__import__('os').system('x')",
        "os.system",
        "/etc/passwd",
        ["a"] * 1000,
        {"name": "Model"},
    ),
]


def wrong_entry(rng: random.Random, folder: Path) -> None:
    """Format, kind, or the entry of the tensors."""
    file = _manifest(rng, folder)
    body = json.loads(file.read_text())["body"]
    kind = rng.randrange(4)
    if kind == 0:
        rewrite(file, format=rng.choice([3, 99, 10**30, "2", 2.0, float("nan"), True, [], 0, -1]))
    elif kind == 1:
        rewrite(file, kind=rng.choice(["checkpoint", "", 3, [], {"a": 1}, "estimator", "x" * 10_000]))
    elif kind == 2:
        names = [
            "../x",
            "/etc/passwd",
            "..",
            "",
            "tensors-0.safetensors",
            "a\x00b",
            "C:\\x",
            "./" + body["tensors"]["name"],
        ]
        outside = folder.parent / "tensors-0123456789abcdef.safetensors"
        shutil.copy(file.parent / body["tensors"]["name"], outside)
        name = rng.choice([*names, f"../{outside.name}", str(outside), 3, None])
        rewrite(file, tensors={**body["tensors"], "name": name})
    else:
        rewrite(file, tensors={**body["tensors"], "bytes": rng.choice([v for v in _NO_COUNTS if v != 10**4000])})


def no_manifest(rng: random.Random, folder: Path) -> None:
    file = _manifest(rng, folder)
    deep: Any = "[" * 100_000 + "]" * 100_000
    many = '{"sha256": "", "body": [' + "0," * 5_000_000 + "0]}"
    whole = rng.choice(
        ["", "{", "[]", "null", "3", '{"body": 3}', deep, many, '{"body":' * 50_000, json.dumps(sealed([])),
         json.dumps(sealed({})), json.dumps(sealed({"format": 2, "kind": "posterior"})), "\ud800", "1" * 10_000]
    )  # fmt: skip
    file.write_bytes(whole.encode("utf-8", "surrogatepass"))


def huge_network(rng: random.Random, folder: Path) -> None:
    """A network that would take all memory, or all time."""
    if (folder / "estimator.json").exists():
        content = _content(folder / "estimator.json")
        size = rng.choice([10**6, 10**15, -1, float("nan"), "3", None, True, [3]])
        content["network"][rng.choice(["width", "depth", "inputs", "outputs"])] = size
        rewrite(folder / "estimator.json", content=content)
        return
    file = next(each for each in sorted(folder.rglob("manifest.json")) if "network" in _content(each))
    content = _content(file)
    big = {"layer": "Linear", "arguments": {"in_features": 10**5, "out_features": 10**6, "bias": True}}
    huge = {"layer": "Linear", "arguments": {"in_features": 2**40, "out_features": 2**40, "bias": True}}
    small = {"layer": "Tanh", "arguments": {}}
    medium = {"layer": "Linear", "arguments": {"in_features": 4000, "out_features": 4000, "bias": True}}
    products = {"layer": "Polynomial", "arguments": {"degree": 80, "inputs": 3}}
    deep: Any = small
    for _ in range(300):
        deep = {"layer": "Sequential", "children": {"0": deep}}
    rows = {"layer": "Embedding", "arguments": {"num_embeddings": 10**12, "embedding_dim": 8}}
    structure = rng.choice(
        [big, huge, rows, {"layer": "Sequential", "children": {str(k): small for k in range(60_000)}},
         {"layer": "Sequential", "children": {str(k): medium for k in range(500)}},
         {"layer": "Sequential", "children": {str(k): products for k in range(100)}},
         {"layer": "Sequential", "children": {'0"); import os; os.system("touch x': small}},
         {"layer": "Module", "arguments": {}}, {"layer": "__import__", "arguments": {"name": "os"}}, deep,
         {"layer": "Linear", "arguments": {"in_features": float("nan"), "out_features": "x"}}]
    )  # fmt: skip
    content["network"] = {**content["network"], "structure": structure}
    rewrite(file, content=content)


def other_family(rng: random.Random, folder: Path) -> None:
    file = next(each for each in sorted(folder.rglob("manifest.json")) if "network" in _content(each))
    content = _content(file)
    where = rng.choice(["family", "likelihood", "prior", "dtype", "settings"])
    names = ["Posterior", "object", "os.system", "Model", "", 3, None, "__class__", ["a"]]
    content[where] = {
        "family": rng.choice([*names, {"a": 1}]),
        "likelihood": {**content["likelihood"], "name": rng.choice(names)},
        "prior": {"globs": {"*": {"name": rng.choice(names), "scale": 1.0}}},
        "dtype": rng.choice([*names, "int64", "float8"]),
        "settings": rng.choice([{"model": 3}, {"points": {}}, {"nonsense": 1}, 3, [1], "ab"]),
    }[where]
    rewrite(file, content=content)


def _content(manifest: Path) -> dict[str, Any]:
    return json.loads(manifest.read_text())["body"]["content"]


def mutated(rng: random.Random, folder: Path) -> None:
    """Any value of the content becomes something nasty."""
    file = rng.choice(sorted([*folder.rglob("manifest.json"), *folder.rglob("estimator.json")]))
    content = _content(file)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at, key = rng.choice(_places(content))
        at[key] = copy.deepcopy(rng.choice(_NASTY))
    rewrite(file, content=content)


def _places(value: Any) -> list[tuple[Any, Any]]:
    found, waiting = list[tuple[Any, Any]](), [value]
    while waiting:
        each = waiting.pop()
        items = (
            list(each.items()) if isinstance(each, dict) else list(enumerate(each)) if isinstance(each, list) else []
        )
        found += [(each, key) for key, _ in items]
        waiting += [inner for _, inner in items]
    return found


# --- attacks on a single file ----------------------------------------------------------------------------------------


def _members(folder: Path) -> dict[str, bytes]:
    return {
        each.relative_to(folder).as_posix(): each.read_bytes() for each in sorted(folder.rglob("*")) if each.is_file()
    }


def _zipped(file: Path, members: list[tuple[str | zipfile.ZipInfo, bytes]], method: int = zipfile.ZIP_STORED) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", method) as archive:
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, content in members:
            archive.writestr(name, content, compress_type=method)


def compressed(rng: random.Random, folder: Path, file: Path) -> None:
    members = [*_members(folder).items()]
    if rng.random() < 0.2:
        members.append(("bomb.json", bytes(50 * 1024 * 1024)))
    _zipped(file, members, rng.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]))


def doubled(rng: random.Random, folder: Path, file: Path) -> None:
    members = [*_members(folder).items()]
    _zipped(file, [*members, rng.choice(members)])


def climbing(rng: random.Random, folder: Path, file: Path) -> None:
    members = [*_members(folder).items()]
    names = [
        "../x.json",
        "/etc/x.json",
        "a/../../x",
        "..",
        "C:/x",
        "a\\b",
        "x/",
        ".hidden",
        "a//b",
        "n" * 2000,
        "é",
        "a:b",
    ]
    _zipped(file, [*members, (rng.choice(names), b"x")])


def special(rng: random.Random, folder: Path, file: Path) -> None:
    """Members that are links or devices."""
    members: list[Any] = [*_members(folder).items()]
    at = rng.randrange(len(members))
    info = zipfile.ZipInfo(members[at][0])
    info.external_attr = (rng.choice([stat.S_IFLNK, stat.S_IFDIR, stat.S_IFCHR, stat.S_IFIFO]) | 0o777) << 16
    members[at] = (info, b"/etc/passwd")
    _zipped(file, members)


def crowded(rng: random.Random, folder: Path, file: Path) -> None:
    _zipped(file, [*_members(folder).items(), *((f"m{k}", b"") for k in range(rng.choice([1100, 5000])))])


def _lists(data: bytes) -> tuple[int, list[int]]:
    """Where the end of an archive is, and its entries."""
    end = len(data) - 22
    start = struct.unpack_from("<L", data, end + 16)[0]
    found, place = [], start
    while data[place : place + 4] == b"PK\1\2":
        found.append(place)
        place += 46 + sum(struct.unpack_from("<3H", data, place + 28))
    return end, found


def wrong_list(rng: random.Random, folder: Path, file: Path) -> None:
    """A field of the list at the end, or of the end itself, is wrong."""
    pack(Files.at(folder), file)
    data = bytearray(file.read_bytes())
    end, entries = _lists(bytes(data))
    entry, value = rng.choice(entries), rng.choice([0, 1, 0xFFFFFFFF, 0xFFFFFFFE, 2**31, len(data)])
    kind = rng.randrange(9)
    if kind < 4:  # flags, method; sizes, place
        struct.pack_into("<H", data, entry + (8 if kind == 0 else 10), rng.choice([1, 8, 9, 12, 14, 93, 8192 | 1]))
        if kind > 1:
            struct.pack_into("<H", data, entry + (8 if kind == 0 else 10), 0)
            field = rng.choice([20, 24, 42])
            before = struct.unpack_from("<L", data, entry + field)[0]
            struct.pack_into("<L", data, entry + field, value if value != before else 12345)
    elif kind == 4:  # two members at the same place
        others = [each for each in entries if each != entry]
        if others:
            data[entry + 42 : entry + 46] = data[rng.choice(others) + 42 :][:4]
        else:
            struct.pack_into("<L", data, entry + 42, 7)
    elif kind == 5:  # lengths of name and extra
        struct.pack_into("<H", data, entry + rng.choice([28, 30, 32]), rng.choice([60_000, 65_535]))
    elif kind == 6:  # the end: count, length, place, comment
        at, form = rng.choice([(8, "<H"), (10, "<H"), (12, "<L"), (16, "<L"), (20, "<H"), (4, "<H"), (6, "<H")])
        before = struct.unpack_from(form, data, end + at)[0]
        struct.pack_into(form, data, end + at, rng.choice([v for v in (7, 65_535, 1000) if v != before]))
    elif kind == 7:  # in front of a member
        place = struct.unpack_from("<L", data, entry + 42)[0]
        data[place + rng.choice([0, 6, 8, 26, 28, 30])] ^= 1 << rng.randrange(1, 7)
    else:  # a large archive's end, with nonsense in it
        numbers = [rng.choice([0, 1, 2**40, 2**63, len(data)]) for _ in range(4)]
        large = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, *numbers)
        place = rng.choice([end, 2**40, 0])
        data[end:end] = large + struct.pack("<4sLQL", b"PK\6\7", 0, place, 1)
    file.write_bytes(data)


def cut(rng: random.Random, folder: Path, file: Path) -> None:
    pack(Files.at(folder), file)
    data = file.read_bytes()
    at = rng.randrange(len(data))
    junk = rng.randbytes(rng.randrange(1, 200))
    file.write_bytes(rng.choice([data[:at], data + junk, junk + data, data[:at] + junk + data[at:], data[at:], junk]))


def no_archive(rng: random.Random, folder: Path, file: Path) -> None:
    tar = b"manifest.json" + bytes(87) + b"0000644\0"
    file.write_bytes(
        rng.choice([_pickles(rng), b"", b"PK\5\6" + bytes(18), b"\x1f\x8b" + bytes(100), tar + bytes(1000)])
    )


ON_FOLDERS: tuple[Callable[[random.Random, Path], None], ...] = (
    truncated, flipped, removed, appended, pickled, linked, piped, wrong_head, wrong_head, no_head, other_values,
    wrong_entry, wrong_entry, no_manifest, huge_network, other_family, mutated,
)  # fmt: skip
ON_FILES: tuple[Callable[[random.Random, Path, Path], None], ...] = (
    compressed, doubled, climbing, special, crowded, wrong_list, wrong_list, cut, no_archive,
)  # fmt: skip
WITH_HASHES = (wrong_head, no_head, other_values, huge_network, other_family, mutated)
ONLY_IN_FOLDERS = (linked, piped)
MAY_BE_GOOD = ("mutated",)


def make_hostile(rng: random.Random, originals: dict[str, Path], place: Path) -> tuple[str, Path]:
    """Make a hostile artifact at ``place``; the name of the attack, and where it is."""
    original = rng.choice(sorted(originals))
    folder = place / original
    shutil.copytree(originals[original], folder)
    if rng.random() < 0.35:
        attack = rng.choice(ON_FILES)
        attack(rng, folder, place / "x.knowable")
        return attack.__name__, place / "x.knowable"
    spoil = rng.choice(ON_FOLDERS)
    spoil(rng, folder)
    if spoil in WITH_HASHES:
        seal_outside(folder)
    if spoil in ONLY_IN_FOLDERS or rng.random() < 0.5:
        return spoil.__name__, folder
    _zipped(place / "x.knowable", [*_members(folder).items()])
    return spoil.__name__, place / "x.knowable"


# --- loading them, watched -------------------------------------------------------------------------------------------

_FORBIDDEN = (
    *("exec", "compile", "code.__new__", "marshal.loads", "pickle.find_class", "ctypes.dlopen", "subprocess.Popen"),
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "pty.spawn", "webbrowser.open"),
    *("os.remove", "os.rename", "os.mkdir", "os.symlink", "os.chmod", "shutil.rmtree"),
)
_AT_HOME = ("knowable", "torch", "numpy", "tests")


def _watch(where: str, event: str, arguments: Any) -> None:
    """Say which event is forbidden, and end the process."""
    wrong = event in _FORBIDDEN or event.startswith(("socket.", "urllib.", "ftplib.", "http."))
    if event in ("exec", "compile", "marshal.loads"):
        wrong = not _importing()  # whose "import" event has been looked at
    if event == "import":
        top = str(arguments[0]).partition(".")[0]
        wrong = top not in sys.stdlib_module_names and top not in _AT_HOME
    if event == "open":
        path, mode, flags = arguments
        writing = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) if isinstance(flags, int) else "w" in str(mode)
        inside = isinstance(path, int) or str(path).startswith((where, sys.prefix, sys.base_prefix, "/proc/"))
        wrong = writing or not (inside or str(path).endswith((".py", ".pyc")))
    if wrong:
        stack = [f"{each.filename}:{each.lineno}" for each in traceback.extract_stack(limit=60)]
        print(json.dumps({"forbidden": event, "arguments": repr(arguments)[:100], "stack": stack}), flush=True)
        os._exit(3)


def _importing() -> bool:
    """Whether Python's own import machinery is at work."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap_external>":
        frame = frame.f_back
    return frame is not None


def _outcome(path: Path) -> dict[str, Any]:
    begun = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = kn.load(path)
        outcome, said = "loaded", type(found).__name__
    except kn.KnowableError as error:
        outcome, said = "refused", str(error)
    except Exception as error:
        outcome, said = "broken", f"{type(error).__name__}: {error}"
    return {"path": str(path), "outcome": outcome, "said": said[:2000], "seconds": time.process_time() - begun}


def main(place: Path) -> None:
    """Load the good ones first, so that all modules are there; then the hostile ones."""
    for path in sorted((place / "good").iterdir()):
        kn.load(path)
    tensor_file.MAPPED_FROM = 0
    begin = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (begin + MEMORY, begin + MEMORY))
    where, active = str(place), True
    sys.addaudithook(lambda event, arguments: _watch(where, event, arguments) if active else None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = []
    for line in (place / "paths").read_text().splitlines():
        found.append(_outcome(Path(line)))
    active = False
    for each in found:
        print(json.dumps(each))
    print(json.dumps({"memory": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
