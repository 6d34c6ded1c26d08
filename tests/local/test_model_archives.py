"""Archives of models that two readers could understand differently: what was checked is what is loaded.

`PACELINE_FUZZ_SECONDS=7200 ALONE=1 python -m pytest tests/local/test_model_archives.py -m long` tries for two hours;
`PACELINE_FUZZ_SEED` repeats the archives of a failure.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import struct
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.alone import alone

LONG_S = float(os.environ.get("PACELINE_FUZZ_SECONDS", "8"))
pytestmark = pytest.mark.timeout(400 + LONG_S)
EXAMPLES, GRAPH = "model/data/sample_inputs/model.pt", "model/models/model.json"
WEIGHTS = "model/data/weights/model_weights_config.json"
PICKLE = b"cos\nsystem\n(S'touch ran'\ntR."
Entries = list[tuple[str, bytes]]


def packed(entries: Entries, compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", compression) as file:
        warnings.simplefilter("ignore")  # names that occur twice
        for name, data in entries:
            file.writestr(name, data)
    return buffer.getvalue()


def unpacked(data: bytes) -> Entries:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return [(name, file.read(name)) for name in file.namelist()]


def evil_pickle() -> bytes:
    """A file of torch.save whose pickle calls os.system."""
    return packed([("archive/data.pkl", PICKLE), ("archive/byteorder", b"little"), ("archive/version", b"3\n")])


def exported(folder: Path) -> Path:
    import torch

    import paceline.torch

    paceline.torch.export(torch.nn.Sequential(torch.nn.Linear(3, 2)), (torch.ones(2, 3),), to=folder)
    return folder / "model.pt2"


class Canary:
    """Notices calls of os.system."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._calls: list[str] = []
        self._marker = folder / "ran"
        monkeypatch.chdir(folder)
        monkeypatch.setattr(os, "system", self._calls.append)

    def ran(self) -> bool:
        ran = bool(self._calls) or self._marker.exists()
        self._calls.clear()
        return ran


@alone
def test_a_torch_model_with_ambiguous_entries_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import paceline.torch

    path = exported(tmp_path / "model")
    canary = Canary(monkeypatch, tmp_path)
    original = path.read_bytes()
    entries = unpacked(original)

    def refused(data: bytes, message: str) -> None:
        path.write_bytes(data)
        with pytest.raises(paceline.torch.SnapshotRefused, match=message):
            paceline.torch.load(path.parent)
        assert not canary.ran()

    # Of entries with the same name, zipfile reads the last one, and torch another one: it would run these.
    repeated = packed([*[(EXAMPLES, evil_pickle())] * 8, *entries])
    path.write_bytes(repeated)
    with contextlib.suppress(AssertionError):  # os.system returns nothing that torch could use
        torch.export.load(path)
    assert canary.ran()
    refused(repeated, f"it contains '{EXAMPLES}' twice")
    refused(packed([*entries, (EXAMPLES.replace("/", "//"), evil_pickle())]), "it contains '/data//sample")
    refused(packed([*entries, (f"./{EXAMPLES}", evil_pickle())]), "it contains './model/data/sample_inputs")
    refused(packed([*entries, (EXAMPLES.upper(), evil_pickle())]), "it contains 'MODEL/DATA/.*outside of 'model'")
    refused(packed([*entries, (f"other/{EXAMPLES[6:]}", evil_pickle())]), "it contains 'other/data")
    refused(original + packed([(EXAMPLES, evil_pickle())]), "data in front of the archive")
    refused(original + b"more", "data behind the archive")
    refused(packed(entries, zipfile.ZIP_DEFLATED), "is compressed, encrypted or not a file")
    plain = packed(entries)
    for at in (-10, -6):  # size and position of the directory
        wrong = struct.pack("<I", 0x7FFFFFFF)
        refused(plain[:at] + wrong + plain[at + 4 :], "not a model written by torch.export")
    renamed = original.replace(EXAMPLES.encode(), EXAMPLES.upper().encode(), 1)  # only in front of its data
    refused(renamed, "not a model written by torch.export: File name in directory .* and header .* differ")
    # A small file that needs much memory is not even read, and no model writes to the terminal.
    examples = unpacked(dict(entries)[EXAMPLES])
    zeros = packed([(name, b"\0" * 10**8) for name, _ in examples], zipfile.ZIP_DEFLATED)
    refused(packed(_replaced(entries, EXAMPLES, lambda _: zeros)), "is compressed, encrypted or not a file")
    for part in (b"c__builtin__\nbytearray\n", b"ctorch\nTensor\n"):
        large = packed([(name, part + b"J\0\0\0\x70\x85R." if ".pkl" in name else data) for name, data in examples])
        refused(packed(_replaced(entries, EXAMPLES, lambda _, large=large: large)), "its example inputs contain '")
    target = b"torch.ops.aten.linear.default", b"torch.ops.aten._print.default"
    refused(packed(_replaced(entries, GRAPH, lambda data: data.replace(*target))), "its graph has '.*_print.default'")
    path.write_bytes(original)
    assert paceline.torch.load(path.parent)(input=torch.ones(5, 3)).shape == (5, 2)

    # A file that is replaced after its check is not loaded, either.
    evil, load = packed(_replaced(entries, EXAMPLES, lambda _: evil_pickle())), torch.export.load

    def load_later(copy: Any) -> Any:
        path.write_bytes(evil)
        return load(copy)

    monkeypatch.setattr(torch.export, "load", load_later)
    assert paceline.torch.load(path.parent)(input=torch.ones(5, 3)).shape == (5, 2)
    assert path.read_bytes() == evil and not canary.ran()


