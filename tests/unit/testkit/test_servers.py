"""What a test starts ends with it, also when the test is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
from testkit.processes.servers import free_port
from testkit.waiting import until

SCRIPT = """
import sys, time
from pathlib import Path
from testkit.processes.servers import bench
with bench(Path(sys.argv[1])) as stage:
    print(stage.redis(port=int(sys.argv[2])).pid, flush=True)
    time.sleep(600)
"""


def test_redis_ends_with_a_test_that_was_killed(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(free_port())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None
    redis = psutil.Process(int(process.stdout.readline()))
    assert redis.is_running()
    process.kill()
    process.wait()
    until(lambda: not redis.is_running() or redis.status() == psutil.STATUS_ZOMBIE, "Redis is gone")
