"""``python -m testkit.docs.dashboards``: draws the pictures of docs/observability.md again, from a run of its own.

A deployment of the pocket model on this machine serves two tenants for some minutes: a calm time, one prompt again and
again (the same experts are hot), an expert worker that is killed, a burst, and calm again with an attention worker that
is killed. `expertmesh observe` scrapes it meanwhile. Needs prometheus and chromium on PATH.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from loadgen.client import stream_completion
from testkit.pocket.answers import POCKET
from testkit.processes.servers import Bench, Server, bench
from testkit.waiting import until

FOLDER = Path(__file__).parents[3] / "docs/plots/dashboards"
MAX_BYTES = 200_000
COMMAND = [sys.executable, "-m", "services"]
WIDE, PHONE = 1400, 390
DARK, PHONE_NAME = "overview-dark", "overview-phone"
_TALL = 6000
_WORDS = ("sea", "sky", "violin", "lighthouse", "ship", "house", "tree", "music", "river", "stone", "horse", "paper")
_SHARED = "\n".join(f"define: {word}" for word in _WORDS * 4)
"""The beginning that every fourth prompt has: a prefix that the cache knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of the run: how long, how many requests a second, whether all have one prompt, and of which role a process
    is killed at its begin."""

    share: float
    rate: float
    hot: bool = False
    kills: str = ""


PHASES = (
    Phase(share=0.22, rate=2),
    Phase(share=0.22, rate=3, hot=True),
    Phase(share=0.2, rate=2, kills="experts"),
    Phase(share=0.12, rate=12),
    Phase(share=0.24, rate=1.5, kills="attention"),
)


def body(rng: random.Random, *, hot: bool) -> dict[str, Any]:
    """A request. A few are wrong, as everywhere."""
    if rng.random() < 0.02:
        return {"model": "pocket-moe", "prompt": "x", "max_tokens": -1}
    prompt = f"define: {'violin' if hot else rng.choice(_WORDS)}\n"
    if not hot and rng.random() < 0.25:
        prompt = f"{_SHARED}\n{prompt}"
    return {"model": "pocket-moe", "prompt": prompt, "max_tokens": rng.randint(10, 60), "temperature": 0.8}


async def load(server: Server, keys: Sequence[str], seconds: float) -> None:
    """Sends the requests of all phases. A phase that ``kills`` begins with the end of a process of that role."""
    rng, asked = random.Random(7), set[asyncio.Task[object]]()
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        for phase in PHASES:
            if phase.kills:
                os.kill(server.of_role(phase.kills)[0].pid, signal.SIGKILL)
            end = time.monotonic() + phase.share * seconds
            while time.monotonic() < end:
                key = keys[int(rng.random() < 0.3)]
                headers = {"Authorization": f"Bearer {key}"}
                asking = stream_completion(session, server.url, body(rng, hot=phase.hot), headers=headers)
                asked.add(asyncio.create_task(asking))
                await asyncio.sleep(rng.expovariate(phase.rate))
        await asyncio.gather(*asked, return_exceptions=True)


def new_key(file: Path, tenant: str) -> str:
    words = [*COMMAND, "keys", "create", tenant, "--api-keys-file", str(file)]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return said.split()[-1]


@contextmanager
def observed(folder: Path) -> Iterator[tuple[Bench, str]]:
    """A bench, and the Prometheus of an `observe` that finds what is started there."""
    with bench(folder) as stage:
        proc = stage.start("observe", [*COMMAND, "observe"])
        until(lambda: "Ctrl-C" in proc.log(), "observe serves its pages", limit_s=120)
        yield stage, re.findall(r"^Prometheus +(\S+)$", proc.log(), re.M)[0]


def run(folder: Path, seconds: float) -> Path:
    """Has the run, and draws its dashboards. Returns their folder."""
    keys = folder / "keys.yaml"
    tenants = [new_key(keys, tenant) for tenant in ("research", "shop")]
    with observed(folder) as (stage, prometheus):
        server = stage.serve(
            POCKET / "model",
            served_model_name="pocket-moe",
            dtype="float32",
            threads=1,
            api_keys_file=keys,
            auth="required",
            lease=3,
            workers=2,
            max_num_seqs=6,
            kv_memory_gib=0.01,
            layout="disaggregated",
            expert_workers=3,
            expert_groups=2,
            autoscale="on",
            target_tpot=0.5,
            layer_series=True,
        )
        began = time.time()
        asyncio.run(load(server, tenants, seconds))
        span = ["--from", str(began - 10), "--to", str(time.time())]
        words = [*COMMAND, "dashboards", "--prometheus", prometheus, *span, "--out", str(folder / "boards")]
        print(subprocess.run(words, capture_output=True, text=True, check=True).stderr)
    return folder / "boards"


def shot(page: Path, width: int, *, dark: bool = False) -> bytes:
    """A picture of the whole page, as WebP."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "shot.png"
        settings = [f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--window-size={width},{_TALL}"]
        words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *settings]
        words += [f"--user-data-dir={folder}/profile", f"--screenshot={picture}", page.as_uri()]
        subprocess.run(words, capture_output=True, check=True, timeout=120)
        whole = Image.open(picture).convert("RGB")
    empty = Image.new("RGB", whole.size, whole.getpixel((0, whole.height - 1)))
    used = _difference(whole, empty)
    cut = whole.crop((0, 0, whole.width, min(whole.height, used + 16)))
    return _small(cut)


def _small(picture: Any) -> bytes:
    """The picture as WebP, as good as is possible below the limit."""
    for quality in range(70, 20, -5):
        out = io.BytesIO()
        picture.save(out, "WEBP", quality=quality, method=6)
        if out.tell() < MAX_BYTES:
            return out.getvalue()
    raise AssertionError("the picture has too much in it")


def _difference(whole: Any, empty: Any) -> int:
    """The last line that is not background."""
    from PIL import ImageChops

    box = ImageChops.difference(whole, empty).getbbox()
    return int(box[3]) if box else 0


def pictures(boards: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents: each dashboard, and one of them in the dark and on a phone."""
    for page in sorted(boards.glob("*.html")):
        if page.stem != "index":
            yield page.stem, shot(page, WIDE)
    yield DARK, shot(boards / "overview.html", WIDE, dark=True)
    yield PHONE_NAME, shot(boards / "overview.html", PHONE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of docs/observability.md from a run.")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--pages", type=Path, help="pages of an earlier run, instead of a run")
    parser.add_argument("--keep", type=Path, help="a folder for the pages of this run")
    given = parser.parse_args()
    for program in ("prometheus", "chromium"):
        if shutil.which(program) is None:
            sys.exit(f"{program} is not installed")
    with tempfile.TemporaryDirectory() as temporary:
        pages = given.pages or run(Path(temporary), 60 * given.minutes)
        if given.keep:
            shutil.copytree(pages, given.keep, dirs_exist_ok=True)
        FOLDER.mkdir(exist_ok=True)
        for name, content in pictures(pages):
            (FOLDER / f"{name}.webp").write_bytes(content)
            print(f"{name}.webp: {len(content):,} bytes")


if __name__ == "__main__":
    main()
