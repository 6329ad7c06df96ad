"""What ends the load generator's command, each with a hint and an exit code.

0   all is well
1   wrong answers, failed requests, or an objective missed
2   the command cannot be done as it was given
3   the run is invalid: its figures say nothing of the server
4   the run was cut short by a signal: what it had seen is written
"""

from __future__ import annotations

from typing import ClassVar

from services.errors import ExpertMeshError

OK, MISSED, USAGE, INVALID, CUT_SHORT = range(5)


class LoadError(ExpertMeshError):
    """A run cannot begin, or a file cannot be used."""

    code = "load_error"
    exit_code: ClassVar[int] = USAGE


class BadSetting(LoadError):
    """An option is malformed, or contradicts another."""

    code = "bad_setting"


class AddressTaken(LoadError):
    """Another server listens where one is to be started."""

    code = "address_taken"


class FileUnusable(LoadError):
    """A trace, a workload or a recording is missing or has another form."""

    code = "file_unusable"


class ResultsUnreadable(LoadError):
    """A results file is missing or has another form."""

    code = "results_unreadable"


class NotMergeable(LoadError):
    """Results files are not parts of one run."""

    code = "not_mergeable"


class ServerUnusable(LoadError):
    """The server is not there, or does not answer as an OpenAI-compatible one does."""

    code = "server_unusable"


class ServerEnded(ServerUnusable):
    """A server that was started to be measured ended, or did not come up in time."""

    code = "server_ended"


class ProcessLost(LoadError):
    """One of the processes that share a load ended before it."""

    code = "process_lost"


class PackageMissing(LoadError):
    """The extra ``load`` is not installed."""

    code = "package_missing"
