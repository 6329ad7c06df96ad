"""The tile table: nearest entries, broken files, overrides."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels import tiles as table
from moe_kernels.tiles import Entry, TileTableError, choose, load, tiles

QWEN = {"d": 2048, "f": 768, "E": 128, "k": 8}


def entry(rows: int, tag: int, shape: dict[str, int] = QWEN, dtype: str = "bf16", op: str = "small.in") -> Entry:
    return Entry(op=op, dtype=dtype, shape=tuple(shape.items()), rows=rows, tiles={"BLOCK_N": tag})


def chosen(entries: list[Entry], shape: dict[str, int], rows: int, dtype: str = "bf16") -> int:
    found = choose(tuple(entries), "small.in", dtype, tuple(shape.items()), rows)
    assert found is not None
    return found.tiles["BLOCK_N"]


@pytest.mark.parametrize(("rows", "tag"), [(0, 1), (1, 1), (2, 1), (3, 8), (8, 8), (12, 8), (17, 32), (9999, 32)])
def test_a_known_shape_takes_its_nearest_rows_on_a_log_scale(rows: int, tag: int) -> None:
    # 2 is 1 away from 1 and 2 from 8; 3 is 1.58 from 1 and 1.42 from 8; 17 is 1.09 from 8 and 0.91 from 32.
    assert chosen([entry(1, 1), entry(8, 8), entry(32, 32)], QWEN, rows) == tag


def test_a_known_shape_never_takes_another_shapes_entry_even_at_its_rows() -> None:
    assert chosen([entry(1, 1), entry(512, 512, {**QWEN, "E": 64})], QWEN, 512) == 1


def test_an_unknown_shape_takes_the_nearest_over_all_dimensions_and_rows() -> None:
    glm = {"d": 4096, "f": 1408, "E": 128, "k": 8}
    mixtral = {"d": 4096, "f": 14336, "E": 8, "k": 2}
    # Qwen is 1 + 0.87 away in d and f, Mixtral 3.35 + 4 + 2; eight times the rows tip nothing.
    assert chosen([entry(8, 1, mixtral), entry(64, 2)], glm, 8) == 2


def test_a_dimension_that_one_side_lacks_counts_as_a_factor_of_two() -> None:
    bare, near, far = {"d": 2048}, {"d": 2048, "f": 700}, {"d": 2048, "f": 100}
    assert chosen([entry(8, 1, bare), entry(8, 2, near)], {"d": 2048, "f": 768}, 8) == 2
    assert chosen([entry(8, 1, bare), entry(8, 2, far)], {"d": 2048, "f": 768}, 8) == 1


def test_dtypes_have_stand_ins() -> None:
    entries = [entry(8, 16), entry(8, 4, dtype="int4"), entry(8, 0, dtype="any")]
    assert [chosen(entries, QWEN, 8, dtype) for dtype in ("fp16", "int4_channel", "int8", "fp32")] == [16, 4, 0, 0]


@given(st.integers(1, 1 << 16), st.lists(st.integers(1, 1 << 16), min_size=1, max_size=6, unique=True))
@settings(max_examples=50, deadline=None)
def test_the_order_of_dimensions_does_not_matter(rows: int, known: list[int]) -> None:
    entries = [entry(count, count) for count in known]
    assert chosen(entries, QWEN, rows) == chosen(entries, dict(reversed(QWEN.items())), rows)


def test_the_package_serves_every_op_on_an_unknown_gpu() -> None:
    for op in {found.op for found in load(table.DIRECTORY / "default.json")}:
        for dtype in ("bf16", "fp16", "fp32", "int8", "int8_channel", "int4", "int4_channel", "any"):
            assert tiles(op, shape=QWEN, rows=8, dtype=dtype, device_name="Some GPU"), op


@pytest.mark.parametrize("file", sorted(table.DIRECTORY.glob("*.json")), ids=lambda file: file.stem)
def test_the_packages_tables_load(file: Path) -> None:
    assert load(file)


def test_an_unknown_shape_is_said_once_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    shape = {"d": 12345, "f": 3}
    with caplog.at_level(logging.DEBUG, logger="moe_kernels.tiles"):
        for rows in (1, 2, 3, 2, 1):
            tiles("small.in", shape=shape, rows=rows, dtype="bf16", device_name="Some GPU")
    said = [record.getMessage() for record in caplog.records if "12345" in record.getMessage()]
    assert len(said) == 1
    assert "small.in" in said[0]
    assert "Some GPU" in said[0]


def test_an_op_that_no_file_declares_is_an_error() -> None:
    with pytest.raises(TileTableError, match=r"no op 'nope'"):
        tiles("nope", shape=QWEN, rows=1, dtype="bf16")


def test_results_cannot_be_changed_by_a_caller() -> None:
    found: Any = tiles("small.in", shape=QWEN, rows=1, dtype="bf16")
    with pytest.raises(TypeError):
        found["BLOCK_N"] = 1


def test_overrides_nest_and_end() -> None:
    def now() -> int:
        return tiles("small.in", shape=QWEN, rows=1, dtype="bf16").get("X", 0)

    with table.overridden({"small.in": {"X": 1}}):
        with table.overridden({"small.down": {"X": 5}}):
            assert now() == 1
        with table.overridden({"small.in": {"X": 2}}):
            assert now() == 2
        assert now() == 1
    assert now() == 0


GOOD = {"op": "a", "dtype": "any", "shape": {}, "rows": 1, "tiles": {"X": 1}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": 3}, "op must be a string"),
        ({"op": "b"}, "op 'b' is not one of"),
        ({"rows": 0}, "rows must be an integer >= 1, found 0"),
        ({"rows": 1.5}, "found 1.5"),
        ({"shape": {"d": 0}}, "d must be an integer >= 1"),
        ({"shape": []}, "must be an object"),
        ({"tiles": {"X": True}}, "found True"),
        ({"tiles": {"X": -1}}, "X must be an integer >= 0"),
        ({"tiles": {}}, r"a takes \['X'\], found \[\]"),
        ({"tiles": {"X": 1, "Y": 1}}, r"found \['X', 'Y'\]"),
        ({"tiles": None}, "must be an object"),
    ],
)
def test_a_broken_entry_names_the_file_the_entry_and_the_fault(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    (tmp_path / "default.json").write_text(json.dumps({"entries": [GOOD]}))
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"entries": [GOOD, {**GOOD, **changes}]}))
    with pytest.raises(TileTableError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "entry 1" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"entries": [{}]}', '{"entries": [3]}'])
def test_a_file_that_is_no_table_is_a_typed_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "default.json").write_text(text)
    with pytest.raises(TileTableError, match=r"default\.json"):
        load(tmp_path / "default.json")


def test_a_gpus_own_file_wins_and_what_it_lacks_comes_from_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {**GOOD, "op": "b", "tiles": {"Y": 7}}
    (tmp_path / "default.json").write_text(json.dumps({"entries": [GOOD, other]}))
    (tmp_path / "GPU_X.json").write_text(json.dumps({"entries": [{**GOOD, "tiles": {"X": 2}}]}))
    monkeypatch.setattr(table, "DIRECTORY", tmp_path)
    table.forget()
    try:
        assert tiles("a", shape={}, rows=1, dtype="bf16", device_name="GPU X") == {"X": 2}
        assert tiles("a", shape={}, rows=1, dtype="bf16", device_name="GPU Y") == {"X": 1}
        assert tiles("b", shape={}, rows=1, dtype="bf16", device_name="GPU X") == {"Y": 7}
    finally:
        table.forget()


def test_the_module_needs_neither_torch_nor_triton() -> None:
    code = (
        "import sys, importlib.util as u; sys.modules['torch'] = sys.modules['triton'] = None;"
        f"s = u.spec_from_file_location('tiles', {table.__file__!r}); m = u.module_from_spec(s);"
        "sys.modules['tiles'] = m; s.loader.exec_module(m);"
        "print(m.tiles('small.in', shape={'d': 1}, rows=1, dtype='bf16')['BLOCK_N'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
