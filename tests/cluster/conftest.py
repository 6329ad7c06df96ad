"""One cluster for all of these tests, with the images built from this tree. Skipped without KUBE_TOOL; where that names
no program, they fail, or with KUBE_OPTIONAL=1 are skipped. A cluster that does not start is a failure."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest
from testkit.kube.cluster import Cluster, started, table


@pytest.fixture(scope="session")
def bare_cluster() -> Iterator[Cluster]:
    """The cluster, without images."""
    tool = os.environ.get("KUBE_TOOL", "")
    if not os.access(tool, os.X_OK):
        missing = pytest.fail if tool and not os.environ.get("KUBE_OPTIONAL") else pytest.skip
        missing(f"KUBE_TOOL names no program: {tool!r}")
    try:
        cluster, ran_before = started(os.path.abspath(tool))
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.fail(f"no cluster starts here: {error} {error.stderr}")
    yield cluster
    if not ran_before and not os.environ.get("KUBE_KEEP"):
        subprocess.run([cluster.tool, "down", "--keep"], check=True, timeout=300)


@pytest.fixture(scope="session")
def cluster(bare_cluster: Cluster) -> Cluster:
    """The cluster with the images; KUBE_BUILT=1 says that they are there."""
    if not os.environ.get("KUBE_BUILT"):
        took = bare_cluster.build_images()
        print("\nimages built and loaded, s\n" + table(list(took.items())))
    return bare_cluster
