"""``make chaos``: a deployment under load while its processes die and its cables fail; a report and a picture of it.

It lives among the tests because it stands on what they stand on: namespaces as hosts, processes as users start them,
the pocket model's recorded answers. The load itself is :mod:`loadgen.client`.
"""