# ---- generated archives

EXPRESSION = '__import__("os").system("touch ran")'


def _replaced(entries: Entries, name: str, change: Callable[[bytes], bytes]) -> Entries:
    return [(each, change(data) if each == name else data) for each, data in entries]


def _evil_entry(chance: random.Random, entries: Entries) -> tuple[str, bytes]:
    names = [name for name, _ in entries]
    legacy = ["model/data/weights/model.pt", "model/data/constants/model.pt", "version", "serialized_state_dict.pt"]
    name = chance.choice([EXAMPLES, GRAPH, WEIGHTS, *names, *legacy])
    contents = [evil_pickle(), PICKLE, json.dumps({"guards_code": [EXPRESSION]}).encode()]
    return name, chance.choice(contents)


def _misspelled(chance: random.Random, name: str) -> str:
    return chance.choice(
        [
            name.upper(), name.replace("/", "//"), f"./{name}", f"/{name}", f"{name}/", f"{name}\0x",
            f"model/../{name}", name.replace("/", "\\"), name.replace("model/", "other/", 1),
            name.replace("e", "\u0435"),
        ]
    )  # fmt: skip


def _changed_entries(chance: random.Random, entries: Entries) -> Entries:
    entries = list(entries)
    kind = chance.randrange(7)
    if kind == 0:
        entries.insert(chance.randrange(len(entries) + 1), _evil_entry(chance, entries))
    elif kind == 1:
        name, data = _evil_entry(chance, entries)
        entries.insert(chance.randrange(len(entries) + 1), (_misspelled(chance, name), data))
    elif kind == 2:
        name, data = _evil_entry(chance, entries)
        entries = _replaced(entries, name, lambda _: data)
    elif kind == 3:
        entries = _replaced(entries, WEIGHTS, lambda data: data.replace(b'"use_pickle": false', b'"use_pickle": true'))
    elif kind == 4:
        symbols = [b"torch.ops.aten.linear.default", b"Symbol('s", b"as_expr", b"image", b"input"]
        old, new = chance.choice(symbols), chance.choice([b"torch.hub.load", EXPRESSION.replace('"', "'").encode()])
        entries = _replaced(entries, GRAPH, lambda data: data.replace(old, new))
    elif kind == 5:
        chance.shuffle(entries)
    else:
        del entries[chance.randrange(len(entries))]
    return entries or [("model/version", b"1")]


