"""M8, L7 to L9: attacks on one part alone, for which no deployment is needed."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.fabric.tcp import linked, seat_of, serve, table_of
from testkit.models.checkpoints import save_checkpoint
from testkit.pocket.answers import POCKET

from abuse.attack import Record
from abuse.table import Book
from services.attention.setup.build import build
from services.config import Settings
from services.fabric.tcp.peer import Timing
from services.messages import GenerateRequest, SamplingParams

pytestmark = pytest.mark.abuse
Note = Callable[..., None]
_LONG, _SHORT, _ROWS, _STEPS = 32_000, 1_000, 8, 24
_VOCABULARY = 8192
_SCATTERS = 5
"""As many as it takes to look tokens up, to count them and to write them back, with what is computed between."""


@pytest.fixture
def note(book: Book) -> Note:
    """Enters a run into the table, then fails if a bound is broken."""

    def enter(finding: str, name: str, bound: dict[str, Any], seen: dict[str, Any], broken: list[str]) -> None:
        book.add(Record(name=name, finding=finding, bounds=bound, seen=seen, broken=broken))
        assert not broken, "\n".join(broken)

    return enter


def _ask(name: str, length: int, prompt: int, **sampling: Any) -> GenerateRequest:
    """``length`` tokens, of which those after ``prompt`` count as generated."""
    return GenerateRequest(
        id=name,
        attempt=1,
        token_ids=[5 + 7 * i % 300 for i in range(length)],
        prompt_len=prompt,
        sampling=SamplingParams(
            **{"max_tokens": length - prompt + _STEPS, "temperature": 0.0, "ignore_eos": True, **sampling}
        ),
        deadline_ms=10**15,
        priority=5,
        tenant="mallory",
        reply_to="gateway",
    )


def _step_ms(engine: Any, length: int, **sampling: Any) -> float:
    """The quickest step that draws for all rows: the machine has other work."""
    generated = bool(sampling.get("presence_penalty"))
    for row in range(_ROWS):
        engine.add(_ask(f"row-{row}", length, 10 if generated else length, **sampling))
    times = []
    while engine.has_work:
        began = time.perf_counter()
        drawn = len(engine.step())
        if drawn == _ROWS:
            times.append(1e3 * (time.perf_counter() - began))
    return min(times)


def _costs(engine: Any, length: int, **sampling: Any) -> float:
    """Milliseconds that it adds to a step."""
    with_it, without = zip(
        *((_step_ms(engine, length, **sampling), _step_ms(engine, length)) for _ in range(2)), strict=True
    )
    return min(with_it) - min(without)


def _scatter_ms() -> float:
    """What it takes this machine to put a number at a place for each token of all rows."""
    places, logits = torch.randint(_VOCABULARY, (_ROWS, _LONG)), torch.zeros(_ROWS, _VOCABULARY)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        logits.scatter_(1, places, 1.0)
        times.append(1e3 * (time.perf_counter() - began))
    return min(times)


def test_penalties_of_a_long_context_do_not_hold_up_the_batch(tmp_path: Path, note: Note) -> None:
    """A window keeps attention itself from growing with the context."""
    folder = save_checkpoint(tmp_path / "model", "qwen3_moe", seed=3)
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": 40_960, "use_sliding_window": True, "sliding_window": 64}
    (folder / "config.json").write_text(json.dumps(config | {"max_window_layers": 0}))
    settings = Settings(model=folder, dtype="float32", device="cpu", threads=1, kv_blocks=4096)
    engine = build(settings, lambda: 0, worker="worker").engine
    engine.add(_ask("warm", _LONG, _LONG, max_tokens=1))
    while engine.has_work:
        engine.step()
    seen, broken = {}, []
    asked: dict[str, dict[str, Any]] = {
        "repetition": {"repetition_penalty": 1.2},
        "presence and frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        "biases": {"logit_bias": dict.fromkeys(range(4, 300), 1.0)},
    }
    scatter = _scatter_ms()
    for name, sampling in asked.items():
        short, long = _costs(engine, _SHORT, **sampling), _costs(engine, _LONG, **sampling)
        seen[name] = f"{short:.1f} -> {long:.1f} ms"
        if long > 3 * max(short, 0) + _SCATTERS * scatter:
            broken.append(
                f"{name}: a step of {_ROWS} rows takes {long:.1f} ms more at {_LONG}, {short:.1f} at {_SHORT}"
            )
    bound = f"3 x that at 1,000 + {_SCATTERS} x {scatter:.1f} ms"
    note("M8", "penalties: 8 rows of 32,000", {"more per step": bound}, seen, broken)


@contextlib.contextmanager
def _idle_connections(address: tuple[str, int], count: int) -> Iterator[None]:
    """So many, each replaced as soon as it is closed."""
    over, full = threading.Event(), threading.Event()

    def keep() -> None:
        with contextlib.ExitStack() as stack:
            held: list[socket.socket] = []
            while not over.is_set():
                for sock in list(held):
                    with contextlib.suppress(BlockingIOError):
                        try:
                            closed = not sock.recv(1 << 12)
                        except ConnectionError:
                            closed = True
                        if closed:
                            held.remove(sock)
                            sock.close()
                while len(held) < count and not over.is_set():
                    with contextlib.suppress(OSError):
                        sock = socket.create_connection(address, timeout=1)
                        sock.setblocking(False)
                        held.append(stack.enter_context(sock))
                full.set()
                time.sleep(0.05)

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        assert full.wait(20), "so many connections could not be made"
        yield
    finally:
        over.set()
        thread.join()


def test_idle_connections_do_not_keep_attention_workers_out(note: Note) -> None:
    bound_s, began, broken = 8.0, 0.0, []
    server = serve(timing=Timing())
    try:
        with _idle_connections(server.address, 256):
            began = time.monotonic()
            try:
                with linked(table_of(seat_of(server, 0)), timing=Timing(), ready_s=bound_s):
                    pass
            except AssertionError:
                broken.append(f"an attention worker is kept out for {bound_s:g} s")
            took = time.monotonic() - began
    finally:
        server.close()
    note("L7", "fabric: 256 idle connections", {"worker let in": f"{bound_s:g} s"}, {"after": f"{took:.1f} s"}, broken)


_READ = """
import resource, sys
from pathlib import Path
from services.errors import CheckpointError
from services.model.checkpoint import Checkpoint
from services.model.load_spec import load_spec
folder = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    Checkpoint(folder, load_spec(folder))
except CheckpointError as error:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, "refused", type(error).__name__)
"""


def test_a_sparse_header_of_weights_is_refused_unread(tmp_path: Path, note: Note) -> None:
    """4 KB on the disk, 2 GB to whoever believes its first eight bytes."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(POCKET / "model" / name, tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as out:
        out.write((2_000_000_000).to_bytes(8, "little") + b"{}")
        out.truncate(2_600_000_000)

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))

    done = subprocess.run(
        [sys.executable, "-c", _READ, str(tmp_path)], capture_output=True, text=True, timeout=120, preexec_fn=bounded
    )
    words = done.stdout.split()
    grew = int(words[0]) if words else None
    broken = [] if words else [f"not refused: {done.stderr[-300:]}"]
    broken += [f"read {grew} MiB first"] if grew and grew > 200 else []
    note("L8", "weights: a sparse header", {"memory": "200 MiB"}, {"memory": f"{grew} MiB"}, broken)


def test_fetching_into_a_used_folder_leaves_nothing_of_what_was_there(tmp_path: Path, note: Note) -> None:
    first, second, folder = tmp_path / "first", tmp_path / "second", tmp_path / "folder"
    for source, kept in ((first, ("config.json", "chat_template.jinja")), (second, ("config.json",))):
        source.mkdir()
        for name in kept:
            (source / name).write_text(source.name)

    def fetch(source: Path) -> int:
        command = [sys.executable, "-m", "services", "fetch", str(folder), "--source", str(source)]
        return subprocess.run(command, capture_output=True, timeout=60).returncode

    codes = fetch(first), fetch(second)
    names = sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))
    mixed = (folder / "config.json").read_text() == "second" and "chat_template.jinja" in names
    broken = ["files of two checkpoints lie side by side"] if mixed else []
    broken += [] if codes[0] == 0 else [f"the first fetch ended with {codes[0]}"]
    note("L9", "fetch: into a used folder", {"files": "of one source"}, {"exit codes": codes, "files": names}, broken)
