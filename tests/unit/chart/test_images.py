"""What the images install with apt: the commands of the Dockerfile, run on a copy of a base image's sources; and that
the build is given what it copies."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
from testkit.kube.chart import ROOT

DOCKERFILE = ROOT / "helm/images/Dockerfile"
SOURCES = """\
Types: deb
# http://snapshot.debian.org/archive/debian/20250520T000000Z
URIs: http://deb.debian.org/debian
Suites: bookworm bookworm-updates

Types: deb
# http://snapshot.debian.org/archive/debian-security/20250520T000000Z
URIs: http://deb.debian.org/debian-security
Suites: bookworm-security
"""
"""/etc/apt/sources.list.d/debian.sources, as Debian's official images have it."""


def apt_commands() -> list[str]:
    """RUN commands with apt-get, as the shell gets them."""
    joined = DOCKERFILE.read_text().replace("\\\n", "")
    return [text for text in re.findall(r"^RUN (.*)", joined, re.MULTILINE) if "apt-get" in text]


def installed(folder: Path, sources: str, archive: str = "") -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """How it ended, and where apt was led. Without what it removes at last: it runs on this machine, in ``folder``."""
    [command] = apt_commands()
    command = command.partition("&& rm ")[0].removeprefix("cd /etc/apt/sources.list.d")
    assert not re.search(r"/(etc|var|usr)/", command)
    there, program = folder / "debian.sources", folder / "apt-get"
    there.write_text(sources)
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "DEBIAN_ARCHIVE": archive}
    words = ("sh", "-c", f"true {command}")
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done, re.findall(r"^URIs: (.*)", there.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("archive", "led"), [("", "http://snapshot.debian.org/archive"), ("http://mirror/a", "http://mirror/a")]
)
def test_apt_installs_what_was_there_when_the_base_was_made(tmp_path: Path, archive: str, led: str) -> None:
    done, uris = installed(tmp_path, SOURCES, archive)
    assert done.returncode == 0, done.stderr
    assert uris == [f"{led}/{part}/20250520T000000Z" for part in ("debian", "debian-security")]
    assert "Check-Valid-Until=false" in done.stdout, "what an archive's day said is older than it promised to be"
    assert "gcc libc6-dev" in done.stdout


@pytest.mark.parametrize("sources", [SOURCES.replace("# http", "# see http", 1), "deb http://deb.debian.org/debian"])
def test_a_base_without_its_day_is_refused_before_anything_is_installed(tmp_path: Path, sources: str) -> None:
    done, _ = installed(tmp_path, sources)
    assert done.returncode != 0
    assert "BASE_IMAGE names no archive of its day in debian.sources" in done.stderr
    assert "install" not in done.stdout


def test_what_is_copied_is_not_left_out_of_the_build() -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    sources = [source for words in copied for source in words.split()]
    taken = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    missing = [source for source in sources if not any(fnmatch(source, pattern) for pattern in taken)]
    assert missing == []
    assert "loadgen" in sources