def _changed_bytes(chance: random.Random, data: bytes, other: bytes) -> bytes:
    if not data:
        return other  # an earlier change has left nothing
    changed = bytearray(data)
    kind = chance.randrange(5)
    directory = data.rfind(b"PK\1\2")
    if kind == 0:
        return other + data if chance.random() < 0.5 else data + other
    if kind == 1:  # the description of an entry in the directory: sizes, offset, flags, name
        starts = [n for n in range(len(data) - 46) if data[n : n + 4] == b"PK\1\2"] or [0]
        at = chance.choice(starts) + chance.choice([8, 10, 20, 24, 28, 30, 32, 42, 46])
        changed[at : at + 2] = struct.pack("<H", chance.choice([0, 1, 8, 9, 0xFFFF, chance.randrange(0xFFFF)]))
    elif kind == 2:  # the end of the directory
        for _ in range(chance.randrange(1, 4)):
            changed[chance.randrange(max(directory, 0), len(changed))] = chance.randrange(256)
    elif kind == 3:
        for _ in range(chance.randrange(1, 20)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
    else:
        del changed[chance.randrange(len(changed)) :]
    return bytes(changed)


def generated(chance: random.Random, original: bytes) -> bytes:
    entries = unpacked(original)
    for _ in range(chance.randrange(3)):
        entries = _changed_entries(chance, entries)
    plain = original if entries == unpacked(original) else packed(entries, chance.choice([0, 0, 0, 8]))
    other = packed([(EXAMPLES, evil_pickle()), *entries])
    for _ in range(chance.choice([0, 1, 1, 2])):
        plain = _changed_bytes(chance, plain, other)
    return plain


def _try_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    import logging

    import paceline.torch

    logging.disable(logging.CRITICAL)  # torch logs a traceback for each damaged graph
    path = exported(tmp_path / "model")
    original = path.read_bytes()
    paceline.torch.load(path.parent)  # torch imports much when it loads its first model
    canary = Canary(monkeypatch, tmp_path)
    first = int(os.environ.get("PACELINE_FUZZ_SEED", random.SystemRandom().randrange(1 << 48)))
    deadline, seed = time.monotonic() + seconds, first
    while time.monotonic() < deadline or seed == first:
        path.write_bytes(generated(random.Random(seed), original))
        try:
            paceline.torch.load(path.parent)
        except paceline.torch.SnapshotRefused:
            pass
        except Exception as error:
            raise AssertionError(f"PACELINE_FUZZ_SEED={seed}: not a clear error: {error!r}") from error
        assert not canary.ran(), f"PACELINE_FUZZ_SEED={seed}: code of the file ran"
        seed += 1


@alone
def test_no_generated_archive_runs_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _try_archives(tmp_path, monkeypatch, 1.5)


@pytest.mark.long
@alone
def test_no_generated_archive_runs_code_for_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _try_archives(tmp_path, monkeypatch, LONG_S)


# ---- JAX


@alone
def test_parameters_of_a_jax_model_that_occur_twice_or_need_pickle_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import paceline.jax

    folder = paceline.jax.export(
        lambda params, x: x * params["w"], {"w": np.ones(3)}, np.ones((2, 3)), to=tmp_path / "m"
    )
    path = folder / "params.npz"
    canary = Canary(monkeypatch, tmp_path)
    entries = unpacked(path.read_bytes())

    def refused(data: bytes, message: str) -> None:
        path.write_bytes(data)
        with pytest.raises(paceline.jax.SnapshotRefused, match=f"{path}: .*{message}"):
            paceline.jax.load(folder)
        assert not canary.ran()

    name, good = entries[0]
    refused(packed([(name, good), (name, good)]), "twice")
    refused(packed([(name, good), (name.removesuffix(".npy"), good)]), "is not an array")
    header = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
    refused(packed([(name, header + PICKLE)]), "Object arrays cannot be loaded")
    refused(packed([(name, PICKLE)]), "")
    refused(PICKLE, "not a zip file")
    refused(packed(entries, zipfile.ZIP_DEFLATED), "is compressed")
    refused(packed([(name, good.replace(b"(3,)", b"(9" + b"0" * 12 + b",)"))]), "cannot be read")  # huge
    refused(packed([(name, good.replace(b"(3,)", b"[[[,"))]), "cannot be read")
    for other in ([], [(name, good.replace(b"(3,)", b"(2,)"))], [*entries, ("b.npy", good)]):
        refused(packed(other), "is not the one that the program expects")
    path.write_bytes(packed(entries))
    program = (folder / "model.stablehlo").read_bytes()
    for damaged in (b"", PICKLE, program[:100]):
        (folder / "model.stablehlo").write_bytes(damaged)
        with pytest.raises(paceline.jax.SnapshotRefused, match=r"not a model written by jax\.export"):
            paceline.jax.load(folder)
    (folder / "model.stablehlo").write_bytes(program)
    assert paceline.jax.load(folder)({"inputs": np.ones((5, 3))})["output_0"].shape == (5, 3)
